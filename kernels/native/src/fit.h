// The scale and minimum that 32 weights are quantised with at 4 bits.
#pragma once

namespace te {

struct Fit {
  float scale;
  float minimum;
};

// For 16 steps: the least squared error found from a few starts. The range of the block is cut a little or not at all at
// either end, since a single far value would otherwise make every step coarse; every value is rounded to a step, and the
// line through (step, value) is fitted anew, as ggml's k-quants do. Where a value is not finite, so is the scale.
Fit fit_block(const float* values);

}  // namespace te
