#include "team.h"

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

// A few microseconds. On a busy machine two of our threads may share a core: then each further turn keeps the very thread
// we wait for from running, and a step has hundreds of barriers. Yielding costs little when nobody wants the core.
constexpr int kSpinsBeforeYield = 128;

// One turn of waiting, the `spins`-th.
inline void wait_a_little(int spins) {
  if (spins < kSpinsBeforeYield)
    relax();
  else
    std::this_thread::yield();
}

}  // namespace

Team::Team(int threads, int64_t spin_microseconds) : size_(threads), spin_microseconds_(spin_microseconds) {
  for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    call_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Team::run(Task task, void* argument) {
  if (size_ > 1) {
    task_ = task;
    argument_ = argument;
    call_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) {
      std::lock_guard<std::mutex> lock(mutex_);  // a sleeper has either seen the call or is inside wait()
      wake_.notify_all();
    }
  }
  task(argument, 0);
  barrier();
}

void Team::barrier() {
  if (size_ == 1) return;
  const uint32_t round = passed_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size_)) {
    arrived_.store(0, std::memory_order_relaxed);
    passed_.store(round + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; passed_.load(std::memory_order_acquire) == round; ++spins) wait_a_little(spins);
}

void Team::work(int thread) {
  using Clock = std::chrono::steady_clock;
  for (uint32_t seen = 0;; ++seen) {
    const auto deadline = Clock::now() + std::chrono::microseconds(spin_microseconds_);
    for (int spins = 0; call_.load(std::memory_order_acquire) == seen; ++spins) {
      wait_a_little(spins);
      if (spins % 64 != 63 || Clock::now() < deadline) continue;
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return call_.load(std::memory_order_seq_cst) != seen; });
      }
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
    if (stop_) return;
    task_(argument_, thread);
    barrier();
  }
}

}  // namespace te
