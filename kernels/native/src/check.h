// Checks of the C interface: a broken one becomes a sentence in te_error() and the return value -1.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "draw.h"
#include "drafter.h"
#include "te.h"

struct te_team {
  te_team(int threads, int64_t spin_us, const te::Kernels& k) : team(threads, spin_us), kernels(k) {}
  te::Team team;
  const te::Kernels& kernels;
  te::Draw draw;
  std::mutex busy;  // one call at a time
};

struct te_model {
  te_model(te_team& t, const te::ModelConfig& c) : owner(t), model(c, t.kernels, t.team) {}
  te_team& owner;
  te::Model model;
  bool ready = false;
};

struct te_head {
  te_head(te_model& m, const te::HeadConfig& c) : owner(m.owner), head(c, m.model), drafter(head) {}
  te_team& owner;
  te::Head head;
  te::Drafter drafter;
  bool ready = false;
};

namespace te {

struct Refused {
  std::string why;
};

[[noreturn]] __attribute__((format(printf, 1, 2))) void refuse(const char* format, ...);

// Runs `body`; what it throws is kept for te_error().
int remember_failure(const Refused& refused);
template <class Body>
int guarded(Body body) {
  try {
    body();
    return 0;
  } catch (const Refused& refused) {
    return remember_failure(refused);
  } catch (const std::bad_alloc&) {
    return remember_failure({"not enough memory"});
  } catch (const std::exception& error) {
    return remember_failure({error.what()});
  }
}

// For what may be null.
template <class T>
void need_aligned(const T* pointer, const char* name) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignof(T) != 0) refuse("%s is not aligned to %zu bytes", name, alignof(T));
}

template <class T>
void need(const T* pointer, const char* name) {
  if (!pointer) refuse("%s is null", name);
  need_aligned(pointer, name);
}

void need_range(const int64_t* values, int64_t count, int64_t end, const char* name);  // all in [0, end)
void need_between(int64_t value, int64_t low, int64_t high, const char* name);         // low <= value <= high

LayerShape checked_shape(int64_t hidden, int64_t input, int64_t intermediate, int64_t heads, int64_t kv_heads,
                         int64_t head_dim, float eps, float residual_scale);
Format checked_format(int32_t format);

// Allocates and fills `to`, its tiles shared out between the team's threads; the source must be exactly n x k.
void fill_matrix(Team& team, Matrix& to, int32_t format, int32_t source, const void* data, int64_t bytes, int64_t n, int64_t k,
                 bool in_planes = false);  // where it has 8 bits
void fill_vector(Vector& to, const float* data, int64_t count, int64_t expected, const char* name);
void fill_rope(RopeTable& rope, const float* cos, const float* sin, int64_t count, int64_t positions, int64_t head_dim);
// The matrix or vector `name` of a layer with the shape it must have; false when the layer has no such tensor.
bool layer_matrix(LayerWeights& layer, const LayerShape& shape, int32_t name, Matrix*& to, int64_t& n, int64_t& k);
bool layer_vector(LayerWeights& layer, const LayerShape& shape, int32_t name, Vector*& to, int64_t& count);
void need_layer(const LayerWeights& layer, int64_t index);
int64_t layer_bytes(const LayerWeights& layer);

void need_store(const te_kv* kv);
// Checks a pass against its limits and turns it into ours; the reading lists go to `space`.
Pass checked_pass(const te_pass* pass, const te_kv* kv, Workspace& space, int64_t vocabulary, int64_t positions);

}  // namespace te
