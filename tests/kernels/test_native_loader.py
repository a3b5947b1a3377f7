"""Building and finding the native library: what is said where it cannot be had, and what is left behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from treeeagle_edge.kernels.native import build, loader
from treeeagle_edge.kernels.native import library as native
from treeeagle_edge.kernels.native.library import library
from treeeagle_edge.kernels.native.loader import Problem, problem

EMPTY_LIBRARY = 'extern "C" long te_version(void) { return 0; }\n'  # which is not seen from outside
SEEN_LIBRARY = EMPTY_LIBRARY.replace("long", '__attribute__((visibility("default"))) long')


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of this test's own, and nothing remembered of the real library."""
    monkeypatch.setenv("TREEEAGLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(loader.OVERRIDE, raising=False)
    monkeypatch.delenv(build.COMPILER, raising=False)
    loader._found.cache_clear()
    library.cache_clear()
    yield tmp_path / "cache"
    loader._found.cache_clear()
    library.cache_clear()


@pytest.fixture
def one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of one file that compile at once; they are no kernels."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "only.cpp").write_text(EMPTY_LIBRARY)
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def compiler(path: Path, script: str) -> str:
    """A stand-in for a compiler."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def needs_compiler() -> None:
    try:
        build.find_compiler()
    except build.NoCompilerError:
        pytest.skip("no C++ compiler")


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def test_whether_a_start_will_compile_is_known_before_it_does(
    cache: Path, one_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler()
    assert loader.must_compile() and not cache.exists()
    build.build(loader.library_path())
    assert not loader.must_compile()
    loader.library_path().write_bytes(b"cut off")
    assert loader.must_compile()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert not loader.must_compile()  # nothing could
    monkeypatch.setenv(loader.OVERRIDE, str(tmp_path / "mine.so"))
    assert not loader.must_compile()


def test_without_a_compiler_the_hint_names_some(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    for chosen in ("", "   ", "no-such-compiler -O3"):
        monkeypatch.setenv(build.COMPILER, chosen)
        loader._found.cache_clear()
        found = problem()
        assert found is not None
        assert found.reason == "no C++ compiler is installed"
        assert "g++" in found.hint and "clang++" in found.hint
    assert files(cache) == []


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo note >&2; echo 'a.cpp:1:2: error: no such thing' >&2; exit 1", "error: no such thing"),
        ("exit 1", "failed without a word"),
        ("printf '\\377\\376 error' >&2; exit 1", "error"),
    ],
    ids=["says-why", "silent", "not-utf8"],
)  # fmt: skip
def test_a_broken_compiler_is_a_sentence_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    monkeypatch.setenv(build.COMPILER, compiler(tmp_path / "cc", script))
    found = problem()
    assert found is not None
    assert found.reason.startswith("the native kernels did not compile: ")
    assert words in found.reason
    assert len(found.reason.splitlines()) == 1
    assert build.COMPILER in found.hint
    assert files(cache) == []


def test_a_linker_that_stops_half_way_leaves_nothing(
    cache: Path, tmp_path: Path, one_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = 'case "$*" in *-shared*) while [ "$1" != -o ]; do shift; done; echo half > "$2"; exit 1;; esac'
    monkeypatch.setenv(build.COMPILER, compiler(tmp_path / "cc", half))
    assert problem() is not None
    assert files(cache) == []


def test_where_the_cache_cannot_be_written_the_library_is_built_for_this_run(
    cache: Path, one_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler()
    cache.write_text("a file where the folder should be")
    (one_file / "only.cpp").write_text(SEEN_LIBRARY)
    monkeypatch.setattr(native, "_SIGNATURES", {"te_version": native._SIGNATURES["te_version"]})
    monkeypatch.setattr(native, "VERSION", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert problem() is None
    assert library().te_version() == 0
    kept = loader.not_kept()
    assert kept is not None
    assert re.match(rf"the native kernels cannot be kept: [a-z ]+ \({re.escape(str(cache))}", kept.reason)
    assert kept.hint == "set TREEEAGLE_CACHE to a folder you can write to"
    assert [path for path in tmp_path.iterdir() if path.name.startswith("treeeagle-")] == []


def test_where_no_folder_can_be_written_that_is_said(
    cache: Path, one_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file where the folder should be")
    monkeypatch.setattr(tempfile, "tempdir", str(cache))
    found = problem()
    assert found is not None
    assert loader.not_kept() is None
    if found.reason != "no C++ compiler is installed":
        assert re.match(
            rf"the native kernels cannot be kept: [a-z ]+ \({re.escape(str(cache))}", found.reason
        )
        assert "TREEEAGLE_CACHE" in found.hint


def test_a_library_of_another_version_is_not_used(cache: Path, one_file: Path) -> None:
    needs_compiler()
    found = problem()
    assert found is not None
    assert found.reason.startswith("the native kernels did not load: ")
    assert str(loader.library_path()) in found.hint


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def blank(data: bytes) -> bytes:
    """As a file may be after a loss of power: as long as it was, with nothing in it."""
    return data[:64] + bytes(len(data) - 64)


@pytest.mark.parametrize("damage", [cut, blank, lambda data: b"", lambda data: data + b"x"])
def test_a_damaged_library_is_built_again(
    cache: Path, one_file: Path, damage: Callable[[bytes], bytes]
) -> None:
    """Half a file would load, and end the program with a bus error."""
    needs_compiler()
    path = build.build(loader.library_path())
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert not build.is_whole(path)
    code = (
        "import sys; from pathlib import Path; from treeeagle_edge.kernels.native import build, loader;"
        "build.SOURCES = Path(sys.argv[1]); print(loader.problem().reason)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, str(one_file)], capture_output=True, text=True)
    assert done.returncode == 0
    assert "the native library has no function" in done.stdout  # it is no kernels, but it loads
    assert build.is_whole(path) and path.read_bytes()[:4] == whole[:4]


def test_a_whole_library_is_not_built_again(cache: Path, one_file: Path) -> None:
    needs_compiler()
    path = build.build(loader.library_path())
    before = path.stat().st_mtime_ns
    problem()
    assert path.stat().st_mtime_ns == before


def test_the_override_is_used_as_it_is(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.so"
    monkeypatch.setenv(loader.OVERRIDE, str(own))
    assert loader.library_path() == own
    missing = problem()
    assert missing == Problem(
        f"{loader.OVERRIDE} names {own}, where no library is", f"unset {loader.OVERRIDE}"
    )
    assert not own.exists()
    own.write_bytes(b"not a library")
    loader._found.cache_clear()
    damaged = problem()
    assert damaged is not None
    assert damaged.hint == f"unset {loader.OVERRIDE}"
    assert files(cache) == []


def test_the_path_follows_sources_and_flags(
    cache: Path, one_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = loader.library_path()
    assert before == loader.library_path()
    assert cache in before.parents
    (one_file / "only.cpp").write_text(EMPTY_LIBRARY + "// changed\n")
    changed = loader.library_path()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    debug = loader.library_path()
    monkeypatch.setattr(build, "FAMILIES", build.FAMILIES[:1])
    assert len({before, changed, debug, loader.library_path()}) == 4


X86_ONLY = {
    "isa_avx2.cpp": "-mavx2",
    "isa_avx512.cpp": "-mavx512vnni",
    "isa_avxvnni.cpp": "-mavxvnni",
}
ARM_ONLY = {"isa_neon.cpp": "-march=armv8.2-a+dotprod"}


@pytest.mark.parametrize(
    ("machine", "macro", "own"),
    [
        ("x86_64", "-DTE_X86", X86_ONLY),
        ("AMD64", "-DTE_X86", X86_ONLY),
        ("aarch64", "-DTE_ARM", ARM_ONLY),
        ("arm64", "-DTE_ARM", ARM_ONLY),
        ("riscv64", None, {}),
    ],
)
def test_a_machine_compiles_its_own_instruction_sets_with_their_flags(
    tmp_path: Path, machine: str, macro: str | None, own: dict[str, str]
) -> None:
    commands = build.compile_commands("ccache c++", machine, tmp_path)
    by_name = {f"{path.stem}.cpp": command for path, command in commands.items()}
    assert {name for name in by_name if name.startswith("isa_")} == {"isa_portable.cpp", *own}
    for name, command in by_name.items():
        assert command[:2] == ("ccache", "c++")
        assert {flag for flag in command if flag.startswith("-D")} == ({macro} if macro else set())
        assert (own[name] in command) if name in own else not any(f.startswith("-m") for f in command)
    assert set(list(by_name)[-len(own) :] if own else []) == set(own)  # last where they are linked


def build_from(sources: Path, output: Path) -> None:
    """What each process of the next test does."""
    build.SOURCES = sources
    for _ in range(3):
        build.build(output)


def test_processes_that_build_at_once_do_not_collide(cache: Path, one_file: Path) -> None:
    needs_compiler()
    output = cache / "lib.so"
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    processes = [context.Process(target=build_from, args=(one_file, output)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(files(cache)) == [output, output.with_name("lib.so.seal")]
    assert build.is_whole(output)
    assert output.read_bytes()[:4] in (b"\x7fELF", b"\xcf\xfa\xed\xfe")


def test_building_by_hand_talks_on_stderr_and_never_fails(tmp_path: Path) -> None:
    environment = {**os.environ, "TREEEAGLE_CACHE": str(tmp_path), "PATH": str(tmp_path), build.COMPILER: ""}
    environment.pop(loader.OVERRIDE, None)
    command = [sys.executable, "-P", "-m", "treeeagle_edge.kernels.native.loader"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("no C++ compiler is installed; install g++")
