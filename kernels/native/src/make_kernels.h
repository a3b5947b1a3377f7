// The table of one instruction set. Include it once, in a file compiled for that set.
#pragma once

#include "attention_impl.h"
#include "matmul_impl.h"
#include "ops_impl.h"
#include "screen_impl.h"

namespace te {
namespace {

template <class S>
constexpr Kernels make_kernels(const char* name) {
  return {name,         S::kSums, matmul_tiles<S>, screen_tile<S>, quantise_row<S>, rms_norm<S>,     add_scaled<S>,
          silu_mul<S>,  rope<S>,  store_bf16<S>,  attend<S>,      attend_parts<S>, merge_parts<S>,  attend_scratch,
          note_peaks<S>, log_softmax_top<S>};
}

}  // namespace
}  // namespace te
