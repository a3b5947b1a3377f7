"""Checks that speculation gives the tokens of plain decoding: compares every id, at 8 and 4 bits, greedy and sampled.

python docs/check_exactness.py [--count 200] [--tokens 200] [--prompts FILE.jsonl] [--threads 2] [-o exactness.json]

The prompts are the built-in ones, those of the files, and made-up ones until there are `--count`: an earlier prompt,
followed by some tokens that the model draws at temperature 1. Each is answered plainly and with trees, greedily and at
temperature 0.8 with its own seed. For every second prompt the controller chooses the trees. The others have trees of
fixed shapes in turn, since on a busy machine the controller may choose none. End tokens do not end an answer, so that
every answer has `--tokens` tokens. There is no tolerance: exit code 1 where one id differs, or where nothing was
drafted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from measuring.runs import (
    PromptIds,
    Report,
    add_bits,
    add_prompts,
    as_ids,
    load_each,
    parser,
    questions,
    run,
    say,
)
from measuring.timing import decode

from treeeagle_edge.bench.samples import first_difference
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.markdown_table import aligned_table
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.sampling_params import SamplingParams

TEMPERATURE = 0.8
SHAPES = (
    None,
    TreeShape(5, 4, 16),
    None,
    TreeShape(2, 2, 3),
    None,
    TreeShape(8, 3, 11),
    None,
    TreeShape(6, 8, 31),
)
SHORTEST, STEP, LENGTHS = 4, 7, 13  # made-up tokens: 4, 11, 18, ... 88, then from the start


@dataclass
class Count:
    """What was compared in one mode at one width."""

    answers: int = 0
    tokens: int = 0
    tree_rounds: int = 0
    accepted: int = 0  # drafted tokens that became text, that is, tokens that could have been wrong
    differences: list[str] = field(default_factory=list)


def made_up(engine: Engine, bases: Sequence[PromptIds]) -> Iterator[PromptIds]:
    """Endless: each base in turn, followed by tokens that are new every time."""
    number = 0
    while True:
        base = bases[number % len(bases)]
        params = SamplingParams(
            max_tokens=SHORTEST + STEP * (number % LENGTHS), temperature=1.0, seed=1000 + number
        )
        drawn = decode(engine, base.ids, params, speculate=False).ids
        yield PromptIds("made up", f"{base.name}+{len(drawn)}", (*base.ids, *drawn))
        number += 1


def compare(
    engine: Engine, case: PromptIds, params: SamplingParams, shape: TreeShape | None, count: Count
) -> None:
    """Answer `case` plainly and with trees, and count. Without a shape the controller chooses the trees."""
    plain = decode(engine, case.ids, params, speculate=False)
    tree = decode(engine, case.ids, params, tree=shape)
    count.answers += 1
    count.tokens += len(plain.ids)
    count.tree_rounds += sum(item.kind == "tree" for item in tree.rounds)
    count.accepted += sum(item.accepted for item in tree.rounds)
    at = first_difference(plain.ids, tree.ids)
    if at is not None:
        count.differences.append(
            f"{case.name}, token {at}: plain {plain.ids[at : at + 1]}, tree {tree.ids[at : at + 1]}"
        )


def table(counts: dict[tuple[int, str], Count]) -> str:
    """One row for each width and mode."""
    header = (
        "bits",
        "sampling",
        "answers",
        "tokens compared",
        "rounds with a tree",
        "drafted tokens taken",
        "differ",
    )
    rows = [
        (str(bits), mode, f"{item.answers:,}", f"{item.tokens:,}", f"{item.tree_rounds:,}", f"{item.accepted:,}",
         str(len(item.differences)))
        for (bits, mode), item in counts.items()
    ]  # fmt: skip
    return aligned_table(header, rows, left=(1,))


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    add_prompts(made)
    add_bits(made)
    made.add_argument("--count", type=int, default=200, help="prompts")
    made.add_argument("--tokens", type=int, default=200, help="of every answer")
    return made.parse_args()


def main() -> int:
    """Compare, print the counts and every difference."""
    chosen = arguments()
    chosen.bits = chosen.bits or [8, 4]
    report = Report("exactness", chosen)
    runtimes = load_each(chosen, report, context=2048, nodes=0)
    first = runtimes[chosen.bits[0]]
    bases = as_ids(first, questions(chosen))
    given = bases[: chosen.count]
    cases = [*given, *islice(made_up(first.engine, bases), chosen.count - len(given))]
    modes = ("greedy", f"temperature {TEMPERATURE}")
    counts = {(bits, mode): Count() for bits in runtimes for mode in modes}
    for number, case in enumerate(cases):
        for bits, runtime in runtimes.items():
            for mode in modes:
                params = SamplingParams(
                    max_tokens=chosen.tokens,
                    temperature=0.0 if mode == "greedy" else TEMPERATURE,
                    seed=number,
                )
                compare(runtime.engine, case, params, SHAPES[number % len(SHAPES)], counts[bits, mode])
        differing = sum(len(item.differences) for item in counts.values())
        say(f"{number + 1}/{len(cases)} {case.name}: {differing} differences so far")
    note = f"{len(given)} prompts given, {len(cases) - len(given)} made up; kernels: {first.kernels}"
    data = {f"{bits}-bit, {mode}": vars(item) for (bits, mode), item in counts.items()}
    report.section("Exactness", table(counts), note, data=data)
    differences = [
        f"{bits}-bit, {mode}: {text}" for (bits, mode), item in counts.items() for text in item.differences
    ]
    for line in differences:
        print(f"- {line}")
    report.verdict("answers that differ", len(differences), 0, at_least=False)
    report.verdict("drafted tokens taken, in every row", min(item.accepted for item in counts.values()), 1)
    report.close()
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(run(main))
