#include "workspace.h"

#include <algorithm>

namespace te {

namespace {
int64_t parts_of(const AttentionShape& shape, int64_t chunks, int64_t rows) {
  return chunks * rows * shape.heads * shape.part_width();
}
}  // namespace

Workspace::Workspace(const LayerShape& shape, const Kernels& kernels, int threads, int64_t rows, int64_t widest,
                     int64_t positions)
    : max_rows(rows),
      x(rows * shape.hidden),
      qkv(rows * shape.qkv_width()),
      quants(rows * widest),
      infos(rows * widest / kBlock),
      quants_other(rows * widest),
      infos_other(rows * widest / kBlock),
      own(rows * rows),
      own_count(rows),
      parts(parts_of(shape.attention, (positions + kChunk - 1) / kChunk, std::min(rows, kMaxRowsTogether)),
            Stay::kUntilReplaced) {
  for (int t = 0; t < threads; ++t) {
    row.emplace_back(widest);
    tile.emplace_back(rows * 2 * kBlock);
    attention.emplace_back(kernels.attend_scratch(shape.attention, kMaxRowsTogether * shape.attention.heads));
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

void Workspace::make_room_for_parts(const AttentionShape& shape, const Pass& pass) {
  if (!in_chunks(pass)) return;
  const int64_t needed = parts_of(shape, pass.reads.chunks(0, pass.rows), pass.rows);
  if (parts.size() >= needed) return;
  parts = Vector();  // what there was goes first
  parts = Vector(needed + needed / 4, Stay::kUntilReplaced);
}

}  // namespace te
