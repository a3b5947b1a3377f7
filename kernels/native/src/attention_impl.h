// Attention of a few query rows over slot lists, for any instruction set.
//
// A row reads positions 0, 1, 2, ... of its list: the prefix, then its ancestors. Positions are cut into chunks and blocks
// by their absolute number; a block yields scores, one rescaling of its chunk's running softmax, and the weighted values,
// each summed in reading order; chunks are then merged in order. Where the prefix ends never enters the arithmetic, so a
// node of a tree gets the bits that plain decoding gives. What rows have in common only decides which blocks are prepared
// once for all of them, and threads only decide who computes which chunk.
//
// Keys, values, queries and probabilities are bf16 in pairs, sums are fp32. Keys are transposed (dimension pairs x keys),
// values interleaved (key pairs x dimensions), and both products become the same small kernel: `pair_product_impl.h`.
// `key_block_impl.h` puts keys and values into these shapes, `softmax_impl.h` makes weights of scores.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "key_block_impl.h"
#include "pair_product_impl.h"
#include "softmax_impl.h"

namespace te {
namespace {

struct Scratch {
  KeyBlock shared, own;
  QueryState state;
  float* parts;  // [queries][part_width]: what the chunks so far have found
};

// Lays the scratch out from `base` and returns its size; with base null only the size matters.
inline int64_t lay_out(const AttentionShape& shape, int64_t queries, char* base, Scratch& s) {
  const int64_t dim = shape.head_dim;
  int64_t used = 0;
  const auto carve = [&](auto*& pointer, int64_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += round_up(count * static_cast<int64_t>(sizeof(T)), kAlign);
  };
  for (KeyBlock* block : {&s.shared, &s.own}) {
    carve(block->keys, kKeyBlock * dim / 2);
    carve(block->values, kKeyBlock * dim / 2);
  }
  carve(s.state.query, queries * dim / 2);
  carve(s.state.part, queries * shape.part_width());
  carve(s.state.scores, queries * kKeyBlock);
  carve(s.state.weights, queries * kKeyBlock);
  carve(s.parts, queries * shape.part_width());
  return used;
}

template <class S>
void attend_block(const KeyBlock& block, const QueryState& state, int64_t query0, int64_t queries, int64_t count,
                  const AttentionShape& shape, Soon& soon) {
  const int64_t dim = shape.head_dim, width = shape.part_width();
  float* scores = state.scores + query0 * kKeyBlock;
  const int64_t vectors = (count + S::kLanes - 1) / S::kLanes;
  __builtin_memset(scores, 0, static_cast<size_t>(queries * kKeyBlock) * sizeof(float));
  pair_product<S>(queries, vectors, block.keys, kKeyBlock, state.query + query0 * dim / 2, dim / 2, dim / 2, scores,
                  kKeyBlock, soon);
  soften<S>(state.from(query0, shape), queries, count, shape);
  const auto* weights = reinterpret_cast<const uint32_t*>(state.weights + query0 * kKeyBlock);
  pair_product<S>(queries, dim / S::kLanes, block.values, dim, weights, kKeyBlock / 2, (count + 1) / 2,
                  state.part + query0 * width, width, soon);
}

// How many positions rows [row0, row1) read alike.
inline int64_t common_length(const ReadingLists& reads, int64_t row0, int64_t row1) {
  int64_t common = reads.own_count[row0];
  for (int64_t r = row0 + 1; r < row1; ++r) {
    int64_t same = 0;
    const int64_t most = common < reads.own_count[r] ? common : reads.own_count[r];
    while (same < most && reads.own[r * reads.stride + same] == reads.own[row0 * reads.stride + same]) ++same;
    common = same;
  }
  return reads.prefix_count + common;
}

template <class S>
void load_queries(const AttentionJob& job, int64_t row0, int64_t row1, int64_t kv_head, const QueryState& state) {
  const int64_t dim = job.shape.head_dim, group = job.shape.group();
  for (int64_t r = row0; r < row1; ++r)
    for (int64_t g = 0; g < group; ++g) {
      const int64_t q = (r - row0) * group + g;
      const float* from = job.query + r * job.query_stride + (kv_head * group + g) * dim;
      store_bf16<S>(from, dim, reinterpret_cast<uint16_t*>(state.query + q * dim / 2));
    }
}

// The softmax of one chunk, begun from nothing, for rows [row0, row1) and kv heads [head0, head1); the state holds the
// queries of one head after those of another.
template <class S>
void attend_chunk(const AttentionJob& job, int64_t row0, int64_t row1, int64_t head0, int64_t head1, int64_t chunk,
                  int64_t common, const Scratch& s, Soon& soon) {
  const AttentionShape& shape = job.shape;
  const int64_t dim = shape.head_dim, group = shape.group(), queries = (row1 - row0) * group;
  for (int64_t q = 0; q < (head1 - head0) * queries; ++q) {
    float* part = s.state.part + q * shape.part_width();
    __builtin_memset(part, 0, static_cast<size_t>(shape.part_width()) * sizeof(float));
    part[dim] = -__builtin_inff();
  }

  const int64_t begin = chunk * kChunk, end = begin + kChunk;
  const int64_t border = common / kKeyBlock * kKeyBlock;  // whole blocks before it are the same for all rows
  for (int64_t first = begin; first < end && first < border; first += kKeyBlock) {
    if (head1 - head0 > 1) fetch_block(job, row0, head0, head1, first, kKeyBlock);  // one head's pieces are no stream
    for (int64_t h = head0; h < head1; ++h) {
      prepare_block<S>(job, row0, h, first, 0, kKeyBlock, s.shared);
      attend_block<S>(s.shared, s.state.from((h - head0) * queries, shape), 0, queries, kKeyBlock, shape, soon);
    }
  }
  if (border >= end) return;
  const int64_t ready = border >= begin ? common - border : 0;  // positions of the border's block that all rows share
  for (int64_t h = head0; h < head1; ++h) {
    const QueryState state = s.state.from((h - head0) * queries, shape);
    if (ready > 0) prepare_block<S>(job, row0, h, border, 0, ready, s.shared);
    for (int64_t r = row0; r < row1; ++r) {
      const int64_t length = job.reads.length(r);
      for (int64_t first = border > begin ? border : begin; first < length && first < end; first += kKeyBlock) {
        const int64_t count = length - first < kKeyBlock ? length - first : kKeyBlock;
        const KeyBlock& block = first == border ? s.shared : s.own;
        const int64_t from = first == border ? ready : 0;
        if (from % kTile != 0 && count - from <= kFewKeys)
          replace_keys<S>(job, r, h, first, from, count, block);
        else if (from < count)
          prepare_block<S>(job, r, h, first, from / kTile * kTile, count, block);
        attend_block<S>(block, state, (r - row0) * group, group, count, shape, soon);
      }
    }
  }
}

// `into` and the chunk after it, as if one softmax had run over both. Only what has the lower peak shrinks.
template <class S>
inline void merge_part(float* into, const float* part, int64_t dim) {
  const bool higher = part[dim] > into[dim];
  const typename S::F shrink = exp_approx<S>(S::set1(higher ? into[dim] - part[dim] : part[dim] - into[dim]));
  const float* high = higher ? part : into;
  const float* low = higher ? into : part;
  alignas(64) float lanes[S::kLanes];
  S::store(lanes, shrink);
  into[dim + 1] = high[dim + 1] + low[dim + 1] * lanes[0];
  for (int64_t d = 0; d < dim; d += S::kLanes) S::store(into + d, S::fma(S::load(low + d), shrink, S::load(high + d)));
  into[dim] = high[dim];
}

// The weighted mean of the values leaves as blocks of int8.
template <class S>
inline void finish_query(const AttentionJob& job, int64_t row, int64_t head, float* part) {
  const int64_t dim = job.shape.head_dim;
  const typename S::F inverse = S::set1(1.0f / part[dim + 1]);
  for (int64_t d = 0; d < dim; d += S::kLanes) S::store(part + d, S::mul(S::load(part + d), inverse));
  quantise_row<S>(part, dim, job.out, row, head * dim / kBlock);
  if (job.raw)
    __builtin_memcpy(job.raw + (row * job.shape.heads + head) * dim, part, static_cast<size_t>(dim) * sizeof(float));
}

template <class S>
void attend(const AttentionJob& job, int64_t row0, int64_t row1, int64_t kv_head, void* memory,
            Soon& soon) {
  const int64_t dim = job.shape.head_dim, group = job.shape.group(), width = job.shape.part_width();
  Scratch s;
  lay_out(job.shape, (row1 - row0) * group, static_cast<char*>(memory), s);
  load_queries<S>(job, row0, row1, kv_head, s.state);
  const int64_t common = common_length(job.reads, row0, row1);
  for (int64_t chunk = 0; chunk < job.reads.chunks(row0, row1); ++chunk) {
    Scratch of_chunk = s;
    if (chunk == 0) of_chunk.state.part = s.parts;
    attend_chunk<S>(job, row0, row1, kv_head, kv_head + 1, chunk, common, of_chunk, soon);
    for (int64_t r = row0; chunk > 0 && r < row1; ++r) {
      if (job.reads.length(r) <= chunk * kChunk) continue;
      for (int64_t q = (r - row0) * group; q < (r - row0 + 1) * group; ++q)
        merge_part<S>(s.parts + q * width, s.state.part + q * width, dim);
    }
  }
  for (int64_t r = row0; r < row1; ++r)
    for (int64_t g = 0; g < group; ++g)
      finish_query<S>(job, r, kv_head * group + g, s.parts + ((r - row0) * group + g) * width);
}

template <class S>
void attend_parts(const AttentionJob& job, int64_t rows, int64_t head0, int64_t head1, int64_t chunk, float* parts,
                  void* memory, Soon& soon) {
  const int64_t queries = rows * job.shape.group();  // of a kv head
  Scratch s;
  lay_out(job.shape, (head1 - head0) * queries, static_cast<char*>(memory), s);
  s.state.part = parts + (chunk * job.shape.kv_heads + head0) * queries * job.shape.part_width();
  for (int64_t h = head0; h < head1; ++h) load_queries<S>(job, 0, rows, h, s.state.from((h - head0) * queries, job.shape));
  attend_chunk<S>(job, 0, rows, head0, head1, chunk, common_length(job.reads, 0, rows), s, soon);
}

template <class S>
void merge_parts(const AttentionJob& job, int64_t rows, int64_t row, int64_t head, float* parts) {
  const int64_t group = job.shape.group(), width = job.shape.part_width(), step = rows * job.shape.heads * width;
  float* part = parts + ((head / group * rows + row) * group + head % group) * width;
  for (int64_t chunk = 1; chunk * kChunk < job.reads.length(row); ++chunk)
    merge_part<S>(part, part + chunk * step, job.shape.head_dim);
  finish_query<S>(job, row, head, part);
}

inline int64_t attend_scratch(const AttentionShape& shape, int64_t queries) {
  Scratch s;
  return lay_out(shape, queries, nullptr, s);
}

}  // namespace
}  // namespace te
