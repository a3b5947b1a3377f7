// Aligned memory that is taken once and zeroed; large parts come from shared chunks of huge pages where the system grants
// them. A pass reads every weight once, so with small pages it would look up some 35,000 of them a pass.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "blocks.h"

namespace te {

// How long memory is held. A chunk is given back as a whole, so what is replaced while others stay does not belong in one.
enum class Stay { kToTheEnd, kUntilReplaced };

// `bytes` of zeroed memory at a multiple of 64; it lives as long as the pointer. Throws std::bad_alloc.
std::shared_ptr<char> take_memory(int64_t bytes, Stay stay);

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count, Stay stay = Stay::kToTheEnd)
      : memory_(take_memory(count * static_cast<int64_t>(sizeof(T)), stay)),
        data_(reinterpret_cast<T*>(memory_.get())),
        count_(count) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }

  T* data() const { return data_; }
  int64_t size() const { return count_; }
  int64_t bytes() const { return count_ * static_cast<int64_t>(sizeof(T)); }

 private:
  void swap(Buffer& other) {
    std::swap(memory_, other.memory_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
  }

  std::shared_ptr<char> memory_;
  T* data_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace te
