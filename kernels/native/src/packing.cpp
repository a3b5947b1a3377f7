#include "packing.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace te {

namespace {

// Rows of a source become tiles. What goes to two planes is packed in one first, tile by tile, so that no second copy of the whole
// is ever held.
struct Packing final : Job {
  Packing(Matrix& matrix, bool gguf, const uint8_t* rows, int64_t bytes, int threads)
      : to(matrix), is_gguf(gguf), data(rows), row_bytes(bytes) {
    if (to.weight.format != Format::Split) return;
    norms.resize(static_cast<size_t>(to.weight.tiles));
    for (int t = 0; t < threads; ++t) one_plane.emplace_back().allocate(Format::Q8, kTile, to.weight.k);
  }

  int64_t units(int64_t phase) const override { return phase == 0 ? to.weight.tiles : -1; }
  void work(int64_t, const Part& part) const override {
    for (int64_t tile = part.begin; tile < part.end; ++tile) {
      const int64_t channels = std::min<int64_t>(kTile, to.weight.n - tile * kTile);
      if (norms.empty()) {
        pack(to, tile * kTile, tile * kTile, channels);
        continue;
      }
      const Matrix& one = one_plane[static_cast<size_t>(part.thread)];
      std::memset(one.memory.data(), 0, static_cast<size_t>(one.memory.bytes()));
      pack(one, 0, tile * kTile, channels);
      norms[static_cast<size_t>(tile)] = split_tile(one.weight, to.weight, to.memory.data(), tile, channels);
    }
  }
  void pack(const Matrix& matrix, int64_t row, int64_t first, int64_t rows) const {
    const uint8_t* from = data + first * row_bytes;
    if (is_gguf)
      pack_gguf_rows(matrix.weight, matrix.memory.data(), from, row, rows);
    else
      pack_float_rows(matrix.weight, matrix.memory.data(), reinterpret_cast<const float*>(from), row, rows);
  }

  Matrix& to;
  const bool is_gguf;
  const uint8_t* data;
  const int64_t row_bytes;
  std::vector<Matrix> one_plane;     // per thread, where there will be two
  mutable std::vector<float> norms;  // of a matrix in two planes: what `split_tile` found in each tile
};

}  // namespace

void pack_matrix(Team& team, Matrix& to, bool is_gguf, const uint8_t* data, int64_t row_bytes) {
  const Packing packing(to, is_gguf, data, row_bytes, team.size());
  team.run(packing);
  for (const float norm : packing.norms) to.weight.largest_norm = std::max(to.weight.largest_norm, norm);
}

}  // namespace te
