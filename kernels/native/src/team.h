// A team of threads that works through the phases of a job together: the caller and its workers.
//
// A phase is over when its work is done, not when every thread has been there. Threads take chunks of a phase, first of
// their own share, then of what others have not begun; a thread that another program has put off its core therefore
// holds up at most the one chunk that it had taken. Only who holds a chunk touches the job: the phase, and with it the
// call, cannot end before the chunk is done, so whatever a late thread could still read or write is still there. Who
// comes late finds nothing to take and goes on with the phase that is open then.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace te {

// The part [begin, end) of `count` items that belongs to `thread`.
struct Share {
  int64_t begin, end;
  Share(int64_t count, int64_t thread, int64_t threads)
      : begin(count * thread / threads), end(count * (thread + 1) / threads) {}
};

// Units [begin, end) of a phase, to be done by one thread now. Up to `soon` lies what it will probably do after them.
struct Part {
  int64_t begin, end, soon;
  int thread, threads;
};

// Phases 0, 1, 2, ... of a call. Units of a phase may be done in any order, by any thread, at the same time.
class Job {
 public:
  // How many units a phase has; 0: it is passed over; less: there is no such phase, the job is done.
  virtual int64_t units(int64_t phase) const = 0;
  virtual void work(int64_t phase, const Part& part) const = 0;

 protected:
  ~Job() = default;
};

// Between calls a worker spins for a while (the next step usually follows at once), then sleeps.
class Team {
 public:
  Team(int threads, int64_t spin_microseconds);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  // All phases of the job, one after the other; returns when the last is done. One caller at a time.
  void run(const Job& job);

 private:
  // Numbers count phases since the team began. They come round after weeks; only a thread that slept for as long, to the
  // very phase, could take one for another.
  struct Open {
    uint64_t number : 40;
    uint64_t chunks : 24;  // 0: no phase is open
  };
  // What is taken of a thread's share: by itself from the front, by others from the back. The entry of an earlier phase
  // means that nothing is taken yet, so nobody has to go round and clear the entries.
  struct Taken {
    uint64_t number : 40;
    uint64_t front : 12;
    uint64_t back : 12;
  };
  static constexpr int64_t kMostChunks = (1 << 12) - 1;
  struct alignas(64) Line {
    std::atomic<Taken> taken{Taken{0, 0, 0}};
  };

  void work(int thread);
  void take_part(Open open, int thread);
  bool do_chunks(Open open, int thread, bool alone);
  static bool take(Open open, const Share& share, std::atomic<Taken>& taken, bool own, Share& chunks);
  bool is_over(Open phase, int spins) const;
  void open_next();

  const int size_;
  const int64_t spin_microseconds_;
  // Written by who opens a phase, while nobody holds a chunk; read by those who do.
  const Job* job_ = nullptr;
  int64_t phase_ = 0;
  int64_t units_ = 0;
  int64_t grain_ = 1;  // units a chunk
  std::vector<Line> lines_;  // one a thread
  alignas(64) std::atomic<Open> open_{Open{0, 0}};
  alignas(64) std::atomic<int64_t> done_{0};  // chunks of the open phase
  alignas(64) std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace te
