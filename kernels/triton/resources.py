"""What each kernel takes of a card, read from the machine code that is compiled for it: no card is needed.

`python -m treeeagle_edge.kernels.triton.resources` prints the table of docs/kernels.md; `--json` the same as data.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from treeeagle_edge.kernels.triton.launch import Launch
from treeeagle_edge.kernels.triton.launched import launched

# KB a block may have, by compute capability (CUDA C++ guide, 16.2)
SHARED_LIMIT = {86: 99, 89: 99, 90: 227, 120: 99}
_ALIGNMENT = 16  # bytes, or a factor: what Triton specialises pointers and integers on
_POINTER = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Usage:
    """One kernel on one card."""

    kernel: str
    capability: int  # 86 is sm_86
    warps: int
    registers: int  # a thread
    shared: int  # bytes a block
    spilled: int  # bytes a thread that did not fit into registers

    @property
    def fits(self) -> bool:
        """Whether the card can launch it, and nothing was spilled."""
        return self.spilled == 0 and self.shared <= SHARED_LIMIT[self.capability] * 1024


def main(arguments: list[str]) -> int:
    """Print the table, or with `--json` a list of objects; 1 if a kernel does not fit its card."""
    workers = min(len(SHARED_LIMIT), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:  # the compiler takes one core
        cards = pool.map(usages, SHARED_LIMIT)
        found = [each for kernel in zip(*cards, strict=True) for each in kernel]
    print(json.dumps([asdict(each) for each in found]) if "--json" in arguments else table(found))
    return 0 if all(each.fits for each in found) else 1


def table(found: list[Usage]) -> str:
    """Markdown: a line a kernel; for each card registers, KB of shared memory and bytes spilled."""
    lines = [
        "| kernel | warps | " + " | ".join(f"sm_{capability}" for capability in SHARED_LIMIT) + " |",
        "| --- " * (2 + len(SHARED_LIMIT)) + "|",
    ]
    for name in dict.fromkeys(each.kernel for each in found):
        cards = [each for each in found if each.kernel == name]
        cells = [f"{card.registers}, {card.shared / 1024:.0f}, {card.spilled}" for card in cards]
        lines.append(f"| {name} | {cards[0].warps} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compile_for(launch: Launch, capability: int) -> Any:
    """The compiled kernel, specialised as `launch` would have it on a card of that compute capability."""
    return triton.compile(_source(launch), target=GPUTarget("cuda", capability, 32), options=launch.options)


def usages(capability: int) -> list[Usage]:
    """What every launch takes on a card of that compute capability."""
    return [usage(name, launch, capability) for name, launch in launched().items()]


def usage(name: str, launch: Launch, capability: int) -> Usage:
    """Compile `launch` and read what it takes."""
    compiled = compile_for(launch, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = _USAGE.search(said)
    assert found is not None, said
    registers, stack, _, local = (int(number) for number in found.groups())
    shared = compiled.metadata.shared  # of the launch; what the code itself names is the driver's reserve
    return Usage(name, capability, launch.num_warps, registers, shared, stack + local)


def _source(launch: Launch) -> ASTSource:
    """Types, constants and alignments as Triton's launcher finds them in the arguments."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTER[value.dtype]
            aligned = not parameter.do_not_specialize_on_alignment
        else:
            signature[parameter.name] = parameter.annotation_type
            # Triton asks whole numbers alone
            aligned = not parameter.do_not_specialize and isinstance(value, int) and value % _ALIGNMENT == 0
        if aligned:
            attributes[(parameter.num,)] = [["tt.divisibility", _ALIGNMENT]]
    return ASTSource(launch.kernel, signature, constants, attributes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
