// Prints the instruction sets that an x86 processor gets which has the features named in the arguments.
#include <cstdio>
#include <cstring>

static int g_count;
static char** g_features;

static bool is_named(const char* feature) {
  for (int i = 1; i < g_count; ++i)
    if (std::strcmp(g_features[i], feature) == 0) return true;
  return false;
}

#define __builtin_cpu_supports is_named
#include "dispatch.cpp"

namespace te {

static Kernels named(const char* name) {
  Kernels kernels{};
  kernels.name = name;
  return kernels;
}

const Kernels kPortableKernels = named("portable"), kAvx2Kernels = named("avx2"), kAvxVnniKernels = named("avxvnni"),
              kAvx512VnniKernels = named("avx512vnni"), kAvx512Bf16Kernels = named("avx512bf16");

}  // namespace te

int main(int count, char** arguments) {
  g_count = count;
  g_features = arguments;
  std::puts(te::kernel_names());
}
