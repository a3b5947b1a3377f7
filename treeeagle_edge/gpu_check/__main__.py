"""`python -m treeeagle_edge.gpu_check`: `treeeagle gpu-check` where nothing is installed but PyTorch with NumPy, Triton
and bitsandbytes. It takes the same options.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from treeeagle_edge.errors import TreeEagleError
from treeeagle_edge.gpu_check.choices import MINUTES, check_options
from treeeagle_edge.gpu_check.report import render
from treeeagle_edge.gpu_check.run import has_failed, run_check

_say = partial(print, file=sys.stderr, flush=True)


def main() -> int:
    """Check, print the table, and return the exit code of `treeeagle gpu-check`."""
    asked = _arguments()
    try:
        options = check_options(asked.device, asked.minutes, asked.sections, asked.size)
        document = run_check(options, progress=_say, save=asked.save)
    except TreeEagleError as error:
        _say(f"error: {error.message}")
        if error.hint:
            _say(f" hint: {error.hint}")
        return error.exit_code
    print(json.dumps(document, indent=1) if asked.json else render(document))
    return int(has_failed(document))


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(prog="python -m treeeagle_edge.gpu_check", description=__doc__)
    made.add_argument("--device", help="cuda or cuda:N; the card with most room unless given")
    made.add_argument("--minutes", type=float, default=MINUTES, help="for all of it")
    made.add_argument("--sections", metavar="NAME,NAME,...", help="only these; all unless given")
    made.add_argument(
        "--save", type=Path, metavar="FILE.json", help="keep everything there, tables in FILE.md"
    )
    made.add_argument("--json", action="store_true", help="print the document in place of the table")
    made.add_argument("--size", default="full", help=argparse.SUPPRESS)
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
