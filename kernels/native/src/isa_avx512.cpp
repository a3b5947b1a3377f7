// Compiled with AVX-512 and VNNI enabled; no other file may include these templates with those flags.
#include "simd_avx512.h"

#include "make_kernels.h"

namespace te {
extern const Kernels kAvx512VnniKernels;
const Kernels kAvx512VnniKernels = make_kernels<Avx512Vnni>("avx512vnni");
#ifdef __AVX512BF16__
extern const Kernels kAvx512Bf16Kernels;
const Kernels kAvx512Bf16Kernels = make_kernels<Avx512Bf16>("avx512bf16");
#endif
}  // namespace te
