// AVX2 with FMA and F16C: eight 32-bit lanes. Byte dot products go through 16-bit sums, arranged so that none saturates.
#pragma once

#include <immintrin.h>

#include "blocks.h"

namespace te {
namespace {

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  struct Q8 {
    I magnitude, value;
  };
  static constexpr int kLanes = 8;
  static constexpr int kTiles = 1;  // multiplied together
  static constexpr int kSums = 6;   // tiles times rows: 6 integer + 6 float accumulators of 16 registers
  static constexpr int kQueries = 4, kVectors = 2;

  static F set1(float x) { return _mm256_set1_ps(x); }
  static F zero() { return _mm256_setzero_ps(); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static float sum(F a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static float max_lane(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  static bool all_between(F x, F low, F high) {  // low <= x < high in every lane, so that none is NaN
    return _mm256_movemask_ps(_mm256_and_ps(_mm256_cmp_ps(x, low, _CMP_GE_OQ), _mm256_cmp_ps(x, high, _CMP_LT_OQ))) == 0xff;
  }
  static F load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

  static void store_bf16(uint16_t* p, F x) {
    const I bits = _mm256_castps_si256(x);
    const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const I rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const I words = _mm256_srli_epi32(rounded, 16);
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static I interleave(const uint16_t* a, const uint16_t* b) {
    const I low = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)));
    const I high = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)));
    return _mm256_or_si256(low, _mm256_slli_epi32(high, 16));
  }
  // By a shuffle: on Intel's processors shifts take the units that multiply.
  static F low_float(I pair) {
    const I place = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 4, 5, -1, -1, 8, 9, -1, -1, 12, 13,  //
                                     -1, -1, 0, 1, -1, -1, 4, 5, -1, -1, 8, 9, -1, -1, 12, 13);
    return _mm256_castsi256_ps(_mm256_shuffle_epi8(pair, place));
  }
  static F high_float(I pair) { return _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(-65536))); }
  static F dot_pair(F acc, I a, I b) {
    return fma(high_float(a), high_float(b), fma(low_float(a), low_float(b), acc));
  }
  static I load_pairs(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_pairs(uint32_t* p, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
  static I broadcast_pair(const uint32_t* p) { return _mm256_set1_epi32(static_cast<int32_t>(*p)); }

  // out[c * stride + r] = rows[r][c] for c, r in 0..7 (32-bit elements)
  static void transpose(const uint16_t* const* rows, int64_t offset, uint32_t* out, int64_t stride) {
    I a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + 2 * offset));
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      store_pairs(out + i * stride, _mm256_permute2x128_si256(a[i], a[4 + i], 0x20));
      store_pairs(out + (4 + i) * stride, _mm256_permute2x128_si256(a[i], a[4 + i], 0x31));
    }
  }

  static F first(F x, int64_t n) {  // lanes [0, n), the others zero
    const I place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), place)));
  }
  static I iset1(int32_t x) { return _mm256_set1_epi32(x); }
  static I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
  static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
  static I round(F x) { return _mm256_cvtps_epi32(x); }
  static int32_t isum(I x) {
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
  }
  static void store_int8(int8_t* p, I x) {
    const I words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x, x), 0x08);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_castsi256_si128(words)));
  }
  static F scale2(F x, I n) {
    return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, iset1(127)), 23)));
  }

  static I load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static I broadcast4(const int8_t* block, int group) {
    int32_t x;
    __builtin_memcpy(&x, block + 4 * group, 4);
    return _mm256_set1_epi32(x);
  }
  template <int N>
  static I shift_left(I x) { return _mm256_slli_epi32(x, N); }
  template <int N>
  static I shift_right(I x) { return _mm256_srli_epi32(x, N); }
  static I select(int32_t mask, I a, I b) {  // bits of a where `mask` is set in every byte, of b elsewhere
    const I bytes = _mm256_set1_epi8(static_cast<char>(mask));
    return _mm256_or_si256(_mm256_and_si256(bytes, a), _mm256_andnot_si256(bytes, b));
  }
  static I low_nibbles(I x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  static I high_nibbles(I x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }

  // |w| * (x with the sign of w): at most 128 * 127 a product, so that a pair fits in 16 bits. Nothing to correct at the start.
  static int32_t start8(const BlockInfo&) { return 0; }
  static Q8 prepare8(I stored) {
    const I value = _mm256_xor_si256(stored, _mm256_set1_epi8(-128));
    return {_mm256_abs_epi8(value), value};
  }
  static I dot8(I acc, const Q8& w, I x) {
    const I pairs = _mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8(x, w.value));
    return in_turn(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
  }
  // Of nibbles 16 bits hold a whole block: 16 products of at most 15 * 127 in each half of a lane.
  static I begin4(int32_t) { return iset1(0); }
  static I dot4(I acc, I w, I x) { return in_turn(_mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x))); }
  static I end4(I acc, int32_t start) { return iadd(_mm256_madd_epi16(acc, _mm256_set1_epi16(1)), iset1(start)); }

 private:
  // Keeps a sum a chain. Compilers know that integers may be added in any order, and make a tree of all products of a block,
  // for which there are not registers enough.
  static I in_turn(I sum) {
    asm("" : "+x"(sum));
    return sum;
  }
};

#ifdef __AVXVNNI__
// The same with the 256-bit byte dot product (Alder Lake and later).
struct AvxVnni : Avx2 {
  using Q8 = I;
  static int32_t start8(const BlockInfo& b) { return b.start_q8; }
  static Q8 prepare8(I stored) { return stored; }
  static I dot8(I acc, Q8 w, I x) { return _mm256_dpbusd_avx_epi32(acc, w, x); }
  static I begin4(int32_t start) { return iset1(start); }
  static I dot4(I acc, I w, I x) { return _mm256_dpbusd_avx_epi32(acc, w, x); }
  static I end4(I acc, int32_t) { return acc; }
};
#endif

}  // namespace
}  // namespace te
