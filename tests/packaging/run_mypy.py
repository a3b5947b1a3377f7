"""Runs mypy on the package as it is imported: with `kernels` and `profiles` inside `treeeagle_edge`.

On disk they lie beside it, and mypy does not follow the mapping of an editable install. A tree of links shows it the
layout of the wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = REPOSITORY / ".mypy_cache"


def linked_tree(cache: Path) -> Path:
    """A folder that holds `treeeagle_edge` as links to the sources."""
    tree = cache / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    package = tree / "treeeagle_edge"
    package.mkdir(parents=True)
    for entry in (REPOSITORY / "treeeagle_edge").iterdir():
        (package / entry.name).symlink_to(entry)
    for name in ("kernels", "profiles"):
        (package / name).symlink_to(REPOSITORY / name)
    return tree


def main() -> int:
    """Exit code of mypy. Its cache lies in the repository, so that the next run is quick."""
    tree = linked_tree(CACHE)
    command = [sys.executable, "-P", "-m", "mypy", "--config-file", str(REPOSITORY / "pyproject.toml")]
    command += ["--cache-dir", str(CACHE), "--package", "treeeagle_edge"]
    return subprocess.run(command, cwd=tree, env={**os.environ, "MYPYPATH": str(tree)}).returncode


if __name__ == "__main__":
    sys.exit(main())
