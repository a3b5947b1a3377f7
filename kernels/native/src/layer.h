// What the target and the draft head have in common: one decoder layer, its workspace, and the phases of a pass.
//
// The units of a phase are rows or output channels. Who does which, and when, never changes a value: a row's numbers
// depend on that row alone. What a phase reads, earlier phases wrote; what a unit writes, no other of its phase touches.
#pragma once

#include <array>
#include <initializer_list>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "team.h"

namespace te {

struct Matrix {
  Weight weight;
  Buffer<uint8_t> memory;

  bool present() const { return memory.size() > 0; }
  void allocate(Format format, int64_t n, int64_t k) {
    weight = weight_shape(format, n, k);
    memory = Buffer<uint8_t>(weight_bytes(weight));
    weight.data = memory.data();
  }
};

using Vector = Buffer<float>;

// Matrices whose tiles make one phase, one after the other; null where there are fewer.
using Matrices = std::array<const Weight*, 3>;

struct LayerWeights {
  Matrix q, k, v, o, gate, up, down;
  Vector attention_norm, mlp_norm;           // [hidden]
  Vector q_bias, k_bias, v_bias, o_bias;     // optional
  Vector q_norm, k_norm;                     // optional, [head_dim]

  Matrices qkv() const { return {&q.weight, &k.weight, &v.weight}; }
};

struct LayerShape {
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t input = 0;  // what q, k, v read: hidden, or twice that in a draft head
  AttentionShape attention;
  float eps = 1e-5f;
  float residual_scale = 1.0f;

  int64_t query_width() const { return attention.heads * attention.head_dim; }
  int64_t kv_width() const { return attention.kv_heads * attention.head_dim; }
  int64_t qkv_width() const { return query_width() + 2 * kv_width(); }
};

// cos and sin of every position, [positions, head_dim / 2].
struct RopeTable {
  Vector cos, sin;
};

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

// Memory of a pass, sized once for `max_rows`.
struct Workspace {
  Workspace() = default;
  Workspace(const LayerShape& shape, const Kernels& kernels, int threads, int64_t max_rows, int64_t widest);

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
  Vector parts;                  // [chunks][rows][heads][part_width] what chunks of attention leave

  // Grows with the context, so seldom; before the pass, since its threads share it.
  void make_room_for_parts(const AttentionShape& shape, const Pass& pass);

  Activations first(int64_t rows) { return {quants.data(), infos.data(), rows}; }
  Activations second(int64_t rows) { return {quants_other.data(), infos_other.data(), rows}; }
};

constexpr int64_t kMaxRowsTogether = 16;  // query rows that share a prepared block of keys

// Weights that a thread will read next: memory is asked for them two tiles ahead, across the border of two matrices too.
struct Ahead {
  const Weight* weight = nullptr;
  int64_t tile = 0;

  const uint8_t* at(int64_t i) const {
    return weight && tile + i < weight->tiles ? weight->quants(tile + i) : nullptr;
  }
};

// A matrix that reads the rows at hand, and where its products go.
struct Projection {
  const Weight* weight;
  const float* bias;      // [weight->n] or null
  float* out;             // or null, if only peaks are wanted
  Peak* peaks = nullptr;  // [rows] of this thread, or null
};

// One thread at its part of a phase.
class Worker {
 public:
  Worker(const Kernels& kernels, Workspace& space, const Part& part) : k(kernels), part_(part), space_(space) {}

  float* row_memory() const { return space_.row[static_cast<size_t>(part_.thread)].data(); }

  // The beginning of this thread's share of the tiles: what to ask memory for while the phase before ends.
  Ahead beginning(const Matrices& matrices) const;

  // Units are tiles of all these matrices, one after the other:
  // out[r * ldo + n] = row r of a . w, plus bias; `w.n` columns exist (the last tile may be cut). Peaks are noted of what
  // a tile gave, while it is in the nearest cache.
  void project(std::initializer_list<Projection> list, const Activations& a, int64_t rows, int64_t ldo,
               const Ahead& next) const;
  // Notes the peaks of rows [row, row + rows) in one tile.
  void project_rows(const Weight& w, int64_t tile, const Activations& a, int64_t row, int64_t rows, Peak* peaks,
                    const uint8_t* next) const;
  // Units are tiles: x[r * w.n + n] += scale * (row r of a . w + bias)
  void project_add(const Weight& w, const Activations& a, int64_t rows, const float* bias, float scale, float* x,
                   const Ahead& next) const;
  // Units are 32 channels: quantised silu(gate) * up.
  void gated(const Weight& gate, const Weight& up, const Activations& a, int64_t rows, const Activations& out,
             const Ahead& next) const;
  // The normalised row r of x, quantised into blocks [block0, ...) of a.
  void norm(const float* x, int64_t r, int64_t width, const Vector& weight, float eps, const Activations& a) const;
  // Units are heads of queries and keys, those of a row side by side.
  void rotate_and_store(const LayerShape& shape, const LayerWeights& w, const RopeTable& rope, const Pass& pass,
                        const KeyValueRows& kv) const;
  // Units are key heads, and of each the rows a few at a time; where there are few rows, key heads of a chunk of positions,
  // which `merge` then puts together, a row and a query head a unit.
  // Attention leaves the memory idle, so that it is asked meanwhile for `next`, what is multiplied after it.
  void attend(const AttentionJob& job, const Pass& pass, const Weight& next) const;
  void merge(const AttentionJob& job, const Pass& pass) const;

  const Kernels& k;

 private:
  Soon slice_of_share(const Weight& w, int64_t unit, int64_t units) const;
  float* tile_memory() const { return space_.tile[static_cast<size_t>(part_.thread)].data(); }
  void project_some(const Projection& to, int64_t begin, int64_t end, int64_t soon, const Activations& a, int64_t rows,
                    int64_t ldo, const Ahead& next) const;

  const Part& part_;
  Workspace& space_;
};

// The phases of a layer after its input norm: space.first() holds the normalised input, x the residual stream.
struct LayerPhases {
  static constexpr int64_t kCount = 8;

  const LayerShape& shape;
  const LayerWeights& w;
  const RopeTable& rope;
  const Pass& pass;
  KeyValueRows kv;
  float* x;
  Workspace& space;
  Matrices after;  // what is read next

  int64_t units(int64_t phase, int threads) const;
  void work(int64_t phase, const Kernels& kernels, const Part& part) const;
};

// Lists in space.own what the rows read of `tree`, [count] slots. They follow `prefix` in reading order.
ReadingLists list_visible(Workspace& space, int64_t rows, const int64_t* prefix, int64_t prefix_count, const int64_t* tree,
                          int64_t count, const uint8_t* visible);  // tree[r] where visible[m * count + r]; null: r <= m
ReadingLists list_ancestors(Workspace& space, int64_t rows, const int64_t* prefix, int64_t prefix_count,
                            const int64_t* tree, int64_t count, const int32_t* parents);  // see te_pass

}  // namespace te
