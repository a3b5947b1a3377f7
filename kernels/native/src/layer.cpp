#include "layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace te {

Workspace::Workspace(const LayerShape& shape, const Kernels& kernels, int threads, int64_t rows, int64_t widest)
    : max_rows(rows),
      x(rows * shape.hidden),
      qkv(rows * shape.qkv_width()),
      quants(rows * widest),
      infos(rows * widest / kBlock),
      quants_other(rows * widest),
      infos_other(rows * widest / kBlock),
      own(rows * rows),
      own_count(rows) {
  for (int t = 0; t < threads; ++t) {
    row.emplace_back(widest);
    tile.emplace_back(rows * 2 * kBlock);
    attention.emplace_back(kernels.attend_scratch(shape.attention, kMaxRowsTogether));
  }
}

ReadingLists list_visible(Workspace& space, int64_t rows, const int64_t* prefix, int64_t prefix_count, const int64_t* tree,
                          int64_t count, const uint8_t* visible) {
  for (int64_t m = 0; m < rows; ++m) {
    int32_t* list = space.own.data() + m * space.max_rows;
    int32_t n = 0;
    for (int64_t r = 0; r < count; ++r)
      if (visible ? visible[m * count + r] != 0 : r <= m) list[n++] = static_cast<int32_t>(tree[r]);
    space.own_count.data()[m] = n;
  }
  return {prefix, prefix_count, space.own.data(), space.own_count.data(), space.max_rows};
}

ReadingLists list_ancestors(Workspace& space, int64_t rows, const int64_t* prefix, int64_t prefix_count,
                            const int64_t* tree, int64_t count, const int32_t* parents) {
  for (int64_t m = 0; m < rows; ++m) {
    int32_t* list = space.own.data() + m * space.max_rows;
    int32_t n = 0;
    for (int32_t r = static_cast<int32_t>(count - rows + m); r >= 0; r = parents[r]) list[n++] = static_cast<int32_t>(tree[r]);
    std::reverse(list, list + n);
    space.own_count.data()[m] = n;
  }
  return {prefix, prefix_count, space.own.data(), space.own_count.data(), space.max_rows};
}

void Worker::project(const Weight& w, const Activations& a, int64_t rows, const float* bias, float* out, int64_t ldo,
                     const Ahead& next) {
  const Share mine = share(w.tiles);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const uint8_t* soon = t + 2 < mine.end ? w.quants(t + 2) : next.at(t + 2 - mine.end);
    const int64_t column = t * kTile, width = std::min<int64_t>(kTile, w.n - column);
    if (width == kTile) {
      k.matmul_tile(w, t, a, 0, rows, out + column, ldo, soon);
    } else {
      float* cut = tile_memory();
      k.matmul_tile(w, t, a, 0, rows, cut, kTile, soon);
      for (int64_t r = 0; r < rows; ++r)
        std::memcpy(out + r * ldo + column, cut + r * kTile, static_cast<size_t>(width) * sizeof(float));
    }
    if (bias)
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < width; ++i) out[r * ldo + column + i] += bias[column + i];
  }
}

void Worker::project_add(const Weight& w, const Activations& a, int64_t rows, const float* bias, float scale, float* x,
                         const Ahead& next) {
  const Share mine = share(w.tiles);
  float* y = tile_memory();
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    k.matmul_tile(w, t, a, 0, rows, y, kTile, t + 2 < mine.end ? w.quants(t + 2) : next.at(t + 2 - mine.end));
    for (int64_t r = 0; r < rows; ++r) {
      if (bias)
        for (int i = 0; i < kTile; ++i) y[r * kTile + i] += bias[t * kTile + i];
      k.add_scaled(x + r * w.n + t * kTile, y + r * kTile, scale, kTile);
    }
  }
}

// A unit is 32 channels of both matrices: exactly one block of the activations that the down projection reads.
void Worker::gated(const Weight& gate, const Weight& up, const Activations& a, int64_t rows, const Activations& out,
                   const Ahead& next) {
  const Share mine = share(gate.n / kBlock);
  float* g = tile_memory();
  float* u = g + rows * kBlock;
  for (int64_t b = mine.begin; b < mine.end; ++b) {
    const int64_t t = 2 * b;
    const bool last = b + 1 == mine.end;
    k.matmul_tile(gate, t, a, 0, rows, g, kBlock, up.quants(t));
    k.matmul_tile(gate, t + 1, a, 0, rows, g + kTile, kBlock, up.quants(t + 1));
    k.matmul_tile(up, t, a, 0, rows, u, kBlock, last ? next.at(0) : gate.quants(t + 2));
    k.matmul_tile(up, t + 1, a, 0, rows, u + kTile, kBlock, last ? next.at(1) : gate.quants(t + 3));
    k.silu_mul(g, u, rows * kBlock);
    for (int64_t r = 0; r < rows; ++r) k.quantise_row(g + r * kBlock, kBlock, out, r, b);
  }
}

void Worker::norm(const float* x, int64_t width, const Vector& weight, float eps, int64_t rows, const Activations& a,
                  int64_t block0) {
  const Share mine = share(rows);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    k.rms_norm(x + r * width, weight.data(), eps, width, row_memory());
    k.quantise_row(row_memory(), width, a, r, block0);
  }
}

void Worker::rotate_and_store(const LayerShape& shape, const LayerWeights& w, const RopeTable& rope, const Pass& pass,
                              const KeyValueRows& kv) {
  const AttentionShape& s = shape.attention;
  const int64_t dim = s.head_dim, heads = s.heads + s.kv_heads;
  const float query_scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const Share mine = share(pass.rows * heads);  // queries and keys, one head at a time
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t r = i / heads, h = i % heads;
    const bool is_query = h < s.heads;
    float* head = space_.qkv.data() + r * shape.qkv_width() + h * dim;
    const Vector& norm = is_query ? w.q_norm : w.k_norm;
    if (norm.size()) k.rms_norm(head, norm.data(), shape.eps, dim, head);
    const int64_t at = pass.positions[r] * dim / 2;
    k.rope(head, rope.cos.data() + at, rope.sin.data() + at, dim, is_query ? query_scale : 1.0f);
    if (is_query) continue;
    const int64_t place = (pass.slots[r] * s.kv_heads + h - s.heads) * dim;
    k.store_bf16(head, dim, kv.keys + place);
    k.store_bf16(head + shape.kv_width(), dim, kv.values + place);
  }
}

void Worker::attend(const LayerShape& shape, const Pass& pass, const KeyValueRows& kv, const Activations& out) {
  const AttentionJob job{shape.attention, space_.qkv.data(), shape.qkv_width(), kv.keys, kv.values, pass.reads, out,
                         nullptr};
  const int64_t together = std::min(kMaxRowsTogether, (pass.rows + threads_ - 1) / threads_);
  const int64_t groups = (pass.rows + together - 1) / together;
  for (int64_t unit = thread_; unit < groups * shape.attention.kv_heads; unit += threads_) {
    const int64_t row = unit / shape.attention.kv_heads * together;
    k.attend(job, row, std::min(row + together, pass.rows), unit % shape.attention.kv_heads,
             space_.attention[static_cast<size_t>(thread_)].data());
  }
}

void Worker::layer_body(const LayerShape& shape, const LayerWeights& w, const RopeTable& rope, const Pass& pass,
                        const KeyValueRows& kv, float* x, const Ahead& next) {
  const int64_t rows = pass.rows, width = shape.qkv_width();
  const Activations a = space_.first(rows), b = space_.second(rows);
  float* qkv = space_.qkv.data();
  project(w.q.weight, a, rows, w.q_bias.data(), qkv, width, beginning(w.k.weight));
  project(w.k.weight, a, rows, w.k_bias.data(), qkv + shape.query_width(), width, beginning(w.v.weight));
  project(w.v.weight, a, rows, w.v_bias.data(), qkv + shape.query_width() + shape.kv_width(), width,
          beginning(w.o.weight));
  barrier();
  rotate_and_store(shape, w, rope, pass, kv);
  barrier();
  attend(shape, pass, kv, b);
  barrier();
  const Weight& gate = w.gate.weight;
  const Ahead first_gate{&gate, share(gate.n / kBlock).begin * 2};
  project_add(w.o.weight, b, rows, w.o_bias.data(), shape.residual_scale, x, first_gate);
  barrier();
  norm(x, shape.hidden, w.mlp_norm, shape.eps, rows, a);
  barrier();
  gated(gate, w.up.weight, a, rows, b, beginning(w.down.weight));
  barrier();
  project_add(w.down.weight, b, rows, nullptr, shape.residual_scale, x, next);
  barrier();
}

}  // namespace te
