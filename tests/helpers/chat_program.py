"""The `treeeagle` program over a scripted engine, for tests that need a process of its own.

The environment says what happens: ANSWERS (a JSON list of texts) and PAUSE (seconds after each round).
"""

from __future__ import annotations

import json
import os
import sys
import time
import types

from chat_fakes import ScriptEngine, fake_runtime, script

from treeeagle_edge.cli.app import main


def _load_runtime(_settings: object, *, progress: object = None) -> object:
    answers = [script(text) for text in json.loads(os.environ.get("ANSWERS", '["The sky is blue."]'))]
    pause = float(os.environ.get("PAUSE", "0"))
    return fake_runtime(ScriptEngine(answers, on_round=lambda _: time.sleep(pause)))


fake = types.ModuleType("treeeagle_edge.runtime")
fake.load_runtime = _load_runtime  # type: ignore[attr-defined]
sys.modules["treeeagle_edge.runtime"] = fake
sys.exit(main())
