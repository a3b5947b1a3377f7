// What a team promises, as a program that ends with 0 where it holds: every unit is done once, after all units of the phase
// before, and a thread that holds a chunk holds up nothing but that.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "team.h"

namespace {

void expect(bool holds, const char* what, int threads) {
  if (holds) return;
  std::fprintf(stderr, "not so with %d threads: %s\n", threads, what);
  std::exit(1);
}

// Plain numbers, not atomic ones: a unit done twice, or before its phase, is a race that the sanitizer sees as well.
class Counted final : public te::Job {
 public:
  explicit Counted(int threads) : threads_(threads) {
    for (const int64_t units : kUnits) done_.emplace_back(static_cast<size_t>(units), 0);
  }

  int64_t units(int64_t phase) const override { return phase < kPhases ? kUnits[phase] : -1; }

  void work(int64_t phase, const te::Part& part) const override {
    expect(part.begin < part.end && part.end <= part.soon && part.soon <= kUnits[phase], "parts lie in the phase", threads_);
    if (part.begin == 0 && phase > 0) expect(all_done(phase - 1), "a phase follows the whole phase before", threads_);
    for (int64_t i = part.begin; i < part.end; ++i) ++done_[static_cast<size_t>(phase)][static_cast<size_t>(i)];
  }

  bool all_done(int64_t phase) const {
    for (const int times : done_[static_cast<size_t>(phase)])
      if (times != 1) return false;
    return true;
  }

  static constexpr int64_t kPhases = 7;

 private:
  static constexpr int64_t kUnits[kPhases] = {5, 0, 1, 97, 0, 10000, 2};  // none, fewer than threads, more than chunks
  const int threads_;
  mutable std::vector<std::vector<int>> done_;
};

// The first thread to come keeps its chunk until all other units are done: by the other thread, which takes them over.
class Held final : public te::Job {
 public:
  int64_t units(int64_t phase) const override { return phase == 0 ? kUnits : -1; }

  void work(int64_t, const te::Part& part) const override {
    const int64_t mine = part.end - part.begin;
    if (!held_.exchange(true))
      while (done_.load() < kUnits - mine) std::this_thread::yield();
    done_ += mine;
  }

  int64_t done() const { return done_.load(); }
  static constexpr int64_t kUnits = 64;

 private:
  mutable std::atomic<bool> held_{false};
  mutable std::atomic<int64_t> done_{0};
};

}  // namespace

int main() {
  for (const int threads : {1, 2, 7, 33})
    for (const int64_t spin_us : {0, 1000}) {  // workers sleep between calls, or are awake
      te::Team team(threads, spin_us);
      for (int run = 0; run < 40; ++run) {
        const Counted job(threads);
        team.run(job);
        for (int64_t phase = 0; phase < Counted::kPhases; ++phase)
          expect(job.all_done(phase), "every unit is done once", threads);
      }
    }
  te::Team two(2, 1000);
  for (int run = 0; run < 20; ++run) {
    const Held job;
    two.run(job);
    expect(job.done() == Held::kUnits, "what a held thread has not begun is done by the other", 2);
  }
}
