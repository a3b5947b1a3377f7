#include "model.h"

#include <algorithm>
#include <cstring>

#include "layer.h"

namespace te {

namespace {
constexpr int64_t kLayerPhases = 1 + LayerPhases::kCount;          // the input norm, then the rest
enum Ending : int64_t { kFinalNorm, kScreen, kFloor, kLogits, kBest };  // after the layers
}  // namespace

struct Model::Call final : Job {
  Call(Model& m, const Pass& p, uint16_t* k, uint16_t* v, int64_t slots, const Wanted& w)
      : model(m), pass(p), keys(k), values(v), stride(slots * m.config.layer.kv_width()), wanted(w) {}

  int64_t units(int64_t phase) const override;
  void work(int64_t phase, const Part& part) const override;

  LayerPhases layer(int64_t l) const;
  void enter(const Worker& worker, int64_t row, int64_t l) const;
  void copy_taps(int64_t row, int64_t l) const;
  void normalise(const Worker& worker, int64_t i) const;
  Peak* peaks(int thread) const { return wanted.best ? model.peaks_[static_cast<size_t>(thread)].data() : nullptr; }
  void merge_peaks(int64_t i) const;
  // Whether the first plane of the output matrix is looked at, to compute only logits that may be the best.
  bool screened() const { return only_best && model.screen_.serves(model.output().weight, wanted.logit_count); }

  Model& model;
  const Pass& pass;
  uint16_t* keys;
  uint16_t* values;
  const int64_t stride;  // of a layer's keys
  const Wanted& wanted;
  const bool only_best = wanted.best && !wanted.logits && wanted.logit_count > 0;
};

Model::Model(const ModelConfig& c, const Kernels& k, Team& t)
    : config(c),
      kernels(k),
      team(t),
      layers(static_cast<size_t>(c.layers)),
      space(c.layer, k, t.size(), c.max_rows, std::max({c.layer.hidden, c.layer.intermediate, c.layer.query_width()}),
            c.max_positions),
      screen_((c.vocabulary + kTile - 1) / kTile, k, t.size()) {
  for (int thread = 0; thread < t.size(); ++thread) peaks_.emplace_back(c.max_rows);
}

void Model::forward(const Pass& pass, uint16_t* keys, uint16_t* values, int64_t slots, const Wanted& wanted) {
  space.make_room_for_parts(config.layer.attention, pass);
  screen_.begin(wanted.logit_count);
  team.run(Call(*this, pass, keys, values, slots, wanted));
}

int64_t Model::Call::units(int64_t phase) const {
  const int64_t l = phase / kLayerPhases, step = phase % kLayerPhases;
  if (l < model.config.layers) return step == 0 ? pass.rows : layer(l).units(step - 1, model.team.size());
  switch (phase - model.config.layers * kLayerPhases) {
    case kFinalNorm: return pass.rows + wanted.logit_count;
    case kScreen: return screened() ? model.output().weight.tiles : 0;
    case kFloor: return screened() ? wanted.logit_count : 0;
    case kLogits:
      return (wanted.logits || wanted.best) && wanted.logit_count > 0 ? model.output().weight.tiles : 0;
    case kBest: return wanted.best ? wanted.logit_count : 0;
    default: return -1;
  }
}

void Model::Call::work(int64_t phase, const Part& part) const {
  const Worker worker(model.kernels, model.space, part);
  const int64_t layers = model.config.layers, l = phase / kLayerPhases, step = phase % kLayerPhases;
  if (l < layers) {
    if (step > 0) return layer(l).work(step - 1, model.kernels, part);
    for (int64_t r = part.begin; r < part.end; ++r) enter(worker, r, l);
    return;
  }
  const Weight& output = model.output().weight;
  const Activations a = model.space.first(wanted.logit_count);
  switch (phase - layers * kLayerPhases) {
    case kFinalNorm:
      for (int64_t i = part.begin; i < part.end; ++i)
        if (i < pass.rows)
          copy_taps(i, layers);
        else
          normalise(worker, i - pass.rows);
      return;
    case kScreen: return model.screen_.look(worker, output, a, part);
    case kFloor: return model.screen_.find_floors(worker, output, a, part, peaks(part.thread));
    case kLogits:
      if (screened()) return model.screen_.compute(worker, output, a, part, peaks(part.thread));
      return worker.project({{&output, nullptr, wanted.logits, peaks(part.thread)}}, a, wanted.logit_count, output.n, {});
    default:
      for (int64_t i = part.begin; i < part.end; ++i) merge_peaks(i);
  }
}

LayerPhases Model::Call::layer(int64_t l) const {
  const size_t i = static_cast<size_t>(l);
  const Matrices after = i + 1 < model.layers.size() ? model.layers[i + 1].qkv() : Matrices{&model.output().weight};
  return {model.config.layer, model.layers[i], model.rope, pass, {keys + l * stride, values + l * stride},
          model.space.x.data(), model.space, after};
}

// A row on its way into layer l: before the first it comes from the embedding.
void Model::Call::enter(const Worker& worker, int64_t row, int64_t l) const {
  const int64_t width = model.config.layer.hidden;
  float* x = model.space.x.data();
  if (l == 0) {
    model.embed(pass.ids[row], x + row * width);
    if (model.config.embedding_scale != 1.0f)
      for (int64_t i = 0; i < width; ++i) x[row * width + i] *= model.config.embedding_scale;
  }
  copy_taps(row, l);
  worker.norm(x, row, width, model.layers[static_cast<size_t>(l)].attention_norm, model.config.layer.eps,
              model.space.first(pass.rows));
}

void Model::Call::copy_taps(int64_t row, int64_t l) const {
  const int64_t width = model.config.layer.hidden;
  const float* x = model.space.x.data() + row * width;
  for (int64_t t = 0; t < wanted.tap_count; ++t) {
    if (wanted.taps[t] != l) continue;
    float* out = wanted.features + (row * wanted.tap_count + t) * width;
    if (l == model.config.layers)
      model.kernels.rms_norm(x, model.final_norm.data(), model.config.layer.eps, width, out);
    else
      std::memcpy(out, x, static_cast<size_t>(width) * sizeof(float));
  }
}

// What the threads found in the i-th of `logit_rows`, whichever tiles each of them had.
void Model::Call::merge_peaks(int64_t i) const {
  Peak best;
  for (int thread = 0; thread < model.team.size(); ++thread) {
    const Peak& found = peaks(thread)[i];
    const bool spoilt = best.spoilt || found.spoilt;
    if (found.value > best.value || (found.value == best.value && found.index < best.index)) best = found;
    best.spoilt = spoilt;
  }
  wanted.best[i] = best.index;
  if (wanted.peaks) wanted.peaks[i] = best.spoilt ? __builtin_nanf("") : best.value;
}

// Final norm of the i-th of `logit_rows`, ready for the logits.
void Model::Call::normalise(const Worker& worker, int64_t i) const {
  const int64_t width = model.config.layer.hidden;
  float* normed = worker.row_memory();
  model.kernels.rms_norm(model.space.x.data() + wanted.logit_rows[i] * width, model.final_norm.data(),
                         model.config.layer.eps, width, normed);
  if (wanted.hidden) std::memcpy(wanted.hidden + i * width, normed, static_cast<size_t>(width) * sizeof(float));
  if (model.config.logit_scale != 1.0f)
    for (int64_t d = 0; d < width; ++d) normed[d] *= model.config.logit_scale;
  const Activations a = model.space.first(wanted.logit_count);
  model.kernels.quantise_row(normed, width, a, i, 0);
  if (only_best) model.screen_.enter(model.output().weight, a, i);
  if (wanted.best)
    for (int thread = 0; thread < model.team.size(); ++thread) peaks(thread)[i] = {};
}

}  // namespace te
