// Preloaded into a process: counts what is asked of the system's memory, by any thread, while a native function runs.
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstddef>

namespace {

std::atomic<long> taken{0};
std::atomic<bool> counting{false};

void note() {
  if (counting.load()) taken.fetch_add(1);
}

}  // namespace

extern "C" {

// The C library's own, which the functions below stand in front of.
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t bytes) {
  note();
  return __libc_malloc(bytes);
}

void* calloc(size_t count, size_t bytes) {
  note();
  return __libc_calloc(count, bytes);
}

void* realloc(void* old, size_t bytes) {
  note();
  return __libc_realloc(old, bytes);
}

void* aligned_alloc(size_t align, size_t bytes) {
  note();
  return __libc_memalign(align, bytes);
}

int posix_memalign(void** out, size_t align, size_t bytes) {
  note();
  *out = __libc_memalign(align, bytes);
  return *out ? 0 : ENOMEM;
}

void* mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) {
  using Map = void* (*)(void*, size_t, int, int, int, off_t);
  static const Map real = reinterpret_cast<Map>(dlsym(RTLD_NEXT, "mmap"));
  note();
  return real(at, bytes, protection, flags, file, offset);
}

// How often memory was asked for while `function` ran with these arguments; what it returned goes to `code`.
long allocations_of(int (*function)(void*, void*, void*, void*, void*, void*), void* a, void* b, void* c, void* d, void* e,
                    void* f, int* code) {
  taken = 0;
  counting = true;
  *code = function(a, b, c, d, e, f);
  counting = false;
  return taken;
}
}
