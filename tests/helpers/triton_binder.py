"""What Triton's own launch makes of every launch of ours: types, constants and alignments. Run as a program, where
nothing is interpreted: it names on stdout, as JSON, each launch whose compiled form is not what `resources` compiles.

A launch goes all the way to the compiler, which is told to stop there, so that neither a card nor a driver is needed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from treeeagle_edge.kernels.triton.launched import launched
from treeeagle_edge.kernels.triton.resources import _source


class CardOfNobody:
    """As much of Triton's driver as a launch asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> int:
    """Launch everything."""
    driver.set_active(CardOfNobody())
    asked: list[dict[str, Any]] = []

    def stop(**about: Any) -> bool:
        asked.append(about["compile"])
        return True  # nothing is compiled, and nothing launched

    knobs.runtime.jit_cache_hook = stop
    differing, launches = {}, launched()
    for name, launch in launches.items():
        launch.run()
        ours, theirs = _source(launch), asked.pop()
        # a pointer to bool is called by two names, which are one type
        types = {key: kind.replace("*u1", "*i1") for key, kind in theirs["signature"].items()}
        aligned = {key: value for key, value in theirs["configs"][0].items() if value}
        if (types, theirs["constants"], aligned) != (ours.signature, ours.constants, ours.attrs):
            differing[name] = f"{types} {theirs['constants']} {aligned}"
    print(json.dumps({"launches": len(launches), "differing": differing}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
