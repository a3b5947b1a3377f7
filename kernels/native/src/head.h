// The EAGLE-3 draft head (arXiv 2503.01840): one decoder layer that reads a token beside a feature, one call a level.
#pragma once

#include <vector>

#include "model.h"

namespace te {

struct HeadConfig {
  LayerShape layer;               // layer.input = 2 * hidden
  int64_t feature_width = 0;      // taps * hidden of the target: what `fc` reads
  int64_t vocabulary = 0;         // of the draft
  int64_t max_positions = 0;
  int64_t max_rows = 0;
  int64_t max_scored = 0;         // rows whose vocabulary may be scored in one call
  int64_t max_expanded = 0;       // nodes that it may run on in one tree
  bool norm_before_residual = false;  // the residual is the normalised state (speculators' heads)
  bool norm_output = false;           // the state handed on is the one after `norm` (EAGLE-3.1)
};

struct HeadInput {
  const float* features = nullptr;  // [][feature_width] true features, or
  const float* hidden = nullptr;    // [][hidden] states of the level before. Of either row m reads
  const int64_t* rows = nullptr;    // [rows] the one named here; null: the m-th

  int64_t of(int64_t row) const { return rows ? rows[row] : row; }
};

struct HeadWanted {
  float* hidden = nullptr;                // [rows][hidden] state for the next level
  const int64_t* scored_rows = nullptr;   // [scored_count]
  int64_t scored_count = 0;
  int64_t top = 0;
  float* log_probs = nullptr;             // [scored_count][top] descending
  int64_t* ids = nullptr;                 // [scored_count][top] ids of the target's vocabulary
};

class Head {
 public:
  Head(const HeadConfig& config, const Model& target);

  void step(const Pass& pass, const KeyValueRows& kv, const HeadInput& input, const HeadWanted& wanted);

  const HeadConfig config;
  const Model& target;
  Matrix fc, lm_head, embedding;  // without `embedding` the target's serves
  LayerWeights layer;             // attention_norm is `input_layernorm`: it meets the token's embedding
  Vector hidden_norm, final_norm;
  RopeTable rope;
  Buffer<int64_t> target_ids;     // [vocabulary] draft id -> target id
  Workspace space;

 private:
  struct Call;

  Vector logits_;  // [max_scored][vocabulary]
};

}  // namespace te
