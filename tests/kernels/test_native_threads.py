"""Threads of a team: results do not depend on them, they race for nothing, and none waits for one that does nothing."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from native_toys import SLOTS, V, causal, needs_native, store, toy

from treeeagle_edge.kernels.native import build
from treeeagle_edge.kernels.native.library import available_isas
from treeeagle_edge.kernels.native.team import Team

pytestmark = needs_native

MANY = 33  # threads: more than cores, and more than most phases of the toy have units
LIMIT_S = 150  # a program that takes longer hangs
TSAN = ("-O1", "-g1", "-fsanitize=thread")
RACE = """
#include <thread>
int shared = 0;
int main() {
  std::thread other([] { ++shared; });
  ++shared;
  other.join();
}
"""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler whose programs notice a race on this machine."""
    if sys.platform != "linux":
        pytest.skip("ThreadSanitizer is tried on Linux")
    try:
        found = build.find_compiler()
    except build.NoCompilerError:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("race")
    source = folder / "race.cpp"
    source.write_text(RACE)
    try:
        program = compiled(found, folder / "race", str(source))
    except build.BuildError as error:
        pytest.skip(f"{found} has no ThreadSanitizer: {error.reason}")
    if b"data race" not in run(program).stderr:
        pytest.skip("ThreadSanitizer does not run here")
    return found


def compiled(compiler: str, output: Path, *parts: str) -> Path:
    command = (*compiler.split(), "-std=c++17", "-pthread", *build.WARNINGS, "-Werror", *TSAN, *parts)
    build.run_all([(*command, "-o", str(output))])
    return output


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(program), *arguments], capture_output=True, timeout=LIMIT_S)


def test_a_team_keeps_its_promises_and_has_no_races(compiler: str, repository: Path, tmp_path: Path) -> None:
    sources = (str(repository / "tests/helpers/native_team.cpp"), str(build.SOURCES / "team.cpp"))
    done = run(compiled(compiler, tmp_path / "team", "-I", str(build.SOURCES), *sources))
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""


@pytest.mark.slow
def test_passes_have_no_races(compiler: str, repository: Path, tmp_path: Path) -> None:
    objects = build.compile_commands(compiler, platform.machine(), tmp_path, (*TSAN, "-Werror"))
    build.run_all(objects.values())
    cases = (str(repository / "tests/helpers/native_cases.cpp"), *map(str, objects))
    program = compiled(compiler, tmp_path / "cases", "-I", str(build.SOURCES), *cases)
    said: list[bytes] = []
    for threads in ("1", "5"):
        done = run(program, available_isas()[0], threads)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stderr == b""
        said.append(done.stdout)
    assert said[0] == said[1]


def passes(threads: int, isa: str, cuts: Sequence[int]) -> np.ndarray:
    ids = np.random.default_rng(2).integers(0, V, 60)
    slots = np.random.default_rng(3).permutation(SLOTS)[:60].astype(np.int64)
    return causal(toy(isa, threads, extras=True).model, ids, store(), slots, tuple(cuts))


@pytest.mark.parametrize("threads", [2, 5, MANY])
def test_any_number_of_threads_gives_the_same_bits(isa: str, threads: int) -> None:
    for cuts in ((), range(9, 60, 9), range(1, 60)):  # all rows, nine and one a pass
        np.testing.assert_array_equal(passes(threads, isa, cuts), passes(1, isa, cuts))


@pytest.mark.parametrize("spin_us", [0, 1000])
def test_calls_find_sleeping_and_wakeful_workers(spin_us: int) -> None:
    rng = np.random.default_rng(5)
    w, x = rng.standard_normal((200, 64)).astype(np.float32), rng.standard_normal((3, 64)).astype(np.float32)
    expected = Team(1).matmul("q8", w, 200, x)
    for threads in (2, MANY):
        team = Team(threads, spin_us=spin_us)
        for _ in range(50):
            np.testing.assert_array_equal(team.matmul("q8", w, 200, x), expected)
