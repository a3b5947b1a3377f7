"""The checks of `treeeagle profile` that need no computation: versions, device, processor, memory, disk."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path

from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.paths import cache_dir
from treeeagle_edge.planning.backend import NATIVE_BITS
from treeeagle_edge.planning.model_shapes import PlannedModel
from treeeagle_edge.planning.run_plan import RunPlan
from treeeagle_edge.planning.torch_bytes import block_bytes, embedding_bytes, head_bytes
from treeeagle_edge.sources.demo_model import DEMO_MODEL
from treeeagle_edge.units import GB, format_gb
from treeeagle_edge.widths import Widths

OK, WARN, FAIL = "ok", "warn", "fail"

_DISTRIBUTION = "treeeagle-edge"
# package -> what does not work without it
_PACKAGES = {
    "torch": "nothing runs without it",
    "transformers": "tokenizers cannot be loaded without it",
    "bitsandbytes": "4-bit weights need it",
    "triton": "kernels on CUDA need it",
}
_ESSENTIAL = ("torch", "transformers")
_AMPERE = (8, 0)  # the first generation with bf16


@dataclass(frozen=True)
class Check:
    """One line of the report. status: "ok", "warn" or "fail". hint: one line of advice."""

    name: str
    status: str
    text: str
    hint: str | None = None


def check_versions() -> Iterator[Check]:
    """One line with all versions, then one for each package that is missing or outside the supported range."""
    ranges = _declared_ranges()
    python = ".".join(map(str, sys.version_info[:3]))
    found = {name: _version(name) for name in _PACKAGES}
    shown = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    problems = [_package_problem(name, found[name], ranges.get(name, "")) for name in _PACKAGES]
    if not in_range(python, ranges.get("python", "")):
        hint = "use a Python in this range; ./install.sh looks for one"
        problems.insert(0, Check("python", FAIL, f"python {python} is outside {ranges['python']}", hint))
    yield Check("versions", OK, f"python {python}, {shown}" if shown else f"python {python}")
    yield from (problem for problem in problems if problem is not None)


def _package_problem(name: str, version: str | None, wanted: str) -> Check | None:
    if name == "triton" and sys.platform != "linux":
        return None
    status = FAIL if name in _ESSENTIAL else WARN
    hint = f"run ./install.sh, or: pip install '{name}{wanted}'"
    if version is None:
        return Check(name, status, f"{name} is not installed: {_PACKAGES[name]}", hint)
    if not in_range(version, wanted):
        return Check(name, status, f"{name} {version} is outside {wanted}", hint)
    return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _declared_ranges() -> dict[str, str]:
    """The versions that this package's metadata asks for, such as name -> ">=2.11"; "python" is one of the names.

    Empty where this package is not installed.
    """
    try:
        found = metadata.metadata(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return {}
    ranges = {"python": ",".join(found.get_all("Requires-Python") or ())}
    for line in found.get_all("Requires-Dist") or ():
        match = re.match(r"([A-Za-z0-9_.-]+)\s*([^;]*)", line)
        if match and "extra ==" not in line:
            ranges[match[1].lower()] = match[2].strip().strip("()")
    return ranges


def in_range(version: str, wanted: str) -> bool:
    """Whether a version such as "2.13.0+cpu" satisfies bounds such as ">=2.11,<3". Empty bounds admit all."""

    def numbers(text: str) -> tuple[int, ...]:
        release = re.match(r"\d+(\.\d+)*", text.strip())
        parts = [int(part) for part in release[0].split(".")] if release else [0]
        return tuple(parts + [0] * (4 - len(parts)))

    here = numbers(version)
    tests = {">=": ge, "<=": le, "<": lt, ">": gt, "==": eq, "!=": ne}
    bounds = (
        re.match(r"(>=|<=|==|!=|<|>)(.+)", bound.strip()) for bound in wanted.split(",") if bound.strip()
    )
    return all(tests[match[1]](here, numbers(match[2])) for match in bounds if match)


def check_device(hardware: Hardware) -> Iterator[Check]:
    """The device that was chosen and why, all cards, and notes about this machine."""
    card = hardware.gpu
    asleep = hardware.kind == "cpu" and bool(hardware.gpus or hardware.hint)
    yield Check("device", WARN if asleep else OK, hardware.why, hardware.hint if asleep else None)
    for gpu in hardware.gpus:
        capability = (
            "" if gpu.capability is None else f", compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        )
        driver = f", driver {gpu.driver}" if gpu.driver else ""
        cuda = f", torch for CUDA {hardware.cuda_version}" if hardware.cuda_version else ""
        number = f"cuda:{gpu.index}" if gpu.usable else "unused"
        text = f"{number} {gpu.name}{capability}{driver}{cuda}, {format_gb(gpu.free)} free of {format_gb(gpu.total)}"
        old = gpu.capability is not None and gpu.capability < _AMPERE
        hint = (
            "cards before compute capability 8.0 have no bf16: use --bits 4, and expect less speed"
            if old
            else None
        )
        yield Check("gpu", WARN if old else OK, text, hint)
    if card is not None and card.free < 0.85 * card.total:
        used = format_gb(card.total - card.free)
        yield Check(
            "gpu memory", WARN, f"{used} of {card.name} is taken by other programs", "nvidia-smi lists them"
        )
    for note in hardware.notes:
        yield Check("system", OK, note)


def check_cpu(hardware: Hardware) -> Iterator[Check]:
    """Processor, instruction sets, cores and memory."""
    cpu, ram = hardware.cpu, hardware.ram
    sets = ", ".join(cpu.instruction_sets) or "no instruction set that we use"
    slow = not {"avx2", "neon"} & set(cpu.instruction_sets)
    text = f"{cpu.name}, {cpu.cores} cores ({cpu.threads} threads), {sets}"
    yield Check("cpu", WARN if slow else OK, text, "expect slow answers on the CPU" if slow else None)
    low = ram.available < 2 * GB
    hint = "close other programs, or use a smaller model" if low else None
    memory = f"{format_gb(ram.available)} of {format_gb(ram.total)} of memory available"
    yield Check("memory", WARN if low else OK, memory, hint)


def check_choices(plan: RunPlan) -> Iterator[Check]:
    """Warnings about the planned width or profile on the planned device."""
    profile, device, stored = plan.profile, plan.device, plan.model.config.stored
    if profile.device != device.partition(":")[0]:
        text = f"profile {profile.name} is made for {profile.device}, and this runs on {device}"
        yield Check("profile", WARN, text, "leave --profile out to get the one for this device")
    if plan.split is not None:
        yield Check("cards", WARN, plan.split.text, plan.split.hint)
    if plan.rotation is not None:
        yield Check("rotation", WARN, plan.rotation.text, plan.rotation.hint)
    if plan.bits == 8 and device.startswith("cuda"):
        text = "8-bit weights on CUDA (LLM.int8) buy room, not speed"
        other = "" if stored is None else "the unquantised repository of the model with "
        yield Check("bits", WARN, text, f"use {other}--bits 4 for speed")


def check_backend(plan: RunPlan) -> Iterator[Check]:
    """Whether 4 and 8 bits run on the native kernels of a CPU, and with which instruction set; or why not."""
    if plan.device != "cpu" or plan.bits not in NATIVE_BITS:
        return
    if plan.backend.native:
        yield Check("native kernels", OK, f"native kernels are there and use {native_isa()}")
        if plan.backend.reason is not None:
            yield Check("cache", WARN, plan.backend.reason, plan.backend.hint)
        if plan.note is not None:
            yield Check("stored weights", WARN, plan.note.text, plan.note.hint)
    elif plan.note is not None:
        yield Check("native kernels", WARN, plan.note.text, plan.note.hint)


def native_isa() -> str:
    """Name of the instruction set that the native kernels use on this processor."""
    from treeeagle_edge.kernels.native.library import available_isas

    return available_isas()[0]


def download_bytes(model: PlannedModel) -> int:
    """Bytes to be fetched before the first run: 0 where all is on disk. Published weights have 16 bits."""
    if model.name == DEMO_MODEL.name:
        return 0 if model.on_disk else DEMO_MODEL.wheel_size + DEMO_MODEL.size
    floats = Widths(layers=16, lm_head=16, head=16)
    target = 0 if model.on_disk else block_bytes(model.config, 16) + embedding_bytes(model.config, floats)
    return target + (head_bytes(model.head, 16) if model.head is not None and not model.head_on_disk else 0)


def check_disk(model: PlannedModel, *, imagined: bool = False) -> Iterator[Check]:
    """Whether the disk has room for what is still to be fetched. It decides nothing about a card that is `imagined`,
    which may have another disk beside it.
    """
    folder = download_folder(model)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free, need = shutil.disk_usage(there).free, download_bytes(model)
    if need > free:
        text = f"{format_gb(free)} free in {folder}, and {model.name} needs {format_gb(need)}"
        status = WARN if imagined else FAIL
        yield Check(
            "disk", status, text, "free some space, or set HF_HOME or TREEEAGLE_CACHE to another disk"
        )
    else:
        suffix = f"; {format_gb(need)} still to be fetched" if need else "; the model is here"
        yield Check("disk", OK, f"{format_gb(free)} free in {folder}{suffix}")


def download_folder(model: PlannedModel) -> Path:
    """Folder of this model's files: this program's cache for the demo model, the hub's cache for others."""
    if model.name == DEMO_MODEL.name:
        return cache_dir()
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)
