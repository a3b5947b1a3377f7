// Runs products, an attention and a small model on one instruction set and writes every result to stdout, for machines
// that only an emulator offers. With no argument it prints the names of the instruction sets that it may use.
//
// Inputs come from integer arithmetic and single divisions, so that every machine has the same bits. A record is a line
// "name count", then `count` floats as they lie in memory.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "te.h"

namespace {

using Floats = std::vector<float>;
using Ints = std::vector<int64_t>;

const char* const kFormats[] = {"q8", "q4_0", "q4_1"};

void check(int code) {
  if (code == 0) return;
  std::fprintf(stderr, "%s\n", te_error());
  std::exit(1);
}

void put(const std::string& name, const Floats& values) {
  std::printf("%s %zu\n", name.c_str(), values.size());
  std::fwrite(values.data(), sizeof(float), values.size(), stdout);
}

Floats noise(uint32_t seed, int64_t count, float scale, float mean = 0.0f) {
  Floats x(static_cast<size_t>(count));
  uint32_t state = seed * 2654435761u + 1;
  for (float& value : x) {
    state = state * 1664525u + 1013904223u;
    value = mean + scale / 8388608 * static_cast<float>(static_cast<int32_t>(state) >> 8);
  }
  return x;
}

std::vector<uint16_t> bf16_noise(uint32_t seed, int64_t count) {
  const Floats x = noise(seed, count, 2.0f);
  std::vector<uint16_t> upper(x.size());
  for (size_t i = 0; i < x.size(); ++i) std::memcpy(&upper[i], reinterpret_cast<const char*>(&x[i]) + 2, 2);
  return upper;
}

Ints scattered(int64_t count, int64_t slots) {  // 7 and `slots` have no common factor
  Ints at(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) at[static_cast<size_t>(i)] = i * 7 % slots;
  return at;
}

void products(te_team* team) {
  constexpr int64_t kN = 40, kRows = 17;
  for (int32_t format = TE_Q8; format <= TE_Q4_1; ++format)
    for (const int64_t k : {32, 576}) {
      const Floats w = noise(1, kN * k, 0.05f), x = noise(2, kRows * k, 3.0f);
      Floats together(kRows * kN), alone(kRows * kN);
      const auto multiply = [&](int64_t row, int64_t rows, Floats& out) {
        check(te_matmul(team, format, TE_FROM_FLOAT, w.data(), static_cast<int64_t>(w.size() * sizeof(float)), kN, k,
                        x.data() + row * k, rows, out.data() + row * kN));
      };
      multiply(0, kRows, together);
      for (int64_t row = 0; row < kRows; ++row) multiply(row, 1, alone);
      const std::string name = std::string("product/") + kFormats[format] + "/" + std::to_string(k);
      put(name + "/together", together);
      put(name + "/alone", alone);
    }
}

void attention(te_team* team) {
  constexpr int64_t kHeads = 9, kKvHeads = 3, kDim = 64, kSlots = 300, kPrefix = 100, kNodes = 24;
  constexpr int64_t kWidth = kHeads * kDim;
  std::vector<uint16_t> keys = bf16_noise(3, kSlots * kKvHeads * kDim), values = bf16_noise(4, kSlots * kKvHeads * kDim);
  const te_kv kv{keys.data(), values.data(), kSlots};
  const Floats query = noise(5, kNodes * kWidth, 2.0f);
  const Ints slots = scattered(kPrefix + kNodes, kSlots);
  std::vector<uint8_t> visible(kNodes * kNodes);
  for (int64_t row = 0; row < kNodes; ++row) {
    for (int64_t node = row; node > 0; node = (node - 1) / 2) visible[static_cast<size_t>(row * kNodes + node)] = 1;
    visible[static_cast<size_t>(row * kNodes)] = 1;  // the root
  }
  Floats together(kNodes * kWidth), alone(kNodes * kWidth);
  te_pass pass{};
  pass.rows = kNodes;
  pass.prefix = slots.data();
  pass.prefix_count = kPrefix;
  pass.tree = slots.data() + kPrefix;
  pass.tree_count = kNodes;
  pass.visible = visible.data();
  check(te_attention(team, query.data(), kHeads, kKvHeads, kDim, &pass, &kv, together.data()));
  for (int64_t row = 0; row < kNodes; ++row) {  // plain decoding: everything but the row itself is prefix
    Ints reads(slots.begin(), slots.begin() + kPrefix);
    for (int64_t node = 0; node < kNodes; ++node)
      if (visible[static_cast<size_t>(row * kNodes + node)]) reads.push_back(slots[static_cast<size_t>(kPrefix + node)]);
    te_pass single{};
    single.rows = single.tree_count = 1;
    single.prefix = reads.data();
    single.prefix_count = static_cast<int64_t>(reads.size()) - 1;
    single.tree = reads.data() + single.prefix_count;
    const int64_t at = row * kWidth;
    check(te_attention(team, query.data() + at, kHeads, kKvHeads, kDim, &single, &kv, alone.data() + at));
  }
  put("attention/together", together);
  put("attention/alone", alone);
}

te_model* small_model(te_team* team, const te_model_config& c, int32_t format) {
  const int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  const int64_t shapes[][2] = {{q, c.hidden}, {kv, c.hidden}, {kv, c.hidden}, {c.hidden, q},
                               {c.intermediate, c.hidden}, {c.intermediate, c.hidden}, {c.hidden, c.intermediate}};
  te_model* model = nullptr;
  check(te_model_create(team, &c, &model));
  uint32_t seed = 10;
  const auto matrix = [&](int64_t layer, int32_t name, int32_t as, int64_t n, int64_t k, float scale) {
    const Floats w = noise(++seed, n * k, scale);
    check(te_model_matrix(model, layer, name, as, TE_FROM_FLOAT, w.data(), static_cast<int64_t>(w.size() * sizeof(float))));
  };
  const auto norm = [&](int64_t layer, int32_t name) {
    const Floats w = noise(++seed, c.hidden, 0.2f, 1.0f);
    check(te_model_vector(model, layer, name, w.data(), c.hidden));
  };
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    for (int32_t name = TE_Q; name <= TE_DOWN; ++name) matrix(layer, name, format, shapes[name][0], shapes[name][1], 0.2f);
    norm(layer, TE_ATTENTION_NORM);
    norm(layer, TE_MLP_NORM);
  }
  matrix(0, TE_EMBEDDING, TE_Q8, c.vocabulary, c.hidden, 1.7f);
  norm(0, TE_FINAL_NORM);
  const Floats t = noise(++seed, c.max_positions * c.head_dim / 2, 1.0f);  // tangents of half an angle
  Floats cos(t.size()), sin(t.size());
  for (size_t i = 0; i < t.size(); ++i) {
    cos[i] = (1.0f - t[i] * t[i]) / (1.0f + t[i] * t[i]);
    sin[i] = 2.0f * t[i] / (1.0f + t[i] * t[i]);
  }
  check(te_model_rope(model, cos.data(), sin.data(), static_cast<int64_t>(cos.size())));
  check(te_model_ready(model));
  return model;
}

void forward(te_team* team, int32_t format) {
  const te_model_config c{2, 96, 160, 4, 2, 32, 77, 256, 64, 1e-5f, 1.0f, 1.0f, 1.0f};
  constexpr int64_t kPrompt = 60, kSlots = 256;
  te_model* model = small_model(team, c, format);
  const Ints slots = scattered(kPrompt, kSlots);
  Ints ids, positions;
  for (int64_t i = 0; i < kPrompt; ++i) {
    ids.push_back(i * 31 % c.vocabulary);
    positions.push_back(i);
  }
  for (const int64_t step : {kPrompt, int64_t{7}, int64_t{1}}) {
    std::vector<uint16_t> keys(static_cast<size_t>(c.layers * kSlots * c.kv_heads * c.head_dim)), values(keys.size());
    const te_kv kv{keys.data(), values.data(), kSlots};
    Floats logits(static_cast<size_t>(kPrompt * c.vocabulary)), peaks(kPrompt);
    Ints best(kPrompt);
    for (int64_t begin = 0; begin < kPrompt; begin += step) {
      te_pass pass{};
      pass.rows = pass.tree_count = begin + step < kPrompt ? step : kPrompt - begin;
      pass.ids = ids.data() + begin;
      pass.positions = positions.data() + begin;
      pass.slots = pass.tree = slots.data() + begin;
      pass.prefix = slots.data();
      pass.prefix_count = begin;
      te_wanted wanted{};
      wanted.logit_rows = positions.data();
      wanted.logit_count = pass.rows;
      wanted.logits = logits.data() + begin * c.vocabulary;
      check(te_forward(model, &pass, &kv, &wanted));
      wanted.logits = nullptr;
      wanted.best = best.data() + begin;
      wanted.peaks = peaks.data() + begin;
      check(te_forward(model, &pass, &kv, &wanted));
    }
    for (size_t i = 0; i < best.size(); ++i)
      if (logits[i * static_cast<size_t>(c.vocabulary) + static_cast<size_t>(best[i])] != peaks[i]) std::abort();
    const std::string name = std::string(kFormats[format]) + "/" + std::to_string(step);
    put("forward/" + name, logits);
    put("peaks/" + name, peaks);
  }
  te_model_destroy(model);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::puts(te_isas());
    return 0;
  }
  te_team* team = nullptr;
  check(te_team_create(std::atoi(arguments[2]), arguments[1], 1000, &team));
  products(team);
  attention(team);
  for (int32_t format = TE_Q8; format <= TE_Q4_1; ++format) forward(team, format);
  te_team_destroy(team);
}
