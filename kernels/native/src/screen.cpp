#include "screen.h"

#include <algorithm>

namespace te {
namespace {

// Where logits lie close together, many tiles have to be computed after all. From this part of them on, the first plane costs
// more than it saves, and is not tried again for a while.
constexpr int64_t kWorthwhile = 8;
constexpr int64_t kPassesOff = 16;

}  // namespace

Screen::Screen(int64_t tiles, const Kernels& kernels, int threads)
    : tiles_(tiles),
      most_rows_(kernels.rows_together),
      uppers_(tiles * most_rows_),
      norms_(most_rows_),
      floors_(most_rows_) {
  for (int thread = 0; thread < threads; ++thread) best_.emplace_back(most_rows_);
}

void Screen::begin(int64_t rows) {
  const bool too_many = computed_.load(std::memory_order_relaxed) * kWorthwhile > tiles_;
  passes_off_ = too_many ? kPassesOff : std::max<int64_t>(passes_off_ - 1, 0);
  computed_.store(0, std::memory_order_relaxed);
  for (const Buffer<Contender>& best : best_) std::fill_n(best.data(), std::min(rows, most_rows_), Contender{});
}

void Screen::enter(const Weight& output, const Activations& a, int64_t row) {
  if (row < most_rows_) norms_.data()[row] = row_norm(a, output.blocks, row);
}

bool Screen::serves(const Weight& output, int64_t rows) const {
  if (output.format != Format::Split || rows > most_rows_ || passes_off_ > 0) return false;
  constexpr float kSafe = 1e38f;  // a third of what fp32 holds; false for what is infinite or NaN, too
  return std::all_of(norms_.data(), norms_.data() + rows, [&](float norm) { return norm * output.largest_norm <= kSafe; });
}

void Screen::look(const Worker& worker, const Weight& output, const Activations& a, const Part& part) {
  Contender* best = best_[static_cast<size_t>(part.thread)].data();
  for (int64_t t = part.begin; t < part.end; ++t)
    worker.k.screen_tile(output, t, a, norms_.data(), best, uppers_.data() + t * most_rows_,
                         t + 2 < part.soon ? output.quants(t + 2) : nullptr);
}

void Screen::find_floors(const Worker& worker, const Weight& output, const Activations& a, const Part& part, Peak* peaks) {
  for (int64_t row = part.begin; row < part.end; ++row) {
    Contender best;
    for (const Buffer<Contender>& found : best_)
      if (found.data()[row].lower > best.lower) best = found.data()[row];
    worker.project_rows(output, best.tile, a, row, 1, peaks, nullptr);
    floors_.data()[row] = peaks[row].value;
  }
}

Share Screen::rows_of(int64_t tile, int64_t rows) const {
  const float* uppers = uppers_.data() + tile * most_rows_;
  const auto reaches = [&](int64_t row) { return uppers[row] >= floors_.data()[row]; };
  Share found(rows, 0, 1);
  while (found.begin < found.end && !reaches(found.begin)) ++found.begin;
  while (found.begin < found.end && !reaches(found.end - 1)) --found.end;
  return found;
}

// Memory for the next of these tiles is asked for while one is computed.
void Screen::compute(const Worker& worker, const Weight& output, const Activations& a, const Part& part, Peak* peaks) {
  int64_t computed = 0;
  Share rows(0, 0, 1);  // of the tile that `needed` found last
  const auto needed = [&](int64_t tile) {
    for (; tile < part.end; ++tile) {
      rows = rows_of(tile, a.rows);
      if (rows.begin < rows.end) break;
    }
    return tile;
  };
  for (int64_t tile = needed(part.begin), next = 0; tile < part.end; tile = next, ++computed) {
    const Share these = rows;
    next = needed(tile + 1);
    worker.project_rows(output, tile, a, these.begin, these.end - these.begin, peaks,
                        next < part.end ? output.quants(next) : nullptr);
  }
  computed_.fetch_add(computed, std::memory_order_relaxed);
}

}  // namespace te
