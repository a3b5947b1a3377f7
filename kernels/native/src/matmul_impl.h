// One tile of 16 output channels times a few rows, for any instruction set.
//
// A row's float value is built the same way whatever happens around it: for every block in order, an exact integer dot
// product, one multiplication by the weights' scale, one fused multiply-add by the activations' scale (Q4_1: one more for
// the minimum). The number of rows handled together only decides which registers are busy.
#pragma once

#include "blocks.h"

namespace te {
namespace {

// What of a matrix in two planes a product reads.
enum class Planes { kBoth, kFirst };

// Four k-groups as bytes; `low` is not read where only the first plane is.
template <class S, Planes P>
inline void join_planes(const uint8_t* upper, const uint8_t* low, typename S::I (&w)[4]) {
  using I = typename S::I;
  I lows = S::iset1(static_cast<int32_t>(kPlaneFill * 0x01010101u));
  if constexpr (P == Planes::kBoth) lows = S::load_bytes(low);
  for (int g = 0; g < 3; ++g) w[g] = S::load_bytes(upper + g * 64);
  const I last = P == Planes::kBoth ? S::template shift_right<6>(lows) : lows;
  w[3] = S::select(0xc0, S::template shift_left<6>(w[0]),
                   S::select(0x30, S::template shift_left<4>(w[1]), S::select(0x0c, S::template shift_left<2>(w[2]), last)));
  if constexpr (P == Planes::kBoth) w[0] = S::select(0xfc, w[0], lows);
  w[1] = S::select(0xfc, w[1], P == Planes::kBoth ? S::template shift_right<2>(lows) : lows);
  w[2] = S::select(0xfc, w[2], P == Planes::kBoth ? S::template shift_right<4>(lows) : lows);
}

template <class S, Format Fmt, Planes P, int R>
inline void block_dots(const uint8_t* quants, const uint8_t* low, int sub, const int8_t* x, typename S::I (&acc)[R]) {
  const uint8_t* lane = quants + sub * S::kLanes * 4;
  if constexpr (Fmt == Format::Split) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      typename S::I stored[4];
      join_planes<S, P>(lane + half * 192, low + half * 64 + sub * S::kLanes * 4, stored);
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) {
        const typename S::Q8 w = S::prepare8(stored[g]);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[r] = S::dot8(acc[r], w, S::broadcast4(x + r * kBlock, half * 4 + g));
      }
    }
  } else if constexpr (Fmt == Format::Q8) {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      const typename S::Q8 w = S::prepare8(S::load_bytes(lane + g * 64));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r] = S::dot8(acc[r], w, S::broadcast4(x + r * kBlock, g));
    }
  } else {
#pragma GCC unroll 4
    for (int g = 0; g < 8; g += 2) {
      const typename S::I both = S::load_bytes(lane + g / 2 * 64);
      const typename S::I low = S::low_nibbles(both), high = S::high_nibbles(both);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        acc[r] = S::dot4(acc[r], low, S::broadcast4(x + r * kBlock, g));
        acc[r] = S::dot4(acc[r], high, S::broadcast4(x + r * kBlock, g + 1));
      }
    }
  }
}

// The products of kLanes channels, those of `sub`, with R rows. `next` is memory that will be needed soon: `lines` cache lines
// of it are asked for a block.
template <class S, Format Fmt, Planes P, int R>
inline void channel_totals(const Weight& w, int64_t tile, int sub, const Activations& a, int64_t row, const uint8_t*& next,
                           int lines, typename S::F (&total)[R]) {
  using F = typename S::F;
  using I = typename S::I;
  constexpr bool kEight = Fmt == Format::Q8 || Fmt == Format::Split;
  const uint8_t* quants = w.quants(tile);
  const uint8_t* low = Fmt == Format::Split ? w.low(tile) : quants;  // not read otherwise
  const uint16_t* scales = w.scales(tile) + sub * S::kLanes;
  const uint16_t* minima = w.minima(tile) + sub * S::kLanes;
  const int8_t* x = a.block(0, row);
  const BlockInfo* info = a.block_info(0, row);
  for (int r = 0; r < R; ++r) total[r] = S::zero();
  for (int64_t b = 0; b < w.blocks; ++b) {
    for (int l = 0; l < lines; ++l) __builtin_prefetch(next + l * 64, 0, 2);  // into the second level: the first is busy
    next += lines * 64;
    if constexpr (Fmt == Format::Split && P == Planes::kBoth)
      for (int l = 0; l < kLowBytes / 64; ++l) __builtin_prefetch(low + 2 * w.blocks * kLowBytes + l * 64, 0, 2);
    I acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      acc[r] = S::iset1(kEight ? S::start8(info[r]) : Fmt == Format::Q4_0 ? info[r].start_q4_0 : 0);
    block_dots<S, Fmt, P, R>(quants, low, sub, x, acc);
    const F scale = S::load_half(scales);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      total[r] = S::fma(S::mul(S::to_float(acc[r]), scale), S::set1(info[r].scale), total[r]);
    if constexpr (Fmt == Format::Q4_1) {
      const F minimum = S::load_half(minima);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) total[r] = S::fma(minimum, S::set1(info[r].scaled_sum), total[r]);
      minima += kTile;
    }
    quants += quant_bytes(Fmt);
    low += kLowBytes;
    scales += kTile;
    x += a.rows * kBlock;
    info += a.rows;
  }
}

// out[r * ldo + 0..15] for R rows.
template <class S, Format Fmt, int R>
void tile_rows(const Weight& w, int64_t tile, const Activations& a, int64_t row, float* out, int64_t ldo,
               const uint8_t* next, int lines) {
  for (int sub = 0; sub < kTile / S::kLanes; ++sub) {
    typename S::F total[R];
    channel_totals<S, Fmt, Planes::kBoth, R>(w, tile, sub, a, row, next, lines, total);
    for (int r = 0; r < R; ++r) S::store(out + r * ldo + sub * S::kLanes, total[r]);
  }
}

using TileFn = void (*)(const Weight&, int64_t, const Activations&, int64_t, float*, int64_t, const uint8_t*, int);

template <class S, Format Fmt, int R>
inline TileFn tile_function(int64_t rows) {
  if constexpr (R == 1) {
    (void)rows;
    return tile_rows<S, Fmt, 1>;
  } else {
    return rows == R ? tile_rows<S, Fmt, R> : tile_function<S, Fmt, R - 1>(rows);
  }
}

// out[row * ldo + 0..15] for rows [0, rows): even groups of at most kRows, the tile staying in the nearest cache.
template <class S, Format Fmt>
void tile_all_rows(const Weight& w, int64_t tile, const Activations& a, int64_t row0, int64_t rows, float* out, int64_t ldo,
                   const uint8_t* next) {
  const int64_t groups = (rows + S::kRows - 1) / S::kRows;
  const int64_t all_lines = next ? w.tile_bytes / 64 : 0;
  const int lines = static_cast<int>((all_lines + groups * w.blocks - 1) / (groups * w.blocks));
  for (int64_t g = 0, row = 0; g < groups; ++g) {
    const int64_t count = (rows - row + (groups - g) - 1) / (groups - g);
    tile_function<S, Fmt, S::kRows>(count)(w, tile, a, row0 + row, out + row * ldo, ldo, next, lines);
    if (next) next += static_cast<int64_t>(lines) * 64 * w.blocks;
    row += count;
  }
}

template <class S>
void matmul_tile(const Weight& w, int64_t tile, const Activations& a, int64_t row0, int64_t rows, float* out, int64_t ldo,
                 const uint8_t* next) {
  switch (w.format) {
    case Format::Q8: return tile_all_rows<S, Format::Q8>(w, tile, a, row0, rows, out, ldo, next);
    case Format::Q4_0: return tile_all_rows<S, Format::Q4_0>(w, tile, a, row0, rows, out, ldo, next);
    case Format::Split: return tile_all_rows<S, Format::Split>(w, tile, a, row0, rows, out, ldo, next);
    case Format::Q4_1: return tile_all_rows<S, Format::Q4_1>(w, tile, a, row0, rows, out, ldo, next);
  }
}

}  // namespace
}  // namespace te
