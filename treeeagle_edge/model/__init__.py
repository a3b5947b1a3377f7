"""Target and draft head, in PyTorch and on the native kernels, behind the protocols that the engine asks for."""
