#include "team.h"

#include <algorithm>
#include <chrono>

namespace te {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;

// Some microseconds. Where the cores are ours the others are about to end, too, and a look at what they have taken would
// cost them more than it could save: the memory that says so goes from core to core.
constexpr int kSpinsBeforeTakingOver = 200;

// Who waits for longer waits for a thread that another program has put off its core, for milliseconds. A short sleep
// leaves the core to whoever wants it and keeps our claim to it; a yield would give up our whole turn every time.
constexpr std::chrono::microseconds kSpin{50}, kNap{50};

// Between calls nothing is to be done, so there is no turn to lose; the caller itself may want this core.
constexpr int kSpinsBeforeYield = 128;

// Of numbers of 40 bits that come round.
inline bool is_before(uint64_t a, uint64_t b) { return static_cast<int64_t>((a - b) << 24) < 0; }

}  // namespace

Team::Team(int threads, int64_t spin_microseconds)
    : size_(threads), spin_microseconds_(spin_microseconds), lines_(static_cast<size_t>(threads)) {
  for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true, std::memory_order_relaxed);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Team::run(const Job& job) {
  if (size_ == 1) {
    for (int64_t phase = 0, units = 0; (units = job.units(phase)) >= 0; ++phase)
      if (units > 0) job.work(phase, {0, units, units, 0, 1});
    return;
  }
  job_ = &job;
  phase_ = -1;
  open_next();
  if (sleepers_.load(std::memory_order_seq_cst) != 0) {
    std::lock_guard<std::mutex> lock(mutex_);  // a sleeper has either seen the phase or is inside wait()
    wake_.notify_all();
  }
  take_part(open_.load(std::memory_order_acquire), 0);
}

// By the caller, or by the thread that did the last chunk of a phase: nobody else holds one then.
void Team::open_next() {
  do units_ = job_->units(++phase_);
  while (units_ == 0);
  grain_ = units_ / kMostChunks + 1;
  const int64_t chunks = units_ < 0 ? 0 : (units_ + grain_ - 1) / grain_;
  done_.store(0, std::memory_order_relaxed);
  const Open before = open_.load(std::memory_order_relaxed);
  open_.store({before.number + 1, static_cast<uint64_t>(chunks)}, std::memory_order_seq_cst);
}

// Half of what is left of a share, so that its owner seldom asks and what others may take over is small in the end.
bool Team::take(Open open, const Share& share, std::atomic<Taken>& taken, bool own, Share& chunks) {
  Taken seen = taken.load(std::memory_order_relaxed);
  for (;;) {
    if (is_before(open.number, seen.number)) return false;  // the phase is over, and we are late
    Taken next = seen.number == open.number ? seen : Taken{open.number, 0, 0};
    const int64_t front = share.begin + next.front, back = share.end - next.back;
    if (front >= back) return false;
    const int64_t count = (back - front + 1) / 2;
    if (own) {
      chunks.begin = front;
      next.front += static_cast<uint64_t>(count);
    } else {
      chunks.begin = back - count;
      next.back += static_cast<uint64_t>(count);
    }
    chunks.end = chunks.begin + count;
    // Relaxed: a chunk that is left is proof that the phase is open, and what its opener wrote came with `open`.
    if (taken.compare_exchange_weak(seen, next, std::memory_order_relaxed)) return true;
  }
}

// The own share first, then what the others have left of theirs; whoever does the last chunk opens the next phase.
// `alone`: the phase before left something to take over, so this one will, too. Returns the same for the next.
bool Team::do_chunks(Open open, int thread, bool alone) {
  bool took_over = false;
  for (int i = 0; i < size_; ++i) {
    if (i == 1 && !alone && is_over(open, kSpinsBeforeTakingOver)) return false;
    const int owner = (thread + i) % size_;
    const Share share(static_cast<int64_t>(open.chunks), owner, size_);
    std::atomic<Taken>& taken = lines_[static_cast<size_t>(owner)].taken;
    int64_t finished = 0;
    for (Share chunks = share; take(open, share, taken, i == 0, chunks); finished += chunks.end - chunks.begin) {
      const int64_t last = i == 0 ? share.end : chunks.end;
      job_->work(phase_, {chunks.begin * grain_, std::min(chunks.end * grain_, units_), std::min(last * grain_, units_),
                          thread, size_});
    }
    if (finished == 0) continue;
    took_over = i > 0;
    if (done_.fetch_add(finished, std::memory_order_acq_rel) + finished == static_cast<int64_t>(open.chunks)) {
      open_next();
      break;
    }
  }
  return took_over;
}

// Whether the phase ends within so many turns.
bool Team::is_over(Open phase, int spins) const {
  for (; open_.load(std::memory_order_acquire).number == phase.number; --spins) {
    if (spins == 0) return false;
    relax();
  }
  return true;
}

// Works on the open phase and on those after it, until none is open.
void Team::take_part(Open open, int thread) {
  for (bool alone = false; open.chunks != 0; open = open_.load(std::memory_order_acquire)) {
    alone = do_chunks(open, thread, alone);
    if (is_over(open, kSpinsBeforeTakingOver)) continue;
    for (const auto end = Clock::now() + kSpin; !is_over(open, 64);)
      if (Clock::now() > end) std::this_thread::sleep_for(kNap);
  }
}

void Team::work(int thread) {
  for (;;) {
    const auto deadline = Clock::now() + std::chrono::microseconds(spin_microseconds_);
    Open open{};
    for (int spins = 0; (open = open_.load(std::memory_order_acquire)).chunks == 0; ++spins) {
      if (stop_.load(std::memory_order_relaxed)) return;
      if (spins < kSpinsBeforeYield)
        relax();
      else
        std::this_thread::yield();
      if (spins % 64 != 63 || Clock::now() < deadline) continue;
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] {
          return open_.load(std::memory_order_seq_cst).chunks != 0 || stop_.load(std::memory_order_relaxed);
        });
      }
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
    take_part(open, thread);
  }
}

}  // namespace te
