// Aligned memory that is taken once and zeroed; huge pages where the system grants them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "blocks.h"

namespace te {

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) : count_(count) {
    const int64_t page = bytes() >= (int64_t{1} << 22) ? int64_t{1} << 21 : kAlign;
    data_ = static_cast<T*>(std::aligned_alloc(static_cast<size_t>(page), static_cast<size_t>(round_up(bytes() + 1, page))));
    if (!data_) throw std::bad_alloc();
#if defined(__linux__)
    if (page > kAlign) madvise(data_, static_cast<size_t>(round_up(bytes() + 1, page)), MADV_HUGEPAGE);
#endif
    std::memset(static_cast<void*>(data_), 0, static_cast<size_t>(bytes()));
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() { std::free(data_); }

  T* data() const { return data_; }
  int64_t size() const { return count_; }
  int64_t bytes() const { return count_ * static_cast<int64_t>(sizeof(T)); }

 private:
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
  }

  T* data_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace te
