#include "growth.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace te {

bool Growth::stops(int64_t token) const { return std::find(stop_ids, stop_ids + stop_count, token) != stop_ids + stop_count; }

double Growth::chance(double log_prob) const {
  const double sure = std::min(log_prob, -least);
  const double odds = calibration[0] + calibration[1] * (sure - std::log(-std::expm1(sure)));
  return 1.0 / (1.0 + std::exp(-std::max(odds, std::log(least))));
}

Candidates::Candidates(int64_t max_expanded, int64_t max_scored)
    : pool_((1 + max_expanded) * max_scored),
      ranked_((1 + max_expanded) * max_scored),
      level_(max_scored * max_scored) {}

void Candidates::begin(const Growth& growth) {
  growth_ = growth;
  count_ = newest_ = kept_ = levels_ = 0;
  chosen_ = -1;  // the root
}

// Of equal scores the one that was scored first.
bool Candidates::better(int32_t a, int32_t b) const {
  const double left = pool_.data()[a].score, right = pool_.data()[b].score;
  return left != right ? left > right : a < b;
}

bool Candidates::add(const float* log_probs, const int64_t* ids, int64_t children) {
  newest_ = count_;
  for (int64_t p = 0; p < std::max<int64_t>(chosen_, 1); ++p) {
    const int32_t parent = chosen_ < 0 ? -1 : level_.data()[p];
    const double above = parent < 0 ? 0.0 : pool_.data()[parent].log_prob;
    for (int64_t i = p * children; i < (p + 1) * children; ++i) {
      const double log_prob = log_probs[i];
      if (!std::isfinite(log_prob)) return false;
      const double score = growth_.verify ? (parent < 0 ? 1.0 : pool_.data()[parent].score) * growth_.chance(log_prob)
                                          : (parent < 0 ? 0.0 : pool_.data()[parent].score) + log_prob;
      pool_.data()[count_++] = {above + log_prob, score, static_cast<int32_t>(ids[i]), parent, -1, 0};
    }
  }
  int32_t* ranked = ranked_.data();
  int64_t all = kept_;
  for (int64_t i = newest_; i < count_; ++i) ranked[all++] = static_cast<int32_t>(i);
  std::sort(ranked, ranked + all, [&](int32_t a, int32_t b) { return better(a, b); });
  kept_ = std::min(all, growth_.nodes);  // what is not among the best now never will be, nor its children
  return true;
}

int64_t Candidates::expand() {
  ++levels_;
  const Best most = growth_.verify ? best() : Best{};
  const double least = growth_.verify            ? worth_expanding(most)
                       : kept_ == growth_.nodes ? score(kept_ - 1)
                                                 : -std::numeric_limits<double>::infinity();
  int32_t* level = level_.data();
  int64_t open = 0;
  for (int64_t i = newest_; i < count_; ++i)
    if (!growth_.stops(pool_.data()[i].token)) level[open++] = static_cast<int32_t>(i);
  std::sort(level, level + open, [&](int32_t a, int32_t b) { return better(a, b); });
  chosen_ = 0;
  while (chosen_ < std::min(open, growth_.branching) && pool_.data()[level[chosen_]].score > least) ++chosen_;
  if (growth_.verify && !pays(most, chosen_)) chosen_ = 0;
  return chosen_;
}

int64_t Candidates::select() {
  const int64_t count = growth_.verify ? best().count : kept_;
  for (int64_t i = 0; i < count; ++i) pool_.data()[ranked_.data()[i]].row = static_cast<int32_t>(i + 1);
  return count;
}

// Its surest child must earn its row or the place of the weakest node so far.
double Candidates::worth_expanding(const Best& best) const {
  const double row = growth_.verify[best.count + 2] - growth_.verify[best.count + 1];
  return best.count > 0 ? std::min(row, score(best.count - 1)) : row;
}

// Whether going deeper from here pays, by one level or more.
bool Candidates::pays(const Best& best, int64_t chosen) const {
  double reach = 0.0, tokens = best.tokens;
  for (int64_t i = 0; i < chosen; ++i) reach += pool_.data()[level_.data()[i]].score;
  int64_t more = best.count;
  for (int64_t depth = levels_ + 1; depth <= growth_.depth; ++depth) {
    reach *= growth_.continues[depth];
    tokens += reach;
    more = std::min(more + 1, growth_.nodes);
    double replaced = 0.0;  // the scores of those whose places are taken
    for (int64_t i = std::max<int64_t>(0, 2 * best.count - more); i < best.count; ++i) replaced += score(i);
    const double cost = std::min(growth_.verify[more + 1], growth_.verify[best.count + 1] + replaced);
    if (tokens - growth_.draft[depth] - cost > best.value) return true;
  }
  return false;
}

// The prefix of most value.
Candidates::Best Candidates::best() const {
  Best found{0, 1.0, 1.0 - growth_.verify[1]};
  double tokens = 1.0;
  for (int64_t i = 0; i < kept_; ++i) {
    tokens += score(i);
    const double value = tokens - growth_.verify[i + 2];
    if (value > found.value) found = {i + 1, tokens, value};
  }
  found.value -= growth_.draft[levels_];
  return found;
}

}  // namespace te
