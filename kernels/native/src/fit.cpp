#include "fit.h"

#include <cmath>

#include "simd_portable.h"

namespace te {
namespace {

using V = Portable;  // the same steps on every machine
using F = V::F;

constexpr float kSteps = 15.0f;           // from the lowest to the highest
constexpr float kCuts[] = {0.0f, 0.06f};  // of the range, at either end
constexpr int kRounds = 2;                // of rounding and fitting, from each start
constexpr int kVectors = kBlock / V::kLanes;

struct Line {
  Fit fit;
  float error;  // of the values rounded to the steps before, that is: at most this with those steps
};

// Rounds to the steps of `fit`, and finds the line of least squared error through them.
Line fit_again(const F (&x)[kVectors], float sum_x, const Fit& fit) {
  const F inverse = V::set1(1.0f / fit.scale), minimum = V::set1(fit.minimum), half = V::set1(0.5f);
  F q[kVectors];
  F sums_q = V::zero(), sums_qq = V::zero(), sums_xq = V::zero();
  for (int v = 0; v < kVectors; ++v) {
    const F at = V::min(V::set1(kSteps), V::max(V::zero(), (x[v] - minimum) * inverse + half));
    q[v] = V::to_float(V::truncate(at));
    sums_q += q[v];
    sums_qq += q[v] * q[v];
    sums_xq += x[v] * q[v];
  }
  const float sum_q = V::sum(sums_q), sum_xq = V::sum(sums_xq);
  const float spread = kBlock * V::sum(sums_qq) - sum_q * sum_q;  // whole numbers below 2^24: exact, and 0 where all q are alike
  if (spread == 0.0f) return {fit, INFINITY};
  Line line{{(kBlock * sum_xq - sum_q * sum_x) / spread, 0.0f}, 0.0f};
  line.fit.minimum = (sum_x - line.fit.scale * sum_q) / kBlock;
  F errors = V::zero();
  for (int v = 0; v < kVectors; ++v) {
    const F off = x[v] - V::set1(line.fit.scale) * q[v] - V::set1(line.fit.minimum);
    errors += off * off;
  }
  line.error = V::sum(errors);
  return line;
}

}  // namespace

Fit fit_block(const float* values) {
  F x[kVectors];
  for (int v = 0; v < kVectors; ++v) x[v] = V::load(values + v * V::kLanes);
  F lows = x[0], highs = x[0], sums = V::zero();
  for (const F& some : x) {
    lows = V::min(lows, some);
    highs = V::max(highs, some);
    sums += some;
  }
  const float low = -V::max_lane(-lows), range = V::max_lane(highs) - low, sum = V::sum(sums);
  Line best{{range / kSteps, low}, INFINITY};
  if (!(range > 0.0f) || !std::isfinite(range)) return best.fit;
  for (const float below : kCuts)
    for (const float above : kCuts) {
      Line line{{range * (1.0f - below - above) / kSteps, low + below * range}, INFINITY};
      for (int round = 0; round < kRounds && line.fit.scale > 0.0f; ++round) {
        line = fit_again(x, sum, line.fit);
        if (line.error < best.error) best = line;
      }
    }
  return best.fit;
}

}  // namespace te
