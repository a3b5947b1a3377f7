// The weights of a layer and their shapes: what target and draft head hold alike.
#pragma once

#include <array>

#include "buffer.h"
#include "kernels.h"

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

inline int64_t tiles_of(const Matrices& matrices) {
  int64_t tiles = 0;
  for (const Weight* w : matrices) tiles += w ? w->tiles : 0;
  return tiles;
}

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

}  // namespace te
