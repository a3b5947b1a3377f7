#include "model.h"

#include <algorithm>
#include <cstring>

namespace te {

struct Model::Call {
  Model* model;
  const Pass* pass;
  uint16_t* keys;
  uint16_t* values;
  int64_t slots;
  const Wanted* wanted;
};

Model::Model(const ModelConfig& c, const Kernels& k, Team& t)
    : config(c),
      kernels(k),
      team(t),
      layers(static_cast<size_t>(c.layers)),
      space(c.layer, k, t.size(), c.max_rows, std::max({c.layer.hidden, c.layer.intermediate, c.layer.query_width()})) {}

void Model::forward(const Pass& pass, uint16_t* keys, uint16_t* values, int64_t slots, const Wanted& wanted) {
  Call call{this, &pass, keys, values, slots, &wanted};
  team.run([](void* argument, int thread) {
    const Call& it = *static_cast<const Call*>(argument);
    it.model->run(it, thread);
  }, &call);
}

void Model::copy_taps(Worker& worker, const Wanted& wanted, int64_t rows, int64_t layer) const {
  const int64_t width = config.layer.hidden;
  for (int64_t t = 0; t < wanted.tap_count; ++t) {
    if (wanted.taps[t] != layer) continue;
    const Share mine = worker.share(rows);
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      const float* x = space.x.data() + r * width;
      float* out = wanted.features + (r * wanted.tap_count + t) * width;
      if (layer == config.layers)
        kernels.rms_norm(x, final_norm.data(), config.layer.eps, width, out);
      else
        std::memcpy(out, x, static_cast<size_t>(width) * sizeof(float));
    }
  }
}

void Model::run(const Call& call, int thread) {
  Worker worker(kernels, team, thread, space);
  const Pass& pass = *call.pass;
  const LayerShape& shape = config.layer;
  float* x = space.x.data();
  const Share mine = worker.share(pass.rows);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    embed(pass.ids[r], x + r * shape.hidden);
    if (config.embedding_scale != 1.0f)
      for (int64_t i = 0; i < shape.hidden; ++i) x[r * shape.hidden + i] *= config.embedding_scale;
  }
  const int64_t layer_stride = call.slots * shape.kv_width();
  for (int64_t l = 0; l < config.layers; ++l) {
    const LayerWeights& w = layers[static_cast<size_t>(l)];
    copy_taps(worker, *call.wanted, pass.rows, l);
    worker.norm(x, shape.hidden, w.attention_norm, shape.eps, pass.rows, space.first(pass.rows));
    worker.barrier();
    const Weight& after = l + 1 < config.layers ? layers[static_cast<size_t>(l + 1)].q.weight : output().weight;
    worker.layer_body(shape, w, rope, pass, {call.keys + l * layer_stride, call.values + l * layer_stride}, x,
                      worker.beginning(after));
  }
  copy_taps(worker, *call.wanted, pass.rows, config.layers);
  if (call.wanted->logit_count > 0) finish(worker, *call.wanted);
}

// Final norm of the chosen rows, then the logits. Its rows are those of `logit_rows`, in their order.
void Model::finish(Worker& worker, const Wanted& wanted) {
  const int64_t width = config.layer.hidden, rows = wanted.logit_count;
  const Activations a = space.first(rows);
  const Share mine = worker.share(rows);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    float* normed = worker.row_memory();
    kernels.rms_norm(space.x.data() + wanted.logit_rows[i] * width, final_norm.data(), config.layer.eps, width, normed);
    if (wanted.hidden) std::memcpy(wanted.hidden + i * width, normed, static_cast<size_t>(width) * sizeof(float));
    if (config.logit_scale != 1.0f)
      for (int64_t d = 0; d < width; ++d) normed[d] *= config.logit_scale;
    kernels.quantise_row(normed, width, a, i, 0);
  }
  if (!wanted.logits) return;
  worker.barrier();
  worker.project(output().weight, a, rows, nullptr, wanted.logits, config.vocabulary, {});
  if (!wanted.best) return;
  worker.barrier();
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    float value;
    kernels.peak_of(wanted.logits + i * config.vocabulary, config.vocabulary, &value, wanted.best + i);
    if (wanted.peaks) wanted.peaks[i] = value;
  }
}

}  // namespace te
