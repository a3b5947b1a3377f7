// The C interface: single operations, for tests.
#include <algorithm>
#include <cmath>

#include "check.h"

using namespace te;

namespace {

// Rows are quantised, then multiplied.
struct Product final : Job {
  Product(const Kernels& k, Workspace& s, const Weight& w, const float* from, float* to, int64_t m)
      : kernels(k), space(s), weight(w), x(from), y(to), rows(m) {}

  int64_t units(int64_t phase) const override { return phase == 0 ? rows : phase == 1 ? weight.tiles : -1; }
  void work(int64_t phase, const Part& part) const override {
    const Activations a = space.first(rows);
    if (phase == 1)
      return Worker(kernels, space, part).project({{&weight, nullptr, y}}, a, rows, weight.n, {});
    for (int64_t r = part.begin; r < part.end; ++r) kernels.quantise_row(x + r * weight.k, weight.k, a, r, 0);
  }

  const Kernels& kernels;
  Workspace& space;
  const Weight& weight;
  const float* x;
  float* y;
  const int64_t rows;
};

}  // namespace

int te_matmul(te_team* team, int32_t format, int32_t source, const void* data, int64_t bytes, int64_t n, int64_t k,
              const float* x, int64_t rows, float* y) {
  return guarded([&] {
    need(team, "team");
    need(x, "x");
    need(y, "y");
    need_between(rows, 1, 4096, "rows");
    need_between(n, 1, 1 << 24, "n");
    need_between(k, kBlock, 1 << 20, "k");
    const std::lock_guard<std::mutex> lock(team->busy);
    Matrix matrix;
    fill_matrix(team->team, matrix, format, source, data, bytes, n, k);
    LayerShape shape = checked_shape(kBlock, kBlock, kBlock, 1, 1, kBlock, 0.0f, 1.0f);
    Workspace space(shape, team->kernels, team->team.size(), rows, k, 0);
    team->team.run(Product(team->kernels, space, matrix.weight, x, y, rows));
  });
}

int te_attention(te_team* team, const float* query, int64_t heads, int64_t kv_heads, int64_t head_dim, const te_pass* pass,
                 const te_kv* kv, float* out) {
  return guarded([&] {
    need(team, "team");
    need(query, "query");
    need(out, "out");
    need(pass, "pass");
    LayerShape shape = checked_shape(kBlock, kBlock, kBlock, heads, kv_heads, head_dim, 0.0f, 1.0f);
    need_between(pass->rows, 1, 4096, "rows");
    need_between(pass->tree_count, 0, 4096, "tree_count");
    const std::lock_guard<std::mutex> lock(team->busy);
    const int64_t most = std::max(pass->rows, pass->tree_count);
    Workspace space(shape, team->kernels, team->team.size(), most, shape.query_width(), 0);
    const Pass ours = checked_pass(pass, kv, space, 0, 0);
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    for (int64_t r = 0; r < pass->rows; ++r)
      for (int64_t i = 0; i < shape.query_width(); ++i)
        space.qkv.data()[r * shape.qkv_width() + i] = query[r * shape.query_width() + i] * scale;
    AttentionJob job{shape.attention, space.qkv.data(), shape.qkv_width(), kv->keys, kv->values, ours.reads,
                     space.second(pass->rows), out};
    const Kernels& k = team->kernels;
    char* scratch = space.attention[0].data();
    Soon nothing;
    if (pass->rows <= kMaxRowsTogether) {  // as a layer does
      space.make_room_for_parts(shape.attention, ours);
      for (int64_t chunk = 0; chunk < ours.reads.chunks(0, pass->rows); ++chunk)
        k.attend_parts(job, pass->rows, 0, kv_heads, chunk, space.parts.data(), scratch, nothing);
      for (int64_t row = 0; row < pass->rows; ++row)
        for (int64_t head = 0; head < heads; ++head) k.merge_parts(job, pass->rows, row, head, space.parts.data());
      return;
    }
    for (int64_t row = 0; row < pass->rows; row += kMaxRowsTogether)
      for (int64_t head = 0; head < kv_heads; ++head)
        k.attend(job, row, std::min(row + kMaxRowsTogether, pass->rows), head, scratch, nothing);
  });
}

int te_unpack(int32_t format, int32_t source, const void* data, int64_t bytes, int64_t n, int64_t k, float* out) {
  return guarded([&] {
    need(out, "out");
    need_between(n, 1, 1 << 24, "n");
    need_between(k, kBlock, 1 << 20, "k");
    Team alone(1, 0);
    Matrix matrix;
    fill_matrix(alone, matrix, format, source, data, bytes, n, k);
    for (int64_t r = 0; r < n; ++r) unpack_row(matrix.weight, r, out + r * k);
  });
}
