"""Costs of passes as options of a script: measured, from a file, or in milliseconds."""

from __future__ import annotations

import argparse
from pathlib import Path

from treeeagle_edge.drafting.costs import CostTable, load_table
from treeeagle_edge.errors import InputError, UsageError

MS = 1e-3


def add_costs(made: argparse.ArgumentParser) -> None:
    """The options that say what a round takes."""
    where = made.add_mutually_exclusive_group()
    where.add_argument("--measure", action="store_true", help="measure what passes cost now")
    where.add_argument("--costs", type=Path, metavar="FILE", help="a file of costs/ in the program's cache")
    where.add_argument("--verify", metavar="ROWS:MS,...", help="of target passes; from 1 row on")
    made.add_argument("--draft", metavar="MS,MS", help="of the first level, and of each further one")
    made.add_argument("--other", type=float, default=0.1, help="ms of a round beside its passes")
    made.add_argument("--noise", type=float, default=0.03, help="deviation of a cost, as a share of it")


def costs_of(chosen: argparse.Namespace, measured: CostTable | None) -> CostTable:
    """What the options of `add_costs` say, else `measured`.

    Raises InputError for a file of another kind, UsageError for other figures than those of a cost each.
    """
    if (chosen.verify is None) != (chosen.draft is None):
        raise UsageError("--verify and --draft belong together", "give both, or neither")
    if chosen.verify is not None:
        return _table(chosen.verify, chosen.draft)
    found = measured if chosen.costs is None else load_table(chosen.costs)
    if found is None:
        raise InputError(
            f"{chosen.costs} holds no costs of passes", "name a file of costs/ in the program's cache"
        )
    return found


def _table(verify: str, draft: str) -> CostTable:
    try:
        points = {int(rows): float(ms) * MS for rows, ms in (pair.split(":") for pair in verify.split(","))}
        first, step = (float(ms) * MS for ms in draft.split(","))
        if min(points) != 1 or min(*points.values(), first, step) <= 0:
            raise ValueError
    except ValueError as error:
        raise UsageError(
            f"--verify {verify} --draft {draft} are no costs in milliseconds that begin with 1 row",
            "such as --verify 1:2.5,8:3.0,32:8.6 --draft 0.24,0.09",
        ) from error
    return CostTable(tuple(sorted(points)), tuple(points[rows] for rows in sorted(points)), first, step)


def in_words(table: CostTable) -> str:
    """The table in milliseconds, for a note."""
    passes = ", ".join(
        f"{rows}: {seconds / MS:.2f}" for rows, seconds in zip(table.rows, table.verify, strict=True)
    )
    return f"ms of a pass by rows {passes}; of a level {table.extend / MS:.2f}, then {table.step / MS:.2f}"
