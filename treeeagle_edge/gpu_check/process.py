"""Starts the worker process of the GPU check and reads its events, lines of JSON. The worker may die at any moment."""

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
LOST = 9  # exit code of a worker whose device no longer works, after it has reported its last section
WORKER = "treeeagle_edge.gpu_check.worker"  # the module that is run as a program
_TAIL = 4000  # characters that are kept of the end of a worker's stderr

Event = dict[str, Any]


@dataclass(frozen=True)
class Order:
    """What a worker shall do."""

    device: str
    size: str
    triton: bool
    sections: tuple[tuple[str, float], ...]  # (name, most seconds)
    stop: float  # moment by which all sections have to end; of time.time, which is the same in both processes
    facts: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """This order as one argument of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Order:
        """The order whose `text()` is `text`."""
        raw = json.loads(text)
        return cls(**{**raw, "sections": tuple((name, seconds) for name, seconds in raw["sections"])})


@dataclass(frozen=True)
class Ended:
    """How a worker ended."""

    code: int | None  # exit code; None where it took too long and was killed
    said: str  # the end of its stderr

    @property
    def reason(self) -> str:
        """How the worker ended, as a sentence."""
        if self.code is None:
            return "it took too long, and its process was ended"
        last = self.said.strip().splitlines()[-1:]
        return f"its process ended with {self.code}" + (f": {last[0]}" if last else "")


def run_worker(order: Order, until: float) -> Generator[Event | Ended, float, None]:
    """Run a worker; a generator of its events and of one `Ended` at the end.

    until: moment (of `time.perf_counter`) by which the first event has to come, else the worker is killed. For each
    event, send the moment by which the next one has to come.
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
            process.kill()  # does nothing where it has already ended
            process.wait()
        said.seek(0)
        yield Ended(code, said.read()[-_TAIL:])


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
