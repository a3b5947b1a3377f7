"""C++ kernels for CPUs, called through ctypes."""
