#include "fit.h"

#include <algorithm>
#include <cmath>

#include "blocks.h"

namespace te {
namespace {

constexpr float kSteps = 15.0f;                // from the lowest to the highest
constexpr float kCuts[] = {0.0f, 0.06f};       // of the range, at either end
constexpr int kRounds = 2;                     // of rounding and fitting, from each start

struct Line {
  Fit fit;
  float error;  // of the values rounded to the steps before, that is: at most this with those steps
};

// Rounds to the steps of `fit`, and finds the line of least squared error through them.
Line fit_again(const float* x, const Fit& fit) {
  const float inverse = 1.0f / fit.scale;
  float q[kBlock];
  float sum_q = 0.0f, sum_qq = 0.0f, sum_x = 0.0f, sum_xq = 0.0f;
  for (int i = 0; i < kBlock; ++i) {
    const float at = std::min(kSteps, std::max(0.0f, (x[i] - fit.minimum) * inverse + 0.5f));
    q[i] = static_cast<float>(static_cast<int>(at));
    sum_q += q[i];
    sum_qq += q[i] * q[i];
    sum_x += x[i];
    sum_xq += x[i] * q[i];
  }
  const float spread = kBlock * sum_qq - sum_q * sum_q;  // whole numbers below 2^24: exact, and 0 where all q are alike
  if (spread == 0.0f) return {fit, INFINITY};
  Line line{{(kBlock * sum_xq - sum_q * sum_x) / spread, 0.0f}, 0.0f};
  line.fit.minimum = (sum_x - line.fit.scale * sum_q) / kBlock;
  for (int i = 0; i < kBlock; ++i) {
    const float off = x[i] - line.fit.scale * q[i] - line.fit.minimum;
    line.error += off * off;
  }
  return line;
}

}  // namespace

Fit fit_block(const float* x) {
  const auto [low, high] = std::minmax_element(x, x + kBlock);
  const float range = *high - *low;
  Line best{{range / kSteps, *low}, INFINITY};
  if (!(range > 0.0f) || !std::isfinite(range)) return best.fit;
  for (const float below : kCuts)
    for (const float above : kCuts) {
      Line line{{range * (1.0f - below - above) / kSteps, *low + below * range}, INFINITY};
      for (int round = 0; round < kRounds && line.fit.scale > 0.0f; ++round) {
        line = fit_again(x, line.fit);
        if (line.error < best.error) best = line;
      }
    }
  return best.fit;
}

}  // namespace te
