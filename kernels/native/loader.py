"""Finds the native library; builds it once a machine, where a C++ compiler is there.

The sources are part of the package. What they are compiled to lies in the cache, under a digest of sources, flags and
platform: an update of the package builds anew, and two installations share one build.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from treeeagle_edge.kernels.native import build
from treeeagle_edge.paths import cache_dir

OVERRIDE = "TREEEAGLE_NATIVE"  # environment: a library to use as it is, for tests of other builds


@dataclass(frozen=True)
class Problem:
    """Why there is no native library: a sentence and a hint."""

    reason: str
    hint: str


def library_path() -> Path:
    """Where the library of these sources lies, or will lie once built."""
    override = os.environ.get(OVERRIDE)
    if override:
        return Path(override)
    digest = hashlib.sha256(f"{platform.machine()} {sys.platform} {build.FLAGS} {build.X86_FLAGS}".encode())
    for source in sorted(build.SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return cache_dir() / "native" / digest.hexdigest()[:16] / "libtreeeagle.so"


@functools.cache
def problem() -> Problem | None:
    """None where the native library is there and loads, building it if need be; else why not."""
    path = library_path()
    try:
        if not path.is_file():
            build.build(path)
    except build.NoCompilerError:
        return Problem(
            "no C++ compiler is installed", "install g++ or clang++ for kernels several times as fast"
        )
    except (build.BuildError, OSError) as error:
        first = str(error).splitlines()[0]
        return Problem(
            f"the native kernels did not compile: {first}", f"set {build.COMPILER} to another C++ compiler"
        )
    from treeeagle_edge.kernels.native import bindings

    try:
        bindings.library()
    except (OSError, bindings.NativeError) as error:
        return Problem(f"the native kernels did not load: {error}", f"delete {path} to have them built again")
    return None


if __name__ == "__main__":
    found = problem()
    print(
        f"native kernels: {library_path()}" if found is None else f"{found.reason}; {found.hint}",
        file=sys.stderr,
    )
