// Compiled with AVX2, FMA and F16C enabled; no other file may include these templates with those flags.
#include "simd_avx2.h"

#include "make_kernels.h"

namespace te {
extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels = make_kernels<Avx2>("avx2");
}  // namespace te
