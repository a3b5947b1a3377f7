#include "drafter.h"

#include <algorithm>

namespace te {

Drafter::Drafter(Head& head)
    : head_(head),
      candidates_(head.config.max_expanded, head.config.max_scored),
      states_(head.config.max_rows * head.config.layer.hidden),
      ids_(head.config.max_rows),
      positions_(head.config.max_rows),
      state_rows_(head.config.max_rows),
      scored_rows_(head.config.max_scored),
      log_probs_(head.config.max_scored * head.config.max_scored),
      top_ids_(head.config.max_scored * head.config.max_scored),
      slots_(head.config.max_expanded),
      parents_(head.config.max_expanded) {
  for (int64_t i = 0; i < head.config.max_scored; ++i) scored_rows_.data()[i] = i;
}

void Drafter::draft(const TrueRows& rows, const KeyValueRows& kv, int64_t scratch, const Growth& growth, Tree& tree) {
  const int64_t children = std::min(growth.branching, head_.config.vocabulary);
  candidates_.begin(growth);
  expanded_ = level_begin_ = 0;
  tree.rows = 0;
  extend(rows, kv, children);
  for (int64_t depth = 1;; ++depth) {
    const bool finite = candidates_.add(log_probs_.data(), top_ids_.data(), children);
    const int64_t count = finite ? candidates_.expand() : 0;
    tree.levels = candidates_.levels();
    if (!finite) return;
    if (count == 0 || depth == growth.depth) break;
    step(rows, kv, scratch, depth, count, children);
  }
  write(rows.ids[rows.count - 1], tree);
}

// The pass over the true rows; the root's is scored.
void Drafter::extend(const TrueRows& rows, const KeyValueRows& kv, int64_t children) {
  const int64_t* slots = rows.table + rows.prefix;
  const int64_t root = rows.count - 1;
  for (int64_t i = 0; i < rows.count; ++i) positions_.data()[i] = rows.position + i;
  Pass pass;
  pass.rows = rows.count;
  pass.ids = rows.ids;
  pass.positions = positions_.data();
  pass.slots = slots;
  pass.reads = list_visible(head_.space, rows.count, rows.table, rows.prefix, slots, rows.count, nullptr);
  head_.step(pass, kv, {rows.features, nullptr, rows.feature_rows},
             {states_.data(), &root, 1, children, log_probs_.data(), top_ids_.data()});
}

// The pass over the `count` candidates at `depth` that are expanded. Each reads the state of its parent, which ran in the
// pass before: the root's row there is the last one.
void Drafter::step(const TrueRows& rows, const KeyValueRows& kv, int64_t scratch, int64_t depth, int64_t count,
                   int64_t children) {
  const int64_t begin = expanded_;
  for (int64_t i = 0; i < count; ++i) {
    Candidate& candidate = candidates_.expanded(i);
    candidate.scratch = static_cast<int32_t>(begin + i);
    const int32_t above = candidate.parent < 0 ? -1 : candidates_.at(candidate.parent).scratch;
    ids_.data()[i] = candidate.token;
    positions_.data()[i] = rows.position + rows.count - 1 + depth;
    state_rows_.data()[i] = above < 0 ? rows.count - 1 : above - level_begin_;
    slots_.data()[begin + i] = scratch + begin + i;
    parents_.data()[begin + i] = above;
  }
  level_begin_ = begin;
  expanded_ += count;
  Pass pass;
  pass.rows = count;
  pass.ids = ids_.data();
  pass.positions = positions_.data();
  pass.slots = slots_.data() + begin;
  pass.reads = list_ancestors(head_.space, count, rows.table, rows.prefix + rows.count, slots_.data(), expanded_,
                              parents_.data());
  head_.step(pass, kv, {nullptr, states_.data(), state_rows_.data()},
             {states_.data(), scored_rows_.data(), count, children, log_probs_.data(), top_ids_.data()});
}

void Drafter::write(int64_t root, Tree& tree) {
  tree.rows = candidates_.select() + 1;
  tree.tokens[0] = root;
  tree.parents[0] = -1;
  tree.depths[0] = 0;
  tree.log_probs[0] = 0.0;
  for (int64_t row = 1; row < tree.rows; ++row) {
    const Candidate& candidate = candidates_.selected(row);
    const int64_t parent = candidate.parent < 0 ? 0 : candidates_.at(candidate.parent).row;
    tree.tokens[row] = candidate.token;
    tree.parents[row] = parent;
    tree.depths[row] = tree.depths[parent] + 1;
    tree.log_probs[row] = candidate.log_prob;
  }
}

}  // namespace te
