// Weight formats: blocks of 32 along the input dimension, repacked for integer dot products.
//
// A weight [n, k] is cut into tiles of 16 output channels. Inside a tile, the quants of one block lie as
//     [k / 4][16 channels][4 consecutive k]  = 64 bytes for every 4 k,
// which is one AVX-512 register (two AVX2 ones, four of NEON) whose 32-bit lanes are output channels: exactly what
// a four-way byte dot product eats. Scales follow the quants of the whole tile, so every quant load is 64-byte aligned.
//
//     8 bit   : stored as q + 128 (unsigned, what VNNI wants on this side); w = scale * (stored - 128)
//     4 bit, 0: stored as 0..15, two k-groups a byte;                       w = scale * (stored - 8)
//     4 bit, 1: the same with a minimum;                                    w = scale * stored + minimum
//
// The matrix that gives logits has its 8 bits in two planes (Format::Split). First, for all tiles, the upper six of every
// weight: of four k-groups, three have them in the upper six bits of 64 bytes each, and the fourth has its own in the lower two of
// these, the highest first. Behind all tiles, the lower two bits, those of four k-groups a byte, the first group lowest. What a
// product over the first plane alone lacks is bounded for every channel when it is packed; the bound lies beside the scales.
//
// The constant offsets never reach the inner loop: offset * sum(x) of the block is where the integer accumulator starts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace te {

constexpr int kBlock = 32;         // weights that share a scale
constexpr int kTile = 16;          // output channels side by side
constexpr int64_t kAlign = 64;     // bytes

enum class Format : int32_t { Q8 = 0, Q4_0 = 1, Q4_1 = 2, Split = 3 };

// Bytes of quants for 16 channels x 32 inputs; of Split the first plane, with `kLowBytes` in the second.
constexpr int64_t quant_bytes(Format f) { return f == Format::Q8 ? 512 : f == Format::Split ? 384 : 256; }
constexpr int64_t kLowBytes = 128;
// What stands for the lower two bits where they are not read. The first of four k-groups keeps what its byte has there, the
// highest bits of the fourth, which are near the middle, too.
constexpr uint32_t kPlaneFill = 2;

constexpr int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// A repacked weight matrix. The memory belongs to whoever packed it.
struct Weight {
  Format format = Format::Q8;
  int64_t n = 0;           // output channels
  int64_t k = 0;           // inputs, a multiple of 32
  int64_t blocks = 0;      // k / 32
  int64_t tiles = 0;       // ceil(n / 16); the channels past n have scale 0
  int64_t tile_bytes = 0;  // a multiple of 64
  const uint8_t* data = nullptr;
  float largest_norm = 0.0f;  // Split only: no sum of a channel exceeds it times the norm of a row; may be infinite

  const uint8_t* quants(int64_t tile) const { return data + tile * tile_bytes; }
  const uint16_t* scales(int64_t tile) const {  // fp16 [blocks][16]
    return reinterpret_cast<const uint16_t*>(quants(tile) + blocks * quant_bytes(format));
  }
  const uint8_t* low(int64_t tile) const { return data + tiles * tile_bytes + tile * blocks * kLowBytes; }  // Split only
  // fp32 [16], Split only: times the norm of a row of activations, no less than what the product of the first plane and that
  // of both differ by, as computed. Infinite past n, where no product is a logit.
  const float* bounds(int64_t tile) const { return reinterpret_cast<const float*>(scales(tile) + blocks * kTile); }
  const uint16_t* minima(int64_t tile) const { return scales(tile) + blocks * kTile; }  // fp16 [blocks][16], Q4_1 only
};

// What a row's block of 32 activations carries beside its 32 int8 values: 16 bytes, so one cache line serves four blocks.
struct BlockInfo {
  float scale;         // absmax / 127
  float scaled_sum;    // scale * sum(q): meets the minimum of Q4_1
  int32_t start_q8;    // -128 * sum(q): where an accumulator over (stored - 128) starts
  int32_t start_q4_0;  // -8 * sum(q)
};

// Quantised activations of a batch, block by block: [k / 32][rows][32]. A tile of rows then sits at constant distances
// from one pointer, so that the inner loop's loads need no address arithmetic.
struct Activations {
  int8_t* q = nullptr;
  BlockInfo* info = nullptr;  // [k / 32][rows]
  int64_t rows = 0;

  int8_t* block(int64_t b, int64_t row) const { return q + (b * rows + row) * kBlock; }
  BlockInfo* block_info(int64_t b, int64_t row) const { return info + b * rows + row; }
};

// Shape and size of a packed weight; data stays null. k must be a multiple of 32.
Weight weight_shape(Format format, int64_t n, int64_t k);
int64_t weight_bytes(const Weight& w);

// Copies rows in GGUF's own block layout (Q8_0, Q4_0, Q4_1) into tiles; every value stays equal to the file's.
// Rows [row0, row0 + rows) of the packed matrix are written, so that Q, K, V or gate, up can share one matrix.
void pack_gguf_rows(const Weight& w, uint8_t* data, const uint8_t* src, int64_t row0, int64_t rows);

// Quantises fp32 rows into w.format (Q8_0: absmax / 127; Q4_0: far end / -8; Q4_1: see fit.h), then packs them.
void pack_float_rows(const Weight& w, uint8_t* data, const float* src, int64_t row0, int64_t rows);

// Copies a matrix of one tile and format Q8 to a tile of `to`, of format Split, and finds the bounds of its channels, of which
// `channels` exist. The values stay the same. Returns the tile's part in `largest_norm`.
float split_tile(const Weight& from, const Weight& to, uint8_t* data, int64_t tile, int64_t channels);

// The norm of a row of `blocks` blocks, rounded up.
float row_norm(const Activations& a, int64_t blocks, int64_t row);

// The exact float value of one packed row, [k].
void unpack_row(const Weight& w, int64_t row, float* out);

float half_to_float(uint16_t h);
uint16_t float_to_half(float f);  // round to nearest even

}  // namespace te
