// One or two tiles of 16 output channels times a few rows, for any instruction set.
//
// A row's float value is built the same way whatever happens around it: for every block in order, an exact integer dot
// product, one multiplication by the weights' scale, one fused multiply-add by the activations' scale (Q4_1: one more for
// the minimum). The number of rows and tiles handled together only decides which registers are busy.
#pragma once

#include <type_traits>

#include "blocks.h"

namespace te {
namespace {

// Up to so many rows memory is what a product waits for, and it is read fastest one tile after the other.
constexpr int64_t kFewRows = 9;

// What of a matrix in two planes a product reads.
enum class Planes { kBoth, kFirst };

template <int N>
using Constant = std::integral_constant<int, N>;

// One of the eight k-groups of a block as bytes. Of a matrix in two planes, four groups have their upper bits in 192 bytes
// at `upper` and their lower ones in 64 at `low`, which are not read where only the first plane is. What is needed several
// times is loaded several times: registers are what there is too little of.
template <class S, Format Fmt, Planes P>
inline typename S::I eight_bits(const uint8_t* quants, const uint8_t* low, int group) {
  using I = typename S::I;
  if constexpr (Fmt == Format::Q8) {
    return S::load_bytes(quants + group * 64);
  } else {
    const int g = group % 4;
    const uint8_t* upper = quants + group / 4 * 192;
    const auto lows = [&](auto shift) -> I {
      constexpr int kShift = decltype(shift)::value;
      if constexpr (P == Planes::kFirst) return S::iset1(static_cast<int32_t>(kPlaneFill * 0x01010101u));
      const I all = S::load_bytes(low + group / 4 * 64);
      return kShift ? S::template shift_right<kShift>(all) : all;
    };
    if (g == 0) return P == Planes::kBoth ? S::select(0xfc, S::load_bytes(upper), lows(Constant<0>{})) : S::load_bytes(upper);
    if (g == 1) return S::select(0xfc, S::load_bytes(upper + 64), lows(Constant<2>{}));
    if (g == 2) return S::select(0xfc, S::load_bytes(upper + 128), lows(Constant<4>{}));
    const I highest = S::template shift_left<6>(S::load_bytes(upper));
    const I middle = S::template shift_left<4>(S::load_bytes(upper + 64));
    const I lowest = S::template shift_left<2>(S::load_bytes(upper + 128));
    return S::select(0xc0, highest, S::select(0x30, middle, S::select(0x0c, lowest, lows(Constant<6>{}))));
  }
}

// Memory that will be needed soon, for each of T tiles at hand: a few cache lines of it are asked for a block, into the
// first level. Into the second was 3 to 7 % slower.
template <int T>
class Prefetch {
 public:
  // All of `next` is asked for by the time that `blocks` blocks are done.
  Prefetch(const Upcoming& next, int64_t tile_bytes, int64_t blocks) {
    for (int t = 0; t < T; ++t) {
      at_[t] = next.tiles[t];
      lines_[t] = at_[t] ? static_cast<int>((tile_bytes / 64 + blocks - 1) / blocks) : 0;
    }
  }

  void ask() {
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) {
      for (int l = 0; l < lines_[t]; ++l) __builtin_prefetch(at_[t] + l * 64);
      at_[t] += lines_[t] * 64;
    }
  }

 private:
  const uint8_t* at_[T];
  int lines_[T];
};

// acc[r][t] += block of tile t . block of row r. What is loaded of a row serves all tiles.
template <class S, Format Fmt, Planes P, int T, int R>
inline void block_dots(const uint8_t* lane, int64_t tile_bytes, const uint8_t* low, int64_t low_bytes, const int8_t* x,
                       typename S::I (&acc)[R][T]) {
  const auto fours = [&](int r, int group) {
    auto some = S::broadcast4(x + r * kBlock, group);
    if constexpr (T > 1) S::hold(some);
    return some;
  };
  if constexpr (Fmt == Format::Q8 || Fmt == Format::Split) {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      typename S::Q8 w[T];
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t)
        w[t] = S::prepare8(eight_bits<S, Fmt, P>(lane + t * tile_bytes, low + t * low_bytes, g));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const auto some = fours(r, g);
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) acc[r][t] = S::dot8(acc[r][t], w[t], some);
      }
    }
  } else {
#pragma GCC unroll 4
    for (int g = 0; g < 8; g += 2) {
      typename S::I even[T], odd[T];
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t) {
        const typename S::I both = S::load_bytes(lane + t * tile_bytes + g / 2 * 64);
        even[t] = S::low_nibbles(both), odd[t] = S::high_nibbles(both);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const auto some = fours(r, g), more = fours(r, g + 1);
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) acc[r][t] = S::dot4(S::dot4(acc[r][t], even[t], some), odd[t], more);
      }
    }
  }
}

// The products of T tiles, of each kLanes channels, those of `sub`, with R rows.
template <class S, Format Fmt, Planes P, int T, int R>
inline void channel_totals(const Weight& w, int64_t tile, int sub, const Activations& a, int64_t row, Prefetch<T>& next,
                           typename S::F (&total)[R][T]) {
  using F = typename S::F;
  using I = typename S::I;
  constexpr bool kEight = Fmt == Format::Q8 || Fmt == Format::Split;
  const uint8_t* quants = w.quants(tile) + sub * S::kLanes * 4;
  const uint8_t* low = Fmt == Format::Split ? w.low(tile) + sub * S::kLanes * 4 : quants;  // not read otherwise
  const uint16_t* scales = w.scales(tile) + sub * S::kLanes;
  const uint16_t* minima = w.minima(tile) + sub * S::kLanes;
  const int64_t tile_halves = w.tile_bytes / static_cast<int64_t>(sizeof(uint16_t));
  const int8_t* x = a.block(0, row);
  const BlockInfo* info = a.block_info(0, row);
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) total[r][t] = S::zero();
  for (int64_t b = 0; b < w.blocks; ++b) {
    next.ask();
    if constexpr (Fmt == Format::Split && P == Planes::kBoth)
      for (int t = 0; t < T; ++t)
        for (int l = 0; l < kLowBytes / 64; ++l) __builtin_prefetch(low + (2 + t) * w.blocks * kLowBytes + l * 64);
    I acc[R][T];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t)
        acc[r][t] = kEight ? S::iset1(S::start8(info[r])) : S::begin4(Fmt == Format::Q4_0 ? info[r].start_q4_0 : 0);
    block_dots<S, Fmt, P, T, R>(quants, w.tile_bytes, low, w.blocks * kLowBytes, x, acc);
    F scale[T];
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) scale[t] = S::load_half(scales + t * tile_halves);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F scale_r = S::set1(info[r].scale);
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t) {
        const I dot = kEight ? acc[r][t] : S::end4(acc[r][t], Fmt == Format::Q4_0 ? info[r].start_q4_0 : 0);
        total[r][t] = S::fma(S::mul(S::to_float(dot), scale[t]), scale_r, total[r][t]);
      }
    }
    if constexpr (Fmt == Format::Q4_1) {
      F minimum[T];
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t) minimum[t] = S::load_half(minima + t * tile_halves);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F sum_r = S::set1(info[r].scaled_sum);
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) total[r][t] = S::fma(minimum[t], sum_r, total[r][t]);
      }
      minima += kTile;
    }
    quants += quant_bytes(Fmt);
    low += kLowBytes;
    scales += kTile;
    x += a.rows * kBlock;
    info += a.rows;
  }
}

// out[r * ldo + 0 .. 16 T - 1] for R rows.
template <class S, Format Fmt, int T, int R>
void tile_rows(const Weight& w, int64_t tile, const Activations& a, int64_t row, float* out, int64_t ldo, Prefetch<T>& next) {
  for (int sub = 0; sub < kTile / S::kLanes; ++sub) {
    typename S::F total[R][T];
    channel_totals<S, Fmt, Planes::kBoth, T, R>(w, tile, sub, a, row, next, total);
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) S::store(out + r * ldo + t * kTile + sub * S::kLanes, total[r][t]);
  }
}

template <int T>
using TileFn = void (*)(const Weight&, int64_t, const Activations&, int64_t, float*, int64_t, Prefetch<T>&);

template <class S, Format Fmt, int T, int R>
inline TileFn<T> tile_function(int64_t rows) {
  if constexpr (R == 1) {
    (void)rows;
    return tile_rows<S, Fmt, T, 1>;
  } else {
    return rows == R ? tile_rows<S, Fmt, T, R> : tile_function<S, Fmt, T, R - 1>(rows);
  }
}

// out[row * ldo + 0 .. 16 T - 1] for all rows: even groups of as many as fit the registers, the tiles staying in the nearest
// cache.
template <class S, Format Fmt, int T>
void tile_all_rows(const Weight& w, int64_t tile, const Activations& a, int64_t row0, int64_t rows, float* out, int64_t ldo,
                   const Upcoming& next) {
  constexpr int kRows = S::kSums / T;
  const int64_t groups = (rows + kRows - 1) / kRows;
  Prefetch<T> prefetch(next, w.tile_bytes, groups * w.blocks * (kTile / S::kLanes));
  for (int64_t g = 0, row = 0; g < groups; ++g) {
    const int64_t count = (rows - row + (groups - g) - 1) / (groups - g);
    tile_function<S, Fmt, T, kRows>(count)(w, tile, a, row0 + row, out + row * ldo, ldo, prefetch);
    row += count;
  }
}

template <class S, Format Fmt>
void some_tiles(const Weight& w, int64_t tile, int64_t count, const Activations& a, int64_t row0, int64_t rows, float* out,
                int64_t ldo, const Upcoming& next) {
  if constexpr (S::kTiles == 2)
    if (count == 2 && rows > kFewRows) return tile_all_rows<S, Fmt, 2>(w, tile, a, row0, rows, out, ldo, next);
  for (int64_t t = 0; t < count; ++t)
    tile_all_rows<S, Fmt, 1>(w, tile + t, a, row0, rows, out + t * kTile, ldo, {{next.tiles[t], nullptr}});
}

template <class S>
void matmul_tiles(const Weight& w, int64_t tile, int64_t count, const Activations& a, int64_t row0, int64_t rows, float* out,
                  int64_t ldo, const Upcoming& next) {
  switch (w.format) {
    case Format::Q8: return some_tiles<S, Format::Q8>(w, tile, count, a, row0, rows, out, ldo, next);
    case Format::Q4_0: return some_tiles<S, Format::Q4_0>(w, tile, count, a, row0, rows, out, ldo, next);
    case Format::Split: return some_tiles<S, Format::Split>(w, tile, count, a, row0, rows, out, ldo, next);
    case Format::Q4_1: return some_tiles<S, Format::Q4_1>(w, tile, count, a, row0, rows, out, ldo, next);
  }
}

}  // namespace
}  // namespace te
