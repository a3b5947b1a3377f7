// What the first of two planes says about logits, for any instruction set.
#pragma once

#include <limits>

#include "matmul_impl.h"

namespace te {
namespace {

template <class S, int R>
void screen_rows(const Weight& w, int64_t tile, const Activations& a, const float* norms, Contender* best, float* uppers,
                 Prefetch<1>& next) {
  using F = typename S::F;
  const F lowest = S::set1(-std::numeric_limits<float>::max());
  for (int r = 0; r < R; ++r) uppers[r] = -__builtin_inff();
  for (int sub = 0; sub < kTile / S::kLanes; ++sub) {
    F total[R][1];
    channel_totals<S, Format::Split, Planes::kFirst, 1, R>(w, tile, sub, a, 0, next, total);
    const F bound = S::load(w.bounds(tile) + sub * S::kLanes);
    for (int r = 0; r < R; ++r) {
      const F upper = S::fma(bound, S::set1(norms[r]), total[r][0]);
      if (S::all_between(upper, lowest, S::set1(best[r].lower))) continue;
      const float lower = S::max_lane(S::fma(bound, S::set1(-norms[r]), total[r][0]));
      const float highest = S::max_lane(upper);
      if (lower > best[r].lower) best[r] = {lower, tile};
      if (highest > uppers[r]) uppers[r] = highest;
    }
  }
}

using ScreenFn = void (*)(const Weight&, int64_t, const Activations&, const float*, Contender*, float*, Prefetch<1>&);

template <class S, int R>
inline ScreenFn screen_function(int64_t rows) {
  if constexpr (R == 1) {
    (void)rows;
    return screen_rows<S, 1>;
  } else {
    return rows == R ? screen_rows<S, R> : screen_function<S, R - 1>(rows);
  }
}

template <class S>
void screen_tile(const Weight& w, int64_t tile, const Activations& a, const float* norms, Contender* best, float* uppers,
                 const uint8_t* next) {
  Prefetch<1> prefetch({{next, nullptr}}, w.tile_bytes, w.blocks * (kTile / S::kLanes));
  screen_function<S, S::kSums>(a.rows)(w, tile, a, norms, best, uppers, prefetch);
}

}  // namespace
}  // namespace te
