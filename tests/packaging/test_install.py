"""install.sh against a stub Python: what it installs in which order, passes on, and says when it fails."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

# Stands for every Python that install.sh calls. It writes its arguments to $STUB/calls and behaves as $STUB_* say.
STUB_PYTHON = r"""#!/usr/bin/env bash
[ "$1" = "-c" ] || printf '%s\n' "$*" >>"$STUB/calls"
[ "$1" = "-P" ] && shift
case "$1 $2" in
  "-c import sys"*) echo "${STUB_VERSION:-3.11}" ;;
  "-c import ensurepip"*) exit "${STUB_ENSUREPIP:-0}" ;;
  "- "*) exec "$STUB_REAL" - ;;
  "-m venv")
    if [ -n "${STUB_VENV:-}" ]; then echo "$STUB_VENV"; exit 1; fi
    rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  "-m pip")
    [ "$3" = install ] || exit 0
    previous=""
    for word; do [ "$previous" = --log ] && log="$word"; previous="$word"; done
    case "$*" in *"${STUB_PIP_FAILS_ON:-nothing at all}"*)
      printf '%s\n' "${STUB_PIP_SAYS:-}" >>"$log"
      if [ -n "${STUB_PIP_HANGS:-}" ]; then touch "$STUB/hangs"; sleep 30; fi
      exit 1 ;;
    esac
    echo "  Downloading thing-1.whl (12.3 MB)"
    echo "a complaint" >&2
    sleep "${STUB_PIP_SLEEPS:-0}"
    case "$*" in *--editable*) cp "$STUB/treeeagle" "$(dirname "$0")/treeeagle" ;; esac ;;
  "-m treeeagle_edge.sources.demo_model") exit "${STUB_FETCH:-0}" ;;
  "-m treeeagle_edge.kernels.native.loader") echo "native kernels: here"; exit "${STUB_NATIVE:-0}" ;;
  "-m pytest") exit "${STUB_EXIT:-0}" ;;
esac
"""
STUB_TREEEAGLE = r"""#!/usr/bin/env bash
for word; do printf '<%s>\n' "$word"; done
cat
exit "${STUB_EXIT:-0}"
"""
STUB_UNAME = (
    '#!/usr/bin/env bash\n[ "$1" = -s ] && echo "${STUB_SYSTEM:-Linux}" || echo "${STUB_MACHINE:-x86_64}"\n'
)
STUB_NVIDIA_SMI = '#!/usr/bin/env bash\nexit "${STUB_NO_GPU:-9}"\n'


@dataclass(frozen=True)
class Place:
    """A copy of install.sh in a folder of its own, with stubs for everything it calls."""

    root: Path
    stub: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "install.sh"), *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            env={**self.environment, **environment},
        )

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "install.sh"), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment, **environment},
            start_new_session=True,
        )

    def calls(self, word: str = "") -> list[str]:
        log = self.stub / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if word in line]


@pytest.fixture
def place(tmp_path: Path, repository: Path) -> Place:
    root = tmp_path / "a folder" / "tree"
    stub = tmp_path / "stub"
    root.mkdir(parents=True)
    stub.mkdir()
    for name in ("install.sh", "pyproject.toml"):
        shutil.copy(repository / name, root / name)
    scripts = {"treeeagle": STUB_TREEEAGLE, "uname": STUB_UNAME, "nvidia-smi": STUB_NVIDIA_SMI}
    scripts.update(dict.fromkeys(("python3", "python3.11", "python3.12", "python3.13"), STUB_PYTHON))
    for name, text in scripts.items():
        (stub / name).write_text(text)
        (stub / name).chmod(0o755)
    environment = {
        "PATH": f"{stub}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "STUB": str(stub),
        "STUB_REAL": sys.executable,
    }
    return Place(root, stub, environment)


def test_the_scripts_parse(repository: Path) -> None:
    for name in ("install.sh", ".ci/run"):
        assert os.access(repository / name, os.X_OK), f"{name} is not executable"
        subprocess.run(["bash", "-n", str(repository / name)], check=True)
    assert "./install.sh test" in (repository / ".ci" / "run").read_text().splitlines()


def test_alone_it_sets_up_and_says_what_next(place: Place) -> None:
    done = place.run()
    assert (done.returncode, done.stdout) == (0, "")
    assert "ready: start with ./install.sh chat" in done.stderr
    torch, package = place.calls("pip install")
    assert "torch==2.13.0+cpu" in torch
    assert "--index-url" not in torch  # the person's own index is asked first
    assert package.endswith(f"--no-build-isolation --editable {place.root}")
    assert place.calls("treeeagle_edge.sources.demo_model")
    assert place.calls("treeeagle_edge.kernels.native.loader") == [
        "-P -m treeeagle_edge.kernels.native.loader"
    ]


def test_words_stdin_and_exit_code_pass_through(place: Place) -> None:
    done = place.run(
        "chat", "-p", "why is the sky blue?", "", "a*b", "--", "-x", stdin="more\n", STUB_EXIT="7"
    )
    assert done.stdout == "<chat>\n<-p>\n<why is the sky blue?>\n<>\n<a*b>\n<-->\n<-x>\nmore\n"
    assert done.returncode == 7


def test_the_second_start_does_nothing_but_start(place: Place) -> None:
    place.run()
    calls = place.calls()
    done = place.run("--version")
    assert (done.stdout, done.stderr) == ("<--version>\n", "")
    assert place.calls() == calls


def test_tests_bring_their_extra_and_a_whole_run_its_coverage(place: Place) -> None:
    place.run()
    assert place.run("test", STUB_EXIT="5").returncode == 5
    assert place.calls("--editable")[-1].endswith(f"{place.root}[test]")
    assert "--cov-fail-under=85" in place.calls("-m pytest")[-1]
    installs = len(place.calls("pip install"))
    place.run("test", "tests/unit", "-k", "tree or pool")
    assert place.calls("-m pytest")[-1] == "-P -m pytest tests/unit -k tree or pool"
    place.run("chat")
    assert len(place.calls("pip install")) == installs


@pytest.mark.parametrize("name", ["install.sh", "pyproject.toml"])
def test_a_changed_file_sets_up_again_in_the_same_environment(place: Place, name: str) -> None:
    place.run()
    with (place.root / name).open("a") as file:
        file.write("# changed\n")
    place.run()
    assert len(place.calls("--editable")) == 2
    assert len(place.calls("-m venv")) == 1


def test_a_moved_folder_gets_a_new_environment(place: Place) -> None:
    place.run()
    moved = place.root.parent / "moved"
    place.root.rename(moved)
    done = Place(moved, place.stub, place.environment).run()
    assert done.returncode == 0
    assert place.calls("-m venv")[-1].endswith(str(moved / ".venv"))
    assert len(place.calls("-m venv")) == 2


def test_a_persons_own_environment_is_not_thrown_away(place: Place) -> None:
    (place.root / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(place.stub / "python3.11", place.root / ".venv" / "bin" / "python")
    (place.root / ".venv" / "own").touch()
    assert place.run().returncode == 0
    assert (place.root / ".venv" / "own").exists()
    assert not place.calls("-m venv")


def test_a_killed_set_up_is_built_anew(place: Place) -> None:
    process = place.start(STUB_PIP_FAILS_ON="--editable", STUB_PIP_HANGS="1")
    deadline = time.monotonic() + 20
    while not (place.stub / "hangs").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done = place.run()
    assert "was interrupted" in done.stderr
    assert done.returncode == 0
    assert len(place.calls("-m venv")) == 2


def test_a_failed_set_up_goes_on_where_it_stopped(place: Place) -> None:
    assert place.run(STUB_PIP_FAILS_ON="--editable", STUB_PIP_SAYS="ERROR: no such thing").returncode == 3
    assert place.run("chat").returncode == 0
    assert len(place.calls("-m venv")) == 1


def test_two_at_once_set_up_once(place: Place) -> None:
    both = [place.start("chat", STUB_PIP_SLEEPS="0.3") for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(place.calls("--editable")) == 1
    assert sum("another set-up is running" in err for _, err in said) == 1
    assert [out for out, _ in said] == ["<chat>\n", "<chat>\n"]


def test_a_terminal_gets_what_pip_draws_and_not_what_it_complains(place: Place) -> None:
    ours, theirs = pty.openpty()
    command = [str(place.root / "install.sh"), "chat"]
    subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, env=place.environment
    )
    os.close(theirs)
    drawn = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while piece := os.read(ours, 4096):
            drawn += piece
    os.close(ours)
    assert drawn.count(b"Downloading thing-1.whl") == 2
    assert b"a complaint" not in drawn
    assert "a complaint" in (place.root / ".venv" / "setup.log").read_text()


def test_nobody_holds_the_lock_once_the_command_runs(place: Place) -> None:
    code = "import os,sys; print(os.path.exists('/proc/self/fd/9') or os.path.exists('/dev/fd/9'))"
    (place.stub / "treeeagle").write_text(f'#!/usr/bin/env bash\nexec "$STUB_REAL" -c "{code}"\n')
    both = [place.start("chat", STUB_PIP_SLEEPS="0.3") for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert [out for out, _ in said] == ["False\n", "False\n"]


def test_an_index_without_cpu_builds_is_followed_by_pytorchs_own(place: Place) -> None:
    done = place.run(
        STUB_PIP_FAILS_ON="--retries", STUB_PIP_SAYS="ERROR: No matching distribution found for torch"
    )
    assert done.returncode == 3
    first, second = place.calls("pip install")
    assert "--extra-index-url" not in first
    assert "--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu" in second
    assert (
        "the CPU build of PyTorch cannot be installed: No matching distribution found for torch"
        in done.stderr
    )


@pytest.mark.parametrize(
    "machine",
    [{"STUB_NO_GPU": "0"}, {"STUB_SYSTEM": "Darwin", "STUB_MACHINE": "arm64"}, {"STUB_MACHINE": "aarch64"}],
    ids=["nvidia", "macos", "arm"],
)
def test_elsewhere_plain_torch_is_right(place: Place, machine: dict[str, str]) -> None:
    assert place.run(**machine).returncode == 0
    assert "torch>=2.11" in place.calls("pip install")[0]


def test_a_person_may_choose_the_build_of_torch(place: Place) -> None:
    place.run(TREEEAGLE_TORCH="torch==2.12.1")
    assert "torch==2.12.1" in place.calls("pip install")[0]


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("NewConnectionError: Failed to establish a new connection", "the package index does not answer"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("2026-01-01T00:00:00,000 ERROR: it is broken", "cannot be installed: it is broken"),
        ("", "pip stopped without a reason"),
    ],
)
@pytest.mark.parametrize("step", ["torch==", "--editable"])
def test_a_failing_pip_is_one_sentence_and_a_hint(place: Place, says: str, words: str, step: str) -> None:
    done = place.run("chat", STUB_PIP_FAILS_ON=step, STUB_PIP_SAYS=says)
    assert (done.returncode, done.stdout) == (3, "")
    errors = [
        line for line in done.stderr.splitlines() if not line.startswith(("treeeagle: ", "  Downloading"))
    ]
    assert len(errors) == 2, done.stderr
    assert errors[0].startswith("error: ")
    assert words in errors[0]
    assert errors[1].startswith(" hint: ")


def test_no_network_is_asked_only_once(place: Place) -> None:
    place.run(STUB_PIP_FAILS_ON="torch==", STUB_PIP_SAYS="Temporary failure in name resolution")
    assert len(place.calls("pip install")) == 1


@pytest.mark.parametrize(
    ("environment", "sentence", "hint"),
    [
        ({"STUB_VERSION": "3.10"}, "no Python 3.11, 3.12 or 3.13 was found (python3 is 3.10)", "install one"),
        (
            {"STUB_VERSION": "3.12", "STUB_ENSUREPIP": "1"},
            "cannot make virtual environments",
            "apt install python3.12-venv",
        ),
        ({"PYTHON": "/no/such/python"}, "PYTHON is /no/such/python", "unset PYTHON"),
        (
            {"PYTHON": "python3", "STUB_VERSION": "3.9"},
            "PYTHON is python3, which is Python 3.9 and not",
            "unset PYTHON",
        ),
        ({"STUB_VENV": "no room here"}, "cannot be made: no room here", "check the disk"),
    ],
)
def test_what_is_missing_is_said_at_once(
    place: Place, environment: dict[str, str], sentence: str, hint: str
) -> None:
    done = place.run("chat", **environment)
    assert (done.returncode, done.stdout) == (3, "")
    error, advice = done.stderr.splitlines()[-2:]
    assert sentence in error
    assert hint in advice
    assert not place.calls("pip install")


def test_a_person_may_choose_the_python(place: Place) -> None:
    chosen = place.stub / "my python"
    shutil.copy(place.stub / "python3.11", chosen)
    assert place.run(PYTHON=str(chosen)).returncode == 0
    assert (place.root / ".venv" / "bin" / "python").exists()


def test_kernels_that_cannot_be_built_stop_nothing(place: Place) -> None:
    done = place.run("chat", STUB_NATIVE="1")
    assert (done.returncode, done.stdout) == (0, "<chat>\n")
    assert "native kernels: here" in done.stderr
    calls = place.calls("treeeagle_edge.")
    assert [call.rpartition(".")[2] for call in calls] == ["demo_model", "loader"]
    place.run("chat")
    assert place.calls("treeeagle_edge.") == calls  # set up once


def test_the_exit_code_of_the_demo_models_fetch_passes_through(place: Place) -> None:
    assert place.run("chat", STUB_FETCH="3").returncode == 3
    assert place.run("chat").returncode == 0  # and the next start tries again


def test_a_closed_index_with_the_real_pip(place: Place, tmp_path: Path) -> None:
    with socket.socket() as listener:  # a port that was free a moment ago refuses connections
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    closed = {
        "PYTHON": sys.executable,
        "PATH": f"{place.stub}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple",
    }
    done = Place(place.root, place.stub, closed).run("chat")
    assert (done.returncode, done.stdout) == (3, "")
    assert (
        done.stderr.splitlines()[-2]
        == "error: the package index does not answer: PyTorch cannot be installed"
    )
    assert "Traceback" not in done.stderr
