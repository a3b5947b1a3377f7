// Compiled for the oldest CPU that the build targets.
#include "simd_portable.h"

#include "make_kernels.h"

namespace te {
extern const Kernels kPortableKernels;
const Kernels kPortableKernels = make_kernels<Portable>("portable");
}  // namespace te
