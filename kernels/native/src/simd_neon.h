// NEON with byte dot products (ARMv8.2 and DotProd: Cortex-A75 and later, Neoverse, Apple silicon): four 32-bit lanes.
// Where plain C++ on vectors is one instruction already, the portable path's function serves.
#pragma once

#include <arm_neon.h>

#include "simd_portable.h"

namespace te {
namespace {

struct NeonDot : Portable {
  using Q8 = I;
  static constexpr int kTiles = 1;        // multiplied together
  static constexpr int kSums = 8;         // tiles times rows: 8 integer + 8 float accumulators of 32 registers
  static constexpr int kQueries = 4, kVectors = 4;

  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static float max_lane(F a) { return vmaxvq_f32(a); }
  static bool all_between(F x, F low, F high) {
    return vminvq_u32(vandq_u32(vcgeq_f32(x, low), vcltq_f32(x, high))) != 0;
  }
  static F load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

  static void store_bf16(uint16_t* p, F x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    vst1_u16(p, vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16));
  }
  static I interleave(const uint16_t* a, const uint16_t* b) {
    const uint16x4x2_t pairs = vzip_u16(vld1_u16(a), vld1_u16(b));
    return vreinterpretq_s32_u16(vcombine_u16(pairs.val[0], pairs.val[1]));
  }
  static F dot_pair(F acc, I a, I b) {
    return fma(high_float(a), high_float(b), fma(low_float(a), low_float(b), acc));
  }
  static void transpose(const uint16_t* const* rows, int64_t offset, uint32_t* out, int64_t stride) {
    int32x4_t row[4];
    for (int r = 0; r < 4; ++r) row[r] = load_pairs(reinterpret_cast<const uint32_t*>(rows[r] + 2 * offset));
    const int32x4x2_t even = vzipq_s32(row[0], row[2]), odd = vzipq_s32(row[1], row[3]);
    for (int half = 0; half < 2; ++half) {
      const int32x4x2_t columns = vzipq_s32(even.val[half], odd.val[half]);
      store_pairs(out + 2 * half * stride, columns.val[0]);
      store_pairs(out + (2 * half + 1) * stride, columns.val[1]);
    }
  }

  static F to_float(I x) { return vcvtq_f32_s32(x); }
  static I round(F x) { return vcvtnq_s32_f32(x); }  // nearest even
  static int32_t isum(I x) { return vaddvq_s32(x); }
  static void store_int8(int8_t* p, I x) {
    const int16x4_t words = vmovn_s32(x);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    std::memcpy(p, &bytes, 4);
  }

  static I high_nibbles(I x) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x), 4)); }

  // A dot product takes its four activations from any lane of a register, so that sixteen are loaded at once.
  struct Fours {
    int8x16_t sixteen;
    int lane;
  };
  static Fours broadcast4(const int8_t* block, int group) { return {vld1q_s8(block + group / 4 * 16), group % 4}; }
  static Q8 prepare8(I stored) { return stored ^ static_cast<int32_t>(0x80808080u); }
  static I dot8(I acc, Q8 w, Fours x) { return dot4(acc, w, x); }
  static I begin4(int32_t start) { return iset1(start); }
  static I dot4(I acc, I w, Fours x) {
    const int8x16_t bytes = vreinterpretq_s8_s32(w);
    switch (x.lane) {  // known to the compiler: the loops over groups are unrolled
      case 0: return vdotq_laneq_s32(acc, bytes, x.sixteen, 0);
      case 1: return vdotq_laneq_s32(acc, bytes, x.sixteen, 1);
      case 2: return vdotq_laneq_s32(acc, bytes, x.sixteen, 2);
      default: return vdotq_laneq_s32(acc, bytes, x.sixteen, 3);
    }
  }
  static I end4(I acc, int32_t) { return acc; }
};

}  // namespace
}  // namespace te
