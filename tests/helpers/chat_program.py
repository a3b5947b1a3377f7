"""The `treeeagle` program over a scripted engine, for tests that need a process of its own.

The environment says what happens: ANSWERS (a JSON list of texts), PAUSE (seconds after each round) and READING (seconds
that the first prompt is read, of which it says that it has 3,200 tokens; 40 % of them are read at once).
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

from chat_fakes import ScriptEngine, fake_runtime, script

from treeeagle_edge.cli.app import main
from treeeagle_edge.rounds import Round


class SlowReader(ScriptEngine):
    """Takes its time over the first prompt."""

    def generate(self, *arguments: Any, **options: Any) -> Iterator[Round]:
        seconds = float(os.environ.pop("READING", "0"))
        if seconds:
            options["reading"](0, 3200)
            options["reading"](1280, 3200)
            time.sleep(seconds)
            options["reading"](3200, 3200)
        yield from super().generate(*arguments, **options)


def _load_runtime(_settings: object, *, progress: object = None) -> object:
    answers = [script(text) for text in json.loads(os.environ.get("ANSWERS", '["The sky is blue."]'))]
    pause = float(os.environ.get("PAUSE", "0"))
    return fake_runtime(SlowReader(answers, on_round=lambda _: time.sleep(pause)))


fake = types.ModuleType("treeeagle_edge.runtime")
fake.load_runtime = _load_runtime  # type: ignore[attr-defined]
sys.modules["treeeagle_edge.runtime"] = fake
sys.exit(main())
