// The running softmax of attention, for any instruction set.
#pragma once

#include "ops_impl.h"

namespace te {
namespace {

constexpr int64_t kMostSoftened = 16;  // queries

// The queries of a unit and their running softmax. Of each query a part holds the weighted sum of the values [head_dim],
// then the largest score so far and the sum of exp(score - largest).
struct QueryState {
  uint32_t* query;     // [queries][head_dim / 2] bf16 pairs
  float* part;         // [queries][part_width]
  float* scores;       // [queries][kKeyBlock]
  uint16_t* weights;   // [queries][kKeyBlock] bf16

  QueryState from(int64_t first, const AttentionShape& shape) const {
    return {query + first * shape.head_dim / 2, part + first * shape.part_width(), scores + first * kKeyBlock,
            weights + first * kKeyBlock};
  }
};

// Scores of a block become bf16 weights, and the running sums are brought to the new peaks. V vectors hold the `count` scores of
// a query. Each step goes over all queries before the next one begins: what a query does in turn waits for itself, and there
// is room in the processor for the same step of others meanwhile.
template <class S, int V>
void soften_vectors(const QueryState& state, int64_t queries, int64_t count, const AttentionShape& shape) {
  using F = typename S::F;
  const int64_t dim = shape.head_dim, width = shape.part_width();
  float shrink_by[kMostSoftened];
  for (int64_t q = 0; q < queries; ++q) {
    float* scores = state.scores + q * kKeyBlock;
    for (int64_t j = count; j < V * S::kLanes; ++j) scores[j] = -__builtin_inff();
    F largest = S::load(scores);
#pragma GCC unroll 16
    for (int v = 1; v < V; ++v) largest = S::max(largest, S::load(scores + v * S::kLanes));
    const float found = S::max_lane(largest);
    float& peak = state.part[q * width + dim];
    shrink_by[q] = peak - found;  // below zero where there is a new peak
    if (found > peak) peak = found;
  }
  for (int64_t q = 0; q < queries; ++q) {
    float* scores = state.scores + q * kKeyBlock;
    uint16_t* weights = state.weights + q * kKeyBlock;
    const F peak = S::set1(state.part[q * width + dim]);
    F weight[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) weight[v] = exp_approx<S>(S::sub(S::load(scores + v * S::kLanes), peak));
    weight[V - 1] = S::first(weight[V - 1], count - (V - 1) * S::kLanes);
    F total = S::zero();
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      total = S::add(total, weight[v]);
      S::store_bf16(weights + v * S::kLanes, weight[v]);
    }
    S::store(scores, total);
    if (count % 2 != 0) weights[count] = 0;  // the partner of the last pair, when a vector ends between them
  }
  for (int64_t q = 0; q < queries; ++q) {
    float* part = state.part + q * width;
    if (shrink_by[q] < 0.0f) {
      const F shrink = exp_approx<S>(S::set1(shrink_by[q]));
      for (int64_t d = 0; d < dim; d += S::kLanes) S::store(part + d, S::mul(S::load(part + d), shrink));
      alignas(64) float lanes[S::kLanes];
      S::store(lanes, shrink);
      part[dim + 1] *= lanes[0];
    }
    part[dim + 1] += S::sum(S::load(state.scores + q * kKeyBlock));
  }
}

template <class S, int V = kKeyBlock / S::kLanes>
void soften(const QueryState& state, int64_t queries, int64_t count, const AttentionShape& shape) {
  if constexpr (V > 1)
    if (count <= (V - 1) * S::kLanes) return soften<S, V - 1>(state, queries, count, shape);
  for (int64_t q = 0; q < queries; q += kMostSoftened)
    soften_vectors<S, V>(state.from(q, shape), queries - q < kMostSoftened ? queries - q : kMostSoftened, count, shape);
}

}  // namespace
}  // namespace te
