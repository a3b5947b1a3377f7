// AVX-512 with VNNI: sixteen 32-bit lanes, four-way byte dot products (unsigned weights, signed activations).
#pragma once

#pragma GCC diagnostic push  // GCC 12 mistakes its own _mm512_undefined_* for uninitialised variables
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "blocks.h"

namespace te {
namespace {

struct Avx512Vnni {
  using F = __m512;
  using I = __m512i;
  using Q8 = __m512i;
  static constexpr int kLanes = 16;
  static constexpr int kQueries = 4, kVectors = 4;  // tile of the attention products
  static constexpr int kTiles = 2;  // multiplied together
  // Tiles times rows: 12 integer and 12 float accumulators; weights, activations and scales in the other registers.
  static constexpr int kSums = 12;

  static F set1(float x) { return _mm512_set1_ps(x); }
  static F zero() { return _mm512_setzero_ps(); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static float sum(F a) { return _mm512_reduce_add_ps(a); }
  static float max_lane(F a) { return _mm512_reduce_max_ps(a); }
  static bool all_between(F x, F low, F high) {  // low <= x < high in every lane, so that none is NaN
    return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x, low, _CMP_GE_OQ), x, high, _CMP_LT_OQ) == 0xffff;
  }
  static F load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }

  // bf16: the upper half of a float. Rounded to nearest even by integer arithmetic, so that every path rounds alike.
  static void store_bf16(uint16_t* p, F x) {
    const I bits = _mm512_castps_si512(x);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const I rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
  // lanes of (a[i], b[i]) as (low, high) 16 bits
  static I interleave(const uint16_t* a, const uint16_t* b) {
    const I low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
    const I high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
  static F low_float(I pair) { return _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)); }
  static F high_float(I pair) { return _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(-65536))); }
  // acc + a.low * b.low + a.high * b.high
  static F dot_pair(F acc, I a, I b) {
    return fma(high_float(a), high_float(b), fma(low_float(a), low_float(b), acc));
  }
  static I load_pairs(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static void store_pairs(uint32_t* p, I x) { _mm512_storeu_si512(p, x); }
  static I broadcast_pair(const uint32_t* p) { return _mm512_set1_epi32(static_cast<int32_t>(*p)); }

  // out[c * stride + r] = rows[r][c] for c, r in 0..15 (32-bit elements)
  static void transpose(const uint16_t* const* rows, int64_t offset, uint32_t* out, int64_t stride) {
    I a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + 2 * offset);
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {  // a[4 g + i] holds, in its 128-bit lane c, column 4 c + i of rows 4 g .. 4 g + 3
      const I p = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), q = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
      const I s = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd), t = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
      _mm512_storeu_si512(out + (0 + i) * stride, _mm512_shuffle_i32x4(p, q, 0x88));
      _mm512_storeu_si512(out + (8 + i) * stride, _mm512_shuffle_i32x4(p, q, 0xdd));
      _mm512_storeu_si512(out + (4 + i) * stride, _mm512_shuffle_i32x4(s, t, 0x88));
      _mm512_storeu_si512(out + (12 + i) * stride, _mm512_shuffle_i32x4(s, t, 0xdd));
    }
  }

  static F first(F x, int64_t n) {  // lanes [0, n), the others zero
    return _mm512_maskz_mov_ps(static_cast<__mmask16>((1u << n) - 1), x);
  }
  static I iset1(int32_t x) { return _mm512_set1_epi32(x); }
  static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static I round(F x) { return _mm512_cvtps_epi32(x); }  // nearest even
  static int32_t isum(I x) { return _mm512_reduce_add_epi32(x); }
  static void store_int8(int8_t* p, I x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x)); }
  // x * 2^n, n in the range of normal exponents
  static F scale2(F x, I n) {
    return mul(x, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, iset1(127)), 23)));
  }

  static I load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
  // in every lane: the four activations that one group of a block's eight multiplies
  static I broadcast4(const int8_t* block, int group) {
    int32_t x;
    __builtin_memcpy(&x, block + 4 * group, 4);
    return _mm512_set1_epi32(x);
  }
  // Keeps what serves two products in a register: each would load it again, and loads are what there is too little of.
  static void hold(I& x) { asm("" : "+v"(x)); }
  template <int N>
  static I shift_left(I x) { return _mm512_slli_epi32(x, N); }
  template <int N>
  static I shift_right(I x) { return _mm512_srli_epi32(x, N); }
  static I select(int32_t mask, I a, I b) {  // bits of a where `mask` is set in every byte, of b elsewhere
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(static_cast<char>(mask)), a, b, 0xca);
  }
  static I low_nibbles(I x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  static I high_nibbles(I x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }

  static int32_t start8(const BlockInfo& b) { return b.start_q8; }
  static Q8 prepare8(I stored) { return stored; }
  static I dot8(I acc, Q8 w, I x) { return _mm512_dpbusd_epi32(acc, w, x); }
  // A block's nibble products, from `start` on.
  static I begin4(int32_t start) { return iset1(start); }
  static I dot4(I acc, I w, I x) { return _mm512_dpbusd_epi32(acc, w, x); }
  static I end4(I acc, int32_t) { return acc; }
};

#ifdef __AVX512BF16__
// The same with bf16 dot products in attention (Zen 4, Sapphire Rapids and later). Its conversion rounds as all do; numbers below
// the normal ones become zero.
struct Avx512Bf16 : Avx512Vnni {
  static void store_bf16(uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
  }
  static F dot_pair(F acc, I a, I b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
};
#endif

}  // namespace
}  // namespace te
