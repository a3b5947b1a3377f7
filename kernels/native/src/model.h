// The target: a decoder of the Llama family, one call a step.
#pragma once

#include <memory>
#include <vector>

#include "screen.h"

namespace te {

struct ModelConfig {
  LayerShape layer;
  int64_t layers = 0;
  int64_t vocabulary = 0;
  int64_t max_positions = 0;
  int64_t max_rows = 0;
  float embedding_scale = 1.0f;
  float logit_scale = 1.0f;
};

// Where a pass puts what the caller asked for; null means not wanted.
struct Wanted {
  const int64_t* logit_rows = nullptr;  // [logit_count] rows of the pass
  int64_t logit_count = 0;
  float* logits = nullptr;    // [logit_count][vocabulary]
  int64_t* best = nullptr;    // [logit_count] argmax, the lower index on ties
  float* peaks = nullptr;     // [logit_count] the logit there, NaN where one of the row is not finite: `best` is any then
  float* hidden = nullptr;    // [logit_count][hidden] after the final norm
  const int64_t* taps = nullptr;  // [tap_count] in ascending order: the residual stream entering that layer; `layers`: leaving the last
  int64_t tap_count = 0;
  float* features = nullptr;  // [rows][tap_count * hidden]
};

class Model {
 public:
  Model(const ModelConfig& config, const Kernels& kernels, Team& team);

  void forward(const Pass& pass, uint16_t* keys, uint16_t* values, int64_t slots, const Wanted& wanted);

  // Row `id` of the embedding, unscaled.
  void embed(int64_t id, float* out) const { unpack_row(embedding.weight, id, out); }
  const Matrix& output() const { return lm_head.present() ? lm_head : embedding; }

  const ModelConfig config;
  const Kernels& kernels;
  Team& team;
  Matrix embedding, lm_head;  // without lm_head the embedding serves
  Vector final_norm;
  RopeTable rope;
  std::vector<LayerWeights> layers;
  Workspace space;

 private:
  struct Call;

  Screen screen_;
  std::vector<Buffer<Peak>> peaks_;  // per thread: [max_rows] what its tiles held
};

}  // namespace te
