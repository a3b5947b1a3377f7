// Products of bf16 pairs with fp32 sums, for any instruction set: scores from queries and keys, and mixes of values.
#pragma once

#include "kernels.h"

namespace te {
namespace {

// c[q * c_stride + v * lanes] += sum over steps of a[step * a_stride + v * lanes] . b[q * b_stride + step]
template <class S, int NQ, int NV>
inline void pair_tile(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t steps, float* c,
                      int64_t c_stride, Soon& soon) {
  const uint8_t* ask = soon.take(steps);
  const int64_t line = ask ? 64 : 0;
  if (!ask) ask = reinterpret_cast<const uint8_t*>(b);  // is there already
  typename S::F acc[NQ][NV];
#pragma GCC unroll 8
  for (int q = 0; q < NQ; ++q)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[q][v] = S::load(c + q * c_stride + v * S::kLanes);
  for (int64_t s = 0; s < steps; ++s) {
    __builtin_prefetch(ask + s * line, 0, 2);
    typename S::I row[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) row[v] = S::load_pairs(a + s * a_stride + v * S::kLanes);
#pragma GCC unroll 8
    for (int q = 0; q < NQ; ++q) {
      const typename S::I other = S::broadcast_pair(b + q * b_stride + s);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[q][v] = S::dot_pair(acc[q][v], row[v], other);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < NQ; ++q)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) S::store(c + q * c_stride + v * S::kLanes, acc[q][v]);
}

template <class S, int NQ, int NV>
inline void pair_tile_any(int64_t nq, int64_t nv, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                          int64_t steps, float* c, int64_t c_stride, Soon& soon) {
  if constexpr (NQ > 1) {
    if (nq < NQ) return pair_tile_any<S, NQ - 1, NV>(nq, nv, a, a_stride, b, b_stride, steps, c, c_stride, soon);
  }
  if constexpr (NV > 1) {
    if (nv < NV) return pair_tile_any<S, NQ, NV - 1>(nq, nv, a, a_stride, b, b_stride, steps, c, c_stride, soon);
  }
  pair_tile<S, NQ, NV>(a, a_stride, b, b_stride, steps, c, c_stride, soon);
}

template <class S>
void pair_product(int64_t queries, int64_t vectors, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                  int64_t steps, float* c, int64_t c_stride, Soon& soon) {
  for (int64_t q = 0; q < queries; q += S::kQueries)
    for (int64_t v = 0; v < vectors; v += S::kVectors)
      pair_tile_any<S, S::kQueries, S::kVectors>(queries - q, vectors - v, a + v * S::kLanes, a_stride, b + q * b_stride,
                                                 b_stride, steps, c + q * c_stride + v * S::kLanes, c_stride, soon);
}

}  // namespace
}  // namespace te
