"""Measured memory."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from treeeagle_edge.hardware import memory_watch
from treeeagle_edge.hardware.memory_watch import MemoryWatch

MB = 1 << 20


def touch(megabytes: int) -> None:
    """Hold that much for a moment, every page written: new pages, where a heap may have old ones to give."""
    with mmap.mmap(-1, megabytes * MB) as block:
        block[::4096] = b"x" * len(block[::4096])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's high-water mark is Linux")
def test_a_peak_between_two_looks_is_seen_and_a_reset_forgets_it():
    watch = MemoryWatch()
    if watch.source != "peak resident memory":
        pytest.skip("this kernel does not let a process restart its high-water mark")
    before = watch.current()
    touch(200)
    assert watch.peak() - before > 150 * MB
    assert watch.current() - before < 100 * MB  # it is gone again, and was seen nonetheless
    watch.reset()
    assert watch.peak() - before < 100 * MB


def test_without_the_kernels_mark_memory_is_read_when_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(memory_watch, "_CLEAR", tmp_path / "absent" / "clear_refs")
    watch = MemoryWatch()
    assert watch.source == "resident memory, read between answers"
    levels = iter([5, 9, 7, 3])
    monkeypatch.setattr(watch, "current", lambda: next(levels))
    watch.reset()
    watch.note()
    watch.note()
    assert watch.peak() == 9


def test_on_cuda_the_allocator_is_asked(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, str]] = []

    def answer(name: str, value: int):
        return lambda device: asked.append((name, device)) or value

    cuda = SimpleNamespace(
        reset_peak_memory_stats=answer("reset", 0),
        memory_allocated=answer("now", 11),
        max_memory_allocated=answer("peak", 22),
        memory_snapshot=list,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    watch = MemoryWatch("cuda:1")
    watch.note()
    assert (watch.current(), watch.peak()) == (11, 22)
    assert asked == [("reset", "cuda:1"), ("now", "cuda:1"), ("peak", "cuda:1")]
    assert watch.source == "peak of the CUDA allocator"


def test_several_cards_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"cuda:0": 5, "cuda:1": 7}
    emptied: list[str] = []
    cuda = SimpleNamespace(
        reset_peak_memory_stats=emptied.append,
        memory_allocated=held.__getitem__,
        max_memory_allocated=lambda device: 2 * held[device],
        memory_snapshot=list,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    watch = MemoryWatch("cuda:0", "cuda:1")
    assert (watch.current(), watch.peak()) == (12, 24) and emptied == ["cuda:0", "cuda:1"]


def test_what_graphs_hold_counts_though_no_tensor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of CUDA graphs is free by the allocator's count, and written to by every replay."""

    def segment(pool: tuple[int, int], size: int, used: int) -> dict[str, object]:
        return {"segment_pool_id": pool, "total_size": size, "allocated_size": used}

    cuda = SimpleNamespace(
        reset_peak_memory_stats=lambda device: None,
        memory_allocated=lambda device: 50,
        max_memory_allocated=lambda device: 70,
        memory_snapshot=lambda: [segment((0, 0), 100, 40), segment((3, 0), 30, 10), segment((3, 0), 8, 0)],
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    watch = MemoryWatch("cuda:0")
    assert (watch.graphs(), watch.current(), watch.peak()) == (28, 78, 98)
    assert MemoryWatch("cpu").graphs() == 0
