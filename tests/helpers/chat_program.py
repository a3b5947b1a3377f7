"""The `treeeagle` program over a scripted engine, for tests that need a process of its own.

The environment says what happens: ANSWERS (a JSON list of texts), PAUSE (seconds after each round; of several numbers
the last counts from there on), READING (seconds that the first prompt is read, of which it says that it has 3,200
tokens; 40 % of them are read at once) and ASLEEP (a file that appears when a wait of more than a second begins).
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chat_fakes import ScriptEngine, fake_runtime, script

from treeeagle_edge.cli.app import main
from treeeagle_edge.rounds import Round


def sleep(seconds: float) -> None:
    if seconds > 1 and "ASLEEP" in os.environ:
        Path(os.environ["ASLEEP"]).touch()
    time.sleep(seconds)


class SlowReader(ScriptEngine):
    """Takes its time over the first prompt."""

    def generate(self, *arguments: Any, **options: Any) -> Iterator[Round]:
        seconds = float(os.environ.pop("READING", "0"))
        if seconds:
            options["reading"](0, 3200)
            options["reading"](1280, 3200)
            sleep(seconds)
            options["reading"](3200, 3200)
        yield from super().generate(*arguments, **options)


def _load_runtime(_settings: object, *, progress: object = None) -> object:
    answers = [script(text) for text in json.loads(os.environ.get("ANSWERS", '["The sky is blue."]'))]
    pauses = [float(pause) for pause in os.environ.get("PAUSE", "0").split()]
    return fake_runtime(
        SlowReader(answers, on_round=lambda number: sleep(pauses[min(number, len(pauses) - 1)]))
    )


fake = types.ModuleType("treeeagle_edge.runtime")
fake.load_runtime = _load_runtime  # type: ignore[attr-defined]
sys.modules["treeeagle_edge.runtime"] = fake
sys.exit(main())
