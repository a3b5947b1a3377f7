"""Nothing is allocated while decoding: passes, draft trees and draws take no memory from the system."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from ctypes import CDLL, addressof, byref, c_double, c_int32, c_int64, c_long, c_void_p, cast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_toys import DIM, HEAD_HEADS, SLOTS, TAPS, H, V, needs_native, store, toy, toy_head

from treeeagle_edge.kernels.native import build
from treeeagle_edge.kernels.native.head import TreeRoom
from treeeagle_edge.kernels.native.library import library
from treeeagle_edge.kernels.native.reading import Store, View
from treeeagle_edge.kernels.native.structs import Growth, Sampling, TreeInput
from treeeagle_edge.kernels.native.team import Team

pytestmark = needs_native

COUNTER = (
    "TREEEAGLE_TEST_ALLOCATIONS"  # environment: the library that counts, in a process that has it preloaded
)
ROWS = (1, 2, 9, 16, 17, 40)  # of a pass: in chunks of the prefix, and not


def counted(function: Any, *arguments: Any) -> int:
    """How often a native function asked for memory."""
    count = CDLL(os.environ[COUNTER]).allocations_of
    count.restype, code = c_long, c_int32()
    taken = count(cast(function, c_void_p), *arguments, *[None] * (6 - len(arguments)), byref(code))
    assert code.value == 0, library().te_error()
    return int(taken)


def of_a_new_team() -> int:
    """What certainly takes memory, so that a count of none elsewhere means something."""
    made = c_void_p()
    taken = counted(library().te_team_create, c_int64(2), None, c_int64(0), byref(made))
    library().te_team_destroy(made)
    return taken


def of_passes() -> int:
    """A conversation up to the end of the context, in passes of all sizes."""
    it, at, taken = toy(Team(1).isa, 2), store(), 0
    for rows in ROWS:
        for length in range(0, SLOTS - rows + 1, 24):
            slots = np.arange(length, length + rows)
            ids, view = slots % V, View(np.arange(length), slots)
            job = view.pass_of(rows, ids, slots, slots)
            for logits in (True, False):
                request = it.model.request(rows, range(rows), (1, 2), logits=logits, best=True)
                taken += counted(
                    library().te_forward, it.model.handle, byref(job), byref(at.struct), byref(request.wanted)
                )
    return taken


def of_trees() -> int:
    """Trees of both rules, from an empty prefix to the end of the context."""
    head, taken = toy_head(Team(1).isa, 2).head, 0
    at, room = Store.allocate(1, SLOTS, HEAD_HEADS, DIM), TreeRoom(24)
    numbers, features = (c_double * 64)(*[0.1] * 64), (c_double * (4 * TAPS * H))()
    ids, table = (c_int64 * 4)(1, 2, 3, 4), (c_int64 * SLOTS)(*range(SLOTS))
    paying = {name: addressof(numbers) for name in ("verify", "draft", "continues", "calibration")}
    for rule in ({}, {**paying, "least": 0.01}):
        growth = Growth(depth=4, branching=6, nodes=20, **rule)
        for prefix in range(0, SLOTS - 32, 16):
            job = TreeInput(
                rows=4, ids=addressof(ids), table=addressof(table), prefix_count=prefix, position=prefix,
                features=addressof(features), feature_count=4, scratch=SLOTS - 24, scratch_count=24,
            )  # fmt: skip
            taken += counted(
                library().te_draft_tree, head.handle, byref(job), byref(at.struct), byref(growth), byref(room.struct)
            )  # fmt: skip
            assert room.struct.rows > 1
    return taken


def of_draws() -> int:
    """All but the first, which makes room for the vocabulary."""
    team, taken = Team(2), 0
    scores, token = np.random.default_rng(3).standard_normal(5000).astype(np.float32), c_int64()
    plain = Sampling(0.8, 0, 1.0, 0.0, 1)
    team.draw(scores, plain, 0)
    for how in (plain, Sampling(1.5, 40, 0.9, 0.05, 2), Sampling(0.3, 0, 0.95, 0.0, 3)):
        for position in range(20):
            taken += counted(
                library().te_draw, team.handle, c_void_p(scores.ctypes.data), c_int64(scores.size), byref(how),
                c_int64(position), byref(token),
            )  # fmt: skip
    return taken


SUBJECTS: dict[str, Callable[[], int]] = {
    "a new team": of_a_new_team, "passes": of_passes, "trees": of_trees, "draws": of_draws
}  # fmt: skip


@pytest.fixture(scope="module")
def counter(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that counts."""
    if sys.platform != "linux" or os.confstr("CS_GNU_LIBC_VERSION") is None:
        pytest.skip("memory is counted where the C library is glibc")
    try:
        compiler = build.find_compiler()
    except build.NoCompilerError:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("counter") / "counter.so"
    source = str(repository / "tests/helpers/native_allocations.cpp")
    build.run_all(
        [(*compiler.split(), "-std=c++17", "-O1", "-fPIC", "-shared", "-o", str(path), source, "-ldl")]
    )
    return path


@pytest.mark.parametrize("subject", SUBJECTS)
def test_nothing_is_allocated_while_decoding(counter: Path, repository: Path, subject: str) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(counter), COUNTER: str(counter)}
    environment["PYTHONPATH"] = str(repository / "tests/helpers")
    command = [sys.executable, "-P", __file__, subject]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 0) == (subject == "a new team")


if __name__ == "__main__":
    print(SUBJECTS[sys.argv[1]]())
