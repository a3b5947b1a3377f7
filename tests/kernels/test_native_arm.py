"""The kernels for ARM, on another machine: cross-compiled, then run by an emulator of ARM processors.

Skips where a cross compiler or an emulator is missing. On ARM itself the other tests run all there is.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import numpy as np
import pytest
from native_cases import DRIVER, Records, helper_program, records, tool
from native_toys import needs_native

from treeeagle_edge.kernels.native import build
from treeeagle_edge.kernels.native.loader import library_path

COMPILER, EMULATOR = "TREEEAGLE_ARM_COMPILER", "TREEEAGLE_ARM_EMULATOR"  # environment: where they are
WITH_DOT_PRODUCTS, WITHOUT = "cortex-a76", "cortex-a72"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.machine().lower() in ("aarch64", "arm64"), reason="this is ARM: the other tests run there"
    ),
]


@pytest.fixture(scope="module")
def on_arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases and all kernels in one program for ARM."""
    tool(EMULATOR, "qemu-aarch64-static", "qemu-aarch64")
    compiler = tool(COMPILER, "aarch64-linux-gnu-g++")
    folder = tmp_path_factory.mktemp("arm")
    compiling = build.compile_commands(compiler, "aarch64", folder, ["-Werror"])
    build.run_all(compiling.values())
    return helper_program(compiler, DRIVER, folder / "cases", "-static", *map(str, compiling))


def run_on_arm(program: Path, processor: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    emulator = tool(EMULATOR, "qemu-aarch64-static", "qemu-aarch64")
    return subprocess.run([emulator, "-cpu", processor, str(program), *arguments], capture_output=True)


@pytest.fixture(scope="module")
def neondot(on_arm: Path) -> Records:
    return records(run_on_arm(on_arm, WITH_DOT_PRODUCTS, "neondot", "1"))


@pytest.fixture(scope="module")
def portable(on_arm: Path) -> Records:
    return records(run_on_arm(on_arm, WITHOUT, "portable", "1"))


def test_the_processor_decides_what_there_is(on_arm: Path) -> None:
    assert run_on_arm(on_arm, WITH_DOT_PRODUCTS).stdout == b"neondot,portable\n"
    assert run_on_arm(on_arm, WITHOUT).stdout == b"portable\n"
    refused = run_on_arm(on_arm, WITHOUT, "neondot", "1")
    assert refused.returncode == 1
    assert refused.stderr == b'instruction set "neondot" is not here; there are: portable\n'


@needs_native
def test_portable_gives_the_bits_of_this_machines_portable(portable: Records, tmp_path: Path) -> None:
    library = library_path()
    place = (str(library), f"-Wl,-rpath,{library.parent}")
    program = helper_program(build.find_compiler(), DRIVER, tmp_path / "cases", *place)
    here = records(subprocess.run([str(program), "portable", "1"], capture_output=True))
    assert here.keys() == portable.keys()
    for name, expected in here.items():
        np.testing.assert_array_equal(portable[name], expected, err_msg=name)


def test_dot_products_are_exact(neondot: Records, portable: Records) -> None:
    for fmt in ("q8", "q4_0"):  # a single block: no sum of floats, so fused multiply-add rounds as the other
        name = f"product/{fmt}/32/together"
        np.testing.assert_array_equal(neondot[name], portable[name])


def test_the_rest_differs_from_portable_by_rounding(neondot: Records, portable: Records) -> None:
    assert neondot.keys() == portable.keys()
    for name, expected in portable.items():
        # an activation at a rounding border may fall to either side, an attention weight to either bf16
        most = {"product": 1e-6, "attention": 1e-3, "forward": 1e-2, "peaks": 4e-3}[name.partition("/")[0]]
        assert np.linalg.norm(neondot[name] - expected) <= most * np.linalg.norm(expected), name
        assert np.abs(expected).max() > 0.1, name


@pytest.mark.parametrize("isa", ["neondot", "portable"])
def test_a_row_has_the_same_bits_in_any_company(isa: str, request: pytest.FixtureRequest) -> None:
    found: Records = request.getfixturevalue(isa)
    pairs = [(name, name.replace("together", "alone")) for name in found if name.endswith("together")]
    pairs += [
        (f"forward/{fmt}/{step}", f"forward/{fmt}/1") for fmt in ("q8", "q4_0", "q4_1") for step in (7, 60)
    ]
    assert len(pairs) == 13
    for name, alone in pairs:
        np.testing.assert_array_equal(found[name], found[alone], err_msg=name)


@pytest.mark.parametrize("isa", ["neondot", "portable"])
def test_peaks_are_the_largest_logits(isa: str, request: pytest.FixtureRequest) -> None:
    found: Records = request.getfixturevalue(isa)
    names = [name for name in found if name.startswith("peaks/")]
    assert len(names) == 9
    for name in names:
        logits = found[name.replace("peaks", "forward")].reshape(len(found[name]), -1)
        np.testing.assert_array_equal(found[name], logits.max(1), err_msg=name)


def test_threads_change_no_bits(on_arm: Path, neondot: Records) -> None:
    for name, values in records(run_on_arm(on_arm, WITH_DOT_PRODUCTS, "neondot", "3")).items():
        np.testing.assert_array_equal(values, neondot[name], err_msg=name)
