"""`treeeagle pull` as a program of its own: Ctrl-C, and the variables that people set."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from hub_stand_in import TOKEN, Hub, running_hub
from pull_cases import MODEL


def program(hub: Hub, home: Path, *arguments: str, **changes: str) -> subprocess.Popen[str]:
    """The program itself, turned to `hub` by the variables that people set."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("HF_") and key != "HUGGING_FACE_HUB_TOKEN"
    }
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), **changes}
    command = [sys.executable, "-m", "treeeagle_edge.cli.app", "pull", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, preexec_fn=_heed_ctrl_c, **pipes)  # type: ignore[call-overload]


def _heed_ctrl_c() -> None:
    """SIGINT is ignored where the tests run in the background of a shell, and a program inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_keeps_what_came_and_the_next_run_goes_on(tmp_path):
    """The real program against a line that goes dead halfway: SIGINT ends it at once, and nothing is lost."""
    large = random.Random(3).randbytes(25_000_000)
    with running_hub() as hub:
        hub.add("org/name", {**MODEL, "model.safetensors": large})
        hub.breaks["model.safetensors"] = [22_000_000]
        hub.stalls = True
        running = program(hub, tmp_path, "org/name")
        deadline = time.monotonic() + 60
        partial = None
        while time.monotonic() < deadline and (partial is None or partial.stat().st_size < 20_000_000):
            time.sleep(0.05)
            partial = next(tmp_path.rglob("*.incomplete"), None)
        assert partial is not None and running.poll() is None
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
        assert running.returncode == 130 and out == ""
        assert err.splitlines()[-1] == "stopped; what has come is kept: run the same command again to go on"
        assert "Traceback" not in err
        kept = partial.stat().st_size
        hub.stalls = False
        hub.seen.clear()
        again = program(hub, tmp_path, "org/name")
        out, err = again.communicate(timeout=60)
        assert again.returncode == 0, err
        assert [seen.range for seen in hub.asked("model.safetensors") if seen.host == "localhost"] == [
            f"bytes={kept}-"
        ]
        folder = Path(out.removeprefix("org/name is in ").partition(";")[0])
        assert (folder / "model.safetensors").read_bytes() == large


def test_the_variables_of_the_hub_are_obeyed(tmp_path):
    with running_hub() as hub:
        hub.add("org/name", MODEL)
        hub.gated.add("org/name")
        done = program(hub, tmp_path, "org/name", HF_TOKEN=TOKEN)
        out, err = done.communicate(timeout=60)
        assert done.returncode == 0 and str(tmp_path / "hub") in out, err
        hub.seen.clear()
        offline = program(hub, tmp_path, "org/name", HF_HUB_OFFLINE="1")
        assert offline.communicate(timeout=60)[0] == out and offline.returncode == 0
        assert hub.seen == []
