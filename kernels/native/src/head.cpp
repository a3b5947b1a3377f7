#include "head.h"

#include <algorithm>
#include <cstring>

namespace te {

struct Head::Call {
  Head* head;
  const Pass* pass;
  const KeyValueRows* kv;
  const HeadInput* input;
  const HeadWanted* wanted;
};

Head::Head(const HeadConfig& c, const Model& t)
    : config(c),
      target(t),
      target_ids(c.vocabulary),
      space(c.layer, t.kernels, t.team.size(), c.max_rows,
            std::max({c.layer.input, c.layer.intermediate, c.feature_width, c.layer.query_width()})),
      logits_(c.max_scored * c.vocabulary) {
  for (int64_t i = 0; i < c.vocabulary; ++i) target_ids.data()[i] = i;
}

void Head::step(const Pass& pass, const KeyValueRows& kv, const HeadInput& input, const HeadWanted& wanted) {
  Call call{this, &pass, &kv, &input, &wanted};
  target.team.run([](void* argument, int thread) {
    const Call& it = *static_cast<const Call*>(argument);
    it.head->run(it, thread);
  }, &call);
}

// The residual stream and the layer's input, concat(norm(embedding), norm(state)), from features or from earlier states.
void Head::enter(Worker& worker, const Call& call) {
  const int64_t rows = call.pass->rows, width = config.layer.hidden;
  float* x = space.x.data();
  const Share mine = worker.share(rows);
  if (call.input->features) {
    const Activations raw = space.second(rows);
    for (int64_t r = mine.begin; r < mine.end; ++r)
      worker.k.quantise_row(call.input->features + r * config.feature_width, config.feature_width, raw, r, 0);
    worker.barrier();
    worker.project(fc.weight, raw, rows, nullptr, x, width, worker.beginning(layer.q.weight));
    worker.barrier();
  } else {
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      const int64_t from = call.input->hidden_rows ? call.input->hidden_rows[r] : r;
      std::memcpy(x + r * width, call.input->hidden + from * width, static_cast<size_t>(width) * sizeof(float));
    }
  }
  const Activations a = space.first(rows);
  const Matrix& table = embedding.present() ? embedding : target.embedding;
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    float* memory = worker.row_memory();
    unpack_row(table.weight, call.pass->ids[r], memory);
    worker.k.rms_norm(memory, layer.attention_norm.data(), config.layer.eps, width, memory);
    worker.k.quantise_row(memory, width, a, r, 0);
    worker.k.rms_norm(x + r * width, hidden_norm.data(), config.layer.eps, width, memory);
    worker.k.quantise_row(memory, width, a, r, width / kBlock);
    if (config.norm_before_residual) std::memcpy(x + r * width, memory, static_cast<size_t>(width) * sizeof(float));
  }
  worker.barrier();
}

void Head::run(const Call& call, int thread) {
  Worker worker(target.kernels, target.team, thread, space);
  enter(worker, call);
  worker.layer_body(config.layer, layer, rope, *call.pass, *call.kv, space.x.data(), worker.beginning(lm_head.weight));
  const int64_t rows = call.pass->rows, width = config.layer.hidden;
  const Share mine = worker.share(rows);
  if (call.wanted->hidden)
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      float* out = call.wanted->hidden + r * width;
      const float* x = space.x.data() + r * width;
      if (config.norm_output)
        worker.k.rms_norm(x, final_norm.data(), config.layer.eps, width, out);
      else
        std::memcpy(out, x, static_cast<size_t>(width) * sizeof(float));
    }
  if (call.wanted->scored_count > 0) score(worker, *call.wanted);
}

void Head::score(Worker& worker, const HeadWanted& wanted) {
  const int64_t rows = wanted.scored_count, width = config.layer.hidden;
  const Activations a = space.first(rows);
  const Share mine = worker.share(rows);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    float* normed = worker.row_memory();
    worker.k.rms_norm(space.x.data() + wanted.scored_rows[i] * width, final_norm.data(), config.layer.eps, width, normed);
    worker.k.quantise_row(normed, width, a, i, 0);
  }
  worker.barrier();
  worker.project(lm_head.weight, a, rows, nullptr, logits_.data(), config.vocabulary, {});
  worker.barrier();
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    int64_t* ids = wanted.ids + i * wanted.top;
    worker.k.log_softmax_top(logits_.data() + i * config.vocabulary, config.vocabulary, wanted.top,
                             wanted.log_probs + i * wanted.top, ids);
    for (int64_t j = 0; j < wanted.top; ++j) ids[j] = target_ids.data()[ids[j]];
  }
}

}  // namespace te
