"""Section of the GPU check: tokens per second, plain and with trees, at acceptance rates that a script sets.

Measured: the engine's own loop over a led target and a scripted head, which runs the passes of a real one. By
arithmetic: times of the graphs in section `passes`, added up to a round, without the host's part of drafting.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.gpu_check.answers import engine_of, prompt_of, script_of, tokens_per_round
from treeeagle_edge.gpu_check.models import LED, ScriptedHead
from treeeagle_edge.gpu_check.probe import Finding, Probe, Row
from treeeagle_edge.gpu_check.process import OK
from treeeagle_edge.gpu_check.timing import GRAPH, wait
from treeeagle_edge.kernels.dispatch import use_backend
from treeeagle_edge.sampling_params import SamplingParams

SETTLED = (2, 3, 4)  # tokens that a round gives
_REPETITIONS = 3


def check_speed(probe: Probe, finding: Finding) -> None:
    """For each attention and acceptance: tokens/s, and their ratio to plain decoding in the same run."""
    columns = ("wanted tokens/round", "tokens/round", "tokens/s", "speedup", "source")
    each = probe.left / len(probe.backends())
    for name in probe.backends():
        stop = time.perf_counter() + each
        row = {"attention": name, "arm": None, **dict.fromkeys(columns)}
        probe.attempt(finding, row, partial(_measured, probe, finding, name, stop))
        finding.rows += by_arithmetic(probe, name)


def _measured(probe: Probe, finding: Finding, name: str, stop: float) -> list[Row]:
    """Medians of plain decoding and of all trees, interleaved, over as many repetitions as time allows."""
    sizes = probe.sizes
    target = probe.model(sizes.main).target(LED, sizes.context)
    prompt = prompt_of(target, sizes.prompt)
    text = script_of(prompt, target, sizes.context + sizes.tree_rows)
    with use_backend(name):
        engines = {
            settled: engine_of(target, ScriptedHead(probe.head(), text, settled - 1), sizes)
            for settled in SETTLED
        }
        arms = {1: engines[SETTLED[0]], **engines}  # 1 token: the same engine, without drafting
        speeds: dict[int, list[float]] = {settled: [] for settled in arms}
        rates: dict[int, float] = {}
        for repetition in range(_REPETITIONS + 1):  # the first warms up
            if repetition > 1 and time.perf_counter() > stop:
                break
            for settled, engine in arms.items():
                speed, rates[settled] = _answer(probe, engine, prompt, speculate=settled > 1)
                if repetition:
                    speeds[settled].append(speed)
    plain = median(speeds[1])
    rows: list[Row] = []
    for settled, found in speeds.items():
        row: Row = {"arm": "tree" if settled > 1 else "plain", "wanted tokens/round": settled}
        row |= {"tokens/round": rates[settled], "tokens/s": median(found), "speedup": median(found) / plain}
        if rates[settled] != settled:
            row["result"] = finding.fail(
                f"{rates[settled]:.2f} tokens a round where the script has {settled}"
            )
        rows.append({**row, "source": "measured"})
    return rows


def _answer(probe: Probe, engine: Engine, prompt: list[int], *, speculate: bool) -> tuple[float, float]:
    """Tokens/s after the first token, by the host's clock, since the host runs the loop; and tokens per round."""
    engine.reset()
    params = SamplingParams(temperature=0.0, max_tokens=probe.sizes.answer)
    rounds = engine.generate(prompt, params, speculate=speculate, reuse_prefix=False)
    settled = [next(rounds)]
    wait(probe.device)
    started = time.perf_counter()
    settled += rounds
    wait(probe.device)
    seconds = time.perf_counter() - started
    return sum(len(one.ids) for one in settled[1:]) / seconds, tokens_per_round(settled)


def by_arithmetic(probe: Probe, name: str) -> list[Row]:
    """Tokens/s of rounds made of the graphs that section `passes` timed; no rows where it did not."""
    us = {key: probe.facts.get(f"{name}.{GRAPH}.{key}") for key in ("decode", "verify", "extend", "step")}
    decode, verify, extend, step = us["decode"], us["verify"], us["extend"], us["step"]
    if decode is None or verify is None or extend is None or step is None:
        return []
    whole = extend + (probe.sizes.tree.depth - 1) * step + verify
    rows: list[Row] = []
    for settled in (1, *SETTLED):
        each = decode if settled == 1 else whole
        rows.append(
            {
                "attention": name,
                "arm": "plain" if settled == 1 else "tree",
                "wanted tokens/round": settled,
                "tokens/round": float(settled),
                "tokens/s": 1e6 * settled / each,
                "speedup": settled * decode / each,
                "source": "arithmetic on graphs",
                "result": OK,
            }
        )
    return rows
