// What the first of two planes says about logits, for any instruction set.
#pragma once

#include <limits>

#include "matmul_impl.h"

namespace te {
namespace {

template <class S, int R>
void screen_rows(const Weight& w, int64_t tile, const Activations& a, const float* norms, Contender* best, float* uppers,
                 const uint8_t* next, int lines) {
  using F = typename S::F;
  const F lowest = S::set1(-std::numeric_limits<float>::max());
  for (int r = 0; r < R; ++r) uppers[r] = -__builtin_inff();
  for (int sub = 0; sub < kTile / S::kLanes; ++sub) {
    F total[R];
    channel_totals<S, Format::Split, Planes::kFirst, R>(w, tile, sub, a, 0, next, lines, total);
    const F bound = S::load(w.bounds(tile) + sub * S::kLanes);
    for (int r = 0; r < R; ++r) {
      const F upper = S::fma(bound, S::set1(norms[r]), total[r]);
      if (S::all_between(upper, lowest, S::set1(best[r].lower))) continue;
      const float lower = S::max_lane(S::fma(bound, S::set1(-norms[r]), total[r]));
      const float highest = S::max_lane(upper);
      if (lower > best[r].lower) best[r] = {lower, tile};
      if (highest > uppers[r]) uppers[r] = highest;
    }
  }
}

using ScreenFn = void (*)(const Weight&, int64_t, const Activations&, const float*, Contender*, float*, const uint8_t*, int);

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
  const int64_t lines = next ? (w.tile_bytes / 64 + w.blocks - 1) / w.blocks : 0;
  screen_function<S, S::kRows>(a.rows)(w, tile, a, norms, best, uppers, next, static_cast<int>(lines));
}

}  // namespace
}  // namespace te
