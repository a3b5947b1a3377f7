#include "buffer.h"

#include <cstdlib>
#include <mutex>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace te {
namespace {

constexpr int64_t kHugePage = int64_t{1} << 21;
constexpr int64_t kChunk = int64_t{1} << 25;  // what is asked of the system at once
constexpr int64_t kSmall = int64_t{1} << 14;  // below it memory is nobody's bottleneck, and a chunk would stay for it
constexpr int64_t kLarge = kChunk / 4;        // above it a part gets memory of its own
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kShare = false;  // the sanitizer sees the ends of allocations, not those of parts
#else
constexpr bool kShare = true;
#endif

std::shared_ptr<char> allocate(int64_t bytes, int64_t align) {
  const auto size = static_cast<size_t>(round_up(bytes + 1, align));
  auto* memory = static_cast<char*>(std::aligned_alloc(static_cast<size_t>(align), size));
  if (!memory) throw std::bad_alloc();
#if defined(__linux__)
  if (align == kHugePage) madvise(memory, size, MADV_HUGEPAGE);
#endif
  return std::shared_ptr<char>(memory, std::free);
}

// The chunk that is being filled. It lives as long as somebody uses a part of it.
struct Chunk {
  std::mutex busy;
  std::weak_ptr<char> memory;
  int64_t used = 0;

  std::shared_ptr<char> take(int64_t bytes) {
    const std::lock_guard<std::mutex> lock(busy);
    std::shared_ptr<char> owner = memory.lock();
    if (!owner || used + bytes > kChunk) {
      owner = allocate(kChunk, kHugePage);
      memory = owner;
      used = 0;
    }
    char* part = owner.get() + used;
    used += round_up(bytes, kAlign);
    return std::shared_ptr<char>(owner, part);
  }
};

}  // namespace

std::shared_ptr<char> take_memory(int64_t bytes) {
  static Chunk chunk;
  std::shared_ptr<char> memory;
  if (bytes > kLarge)
    memory = allocate(bytes, kHugePage);
  else if (kShare && bytes >= kSmall)
    memory = chunk.take(bytes);
  else
    memory = allocate(bytes, kAlign);
  std::memset(memory.get(), 0, static_cast<size_t>(bytes));
  return memory;
}

}  // namespace te
