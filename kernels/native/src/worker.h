// One thread at its part of a phase: products, norms, rotation and attention for the units that are its own.
//
// The units of a phase are rows or output channels. Who does which, and when, never changes a value: a row's numbers
// depend on that row alone. What a phase reads, earlier phases wrote; what a unit writes, no other of its phase touches.
#pragma once

#include <initializer_list>

#include "team.h"
#include "workspace.h"

namespace te {

// The units of a pass's attention: in chunks, a chunk and some key heads; else a key head and some rows.
struct AttentionUnits {
  AttentionUnits(const AttentionShape& shape, const Pass& pass, int threads);

  int64_t across = 0;  // chunks, or groups of rows: units that follow one another have the same heads
  int64_t heads = 1;   // key heads of a unit
  int64_t rows = 0;    // query rows of a unit
  int64_t count = 0;   // in all
};

// Weights that a thread will read next: memory is asked for them two tiles ahead, across the border of two matrices too.
struct Ahead {
  const Weight* weight = nullptr;
  int64_t tile = 0;

  const uint8_t* at(int64_t i) const {
    return weight && tile + i < weight->tiles ? weight->quants(tile + i) : nullptr;
  }
};

// A matrix that reads the rows at hand, and where its products go.
struct Projection {
  const Weight* weight;
  const float* bias;      // [weight->n] or null
  float* out;             // or null, if only peaks are wanted
  Peak* peaks = nullptr;  // [rows] of this thread, or null
};

// One thread at its part of a phase.
class Worker {
 public:
  Worker(const Kernels& kernels, Workspace& space, const Part& part) : k(kernels), part_(part), space_(space) {}

  float* row_memory() const { return space_.row[static_cast<size_t>(part_.thread)].data(); }

  // The beginning of this thread's share of the tiles: what to ask memory for while the phase before ends.
  Ahead beginning(const Matrices& matrices) const;

  // Units are tiles of all these matrices, one after the other:
  // out[r * ldo + n] = row r of a . w, plus bias; `w.n` columns exist (the last tile may be cut). Peaks are noted of what
  // a tile gave, while it is in the nearest cache.
  void project(std::initializer_list<Projection> list, const Activations& a, int64_t rows, int64_t ldo,
               const Ahead& next) const;
  // Notes the peaks of rows [row, row + rows) in one tile.
  void project_rows(const Weight& w, int64_t tile, const Activations& a, int64_t row, int64_t rows, Peak* peaks,
                    const uint8_t* next) const;
  // Units are tiles: x[r * w.n + n] += scale * (row r of a . w + bias)
  void project_add(const Weight& w, const Activations& a, int64_t rows, const float* bias, float scale, float* x,
                   const Ahead& next) const;
  // Units are 32 channels: quantised silu(gate) * up.
  void gated(const Weight& gate, const Weight& up, const Activations& a, int64_t rows, const Activations& out,
             const Ahead& next) const;
  // The normalised row r of x, quantised into row r of a.
  void norm(const float* x, int64_t r, int64_t width, const Vector& weight, float eps, const Activations& a) const;
  // Units are heads of queries and keys, those of a row side by side.
  void rotate_and_store(const LayerShape& shape, const LayerWeights& w, const RopeTable& rope, const Pass& pass,
                        const KeyValueRows& kv) const;
  // Units are key heads, and of each the rows a few at a time; where there are few rows, key heads of a chunk of positions,
  // which `merge` then puts together, a row and a query head a unit.
  // Attention leaves the memory idle, so that it is asked meanwhile for `next`, what is multiplied after it.
  void attend(const AttentionJob& job, const Pass& pass, const Weight& next) const;
  void merge(const AttentionJob& job, const Pass& pass) const;

  const Kernels& k;

 private:
  Soon slice_of_share(const Weight& w, int64_t unit, int64_t units) const;
  float* tile_memory() const { return space_.tile[static_cast<size_t>(part_.thread)].data(); }
  void project_some(const Projection& to, int64_t begin, int64_t end, int64_t soon, const Activations& a, int64_t rows,
                    int64_t ldo, const Ahead& next) const;

  const Part& part_;
  Workspace& space_;
};

}  // namespace te
