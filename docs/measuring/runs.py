"""What all scripts share: options, loading, prompts as ids, reports, and errors as sentences."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeeagle_edge.bench.prompts import BenchPrompt, builtin_prompts, read_prompts
from treeeagle_edge.bench.run import environment_of
from treeeagle_edge.errors import InputError, TreeEagleError
from treeeagle_edge.paths import cache_dir
from treeeagle_edge.runtime import Runtime, load_runtime
from treeeagle_edge.settings import RunSettings


@dataclass(frozen=True)
class PromptIds:
    """One question through the model's chat template."""

    scenario: str
    name: str
    ids: tuple[int, ...]


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that every script has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--threads", type=int, default=2, help="of every arm")
    made.add_argument("-o", "--output", type=Path, help="write everything as JSON")
    return made


def add_prompts(made: argparse.ArgumentParser, per_scenario: int = 4) -> None:
    """The options that choose model and prompts."""
    made.add_argument("--model", default="smollm2-135m", help="name, directory or .gguf file")
    made.add_argument("--prompts", type=Path, action="append", default=[], metavar="FILE.jsonl",
                      help="questions beside the built-in ones, in the MT-bench format; may be repeated")  # fmt: skip
    made.add_argument(
        "--per-scenario", type=int, default=per_scenario, help="built-in prompts of each scenario"
    )
    made.add_argument("--limit", type=int, help="questions of each file, all unless given")


def add_bits(made: argparse.ArgumentParser) -> None:
    """The widths to measure at."""
    made.add_argument("--bits", type=int, action="append", choices=(8, 4), help="both unless given")


def questions(chosen: argparse.Namespace) -> list[BenchPrompt]:
    """The built-in prompts, then those of the files."""
    found = list(builtin_prompts(chosen.per_scenario)) if chosen.per_scenario else []
    for path in chosen.prompts:
        found += read_prompts(path, turns="all", limit=chosen.limit)
    if not found:
        raise InputError("there are no prompts", "give --prompts, or --per-scenario 1 or more")
    return found


def load(chosen: argparse.Namespace, bits: int, *, context: int, **settings: Any) -> Runtime:
    """The model on the CPU. `settings` are fields of RunSettings."""
    wanted = RunSettings(
        model=chosen.model, bits=bits, threads=chosen.threads, device="cpu", context=context, **settings
    )
    return load_runtime(wanted)


def load_each(
    chosen: argparse.Namespace, report: Report, *, context: int, **settings: Any
) -> dict[int, Runtime]:
    """The model at each of `chosen.bits`, as `load` gives it; the report notes the first. All must have a tree arm."""
    runtimes = {bits: load(chosen, bits, context=context, **settings) for bits in chosen.bits}
    first = runtimes[chosen.bits[0]]
    require_head(first)
    report.environment(first)
    return runtimes


def require_head(runtime: Runtime) -> None:
    """Raise InputError where there is no tree arm."""
    if not runtime.engine.has_head:
        raise InputError(f"{runtime.model_name} has no draft head, so there is no tree to measure",
                         "name a head with the model, or take the demo model")  # fmt: skip


def forget_costs() -> None:
    """Delete measured costs of earlier starts: measured at a busy moment, they would give this run wrong trees."""
    for table in (cache_dir() / "costs").glob("*.json"):
        table.unlink(missing_ok=True)


def as_ids(runtime: Runtime, prompts: Sequence[BenchPrompt]) -> list[PromptIds]:
    """First turns, rendered and tokenised."""
    codec = runtime.tokenizer
    return [
        PromptIds(item.scenario, item.name,
                  tuple(codec.encode(codec.render([{"role": "user", "content": item.turns[0]}]))))
        for item in prompts
    ]  # fmt: skip


def long_prompt(runtime: Runtime, prompts: Sequence[BenchPrompt], tokens: int) -> tuple[int, ...]:
    """Exactly `tokens` ids: the prompts' text, repeated as often as needed."""
    text = "\n\n".join(item.turns[0] for item in prompts)
    ids = runtime.tokenizer.encode(text)
    return tuple((ids * (tokens // len(ids) + 1))[:tokens])


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


class Report:
    """Prints Markdown as soon as a part is known, and writes everything as one JSON document at the end."""

    def __init__(self, name: str, chosen: argparse.Namespace) -> None:
        settings = {
            key: [str(item) for item in value] if isinstance(value, list) else value
            for key, value in vars(chosen).items()
        }
        self.document: dict[str, Any] = {
            "schema": f"treeeagle-{name}/1",
            "settings": settings | {"output": None},
            "results": [],
        }
        self._output: Path | None = chosen.output
        self._load_before = os.getloadavg()[0]
        self.missed = 0

    def environment(self, runtime: Runtime) -> None:
        """Note versions and device."""
        self.document["environment"] = environment_of(runtime) | {"kernels": runtime.kernels}

    def section(self, title: str, table: str, *notes: str, data: Any = None) -> None:
        """A heading, a table, sentences below it; `data` goes to the JSON."""
        print("\n".join((f"### {title}", "", table, "", *notes)), flush=True)
        if notes:
            print()
        if data is not None:
            self.document[title] = data

    def verdict(self, what: str, value: float, goal: float, *, at_least: bool = True, unit: str = "") -> None:
        """One claim: its value, and the goal that it is compared with."""
        met = value >= goal if at_least else value <= goal
        self.missed += not met
        bar = f"{'at least' if at_least else 'at most'} {goal:g}{unit}"
        print(f"- {what}: {value:.4g}{unit}, bar {bar}: {'met' if met else 'MISSED'}", flush=True)
        self.document["results"].append({"what": what, "value": value, "bar": bar, "met": met})

    def close(self) -> None:
        """Print the machine's load, and write the JSON."""
        loads = [self._load_before, os.getloadavg()[0]]
        print(f"\nload average before and after: {loads[0]:.1f}, {loads[1]:.1f} on {os.cpu_count()} cores")
        self.document["load_average"] = loads
        if self._output is not None:
            self._output.write_text(json.dumps(self.document, indent=2, default=str) + "\n", encoding="utf-8")


def run(main: Callable[[], int]) -> int:
    """Run `main` and return its exit code. Errors of this program become a sentence and a hint on stderr."""
    try:
        return main()
    except TreeEagleError as error:
        say(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
        return error.exit_code
