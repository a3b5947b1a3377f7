"""What is read of a CPU: its instruction sets, its cores, and the limits of a container."""

from __future__ import annotations

from pathlib import Path

import pytest
from hardware_fakes import (
    MIB,
)

from treeeagle_edge.hardware import cpu


def test_instruction_sets_are_read_from_x86_and_arm():
    x86 = "processor : 0\nmodel name : Some CPU\nflags : fpu fma avx2 avx512f avx512_vnni amx_int8\n"
    assert cpu.parse_cpuinfo(x86) == (
        "Some CPU",
        ("amx-int8", "avx512-vnni", "avx512", "avx2", "fma"),
    )
    arm = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n"
    assert cpu.parse_cpuinfo(arm) == ("processor of unknown name", ("i8mm", "dotprod", "neon"))


@pytest.mark.parametrize(
    ("sets", "cores", "label"),
    [
        (("amx-int8", "avx512-vnni", "avx2"), 2, "cpu (2 cores, avx512-vnni)"),
        (("avx2",), 1, "cpu (1 core, avx2)"),
        ((), 4, "cpu (4 cores)"),
    ],
)
def test_the_label_names_the_best_instruction_set(sets, cores, label):
    assert cpu.Cpu("x", cores, cores, sets).label == label


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_caps_memory(tmp_path: Path, version):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    if version == 2:
        (proc / "self" / "cgroup").write_text("0::/box\n")
        folder, names, inactive = groups / "box", ("memory.max", "memory.current"), "inactive_file"
    else:
        (proc / "self" / "cgroup").write_text("4:memory:/box\n1:cpu:/\n")
        folder, names = groups / "memory" / "box", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        inactive = "total_inactive_file"
    folder.mkdir(parents=True)
    (folder / names[0]).write_text(f"{64 * MIB}\n")
    (folder / names[1]).write_text(f"{40 * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{inactive} {10 * MIB}\n")
    ram = cpu.detect_ram(proc, groups)
    assert ram == cpu.Ram(64 * MIB, 34 * MIB, limited=True)


def test_no_limit_leaves_memory_alone(tmp_path: Path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    (tmp_path / "memory.max").write_text("max\n")
    ram = cpu.detect_ram(tmp_path, tmp_path)
    assert not ram.limited and ram.total > 0


def test_linux_says_how_much_memory_is_free(tmp_path: Path):
    said = "MemTotal:       2000 kB\nMemFree:  3 kB\nMemAvailable:   500 kB\nHugePages_Total:   0\n"
    (tmp_path / "meminfo").write_text(said)
    assert cpu.detect_ram(tmp_path, tmp_path) == cpu.Ram(2000 * 1024, 500 * 1024, limited=False)


def test_a_cpu_quota_is_respected(tmp_path: Path):
    assert cpu._quota_threads(tmp_path) > 1000
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu._quota_threads(tmp_path) == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu._quota_threads(tmp_path) > 1000
