// Draws a token from a row of scores by Gumbel-max. `treeeagle_edge/sampling.py` is the definition and says why; here the
// noise of a token is worked out only where it can matter.
#pragma once

#include <cstdint>

#include "buffer.h"
#include "kernels.h"
#include "team.h"

namespace te {

struct Sampling {
  double temperature = 1.0;
  int64_t top_k = 0;   // 0: off
  double top_p = 1.0;  // 1: off
  double min_p = 0.0;  // 0: off
  uint64_t seed = 0;
};

class Draw {
 public:
  // The token of `scores` [count] whose noise belongs to `position`; -1 where no score is above -infinity. NaN is never drawn.
  // Memory is taken once for the largest count.
  int64_t token(const float* scores, int64_t count, const Sampling& sampling, uint64_t position, const Kernels& kernels,
                Team& team);

 private:
  struct Call;
  struct Noisy {
    double value;  // score plus noise
    int64_t index;
    bool beats(const Noisy& other) const { return value > other.value || (value == other.value && index < other.index); }
  };

  void make_room(int64_t count);

  Buffer<float> scores_;          // [count] over the temperature
  Buffer<float> peaks_;           // the largest of each piece
  Buffer<Noisy> found_;           // the best of each piece
  Buffer<float> gathered_;        // [count] scores that top-k or top-p looks at
  Buffer<float> top_values_;      // [kMostRanked]
  Buffer<int64_t> top_indices_;
};

}  // namespace te
