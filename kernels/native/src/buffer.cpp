#include "buffer.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#if !defined(_WIN32)
#include <sys/mman.h>
#endif

namespace te {
namespace {

constexpr int64_t kHugePage = int64_t{1} << 21;
constexpr int64_t kChunk = int64_t{1} << 25;  // what is asked of the system at once
constexpr int64_t kSmall = int64_t{1} << 14;  // below it memory is nobody's bottleneck, and a chunk would stay for it
constexpr int64_t kLarge = kChunk / 4;        // above it a part gets memory of its own
#if defined(__SANITIZE_ADDRESS__) || defined(_WIN32)
constexpr bool kMap = false;  // the sanitizer sees the ends of allocations, not those of parts or of pages
#else
constexpr bool kMap = true;
#endif

// Zeroed memory of the heap.
std::shared_ptr<char> allocate(int64_t bytes) {
  const auto size = static_cast<size_t>(round_up(bytes + 1, kAlign));
  auto* memory = static_cast<char*>(std::aligned_alloc(kAlign, size));
  if (!memory) throw std::bad_alloc();
  std::memset(memory, 0, size);
  return std::shared_ptr<char>(memory, std::free);
}

// Pages of the system: zeroed, taken when first written, given back as soon as nobody uses them. Huge ones where `align` is
// such a page's size and the system grants them.
std::shared_ptr<char> map(int64_t bytes, int64_t align) {
#if defined(_WIN32)
  static_cast<void>(align);
  return allocate(bytes);
#else
  const auto size = static_cast<size_t>(round_up(bytes, align)), room = size + static_cast<size_t>(align);
  void* all = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) throw std::bad_alloc();
  char* memory = static_cast<char*>(all) + (-reinterpret_cast<uintptr_t>(all) & static_cast<uintptr_t>(align - 1));
#if defined(MADV_HUGEPAGE)
  if (align == kHugePage) madvise(memory, size, MADV_HUGEPAGE);
#endif
  return std::shared_ptr<char>(memory, [all, room](char*) { munmap(all, room); });
#endif
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
      owner = map(kChunk, kHugePage);
      memory = owner;
      used = 0;
    }
    char* part = owner.get() + used;
    used += round_up(bytes, kAlign);
    return std::shared_ptr<char>(owner, part);
  }
};

}  // namespace

std::shared_ptr<char> take_memory(int64_t bytes, Stay stay) {
  static Chunk chunk;
  if (!kMap || bytes < kSmall) return allocate(bytes);
  if (stay == Stay::kUntilReplaced) return map(bytes, kAlign);
  return bytes > kLarge ? map(bytes, kHugePage) : chunk.take(bytes);
}

}  // namespace te
