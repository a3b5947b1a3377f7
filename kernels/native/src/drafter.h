// Grows a draft tree with the head, level by level, in one call. `treeeagle_edge/drafting/drafter.py` does the same with any head.
#pragma once

#include "growth.h"
#include "head.h"

namespace te {

// The rows with true features that come before the tree; the last one is the root's.
struct TrueRows {
  int64_t count = 0;
  const int64_t* ids = nullptr;    // [count]
  const int64_t* table = nullptr;  // [prefix + count] slots in reading order, those of the rows last
  int64_t prefix = 0;
  int64_t position = 0;            // rotary, of the first row
  const float* features = nullptr;  // [][feature_width], of which row m reads
  const int64_t* feature_rows = nullptr;  // [count] the one named here; null: the m-th
};

// Row 0 is the root; parents before children.
struct Tree {
  int64_t* tokens = nullptr;
  int64_t* parents = nullptr;  // rows, -1 for the root
  int64_t* depths = nullptr;
  double* log_probs = nullptr;  // of the path
  int64_t rows = 0;            // 0: scores were not finite
  int64_t levels = 0;          // scored
};

class Drafter {
 public:
  explicit Drafter(Head& head);

  // Writes the rows' keys and values, then grows the tree; `scratch` is the first of enough slots for what is expanded.
  void draft(const TrueRows& rows, const KeyValueRows& kv, int64_t scratch, const Growth& growth, Tree& tree);

 private:
  void extend(const TrueRows& rows, const KeyValueRows& kv, int64_t children);
  void step(const TrueRows& rows, const KeyValueRows& kv, int64_t scratch, int64_t depth, int64_t count, int64_t children);
  void write(int64_t root, Tree& tree);

  Head& head_;
  Candidates candidates_;
  Vector states_;                                  // [max_rows][hidden] of the pass before
  Buffer<int64_t> ids_, positions_, state_rows_;   // [max_rows] of a pass
  Buffer<int64_t> scored_rows_;                    // [max_scored] 0, 1, 2, ...
  Vector log_probs_;                               // [max_scored][max_scored]
  Buffer<int64_t> top_ids_;
  Buffer<int64_t> slots_;                          // [max_expanded] of the rows the head ran on this round ...
  Buffer<int32_t> parents_;                        // ... and their parents among them, -1 for the root
  int64_t expanded_ = 0, level_begin_ = 0;         // of these rows; the last level's begin there
};

}  // namespace te
