// Chooses an instruction set once, by what was compiled and what this machine has.
#include <cstring>

#if defined(TE_ARM) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "kernels.h"

namespace te {

extern const Kernels kPortableKernels;
#ifdef TE_X86
extern const Kernels kAvx2Kernels;
extern const Kernels kAvxVnniKernels;
extern const Kernels kAvx512VnniKernels;
extern const Kernels kAvx512Bf16Kernels;
#endif
#ifdef TE_ARM
extern const Kernels kNeonDotKernels;
#endif

namespace {

#ifdef TE_ARM
bool has_byte_dot_products() {
#if defined(__APPLE__)
  return true;  // since the M1, the first ARM processor of a Mac
#elif defined(__linux__)
  constexpr unsigned long kAsimdDp = 1ul << 20;  // HWCAP_ASIMDDP of Linux; the headers of old C libraries lack the name
  return (getauxval(AT_HWCAP) & kAsimdDp) != 0;
#else
  return false;
#endif
}
#endif

struct Usable {
  const Kernels* list[8];
  int count = 0;
  char names[128] = "";

  void add(bool here, const Kernels& kernels) {
    if (!here) return;
    list[count++] = &kernels;
    if (names[0]) std::strcat(names, ",");
    std::strcat(names, kernels.name);
  }

  Usable() {
#ifdef TE_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
    add(avx512 && __builtin_cpu_supports("avx512bf16"), kAvx512Bf16Kernels);
    add(avx512, kAvx512VnniKernels);
    add(avx2 && __builtin_cpu_supports("avxvnni"), kAvxVnniKernels);
    add(avx2, kAvx2Kernels);
#endif
#ifdef TE_ARM
    add(has_byte_dot_products(), kNeonDotKernels);
#endif
    add(true, kPortableKernels);
  }
};

const Usable& usable() {
  static const Usable found;
  return found;
}

}  // namespace

const Kernels* find_kernels(const char* name) {
  const Usable& all = usable();
  if (!name || !name[0]) return all.list[0];
  for (int i = 0; i < all.count; ++i)
    if (std::strcmp(all.list[i]->name, name) == 0) return all.list[i];
  return nullptr;
}

const char* kernel_names() { return usable().names; }

}  // namespace te
