"""What processor and memory this process may use: instruction sets, cores, RAM, and the limits of a container."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from treeeagle_edge.units import counted

# flag as the kernel prints it -> the name people know; the order is the order of the list
_INSTRUCTION_SETS = {
    "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16",
    "avx512_vnni": "avx512-vnni",
    "avx512_bf16": "avx512-bf16",
    "avx512f": "avx512",
    "avx_vnni": "avx-vnni",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "sve": "sve",
    "i8mm": "i8mm",
    "asimddp": "dotprod",
    "asimd": "neon",
}
_HEADLINE = ("avx512-vnni", "avx-vnni", "avx512", "avx2", "i8mm", "dotprod", "neon")
_MACOS_KEYS = {
    "hw.optional.avx512f": "avx512",
    "hw.optional.avx2_0": "avx2",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_DotProd": "dotprod",
    "hw.optional.neon": "neon",
}


@dataclass(frozen=True)
class Cpu:
    """The processor as this process may use it."""

    name: str
    cores: int  # physical cores this process may run on, never above `threads`
    threads: int  # hardware threads this process may run on, a container's CPU quota respected
    instruction_sets: tuple[str, ...]

    @property
    def label(self) -> str:
        """For example "cpu (2 cores, avx512-vnni)"."""
        best = next((name for name in _HEADLINE if name in self.instruction_sets), None)
        cores = counted(self.cores, "core")
        return f"cpu ({cores}, {best})" if best else f"cpu ({cores})"


@dataclass(frozen=True)
class Ram:
    """Memory in bytes, after the limit of the container this process lives in."""

    total: int
    available: int
    limited: bool  # True where a container's limit is below what the machine has


def detect_cpu() -> Cpu:
    """Read the processor's name, instruction sets and the cores that affinity and quota leave to this process."""
    if sys.platform == "darwin":
        name, sets = _macos_identity()
    else:
        name, sets = parse_cpuinfo(_read(Path("/proc/cpuinfo")))
    threads = max(1, min(len(_affinity()), _quota_threads(Path("/sys/fs/cgroup"))))
    return Cpu(name, max(1, min(_physical_cores(), threads)), threads, sets)


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    """The processor's name and instruction sets from the text of /proc/cpuinfo (x86 "flags", ARM "Features")."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip().lower(), value.strip())
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    name = fields.get("model name") or fields.get("hardware") or "processor of unknown name"
    return name, tuple(label for flag, label in _INSTRUCTION_SETS.items() if flag in flags)


def detect_ram(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Ram:
    """Total and available memory; a container's limit (cgroup v2 or v1) caps both."""
    whole, available = _memory(_read(proc / "meminfo"))
    total, limited = whole, False
    for limit, used in _cgroup_memory(proc, cgroups):
        if limit < whole:
            limited = True
            total, available = min(total, limit), min(available, max(0, limit - used))
    return Ram(total, available, limited)


def _memory(meminfo: str) -> tuple[int, int]:
    """(total, available) bytes, as Linux says in /proc/meminfo; elsewhere psutil finds out."""
    said = {key: value.split() for key, _, value in (line.partition(":") for line in meminfo.splitlines())}
    try:
        return int(said["MemTotal"][0]) * 1024, int(said["MemAvailable"][0]) * 1024
    except (KeyError, IndexError, ValueError):
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)


def _cgroup_memory(proc: Path, cgroups: Path) -> list[tuple[int, int]]:
    """(limit, use that cannot be reclaimed) in bytes of every control group this process is in, from it to the root."""
    found: list[tuple[int, int]] = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names, stat_key = cgroups, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            base = cgroups / "memory"
            names, stat_key = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
        else:
            continue
        own = base / path.lstrip("/")
        folders = [own, *own.parents]
        for folder in folders[: folders.index(base) + 1]:
            limit, used = _read(folder / names[0]).strip(), _read(folder / names[1]).strip()
            if limit.isdigit() and used.isdigit():
                stat = dict(
                    row.split(maxsplit=1) for row in _read(folder / "memory.stat").splitlines() if " " in row
                )
                found.append((int(limit), int(used) - int(stat.get(stat_key, 0))))
    return found


def _quota_threads(cgroups: Path) -> int:
    """Threads that a container's CPU quota (cgroup v2) is worth, rounded up; a large number without a quota."""
    quota, _, period = _read(cgroups / "cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return max(1, math.ceil(int(quota) / int(period)))
    return 1 << 16


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _physical_cores() -> int:
    """Distinct physical cores behind the hardware threads this process may use."""
    seen: set[tuple[str, str]] = set()
    for thread in _affinity():
        folder = Path(f"/sys/devices/system/cpu/cpu{thread}/topology")
        package, core = _read(folder / "physical_package_id").strip(), _read(folder / "core_id").strip()
        if package and core:
            seen.add((package, core))
    if seen:
        return len(seen)
    import psutil

    return psutil.cpu_count(logical=False) or len(_affinity())


def _macos_identity() -> tuple[str, tuple[str, ...]]:
    def ask(key: str) -> str:
        answer = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, check=False)
        return answer.stdout.strip()

    sets = tuple(label for key, label in _MACOS_KEYS.items() if ask(key) == "1")
    return ask("machdep.cpu.brand_string") or "processor of unknown name", sets


def _read(path: Path) -> str:
    """The text of a small system file; empty where it is absent or closed to us, which means "not known"."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
