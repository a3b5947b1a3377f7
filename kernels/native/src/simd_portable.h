// Any CPU: four lanes as plain arrays that a compiler turns into its own vectors, SSE2's or NEON's.
// No fused multiply-add is asked for: without hardware it would be a library call.
#pragma once

#include <cmath>
#include <cstring>

#include "blocks.h"

namespace te {
namespace {

struct Portable {
  static constexpr int kLanes = 4;
  static constexpr int kTiles = 1;  // multiplied together
  static constexpr int kSums = 4;   // tiles times rows
  static constexpr int kQueries = 2, kVectors = 2;
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  typedef int16_t H __attribute__((vector_size(16)));
  struct Q8 {  // bytes of even and of odd place, in 16 bits
    H even, odd;
  };

  static F set1(float x) { return F{x, x, x, x}; }
  static F zero() { return F{}; }
  static F load(const float* p) { return read<F>(p); }
  static void store(float* p, F x) { std::memcpy(p, &x, 16); }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }
  static F abs(F a) { return as_float(as_int(a) & 0x7fffffff); }
  static float sum(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
  static float max_lane(F a) {
    const float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
    return x > y ? x : y;
  }
  static bool all_between(F x, F low, F high) {  // low <= x < high in every lane, so that none is NaN
    const I within = (x >= low) & (x < high);
    return (within[0] & within[1] & within[2] & within[3]) != 0;
  }
  static F load_half(const uint16_t* p) {
    const I half{p[0], p[1], p[2], p[3]}, bits = (half & 0x7fff) << 13;  // an exponent 112 below that of a float
    const I special = (bits >= 0x0f800000) & 0x7f800000;                 // infinite or NaN
    return as_float(as_int(as_float(bits) * 0x1p112f) | special | (half & 0x8000) << 16);
  }

  static void store_bf16(uint16_t* p, F x) {
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = static_cast<uint32_t>(as_int(x)[i]);
      p[i] = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
  }
  static I interleave(const uint16_t* a, const uint16_t* b) {
    I x;
    for (int i = 0; i < 4; ++i) x[i] = static_cast<int32_t>(a[i] | static_cast<uint32_t>(b[i]) << 16);
    return x;
  }
  static F low_float(I pair) { return as_float(pair << 16); }
  static F high_float(I pair) { return as_float(pair & -65536); }
  static F dot_pair(F acc, I a, I b) { return high_float(a) * high_float(b) + (low_float(a) * low_float(b) + acc); }
  static I load_pairs(const uint32_t* p) { return read<I>(p); }
  static void store_pairs(uint32_t* p, I x) { std::memcpy(p, &x, 16); }
  static I broadcast_pair(const uint32_t* p) { return iset1(static_cast<int32_t>(*p)); }
  static void transpose(const uint16_t* const* rows, int64_t offset, uint32_t* out, int64_t stride) {
    for (int r = 0; r < 4; ++r) {
      const I row = read<I>(rows[r] + 2 * offset);
      for (int c = 0; c < 4; ++c) out[c * stride + r] = static_cast<uint32_t>(row[c]);
    }
  }

  static F first(F x, int64_t n) {  // lanes [0, n), the others zero
    for (int64_t i = n; i < kLanes; ++i) x[i] = 0.0f;
    return x;
  }
  static I iset1(int32_t x) { return I{x, x, x, x}; }
  static I iadd(I a, I b) { return a + b; }
  static F to_float(I x) { return __builtin_convertvector(x, F); }
  static I truncate(F x) { return __builtin_convertvector(x, I); }
  // Nearest even by the addition that pushes the fraction out; |x| < 2^22 everywhere it is used, and never NaN.
  static I round(F x) {
    const F magic = set1(12582912.0f);
    return as_int(x + magic) - as_int(magic);
  }
  static int32_t isum(I x) { return x[0] + x[1] + x[2] + x[3]; }
  static void store_int8(int8_t* p, I x) {
    for (int i = 0; i < 4; ++i) p[i] = static_cast<int8_t>(x[i]);
  }
  static F scale2(F x, I n) { return x * as_float((n + 127) << 23); }

  static I load_bytes(const uint8_t* p) { return read<I>(p); }
  static I broadcast4(const int8_t* block, int group) {
    int32_t x;
    std::memcpy(&x, block + 4 * group, 4);
    return iset1(x);
  }
  template <int N>
  static I shift_left(I x) { return x << N; }
  template <int N>
  static I shift_right(I x) { return x >> N; }  // what comes into the highest bits is for the caller to drop
  static I select(int32_t mask, I a, I b) {  // bits of a where `mask` is set in every byte, of b elsewhere
    const I bytes = iset1(static_cast<int32_t>(static_cast<uint32_t>(mask) * 0x01010101u));
    return (a & bytes) | (b & ~bytes);
  }
  static I low_nibbles(I x) { return x & 0x0f0f0f0f; }
  static I high_nibbles(I x) { return (x >> 4) & 0x0f0f0f0f; }

  static int32_t start8(const BlockInfo&) { return 0; }
  static Q8 prepare8(I stored) { return signed_bytes(stored ^ static_cast<int32_t>(0x80808080u)); }
  static I dot8(I acc, const Q8& w, I x) { return acc + sum_halves(pair_sums(w, x)); }
  // Of nibbles 16 bits hold a whole block: 16 products of at most 15 * 127 in each half of a lane.
  static I begin4(int32_t) { return I{}; }
  static I dot4(I acc, I w, I x) { return (I)((H)acc + pair_sums(signed_bytes(w), x)); }
  static I end4(I acc, int32_t start) { return sum_halves((H)acc) + start; }

 private:
  template <class T>
  static T read(const void* p) {
    T x;
    std::memcpy(&x, p, 16);
    return x;
  }
  static I as_int(F x) { return (I)x; }
  static F as_float(I x) { return (F)x; }
  static Q8 signed_bytes(I x) { return {((H)x << 8) >> 8, (H)x >> 8}; }
  static H pair_sums(const Q8& w, I x) {  // each at most 2 * 128 * 127
    const Q8 bytes = signed_bytes(x);
    return w.even * bytes.even + w.odd * bytes.odd;
  }
  static I sum_halves(H x) { return (((I)x << 16) >> 16) + ((I)x >> 16); }
};

}  // namespace
}  // namespace te
