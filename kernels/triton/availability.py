"""Whether Triton's kernels can run here, found out without importing Triton."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

from treeeagle_edge.errors import CannotRunError

_LEAST_CAPABILITY = (8, 0)  # bf16 on tensor cores; Triton supports nothing older
_COMPILERS = ("gcc", "clang")  # Triton builds a launcher in C for each kernel


def interpreting() -> bool:
    """Whether kernels are run step by step on the CPU, which is for tests; to be set before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def problem() -> CannotRunError | None:
    """None where the kernels can run, else the error to raise."""
    if importlib.util.find_spec("triton") is None:
        return CannotRunError(
            "triton is not installed, and CUDA kernels need it", "pip install 'triton>=3.6', or use reference"
        )
    if interpreting():
        return None
    if not torch.cuda.is_available():
        return CannotRunError(
            "triton kernels need a CUDA device, and PyTorch finds none",
            "use reference; tests run the kernels on the CPU with TRITON_INTERPRET=1",
        )
    if torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        return CannotRunError(
            "triton kernels need a card of compute capability 8.0 or newer, such as an RTX 30",
            "use reference",
        )
    if "CC" not in os.environ and not any(map(shutil.which, _COMPILERS)):
        return CannotRunError(
            "triton needs a C compiler, and there is neither gcc nor clang",
            "install one of them, or use reference",
        )
    return None
