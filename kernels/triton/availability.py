"""Whether Triton's kernels can run here, found out without importing Triton."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from treeeagle_edge.errors import CannotRunError

_LEAST_CAPABILITY = (8, 0)  # bf16 on tensor cores; Triton supports nothing older
_COMPILERS = ("gcc", "clang")  # Triton builds a launcher in C for each kernel
_MORE_HEADERS = ("CPATH", "C_INCLUDE_PATH")  # where compilers look, too


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
    headers = _headers()
    if not (headers / "Python.h").is_file() and not any(name in os.environ for name in _MORE_HEADERS):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return CannotRunError(
            f"triton needs Python's own headers, and there is no Python.h in {headers}",
            f"install them (on Ubuntu: apt install python{version}-dev), or use reference",
        )
    return None


def _headers() -> Path:
    """Where Triton's builds take the headers of this Python from."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme has them where the usual one has
    paths = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)
    return Path(paths["include"])
