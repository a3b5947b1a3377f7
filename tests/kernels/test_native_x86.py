"""The instruction set that an x86 processor gets, and that nothing of another one is run there."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from native_cases import DRIVER, helper_program, records, tool

from treeeagle_edge.kernels.native import build

EMULATOR = "TREEEAGLE_X86_EMULATOR"  # environment: where it is
FIRST_WITH_AVX2 = (7, 2)  # version of the emulator

AVX2 = "avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.machine() != "x86_64" or sys.platform != "linux" or not shutil.which("g++"),
        reason="needs Linux on x86, and g++",
    ),
]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All that the library is linked from, by the name of the source."""
    folder = tmp_path_factory.mktemp("objects")
    compiling = build.compile_commands("g++", "x86_64", folder)
    build.run_all(compiling.values())
    return {path.stem: path for path in compiling}


def test_files_with_flags_of_their_own_give_tables_and_nothing_else(objects: dict[str, Path]) -> None:
    """Of an inline function with a copy in several files the linker keeps one, which could be that for AVX-512; what
    runs when the library loads would run on any processor.
    """
    tables = []
    for name in (name for name in objects if name.startswith("isa_")):
        found = subprocess.check_output(["nm", "-C", "--defined-only", "-g", str(objects[name])], text=True)
        tables += [line.split(maxsplit=2) for line in found.splitlines()]
        sections = subprocess.check_output(["objdump", "-h", str(objects[name])], text=True)
        assert ".rodata" in sections
        assert not re.search(r"\.(init_array|ctors|preinit_array)", sections)
    assert sorted(name for _, _, name in tables) == [
        f"te::k{name}Kernels" for name in ("Avx2", "Avx512Bf16", "Avx512Vnni", "AvxVnni", "Portable")
    ]
    assert {kind for _, kind, _ in tables} == {"D"}


def test_what_runs_on_every_processor_has_no_registers_of_avx(objects: dict[str, Path]) -> None:
    for name, path in objects.items():
        code = subprocess.check_output(["objdump", "-d", "--no-show-raw-insn", str(path)], text=True)
        wide = re.findall(r"%[yz]mm\d|\tv[a-z]+\d*[ \t].*%xmm", code)
        assert bool(wide) == (name.startswith("isa_avx")), name


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ("", "portable"),
        (AVX2, "avx2,portable"),
        ("avx2 fma", "portable"),
        ("avx2 f16c", "portable"),
        ("fma f16c", "portable"),
        (f"{AVX2} avxvnni", "avxvnni,avx2,portable"),
        ("avx2 avxvnni", "portable"),
        (AVX512, "avx2,portable"),  # Skylake-X: AVX-512 without VNNI
        (f"{AVX512} avx512bf16", "avx2,portable"),
        (f"{AVX2} avx512f avx512bw avx512dq avx512vnni", "avx2,portable"),
        (f"{AVX512} avx512vnni", "avx512vnni,avx2,portable"),
        (f"{AVX512} avx512vnni avxvnni", "avx512vnni,avxvnni,avx2,portable"),
        (f"{AVX512} avx512vnni avx512bf16", "avx512bf16,avx512vnni,avx2,portable"),
    ],
)
def test_every_feature_that_a_file_is_compiled_with_is_asked_for(
    features: str, names: str, tmp_path: Path
) -> None:
    source = DRIVER.with_name("native_features.cpp")
    program = helper_program("g++", source, tmp_path / "features", "-DTE_X86")
    assert subprocess.check_output([program, *features.split()], text=True).strip() == names


@pytest.mark.parametrize(
    ("processor", "names"),
    [
        ("Nehalem", "portable"),
        ("IvyBridge", "portable"),
        ("Haswell", "avx2,portable"),
        ("Haswell,-f16c", "portable"),
        ("EPYC-Milan", "avx2,portable"),
    ],
)
def test_an_emulated_processor_gives_the_bits_of_this_one(
    objects: dict[str, Path], processor: str, names: str, tmp_path: Path
) -> None:
    emulator = tool(EMULATOR, "qemu-x86_64-static", "qemu-x86_64")
    version = re.search(r"version (\d+)\.(\d+)", subprocess.check_output([emulator, "--version"], text=True))
    assert version
    if tuple(map(int, version.groups())) < FIRST_WITH_AVX2:
        pytest.skip("this emulator knows no AVX2")
    program = helper_program("g++", DRIVER, tmp_path / "cases", "-static", *map(str, objects.values()))
    emulated = [emulator, "-cpu", processor, str(program)]
    assert subprocess.check_output(emulated, text=True, stderr=subprocess.DEVNULL).strip() == names
    here = subprocess.check_output([program], text=True).strip().split(",")
    for isa in (isa for isa in names.split(",") if isa in here):
        expected = records(subprocess.run([program, isa, "1"], capture_output=True))
        found = records(subprocess.run([*emulated, isa, "2"], capture_output=True))
        assert expected.keys() == found.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values, err_msg=name)
