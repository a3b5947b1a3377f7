// A team of threads that runs one function together: the caller and its workers, with cheap barriers inside.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace te {

// Between calls a worker spins for a while (the next step usually follows at once), then sleeps.
class Team {
 public:
  using Task = void (*)(void* argument, int thread);

  Team(int threads, int64_t spin_microseconds);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  // task(argument, thread) on every thread of the team; returns when all are done. One caller at a time.
  void run(Task task, void* argument);
  // All threads of the running task meet here.
  void barrier();

 private:
  void work(int thread);

  const int size_;
  const int64_t spin_microseconds_;
  Task task_ = nullptr;
  void* argument_ = nullptr;
  bool stop_ = false;
  alignas(64) std::atomic<uint32_t> call_{0};       // grows by one a task
  alignas(64) std::atomic<uint32_t> sleepers_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};    // threads waiting at the barrier
  alignas(64) std::atomic<uint32_t> passed_{0};     // barriers opened so far
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

// The part [begin, end) of `count` items that belongs to `thread`.
struct Share {
  int64_t begin, end;
  Share(int64_t count, int thread, int threads)
      : begin(count * thread / threads), end(count * (thread + 1) / threads) {}
};

}  // namespace te
