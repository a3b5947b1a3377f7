// Compiled with NEON's byte dot products enabled; no other file may include these templates with those flags.
#include "simd_neon.h"

#include "make_kernels.h"

namespace te {
extern const Kernels kNeonDotKernels;
const Kernels kNeonDotKernels = make_kernels<NeonDot>("neondot");
}  // namespace te
