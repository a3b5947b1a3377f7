"""Downloads one wheel with pip, which knows the person's package index, proxy and certificates."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

from treeeagle_edge.errors import CannotRunError

_NO_NETWORK = (
    "NewConnectionError",
    "Failed to establish a new connection",
    "ConnectTimeoutError",
    "Read timed out",
    "NameResolutionError",
    "Temporary failure in name resolution",
    "Connection broken",
    "ConnectionResetError",
    "ProxyError",
    "ProtocolError",
    "SSLError",
)


def download_wheel(requirement: str, folder: Path, *, name: str) -> Path:
    """The wheel of `requirement`, downloaded into `folder` and not installed. `name` is what errors call it.

    Raises CannotRunError without pip or a network, or where the index has no such wheel; OSError on a full disk.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
    ]
    command += ["--disable-pip-version-check", "--no-input", "-d", str(folder), requirement]
    if not os.isatty(2):
        command.append("--quiet")  # there is no terminal to draw a progress bar on
    # pip unpacks in TMPDIR, and the system's own may be too small; the caller has checked the disk of `folder`
    environment = {**os.environ, "TMPDIR": str(folder)}
    # pip draws its bar on stdout, which goes to our stderr; its complaints are kept, to be summed up in a sentence
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise _pip_error(done.stderr, requirement, name)


def _pip_error(complaint: str, requirement: str, name: str) -> CannotRunError:
    if "No module named pip" in complaint:
        return CannotRunError(
            f"{name} cannot be fetched: this Python has no pip",
            f"run `{sys.executable} -m ensurepip`, or set up again with ./install.sh",
        )
    if any(sign in complaint for sign in _NO_NETWORK):
        return CannotRunError(
            f"{name} cannot be fetched: the package index does not answer",
            "check the network and pip's proxy and index settings, then run the same command again",
        )
    lines = [line.removeprefix("ERROR: ") for line in complaint.splitlines() if line.startswith("ERROR: ")]
    reason = lines[-1].rstrip(".") if lines else "pip gave no reason"
    return CannotRunError(
        f"{name} cannot be fetched: {reason}",
        f"see what `{sys.executable} -m pip download --no-deps {requirement}` says",
    )
