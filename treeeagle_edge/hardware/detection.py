"""What this machine is, which device a run will use, and why: one sentence a person can read."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from treeeagle_edge.errors import CannotRunError, UsageError
from treeeagle_edge.hardware.cpu import Cpu, Ram, detect_cpu, detect_ram
from treeeagle_edge.hardware.nvidia import Gpu, NvidiaState, detect_nvidia
from treeeagle_edge.planning.card_shares import Card
from treeeagle_edge.units import GB, format_gb

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
    # cards that one model's layers may be split over; the first is home to everything that is no layer
    together: tuple[str, ...] = ()
    asked_together: bool = False  # --device names several cards, so layers are split even where one has room

    @property
    def kind(self) -> str:
        """ "cpu" or "cuda"."""
        return self.device.partition(":")[0]

    @property
    def gpu(self) -> Gpu | None:
        """The chosen card, None on the CPU."""
        if self.kind != "cuda":
            return None
        return next(gpu for gpu in self.gpus if gpu.usable and gpu.device == self.device)

    @property
    def label(self) -> str:
        """For the status line, such as "cpu (2 cores, avx512-vnni)" or "NVIDIA GeForce RTX 3060 (12.9 GB)"."""
        return self.label_of((self.device,))

    def label_of(self, devices: Sequence[str]) -> str:
        """The label of a run on `devices`: cards, or the CPU."""
        cards = [gpu for device in devices for gpu in self.gpus if gpu.usable and device == gpu.device]
        return " + ".join(f"{gpu.name} ({format_gb(gpu.total)})" for gpu in cards) or self.cpu.label

    @property
    def cards(self) -> tuple[Card, ...]:
        """The cards of `together`, with the memory that is free on each now."""
        free = {gpu.device: gpu.free for gpu in self.gpus if gpu.usable}
        return tuple(Card(device, free[device]) for device in self.together)

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
    most free memory, else the CPU. Several cards ("cuda:0,cuda:1") share the layers; without a number all may, where
    none alone has room. Imports torch only where an NVIDIA card was found.

    Raises UsageError for an unknown device name and CannotRunError for a card that is asked for and cannot be used,
    and on native Windows.
    """
    if sys.platform == "win32":
        raise CannotRunError(
            "native Windows is not supported",
            "install WSL2 (in PowerShell: wsl --install) and run this inside it",
        )
    wanted = _parse_device(device)
    state = NvidiaState((), "the CPU was asked for") if wanted == ("cpu", ()) else detect_nvidia()
    if state.driver_fault and _is_wsl():
        state = replace(state, hint=_WSL_DRIVER)
    cpu, ram = detect_cpu(), detect_ram()
    cards = _choose(wanted, state)
    chosen = cards[0] if cards else None
    return Hardware(
        device=chosen.device if chosen else "cpu",
        why=_why(wanted, state, chosen),
        cpu=cpu,
        ram=ram,
        gpus=state.gpus,
        hint=None if chosen else state.hint,
        notes=_notes(ram, state),
        cuda_version=state.cuda_version,
        together=tuple(card.device for card in cards) if len(cards) > 1 else (),
        asked_together=len(wanted[1]) > 1,
    )


def imagine_gpu(here: Hardware, memory: float, device: str | None = None) -> Hardware:
    """This computer with an idle card of `memory` GB (10^9 bytes) in place of its own: for planning only.

    device: as `detect` takes it. The card has the number that is named, else 0; where several are named, each is a card
    of that size. Its name, and with it its bandwidth, is that of a card of about this size that is here, the named one
    first. Raises UsageError for a size out of range, an unknown device name, and the CPU.
    """
    if not 1 <= memory <= 1024:
        raise UsageError(f"gpu-memory is {memory:g}, which is out of range", "use 1 to 1024 (GB)")
    kind, numbers = _parse_device(device)
    if kind == "cpu":
        raise UsageError(
            "--gpu-memory plans for a card and --device asks for the CPU", "leave one of them out"
        )
    size = int(memory * GB)
    alike = [gpu for gpu in here.gpus if abs(gpu.total - size) < GB]
    usual = alike[0].name if alike else "the planned card"
    own = {gpu.index: gpu.name for gpu in alike if gpu.usable}
    cards = [Gpu(number, own.get(number, usual), size, size, usable=True) for number in numbers or (0,)]
    names = tuple(card.device for card in cards)
    several = len(cards) > 1
    what = f"{len(cards)} cards with {format_gb(size)} each" if several else f"a card with {format_gb(size)}"
    return Hardware(
        device=names[0],
        why=f"{','.join(names)}: planned for {what}, as --gpu-memory asks; nothing was measured on one",
        cpu=here.cpu,
        ram=here.ram,
        gpus=tuple(cards),
        notes=here.notes,
        together=names if several else (),
        asked_together=several,
    )


def _parse_device(device: str | None) -> tuple[str, tuple[int, ...]]:
    """("auto" | "cpu" | "cuda", the numbers of the cards that are named)."""
    if device is None or device.strip().lower() == "auto":
        return ("auto", ())
    names = [name.strip() for name in device.lower().split(",")]
    if names in (["cpu"], ["cuda"]):
        return (names[0], ())
    numbers = [number for kind, _, number in (name.partition(":") for name in names) if kind == "cuda"]
    if len(numbers) == len(names) == len(set(numbers)) and all(number.isdigit() for number in numbers):
        return ("cuda", tuple(map(int, numbers)))
    raise UsageError(
        f"device {device!r} is unknown",
        "use cpu, cuda or cuda:N, where N is the number of the card; cuda:0,cuda:1 splits the layers over two",
    )


def _choose(wanted: tuple[str, tuple[int, ...]], state: NvidiaState) -> list[Gpu]:
    """The cards that may be used: those named, in their order, else all by free memory. None for the CPU."""
    kind, numbers = wanted
    usable = {gpu.index: gpu for gpu in state.gpus if gpu.usable}
    if kind == "cpu" or (kind == "auto" and not usable):
        return []
    missing = [f"cuda:{number}" for number in numbers if number not in usable]
    if usable and not missing:
        by_room = sorted(usable.values(), key=lambda gpu: (-gpu.free, gpu.index))
        return [usable[number] for number in numbers] or by_room
    name = missing[0] if missing else "cuda"
    if usable:
        there = ", ".join(gpu.device for gpu in usable.values())
        raise CannotRunError(f"device {name} is not there", f"use one of {there}, or --device cpu")
    reason = state.problem or "no card can be used"
    raise CannotRunError(f"device {name} cannot be used: {reason}", state.hint or "use --device cpu")


def _why(wanted: tuple[str, tuple[int, ...]], state: NvidiaState, chosen: Gpu | None) -> str:
    if chosen is None:
        return f"cpu: {state.problem or 'no card can be used'}"
    facts = f"{chosen.name}, {format_gb(chosen.free)} free of {format_gb(chosen.total)}"
    usable = sum(gpu.usable for gpu in state.gpus)
    if wanted[1]:
        reason = "as --device asks"
    elif usable > 1:
        reason = f"it has the most free memory of {usable} cards"
    else:
        reason = "the only NVIDIA card that torch can use"
    return f"{chosen.device}: {facts}; {reason}"


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
