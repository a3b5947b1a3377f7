// How far a draft tree grows: EAGLE-2's rule (arXiv 2406.16858), or as long as growing pays. `treeeagle_edge/drafting/growth.py` is
// the definition and says why; here are the same sums in the same order, so that both grow the same tree.
#pragma once

#include <cstdint>

#include "buffer.h"

namespace te {

struct Growth {
  int64_t depth = 0;      // levels that may be drafted
  int64_t branching = 0;  // nodes expanded a level
  int64_t nodes = 0;      // of a tree, the root not counted
  const int64_t* stop_ids = nullptr;  // [stop_count] nothing is drafted behind them
  int64_t stop_count = 0;
  const double* verify = nullptr;     // [nodes + 3] a target pass over so many rows, in tokens; null: a fixed tree
  const double* draft = nullptr;      // [depth + 1] so many levels, in tokens
  const double* continues = nullptr;  // [depth + 1] chance that a walk that could goes on to this depth
  const double* calibration = nullptr;  // [2] shift and slope of the log odds
  double least = 0.0;                 // a chance is that far from 0 and from 1

  bool stops(int64_t token) const;
  double chance(double log_prob) const;  // that a node is walked once its parent is
};

struct Candidate {
  double log_prob;  // of the path from the root
  double score;     // what candidates are ranked by; never above the parent's
  int32_t token;
  int32_t parent;   // a candidate; -1: the root
  int32_t scratch;  // its row among those the head ran on; -1: it did not
  int32_t row;      // of the tree, once `select` took it
};

// All nodes scored in one round. Memory is taken once.
class Candidates {
 public:
  // At most `max_expanded` nodes are expanded in a round, each to `max_scored` children or fewer.
  Candidates(int64_t max_expanded, int64_t max_scored);

  void begin(const Growth& growth);
  // The next level: `children` of each node that `expand` chose last, at first of the root. False where one of the scores
  // is not finite; the round's draft has then failed.
  bool add(const float* log_probs, const int64_t* ids, int64_t children);
  // How many candidates of the newest level the head should run on next.
  int64_t expand();
  // How many candidates form the tree; they know their rows, which `selected` gives from 1 on.
  int64_t select();

  Candidate& expanded(int64_t i) { return pool_.data()[level_.data()[i]]; }
  const Candidate& selected(int64_t row) const { return pool_.data()[ranked_.data()[row - 1]]; }
  const Candidate& at(int64_t i) const { return pool_.data()[i]; }
  int64_t levels() const { return levels_; }

 private:
  struct Best {
    int64_t count;
    double tokens, value;
  };
  bool better(int32_t a, int32_t b) const;
  double score(int64_t ranked) const { return pool_.data()[ranked_.data()[ranked]].score; }
  double worth_expanding(const Best& best) const;
  bool pays(const Best& best, int64_t chosen) const;
  Best best() const;

  Growth growth_;
  Buffer<Candidate> pool_;   // in the order they were scored, parents before children
  Buffer<int32_t> ranked_;   // the best `nodes` of them, best first, and room for a level behind them
  Buffer<int32_t> level_;    // candidates of the newest level that may be expanded, best first
  int64_t count_ = 0, newest_ = 0;  // of the pool; the newest level begins at `newest_`
  int64_t kept_ = 0;                // of `ranked_`
  int64_t chosen_ = 0;              // of `level_`
  int64_t levels_ = 0;
};

}  // namespace te
