// What one instruction set offers: a table of functions, chosen once.
#pragma once

#include "blocks.h"

namespace te {

constexpr int kKeyBlock = 64;  // reading positions that share one softmax rescaling; blocks are cut by absolute position
constexpr int kChunk = 2 * kKeyBlock;  // positions whose softmax begins anew; what chunks find is merged in order

// Shapes of one attention layer and of its key and value rows.
struct AttentionShape {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;  // a multiple of 32
  int64_t group() const { return heads / kv_heads; }
  int64_t part_width() const { return head_dim + 16; }  // floats that a chunk leaves of one query
};

// What the rows of one pass read: `prefix` first, then each row its own list.
struct ReadingLists {
  const int64_t* prefix = nullptr;  // [prefix_count] slots
  int64_t prefix_count = 0;
  const int32_t* own = nullptr;     // [rows][stride] slots, in reading order
  const int32_t* own_count = nullptr;
  int64_t stride = 0;

  int64_t length(int64_t row) const { return prefix_count + own_count[row]; }
  // Of the longest of rows [row0, row1).
  int64_t chunks(int64_t row0, int64_t row1) const {
    int64_t longest = 0;
    for (int64_t r = row0; r < row1; ++r) longest = length(r) > longest ? length(r) : longest;
    return (longest + kChunk - 1) / kChunk;
  }
  int64_t slot(int64_t row, int64_t position) const {
    return position < prefix_count ? prefix[position] : own[row * stride + position - prefix_count];
  }
};

struct AttentionJob {
  AttentionShape shape;
  const float* query = nullptr;      // row r, head h at query + r * query_stride + h * head_dim; scaled already
  int64_t query_stride = 0;
  const uint16_t* keys = nullptr;    // bf16 [slots, kv_heads, head_dim]
  const uint16_t* values = nullptr;
  ReadingLists reads;
  Activations out;                   // quantised [heads * head_dim]
  float* raw = nullptr;              // or null: the same before quantisation, [rows][heads * head_dim]
};

// The largest finite logit of a row among those that were looked at, the lower index among equals.
struct Peak {
  float value = -__builtin_inff();
  bool spoilt = false;  // one was not finite
  int64_t index = 0;
};

// The tile that holds the best logit of a row, as far as the first plane tells: at least `lower`.
struct Contender {
  float lower = -__builtin_inff();
  int64_t tile = 0;
};

constexpr int64_t kMostTiles = 2;  // that are multiplied together

// Memory that will be needed soon, asked for while a tile, or the one after it, is multiplied; null where there is none.
struct Upcoming {
  const uint8_t* tiles[kMostTiles] = {};
};

// Memory that will be needed soon. A kernel that has its own data at hand asks for some of it meanwhile.
struct Soon {
  const uint8_t *at = nullptr, *end = nullptr;

  // The next cache lines to ask for; null once all have been.
  [[gnu::always_inline]] const uint8_t* take(int64_t lines) {
    if (at >= end) return nullptr;
    const uint8_t* found = at;
    at += lines * 64;
    return found;
  }
};

struct Kernels {
  const char* name;
  int64_t rows_together;  // rows whose sums of one tile fit the registers
  // out[r * ldo + 0 .. 16 count - 1] = rows [row0, row0 + rows) times tiles [tile, tile + count), one or two
  void (*matmul_tiles)(const Weight& w, int64_t tile, int64_t count, const Activations& a, int64_t row0, int64_t rows,
                       float* out, int64_t ldo, const Upcoming& next);
  // The same from the first plane of a matrix in two, for all rows of a, at most `rows_together`: uppers[r] is no less than any
  // product of both planes, or -infinity where best[r] beats them all. `norms` are the rows'.
  void (*screen_tile)(const Weight& w, int64_t tile, const Activations& a, const float* norms, Contender* best, float* uppers,
                      const uint8_t* next);
  // blocks [block0, ...) of `row` from n floats, n a multiple of 32
  void (*quantise_row)(const float* x, int64_t n, const Activations& a, int64_t row, int64_t block0);
  // out = x / rms(x) * weight, n a multiple of 16
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  // x += scale * y
  void (*add_scaled)(float* x, const float* y, float scale, int64_t n);
  // gate = silu(gate) * up
  void (*silu_mul)(float* gate, const float* up, int64_t n);
  // rotate-half with cos, sin [head_dim / 2], then times scale
  void (*rope)(float* x, const float* cos, const float* sin, int64_t head_dim, float scale);
  void (*store_bf16)(const float* x, int64_t n, uint16_t* out);
  // query rows [row0, row1) of one kv head, all of its query heads
  void (*attend)(const AttentionJob& job, int64_t row0, int64_t row1, int64_t kv_head, void* scratch,
                 Soon& soon);
  // the same cut into chunks, for all `rows` and kv heads [head0, head1): each goes to its place in
  // parts [chunks][kv_heads][rows][group][part_width] ...
  void (*attend_parts)(const AttentionJob& job, int64_t rows, int64_t head0, int64_t head1, int64_t chunk, float* parts,
                       void* scratch, Soon& soon);
  // ... whence those of one row and one query head are merged
  void (*merge_parts)(const AttentionJob& job, int64_t rows, int64_t row, int64_t head, float* parts);
  // bytes of scratch for so many queries at once
  int64_t (*attend_scratch)(const AttentionShape& shape, int64_t queries);
  // takes x[r * ldx + 0..width), channels [channel, channel + width) of `rows` rows, into peaks [rows]; width <= 16
  void (*note_peaks)(const float* x, int64_t ldx, int64_t rows, int64_t channel, int64_t width, Peak* peaks);
  // the k largest of log_softmax(x), descending, the lower index first among equals; k <= n
  void (*log_softmax_top)(const float* x, int64_t n, int64_t k, float* values, int64_t* indices);
};

// nullptr when this build or this machine lacks it. Name null: the best one.
const Kernels* find_kernels(const char* name);
// Comma-separated names usable here, best first.
const char* kernel_names();

}  // namespace te
