// Keys and values of a few positions, gathered from their slots into the shapes that attention multiplies.
#pragma once

#include <initializer_list>

#include "kernels.h"

namespace te {
namespace {

constexpr int64_t kFewKeys = 8;  // up to here single keys are put in place faster than sixteen are transposed

// A block of keys and values in the shape of the products.
struct KeyBlock {
  uint32_t* keys;    // [head_dim / 2][kKeyBlock] pairs of dimensions
  uint32_t* values;  // [kKeyBlock / 2][head_dim] pairs of keys
};

// Fills positions [first + from, first + count) of the block as `row` reads them; `from` is a multiple of 16. Columns past
// `count` repeat its last key: they are never given weight.
template <class S>
void prepare_block(const AttentionJob& job, int64_t row, int64_t kv_head, int64_t first, int64_t from, int64_t count,
                   const KeyBlock& block) {
  const int64_t dim = job.shape.head_dim, stride = job.shape.kv_heads * dim;
  const uint16_t *key_rows[kKeyBlock], *value_rows[kKeyBlock];
  const int64_t end = round_up(count, kTile);
  for (int64_t j = from; j < end; ++j) {
    const int64_t at = job.reads.slot(row, first + (j < count ? j : count - 1)) * stride + kv_head * dim;
    key_rows[j] = job.keys + at;
    value_rows[j] = job.values + at;
  }
  for (int64_t j = from; j < end; j += S::kLanes)
    for (int64_t d = 0; d < dim / 2; d += S::kLanes)
      S::transpose(key_rows + j, d, block.keys + d * kKeyBlock + j, kKeyBlock);
  for (int64_t j = from; j < count; j += 2)
    for (int64_t d = 0; d < dim; d += S::kLanes)
      S::store_pairs(block.values + j / 2 * dim + d, S::interleave(value_rows[j] + d, value_rows[j + 1] + d));
}

// Reads a line of every key, then of every value, of a block that comes next, all heads in the order in which they lie.
// Loads, not prefetches: the hardware sees a stream in them and runs ahead, which was measured to be a third faster.
inline void fetch_block(const AttentionJob& job, int64_t row, int64_t head0, int64_t head1, int64_t first, int64_t count) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(uint16_t));
  const int64_t dim = job.shape.head_dim, stride = job.shape.kv_heads * dim;
  for (const uint16_t* from : {job.keys, job.values})
    for (int64_t j = 0; j < count; ++j) {
      const volatile uint16_t* slot = from + job.reads.slot(row, first + j) * stride;
      for (int64_t d = head0 * dim; d < head1 * dim; d += kLine) (void)slot[d];
    }
}

// Puts the few keys that a row does not share with others at positions [from, count) of a prepared block.
template <class S>
void replace_keys(const AttentionJob& job, int64_t row, int64_t kv_head, int64_t first, int64_t from, int64_t count,
                  const KeyBlock& block) {
  const int64_t dim = job.shape.head_dim;
  const auto place = [&](int64_t j) { return (job.reads.slot(row, first + j) * job.shape.kv_heads + kv_head) * dim; };
  for (int64_t j = from; j < count; ++j) {
    const uint16_t* key = job.keys + place(j);
    for (int64_t d = 0; d < dim / 2; ++d) __builtin_memcpy(block.keys + d * kKeyBlock + j, key + 2 * d, 4);
  }
  // An odd end has a partner without weight: the last key again, as prepare_block leaves it, not another row's.
  for (int64_t j = from / 2 * 2; j < count; j += 2) {
    const uint16_t *a = job.values + place(j), *b = job.values + place(j + 1 < count ? j + 1 : j);
    for (int64_t d = 0; d < dim; d += S::kLanes)
      S::store_pairs(block.values + j / 2 * dim + d, S::interleave(a + d, b + d));
  }
}

}  // namespace
}  // namespace te
