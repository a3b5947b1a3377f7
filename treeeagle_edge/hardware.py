"""What this machine is, which device a run will use, and why: one sentence a person can read."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from treeeagle_edge.errors import CannotRunError, UsageError
from treeeagle_edge.hardware_cpu import Cpu, Ram, detect_cpu, detect_ram
from treeeagle_edge.hardware_nvidia import Gpu, NvidiaState, detect_nvidia
from treeeagle_edge.plan import GB, format_gb

_WSL_DRIVER = "update the NVIDIA driver in Windows, never inside Linux, then run `wsl --shutdown` there"


@dataclass(frozen=True)
class Hardware:
    """The machine and the chosen device."""

    device: str  # "cpu" or "cuda:N"
    why: str  # one sentence: which device was chosen and why
    cpu: Cpu
    ram: Ram
    gpus: tuple[Gpu, ...] = ()
    hint: str | None = None  # what to do where a card is there but unused
    notes: tuple[str, ...] = ()  # for example that this is WSL2
    cuda_version: str | None = None  # of the PyTorch build, where a card was found

    @property
    def kind(self) -> str:
        """ "cpu" or "cuda"."""
        return self.device.partition(":")[0]

    @property
    def gpu(self) -> Gpu | None:
        """The chosen card, None on the CPU."""
        if self.kind != "cuda":
            return None
        index = int(self.device.partition(":")[2])
        return next(gpu for gpu in self.gpus if gpu.usable and gpu.index == index)

    @property
    def label(self) -> str:
        """For the status line, such as "cpu (2 cores, avx512-vnni)" or "NVIDIA GeForce RTX 3060 (12.9 GB)"."""
        return f"{self.gpu.name} ({format_gb(self.gpu.total)})" if self.gpu else self.cpu.label

    @property
    def total(self) -> int:
        """Bytes of memory of the chosen device."""
        return self.gpu.total if self.gpu else self.ram.total

    @property
    def budget(self) -> int:
        """Bytes of memory free on the chosen device now: what a plan may use, its reserve included."""
        return self.gpu.free if self.gpu else self.ram.available


def detect(device: str | None = None) -> Hardware:
    """Look at the machine and choose a device: `device` where given ("cpu", "cuda", "cuda:1"), else the card with the
    most free memory, else the CPU. Imports torch only where an NVIDIA card was found.

    Raises UsageError for an unknown device name and CannotRunError for a card that is asked for and cannot be used,
    and on native Windows.
    """
    if sys.platform == "win32":
        raise CannotRunError(
            "native Windows is not supported",
            "install WSL2 (in PowerShell: wsl --install) and run this inside it",
        )
    wanted = _parse_device(device)
    state = NvidiaState((), "the CPU was asked for") if wanted == ("cpu", None) else detect_nvidia()
    if state.driver_fault and _is_wsl():
        state = replace(state, hint=_WSL_DRIVER)
    cpu, ram = detect_cpu(), detect_ram()
    chosen = _choose(wanted, state)
    return Hardware(
        device=f"cuda:{chosen.index}" if chosen else "cpu",
        why=_why(wanted, state, chosen),
        cpu=cpu,
        ram=ram,
        gpus=state.gpus,
        hint=None if chosen else state.hint,
        notes=_notes(ram, state),
        cuda_version=state.cuda_version,
    )


def imagine_gpu(here: Hardware, memory: float) -> Hardware:
    """The same computer with a card of `memory` GB (10^9 bytes) that is free and idle: for planning only.

    Raises UsageError for a size out of range.
    """
    if not 1 <= memory <= 1024:
        raise UsageError(f"gpu-memory is {memory:g}, which is out of range", "use 1 to 1024 (GB)")
    size = int(memory * GB)
    same = next((gpu for gpu in here.gpus if abs(gpu.total - size) < GB), None)
    name = same.name if same else "the planned card"
    card = Gpu(0, name, size, size, usable=True)
    return Hardware(
        device="cuda:0",
        why=f"cuda:0: planned for a card with {format_gb(size)}, as --gpu-memory asks; nothing was measured on one",
        cpu=here.cpu,
        ram=here.ram,
        gpus=(card,),
        notes=here.notes,
    )


def _parse_device(device: str | None) -> tuple[str, int | None]:
    """("auto" | "cpu" | "cuda", index or None)."""
    if device is None or device == "auto":
        return ("auto", None)
    kind, colon, index = device.lower().partition(":")
    if kind == "cpu" and not colon:
        return ("cpu", None)
    if kind == "cuda" and (not colon or index.isdigit()):
        return ("cuda", int(index) if colon else None)
    raise UsageError(
        f"device {device!r} is unknown", "use cpu, cuda or cuda:N, where N is the number of the card"
    )


def _choose(wanted: tuple[str, int | None], state: NvidiaState) -> Gpu | None:
    kind, index = wanted
    usable = [gpu for gpu in state.gpus if gpu.usable]
    if kind == "cuda" and index is not None:
        usable = [gpu for gpu in usable if gpu.index == index]
    if usable and kind != "cpu":
        return max(usable, key=lambda gpu: (gpu.free, -gpu.index))
    if kind == "cuda":
        name = "cuda" if index is None else f"cuda:{index}"
        numbers = ", ".join(f"cuda:{gpu.index}" for gpu in state.gpus if gpu.usable)
        if numbers:
            raise CannotRunError(f"device {name} is not there", f"use one of {numbers}, or --device cpu")
        reason = state.problem or "no card can be used"
        raise CannotRunError(f"device {name} cannot be used: {reason}", state.hint or "use --device cpu")
    return None


def _why(wanted: tuple[str, int | None], state: NvidiaState, chosen: Gpu | None) -> str:
    if chosen is None:
        return f"cpu: {state.problem or 'no card can be used'}"
    facts = f"{chosen.name}, {format_gb(chosen.free)} free of {format_gb(chosen.total)}"
    usable = sum(gpu.usable for gpu in state.gpus)
    if wanted[1] is not None:
        reason = "as --device asks"
    elif usable > 1:
        reason = f"it has the most free memory of {usable} cards"
    else:
        reason = "the only NVIDIA card that torch can use"
    return f"cuda:{chosen.index}: {facts}; {reason}"


def _notes(ram: Ram, state: NvidiaState) -> tuple[str, ...]:
    notes = []
    if _is_wsl():
        notes.append(
            "this is WSL2: Windows has the driver, shares the card, and sets how much memory Linux gets (.wslconfig)"
        )
    if platform.system() == "Darwin":
        notes.append("on macOS only the CPU is used")
    if ram.limited:
        notes.append(f"a container limits this program to {format_gb(ram.total)} of memory")
    if state.problem and any(gpu.usable for gpu in state.gpus):
        notes.append(state.problem)
    return tuple(notes)


def _is_wsl() -> bool:
    return "microsoft" in _kernel_version().lower()


def _kernel_version() -> str:
    path = Path("/proc/version")
    return path.read_text(errors="replace") if path.exists() else ""
