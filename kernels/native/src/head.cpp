#include "head.h"

#include <algorithm>
#include <cstring>

#include "layer.h"

namespace te {

namespace {
enum Beginning : int64_t { kQuantise, kFeatures, kEnter, kLayer };  // from kLayer on: the phases of the layer
enum Ending : int64_t { kFinalNorm, kLogits, kTop };                 // after them
}  // namespace

struct Head::Call final : Job {
  Call(Head& h, const Pass& p, const KeyValueRows& kv, const HeadInput& i, const HeadWanted& w)
      : head(h), pass(p), input(i), wanted(w),
        layer{h.config.layer, h.layer, h.rope, p, kv, h.space.x.data(), h.space, {&h.lm_head.weight}} {}

  int64_t units(int64_t phase) const override;
  void work(int64_t phase, const Part& part) const override;

  void enter(const Worker& worker, int64_t row) const;
  void hand_on(int64_t row) const;
  void normalise(const Worker& worker, int64_t i) const;
  void rank(int64_t i) const;

  Head& head;
  const Pass& pass;
  const HeadInput& input;
  const HeadWanted& wanted;
  const LayerPhases layer;
};

Head::Head(const HeadConfig& c, const Model& t)
    : config(c),
      target(t),
      target_ids(c.vocabulary),
      space(c.layer, t.kernels, t.team.size(), c.max_rows,
            std::max({c.layer.input, c.layer.intermediate, c.feature_width, c.layer.query_width()}),
            c.max_positions),
      logits_(c.max_scored * c.vocabulary) {
  for (int64_t i = 0; i < c.vocabulary; ++i) target_ids.data()[i] = i;
}

void Head::step(const Pass& pass, const KeyValueRows& kv, const HeadInput& input, const HeadWanted& wanted) {
  space.make_room_for_parts(config.layer.attention, pass);
  target.team.run(Call(*this, pass, kv, input, wanted));
}

int64_t Head::Call::units(int64_t phase) const {
  const int64_t scored = wanted.scored_count;
  switch (phase) {
    case kQuantise: return input.features ? pass.rows : 0;
    case kFeatures: return input.features ? head.fc.weight.tiles : 0;
    case kEnter: return pass.rows;
  }
  phase -= kLayer;
  if (phase < LayerPhases::kCount) return layer.units(phase, head.target.team.size());
  switch (phase - LayerPhases::kCount) {
    case kFinalNorm: return pass.rows + scored;
    case kLogits: return scored > 0 ? head.lm_head.weight.tiles : 0;
    case kTop: return scored;
    default: return -1;
  }
}

void Head::Call::work(int64_t phase, const Part& part) const {
  const Worker worker(head.target.kernels, head.space, part);
  const int64_t rows = pass.rows;
  const auto each = [&](auto&& unit) {
    for (int64_t i = part.begin; i < part.end; ++i) unit(i);
  };
  switch (phase) {
    case kQuantise: {
      const int64_t width = head.config.feature_width;
      return each([&](int64_t r) {
        worker.k.quantise_row(input.features + input.of(r) * width, width, head.space.second(rows), r, 0);
      });
    }
    case kFeatures:
      return worker.project({{&head.fc.weight, nullptr, head.space.x.data()}}, head.space.second(rows), rows,
                            head.config.layer.hidden, worker.beginning(head.layer.qkv()));
    case kEnter: return each([&](int64_t r) { enter(worker, r); });
  }
  phase -= kLayer;
  if (phase < LayerPhases::kCount) return layer.work(phase, worker.k, part);
  switch (phase - LayerPhases::kCount) {
    case kFinalNorm: return each([&](int64_t i) { i < rows ? hand_on(i) : normalise(worker, i - rows); });
    case kLogits:
      return worker.project({{&head.lm_head.weight, nullptr, head.logits_.data()}},
                            head.space.first(wanted.scored_count), wanted.scored_count, head.config.vocabulary, {});
    default: return each([&](int64_t i) { rank(i); });
  }
}

// A row of the residual stream and of the layer's input, concat(norm(embedding), norm(state)). The state comes from
// features, by the projection before, or from an earlier level.
void Head::Call::enter(const Worker& worker, int64_t row) const {
  const int64_t width = head.config.layer.hidden;
  const float eps = head.config.layer.eps;
  float* x = head.space.x.data() + row * width;
  if (!input.features) {
    std::memcpy(x, input.hidden + input.of(row) * width, static_cast<size_t>(width) * sizeof(float));
  }
  const Activations a = head.space.first(pass.rows);
  const Matrix& table = head.embedding.present() ? head.embedding : head.target.embedding;
  float* memory = worker.row_memory();
  unpack_row(table.weight, pass.ids[row], memory);
  worker.k.rms_norm(memory, head.layer.attention_norm.data(), eps, width, memory);
  worker.k.quantise_row(memory, width, a, row, 0);
  worker.k.rms_norm(x, head.hidden_norm.data(), eps, width, memory);
  worker.k.quantise_row(memory, width, a, row, width / kBlock);
  if (head.config.norm_before_residual) std::memcpy(x, memory, static_cast<size_t>(width) * sizeof(float));
}

// The row's state for the next level.
void Head::Call::hand_on(int64_t row) const {
  if (!wanted.hidden) return;
  const int64_t width = head.config.layer.hidden;
  const float* x = head.space.x.data() + row * width;
  float* out = wanted.hidden + row * width;
  if (head.config.norm_output)
    head.target.kernels.rms_norm(x, head.final_norm.data(), head.config.layer.eps, width, out);
  else
    std::memcpy(out, x, static_cast<size_t>(width) * sizeof(float));
}

// The i-th of `scored_rows`, ready for the logits.
void Head::Call::normalise(const Worker& worker, int64_t i) const {
  const int64_t width = head.config.layer.hidden;
  float* normed = worker.row_memory();
  worker.k.rms_norm(head.space.x.data() + wanted.scored_rows[i] * width, head.final_norm.data(), head.config.layer.eps,
                    width, normed);
  worker.k.quantise_row(normed, width, head.space.first(wanted.scored_count), i, 0);
}

void Head::Call::rank(int64_t i) const {
  const int64_t vocabulary = head.config.vocabulary;
  int64_t* ids = wanted.ids + i * wanted.top;
  head.target.kernels.log_softmax_top(head.logits_.data() + i * vocabulary, vocabulary, wanted.top,
                                      wanted.log_probs + i * wanted.top, ids);
  for (int64_t j = 0; j < wanted.top; ++j) ids[j] = head.target_ids.data()[ids[j]];
}

}  // namespace te
