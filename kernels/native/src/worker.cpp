#include "worker.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace te {

Ahead Worker::beginning(const Matrices& matrices) const {
  int64_t tile = Share(tiles_of(matrices), part_.thread, part_.threads).begin;
  for (const Weight* w : matrices) {
    if (w && tile < w->tiles) return {w, tile};
    tile -= w ? w->tiles : 0;
  }
  return {};
}

namespace {

// While tiles t and t + 1 are multiplied, memory for the two after them: of this matrix up to `soon`, then of `next`.
Upcoming upcoming(const Weight& w, int64_t t, int64_t soon, const Ahead& next) {
  const auto ahead = [&](int64_t i) { return i < soon ? w.quants(i) : next.at(i - soon); };
  return {{ahead(t + 2), ahead(t + 3)}};
}

}  // namespace

void Worker::project_some(const Projection& to, int64_t begin, int64_t end, int64_t soon, const Activations& a,
                          int64_t rows, int64_t ldo, const Ahead& next) const {
  const Weight& w = *to.weight;
  for (int64_t t = begin, count = 0; t < end; t += count) {
    count = std::min(kMostTiles, end - t);
    const int64_t column = t * kTile, width = std::min(count * kTile, w.n - column);
    const bool in_place = to.out && width == count * kTile;
    float* y = in_place ? to.out + column : tile_memory();
    const int64_t ldy = in_place ? ldo : kMostTiles * kTile;
    k.matmul_tiles(w, t, count, a, 0, rows, y, ldy, upcoming(w, t, soon, next));
    if (to.bias)
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < width; ++i) y[r * ldy + i] += to.bias[column + i];
    for (int64_t i = 0; to.peaks && i < width; i += kTile)
      k.note_peaks(y + i, ldy, rows, column + i, std::min<int64_t>(kTile, width - i), to.peaks);
    if (to.out && !in_place)
      for (int64_t r = 0; r < rows; ++r)
        std::memcpy(to.out + r * ldo + column, y + r * ldy, static_cast<size_t>(width) * sizeof(float));
  }
}

void Worker::project(std::initializer_list<Projection> list, const Activations& a, int64_t rows, int64_t ldo,
                     const Ahead& next) const {
  int64_t first = 0;  // of this matrix, among the tiles of all
  for (const Projection* to = list.begin(); to != list.end(); ++to) {
    const int64_t tiles = to->weight->tiles, soon = part_.soon - first;
    const bool goes_on = soon > tiles && to + 1 != list.end();  // into the matrix after it
    project_some(*to, std::max<int64_t>(part_.begin - first, 0), std::min(part_.end - first, tiles),
                 std::min(soon, tiles), a, rows, ldo, goes_on ? Ahead{to[1].weight, 0} : next);
    first += tiles;
  }
}

void Worker::project_rows(const Weight& w, int64_t tile, const Activations& a, int64_t row, int64_t rows,
                          Peak* peaks, const uint8_t* next) const {
  const int64_t column = tile * kTile;
  k.matmul_tiles(w, tile, 1, a, row, rows, tile_memory(), kTile, {{next, nullptr}});
  k.note_peaks(tile_memory(), kTile, rows, column, std::min<int64_t>(kTile, w.n - column), peaks + row);
}

void Worker::project_add(const Weight& w, const Activations& a, int64_t rows, const float* bias, float scale, float* x,
                         const Ahead& next) const {
  constexpr int64_t kWidth = kMostTiles * kTile;
  float* y = tile_memory();
  for (int64_t t = part_.begin, count = 0; t < part_.end; t += count) {
    count = std::min(kMostTiles, part_.end - t);
    k.matmul_tiles(w, t, count, a, 0, rows, y, kWidth, upcoming(w, t, part_.soon, next));
    for (int64_t r = 0; r < rows; ++r) {
      if (bias)
        for (int64_t i = 0; i < count * kTile; ++i) y[r * kWidth + i] += bias[t * kTile + i];
      k.add_scaled(x + r * w.n + t * kTile, y + r * kWidth, scale, count * kTile);
    }
  }
}

// A unit is 32 channels of both matrices: exactly one block of the activations that the down projection reads.
void Worker::gated(const Weight& gate, const Weight& up, const Activations& a, int64_t rows, const Activations& out,
                   const Ahead& next) const {
  float* g = tile_memory();
  float* u = g + rows * kBlock;
  for (int64_t b = part_.begin; b < part_.end; ++b) {
    const int64_t t = 2 * b;
    const bool last = b + 1 == part_.soon;
    k.matmul_tiles(gate, t, 2, a, 0, rows, g, kBlock, {{up.quants(t), up.quants(t + 1)}});
    k.matmul_tiles(up, t, 2, a, 0, rows, u, kBlock,
                   last ? Upcoming{{next.at(0), next.at(1)}} : Upcoming{{gate.quants(t + 2), gate.quants(t + 3)}});
    k.silu_mul(g, u, rows * kBlock);
    for (int64_t r = 0; r < rows; ++r) k.quantise_row(g + r * kBlock, kBlock, out, r, b);
  }
}

void Worker::norm(const float* x, int64_t r, int64_t width, const Vector& weight, float eps,
                  const Activations& a) const {
  k.rms_norm(x + r * width, weight.data(), eps, width, row_memory());
  k.quantise_row(row_memory(), width, a, r, 0);
}

void Worker::rotate_and_store(const LayerShape& shape, const LayerWeights& w, const RopeTable& rope, const Pass& pass,
                              const KeyValueRows& kv) const {
  const AttentionShape& s = shape.attention;
  const int64_t dim = s.head_dim, heads = s.heads + s.kv_heads;
  const float query_scale = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int64_t i = part_.begin; i < part_.end; ++i) {
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

// What this thread's share of a matrix has for one of its own `units` of the phase before.
Soon Worker::slice_of_share(const Weight& w, int64_t unit, int64_t units) const {
  const Share own(units, part_.thread, part_.threads), tiles(w.tiles, part_.thread, part_.threads);
  if (unit < own.begin || unit >= own.end) return {};
  const int64_t lines = (tiles.end - tiles.begin) * w.tile_bytes / 64, count = own.end - own.begin, i = unit - own.begin;
  const uint8_t* begin = w.quants(tiles.begin);
  return {begin + lines * i / count * 64, begin + lines * (i + 1) / count * 64};
}

AttentionUnits::AttentionUnits(const AttentionShape& shape, const Pass& pass, int threads) {
  if (in_chunks(pass)) {
    across = pass.reads.chunks(0, pass.rows);
    // all heads of a chunk lie side by side in memory and are best read together, if that leaves every thread something to do
    heads = across >= 2 * threads ? shape.kv_heads : 1;
    rows = pass.rows;
  } else {
    rows = std::min(kMaxRowsTogether, (pass.rows + threads - 1) / threads);  // as many as leave every thread something to do
    across = (pass.rows + rows - 1) / rows;
  }
  count = across * (shape.kv_heads / heads);
}

void Worker::attend(const AttentionJob& job, const Pass& pass, const Weight& next) const {
  char* scratch = space_.attention[static_cast<size_t>(part_.thread)].data();
  const AttentionUnits units(job.shape, pass, part_.threads);
  for (int64_t unit = part_.begin; unit < part_.end; ++unit) {
    const int64_t head = unit / units.across * units.heads, at = unit % units.across;
    if (in_chunks(pass)) {
      Soon soon = slice_of_share(next, unit, units.count);
      k.attend_parts(job, pass.rows, head, head + units.heads, at, space_.parts.data(), scratch, soon);
    } else {
      const int64_t row = at * units.rows;
      Soon nothing;  // so many rows that it is arithmetic which takes the time
      k.attend(job, row, std::min(row + units.rows, pass.rows), head, scratch, nothing);
    }
  }
}

// Head by head as in `attend`: most of what a thread merges it has found itself.
void Worker::merge(const AttentionJob& job, const Pass& pass) const {
  const int64_t group = job.shape.group();
  for (int64_t unit = part_.begin; unit < part_.end; ++unit) {
    const int64_t kv_head = unit / group / pass.rows, row = unit / group % pass.rows;  // as parts lie in memory
    k.merge_parts(job, pass.rows, row, kv_head * group + unit % group, space_.parts.data());
  }
}

}  // namespace te
