#include "check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "packing.h"

namespace te {
namespace {
thread_local std::string last_failure;
}

void refuse(const char* format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Refused{text};
}

int remember_failure(const Refused& refused) {
  last_failure = refused.why;
  return -1;
}

void need_between(int64_t value, int64_t low, int64_t high, const char* name) {
  if (value < low || value > high)
    refuse("%s is %lld, outside %lld..%lld", name, static_cast<long long>(value), static_cast<long long>(low),
           static_cast<long long>(high));
}

void need_range(const int64_t* values, int64_t count, int64_t end, const char* name) {
  for (int64_t i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= end)
      refuse("%s[%lld] is %lld, outside 0..%lld", name, static_cast<long long>(i), static_cast<long long>(values[i]),
             static_cast<long long>(end - 1));
}

Format checked_format(int32_t format) {
  need_between(format, TE_Q8, TE_Q4_1, "format");
  return static_cast<Format>(format);
}

LayerShape checked_shape(int64_t hidden, int64_t input, int64_t intermediate, int64_t heads, int64_t kv_heads,
                         int64_t head_dim, float eps, float residual_scale) {
  constexpr int64_t kMost = int64_t{1} << 20;
  need_between(hidden, kBlock, kMost, "hidden");
  need_between(intermediate, kBlock, kMost, "intermediate");
  need_between(heads, 1, 1024, "heads");
  need_between(kv_heads, 1, heads, "kv_heads");
  need_between(head_dim, kBlock, 1024, "head_dim");
  if (hidden % kBlock != 0) refuse("hidden (%lld) is no multiple of 32", static_cast<long long>(hidden));
  if (intermediate % kBlock != 0) refuse("intermediate (%lld) is no multiple of 32", static_cast<long long>(intermediate));
  if (head_dim % kBlock != 0) refuse("head_dim (%lld) is no multiple of 32", static_cast<long long>(head_dim));
  if (heads % kv_heads != 0) refuse("heads (%lld) is no multiple of kv_heads", static_cast<long long>(heads));
  LayerShape shape;
  shape.hidden = hidden;
  shape.input = input;
  shape.intermediate = intermediate;
  shape.attention = {heads, kv_heads, head_dim};
  shape.eps = eps;
  shape.residual_scale = residual_scale;
  return shape;
}

void fill_matrix(Team& team, Matrix& to, int32_t format, int32_t source, const void* data, int64_t bytes, int64_t n, int64_t k,
                 bool in_planes) {
  const Format f = checked_format(format);
  need_between(source, TE_FROM_FLOAT, TE_FROM_GGUF, "source");
  if (k % kBlock != 0) refuse("a matrix of %lld inputs cannot be cut into blocks of 32", static_cast<long long>(k));
  const int64_t block = f == Format::Q8 ? 34 : f == Format::Q4_0 ? 18 : 20;
  const int64_t expected = source == TE_FROM_GGUF ? n * (k / kBlock) * block : n * k * 4;
  if (bytes != expected)
    refuse("a matrix of %lld x %lld takes %lld bytes, not %lld", static_cast<long long>(n), static_cast<long long>(k),
           static_cast<long long>(expected), static_cast<long long>(bytes));
  if (source == TE_FROM_GGUF) {
    need(static_cast<const uint8_t*>(data), "data");
  } else {
    const auto* values = static_cast<const float*>(data);
    need(values, "data");
    for (int64_t i = 0; i < n * k; ++i)  // beyond it a scale would not fit fp16; NaN fails too
      if (!(std::fabs(values[i]) <= 65504.0f)) refuse("weight %lld is not a finite number that fits fp16", static_cast<long long>(i));
  }
  to.allocate(in_planes && f == Format::Q8 ? Format::Split : f, n, k);
  pack_matrix(team, to, source == TE_FROM_GGUF, static_cast<const uint8_t*>(data), bytes / n);
}

void fill_vector(Vector& to, const float* data, int64_t count, int64_t expected, const char* name) {
  need(data, name);
  if (count != expected)
    refuse("%s has %lld values, not %lld", name, static_cast<long long>(count), static_cast<long long>(expected));
  to = Vector(count);
  std::memcpy(to.data(), data, static_cast<size_t>(count) * sizeof(float));
}

void fill_rope(RopeTable& rope, const float* cos, const float* sin, int64_t count, int64_t positions, int64_t head_dim) {
  fill_vector(rope.cos, cos, count, positions * head_dim / 2, "cos");
  fill_vector(rope.sin, sin, count, positions * head_dim / 2, "sin");
}

bool layer_matrix(LayerWeights& layer, const LayerShape& shape, int32_t name, Matrix*& to, int64_t& n, int64_t& k) {
  const auto is = [&](Matrix& matrix, int64_t rows, int64_t columns) {
    to = &matrix;
    n = rows;
    k = columns;
    return true;
  };
  switch (name) {
    case TE_Q: return is(layer.q, shape.query_width(), shape.input);
    case TE_K: return is(layer.k, shape.kv_width(), shape.input);
    case TE_V: return is(layer.v, shape.kv_width(), shape.input);
    case TE_O: return is(layer.o, shape.hidden, shape.query_width());
    case TE_GATE: return is(layer.gate, shape.intermediate, shape.hidden);
    case TE_UP: return is(layer.up, shape.intermediate, shape.hidden);
    case TE_DOWN: return is(layer.down, shape.hidden, shape.intermediate);
    default: return false;
  }
}

bool layer_vector(LayerWeights& layer, const LayerShape& shape, int32_t name, Vector*& to, int64_t& count) {
  const auto is = [&](Vector& vector, int64_t values) {
    to = &vector;
    count = values;
    return true;
  };
  switch (name) {
    case TE_ATTENTION_NORM: return is(layer.attention_norm, shape.hidden);
    case TE_MLP_NORM: return is(layer.mlp_norm, shape.hidden);
    case TE_Q_BIAS: return is(layer.q_bias, shape.query_width());
    case TE_K_BIAS: return is(layer.k_bias, shape.kv_width());
    case TE_V_BIAS: return is(layer.v_bias, shape.kv_width());
    case TE_O_BIAS: return is(layer.o_bias, shape.hidden);
    case TE_Q_NORM: return is(layer.q_norm, shape.attention.head_dim);
    case TE_K_NORM: return is(layer.k_norm, shape.attention.head_dim);
    default: return false;
  }
}

void need_layer(const LayerWeights& layer, int64_t index) {
  for (const Matrix* m : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down})
    if (!m->present()) refuse("layer %lld lacks a matrix", static_cast<long long>(index));
  for (const Vector* v : {&layer.attention_norm, &layer.mlp_norm})
    if (!v->size()) refuse("layer %lld lacks a norm", static_cast<long long>(index));
}

int64_t layer_bytes(const LayerWeights& layer) {
  int64_t total = 0;
  for (const Matrix* m : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down})
    total += m->memory.bytes();
  for (const Vector* v : {&layer.attention_norm, &layer.mlp_norm, &layer.q_bias, &layer.k_bias, &layer.v_bias, &layer.o_bias,
                          &layer.q_norm, &layer.k_norm})
    total += v->bytes();
  return total;
}

// The caller's own lists, after a look at every entry that will be read.
ReadingLists checked_lists(const te_pass* pass, int64_t slots) {
  need(pass->own, "own");
  need(pass->own_counts, "own_counts");
  need_between(pass->own_stride, 1, INT32_MAX, "own_stride");
  for (int64_t m = 0; m < pass->rows; ++m) {
    need_between(pass->own_counts[m], 0, pass->own_stride, "own_counts");
    for (int32_t i = 0; i < pass->own_counts[m]; ++i) need_between(pass->own[m * pass->own_stride + i], 0, slots - 1, "own");
  }
  return {pass->prefix, pass->prefix_count, pass->own, pass->own_counts, pass->own_stride};
}

void need_store(const te_kv* kv) {
  need(kv, "kv");
  need(kv->keys, "keys");
  need(kv->values, "values");
  need_between(kv->slots, 1, INT32_MAX, "slots of the store");
}

Pass checked_pass(const te_pass* pass, const te_kv* kv, Workspace& space, int64_t vocabulary, int64_t positions) {
  need(pass, "pass");
  need_store(kv);
  need_between(pass->rows, 1, space.max_rows, "rows");
  need_between(pass->tree_count, 0, space.max_rows, "tree_count");
  need_between(pass->prefix_count, 0, INT32_MAX, "prefix_count");
  if (vocabulary > 0) {
    need(pass->ids, "ids");
    need_range(pass->ids, pass->rows, vocabulary, "ids");
    need(pass->positions, "positions");
    need_range(pass->positions, pass->rows, positions, "positions");
    need(pass->slots, "slots");
    need_range(pass->slots, pass->rows, kv->slots, "slots");
  }
  if (pass->prefix_count > 0) need(pass->prefix, "prefix");
  need_range(pass->prefix, pass->prefix_count, kv->slots, "prefix");
  if (pass->tree_count > 0) need(pass->tree, "tree");
  need_range(pass->tree, pass->tree_count, kv->slots, "tree");
  if (pass->parents) {
    need(pass->parents, "parents");
    need_between(pass->tree_count, pass->rows, space.max_rows, "tree_count");
    for (int64_t r = 0; r < pass->tree_count; ++r) need_between(pass->parents[r], -1, r - 1, "parents");
  } else if (!pass->visible && pass->tree_count > 0 && pass->tree_count != pass->rows) {
    refuse("without `visible`, tree_count (%lld) must equal rows (%lld)", static_cast<long long>(pass->tree_count),
           static_cast<long long>(pass->rows));
  }
  Pass ours;
  ours.rows = pass->rows;
  ours.ids = pass->ids;
  ours.positions = pass->positions;
  ours.slots = pass->slots;
  if (pass->own)
    ours.reads = checked_lists(pass, kv->slots);
  else if (pass->parents)
    ours.reads = list_ancestors(space, pass->rows, pass->prefix, pass->prefix_count, pass->tree, pass->tree_count, pass->parents);
  else
    ours.reads = list_visible(space, pass->rows, pass->prefix, pass->prefix_count, pass->tree, pass->tree_count, pass->visible);
  for (int64_t r = 0; r < pass->rows; ++r)
    if (ours.reads.length(r) == 0) refuse("row %lld reads nothing", static_cast<long long>(r));
  return ours;
}

}  // namespace te

int64_t te_version(void) { return TE_VERSION; }
const char* te_error(void) { return te::last_failure.c_str(); }
