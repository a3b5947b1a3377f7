// Compiled with AVX2 and AVX-VNNI enabled; no other file may include these templates with those flags.
#include "simd_avx2.h"

#include "make_kernels.h"

namespace te {
extern const Kernels kAvxVnniKernels;
const Kernels kAvxVnniKernels = make_kernels<AvxVnni>("avxvnni");
}  // namespace te
