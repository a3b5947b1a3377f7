"""Measures the speed that is always required: transformers in fp32, plain decoding and tree decoding in one run.

python docs/measure_floor.py [--bits 8] [--tokens 64] [--threads 2] [-o floor.json]

All three answer each built-in prompt of the bench greedily, one after the other, in an order that changes with every
prompt. Speed is tokens after the first, divided by seconds after the first, so that the prefill does not count. The
result is the median over prompts of two ratios: plain / transformers (goal 2.5) and tree / plain (goal 1.3).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from treeeagle_edge.bench.arms import Bench
from treeeagle_edge.bench.prompts import builtin_prompts
from treeeagle_edge.bench.run import environment_of
from treeeagle_edge.bench.samples import PLAIN, TREE, Case, first_difference
from treeeagle_edge.markdown_table import aligned_table
from treeeagle_edge.runtime import load_runtime
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.sources.model_names import resolve_model

ORACLE = "transformers"
ARMS = (ORACLE, PLAIN, TREE)
GOALS = {"plain / transformers": 2.5, "tree / plain": 1.3}


@dataclass(frozen=True)
class Timed:
    """One answer: its ids, and the seconds from its first token to its last."""

    ids: tuple[int, ...]
    decode_s: float

    @property
    def tps(self) -> float:
        """Tokens after the first a second."""
        return (len(self.ids) - 1) / self.decode_s


class Stamps(StoppingCriteria):
    """Notes when each token comes, and never stops the answer."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """[batch] bool, all False."""
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Oracle:
    """`generate` of transformers on the same weights, in fp32, with its own KV cache."""

    def __init__(self, path: Path, stop_ids: frozenset[int]) -> None:
        """`path` is a Hugging Face directory or a .gguf file."""
        where = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
        self.model = AutoModelForCausalLM.from_pretrained(where[0], dtype=torch.float32, **where[1]).eval()
        self.stop_ids = sorted(stop_ids)

    def answer(self, ids: Sequence[int], max_tokens: int) -> Timed:
        """Greedy, ended by the stop ids or after `max_tokens`."""
        stamps = Stamps()
        prompt = torch.tensor([list(ids)])
        with torch.inference_mode():
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=self.stop_ids,
                pad_token_id=self.stop_ids[0],
                stopping_criteria=StoppingCriteriaList([stamps]),
            )
        return Timed(tuple(output[0, len(ids) :].tolist()), stamps.times[-1] - stamps.times[0])


def measure(
    arms: dict[str, Callable[[Case], Timed]], cases: Sequence[Case], repetitions: int
) -> list[dict[str, Any]]:
    """One entry for each prompt and repetition, with the speed of each arm."""
    entries: list[dict[str, Any]] = []
    for number in range(repetitions * len(cases)):
        case = cases[number % len(cases)]
        turn = number % len(ARMS)
        timed = {name: arms[name](case) for name in (*ARMS[turn:], *ARMS[:turn])}
        if any(len(answer.ids) < 2 for answer in timed.values()):
            print(f"{case.prompt}: an answer of one token has no speed, left out", file=sys.stderr)
            continue
        entry = {"scenario": case.scenario, "prompt": case.prompt, "tokens": len(timed[TREE].ids)}
        entry |= {f"{name}_tps": timed[name].tps for name in ARMS}
        entry["plain / transformers"] = timed[PLAIN].tps / timed[ORACLE].tps
        entry["tree / plain"] = timed[TREE].tps / timed[PLAIN].tps
        entry["tree differs at"] = first_difference(timed[PLAIN].ids, timed[TREE].ids)
        entries.append(entry)
        speeds = ", ".join(f"{name} {timed[name].tps:.1f}" for name in ARMS)
        print(f"{number + 1}/{repetitions * len(cases)} {case.prompt}: {speeds} tok/s", file=sys.stderr)
    return entries


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Every prompt, then the medians."""
    columns = [*(f"{name}_tps" for name in ARMS), *GOALS]
    rows = [
        (
            entry["scenario"],
            entry["prompt"],
            str(entry["tokens"]),
            *(f"{entry[key]:.1f}" for key in columns[:3]),
            *(f"{entry[key]:.2f}x" for key in columns[3:]),
            "same" if entry["tree differs at"] is None else f"differs @ token {entry['tree differs at']}",
        )
        for entry in entries
    ]
    middle = {key: median(entry[key] for entry in entries) for key in columns}
    bottom = [f"{middle[key]:.1f}" for key in columns[:3]] + [f"{middle[key]:.2f}x" for key in columns[3:]]
    header = (
        "scenario",
        "prompt",
        "tokens",
        "transformers tok/s",
        "plain tok/s",
        "tree tok/s",
        *GOALS,
        "parity",
    )
    return aligned_table(header, [*rows, ("median", "", "", *bottom, "")], left=(0, 1, 8))


def verdicts(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each ratio's median and quartiles beside its goal."""
    found: list[dict[str, Any]] = []
    for key, goal in GOALS.items():
        values = [entry[key] for entry in entries]
        low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        found.append(
            {"ratio": key, "median": middle, "quartiles": [low, high], "goal": goal, "met": middle >= goal}
        )
    return found


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="name, directory or .gguf file")
    parser.add_argument("--bits", type=int, default=8, choices=(4, 8, 16, 32), help="of our two arms")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--threads", type=int, default=2, help="of all three arms")
    parser.add_argument("--per-scenario", type=int, default=4, help="prompts of each of the five scenarios")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, help="write everything as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    return parser.parse_args()


def main() -> int:
    """Measure, print the table on stdout, and write the JSON."""
    chosen = arguments()
    load_before = os.getloadavg()[0]
    settings = RunSettings(model=chosen.model, bits=chosen.bits, threads=chosen.threads, device="cpu")
    runtime = load_runtime(settings)
    torch.set_num_threads(chosen.threads)
    stop_ids = runtime.tokenizer.stop_ids | runtime.generation.stop_ids
    params = SamplingParams(max_tokens=chosen.tokens, stop_ids=stop_ids)
    bench = Bench(runtime.engine, runtime.tokenizer, builtin_prompts(chosen.per_scenario), params)
    if bench.arms != (PLAIN, TREE):
        print(f"error: {runtime.model_name} has no head, so there is no tree arm", file=sys.stderr)
        return 1
    oracle = Oracle(resolve_model(chosen.model), stop_ids)

    def ours(arm: str) -> Callable[[Case], Timed]:
        def answer(case: Case) -> Timed:
            sample = bench.answer(case, params, arm)
            return Timed(sample.ids, sample.decode_s)

        return answer

    arms = {ORACLE: lambda case: oracle.answer(case.ids, chosen.tokens), PLAIN: ours(PLAIN), TREE: ours(TREE)}
    cases = [bench.case(prompt) for prompt in bench.prompts]
    for arm in arms.values():  # the first answer of each fills caches
        arm(cases[0])
    entries = measure(arms, cases, chosen.repetitions)
    results = verdicts(entries)
    print(table(entries))
    print()
    for result in results:
        low, high = result["quartiles"]
        word = "met" if result["met"] else "MISSED"
        print(
            f"{result['ratio']}: median {result['median']:.2f}x ({low:.2f}-{high:.2f}), goal {result['goal']}x {word}"
        )
    loads = [load_before, os.getloadavg()[0]]
    print(f"load average before and after: {loads[0]:.1f}, {loads[1]:.1f} on {os.cpu_count()} cores")
    if chosen.output:
        document = {
            "schema": "treeeagle-floor/1",
            "environment": environment_of(runtime) | {"load_average": loads},
            "settings": {**vars(chosen), "output": None},
            "results": results,
            "prompts": entries,
        }
        chosen.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if chosen.check and not all(result["met"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
