"""The `treeeagle` program and `python -m treeeagle_edge`: `cli.app`, with Ctrl-C answered quietly at both ends too."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


def main() -> int:
    """Run the program with the arguments of the process. Returns the exit code, as `cli.app.main` says."""
    sys.unraisablehook = _without_ctrl_c
    try:
        from treeeagle_edge.cli.app import main as run  # here, so that Ctrl-C meanwhile shows no traceback

        return run()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _without_ctrl_c(problem: UnraisableHookArgs) -> None:
    """Report what a `__del__` or the end of Python cannot raise, but for Ctrl-C: it comes there while a model is given
    back, when all is said and done.
    """
    if not issubclass(problem.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(problem)


if __name__ == "__main__":
    sys.exit(main())
