// What a pass is given, and the memory that it works in.
#pragma once

#include <vector>

#include "weights.h"

namespace te {

// The rows of one pass and what they may read.
struct Pass {
  int64_t rows = 0;
  const int64_t* ids = nullptr;        // [rows]
  const int64_t* positions = nullptr;  // [rows]
  const int64_t* slots = nullptr;      // [rows] where their keys and values go
  ReadingLists reads;
};

struct KeyValueRows {
  uint16_t* keys = nullptr;  // bf16 [slots, kv_heads, head_dim] of one layer
  uint16_t* values = nullptr;
};

constexpr int64_t kMaxRowsTogether = 16;  // query rows that share a prepared block of keys

// Few rows leave little to share out between threads, so that the positions they read are cut into chunks.
inline bool in_chunks(const Pass& pass) { return pass.rows <= kMaxRowsTogether; }

// Memory of a pass, sized once for `max_rows` that read up to `positions` each.
struct Workspace {
  Workspace() = default;
  Workspace(const LayerShape& shape, const Kernels& kernels, int threads, int64_t max_rows, int64_t widest, int64_t positions);

  int64_t max_rows = 0;
  Vector x;                      // [rows][hidden] residual stream
  Vector qkv;                    // [rows][qkv_width]
  Buffer<int8_t> quants;         // activations of the running phase ...
  Buffer<BlockInfo> infos;
  Buffer<int8_t> quants_other;   // ... and those it writes for the next
  Buffer<BlockInfo> infos_other;
  Buffer<int32_t> own, own_count;  // reading lists beyond the prefix
  std::vector<Vector> row;       // per thread: [widest] one row
  std::vector<Vector> tile;      // per thread: [rows][64] results of a few tiles
  std::vector<Buffer<char>> attention;  // per thread
  // [chunks][rows][heads][part_width] what chunks of attention leave. Its pages are the system's, which gives each when
  // it is first written, so that a long context that nobody uses costs nothing.
  Vector parts;

  // For passes that read more positions than were foreseen; before the pass, since its threads share the room.
  void make_room_for_parts(const AttentionShape& shape, const Pass& pass);

  Activations first(int64_t rows) { return {quants.data(), infos.data(), rows}; }
  Activations second(int64_t rows) { return {quants_other.data(), infos_other.data(), rows}; }
};

// Lists in space.own what the rows read of `tree`, [count] slots. They follow `prefix` in reading order.
ReadingLists list_visible(Workspace& space, int64_t rows, const int64_t* prefix, int64_t prefix_count, const int64_t* tree,
                          int64_t count, const uint8_t* visible);  // tree[r] where visible[m * count + r]; null: r <= m
ReadingLists list_ancestors(Workspace& space, int64_t rows, const int64_t* prefix, int64_t prefix_count,
                            const int64_t* tree, int64_t count, const int32_t* parents);  // see te_pass

}  // namespace te
