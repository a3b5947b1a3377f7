"""The worker process of the GPU check, seen from outside: events as lines of JSON, and an end that may be sudden."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from typing import IO, Any

OK, FAILED, SKIPPED, NOT_HERE = "ok", "FAILED", "skipped", "not on this device"
LOST = 9  # exit code of a worker whose device answers no more, after it reported its last section
WORKER = "treeeagle_edge.gpu_check.worker"  # run as a program
_TAIL = 4000  # characters of what a worker said last

Event = dict[str, Any]


@dataclass(frozen=True)
class Order:
    """What a worker is to do."""

    device: str
    size: str
    triton: bool
    sections: tuple[tuple[str, float], ...]  # name, the most seconds
    stop: float  # of time.time, which two processes share: when all of them have to be over
    facts: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Order:
        """The order that `text` was made of."""
        raw = json.loads(text)
        return cls(**{**raw, "sections": tuple((name, seconds) for name, seconds in raw["sections"])})


@dataclass(frozen=True)
class Ended:
    """How a worker came to its end."""

    code: int | None  # of its process; None where it was ended because it took too long
    said: str  # what it wrote last to stderr

    @property
    def reason(self) -> str:
        """A sentence."""
        if self.code is None:
            return "it took too long, and its process was ended"
        last = self.said.strip().splitlines()[-1:]
        return f"its process ended with {self.code}" + (f": {last[0]}" if last else "")


def run_worker(order: Order, until: float) -> Generator[Event | Ended, float, None]:
    """Yields the worker's events, then one `Ended`. `until`, and what each event is answered with: the moment (of
    `time.perf_counter`) by which the next event has to come, or else the worker is ended.
    """
    command = [sys.executable, "-P", "-m", WORKER, order.text()]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        assert process.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        code = None
        try:
            while (line := lines.get(timeout=max(0.01, until - time.perf_counter()))) is not None:
                until = yield json.loads(line)
            code = process.wait()
        except queue.Empty:
            pass
        finally:
            process.kill()  # nothing happens where it has ended
            process.wait()
        said.seek(0)
        yield Ended(code, said.read()[-_TAIL:])


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
