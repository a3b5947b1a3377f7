"""Section of the GPU check: rounds that the host directs, rounds on the device, and those as CUDA graphs.

Graphs must give the same tokens as the same operations launched one by one, and many rounds must take no more memory
than the first ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.gpu_check.answers import HOST, engine_led, prompt_of, timed, tokens_per_round
from treeeagle_edge.gpu_check.branches import BRANCHES, branched
from treeeagle_edge.gpu_check.memory import allocator
from treeeagle_edge.gpu_check.models import FREE, LED
from treeeagle_edge.gpu_check.probe import Finding, Probe, Row
from treeeagle_edge.gpu_check.timing import EAGER, GRAPH
from treeeagle_edge.hardware.memory_watch import MemoryWatch
from treeeagle_edge.kernels.dispatch import use_backend
from treeeagle_edge.sampling_params import SamplingParams

TREE = "tree"
_REPETITIONS = 3
_SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, repetition_penalty=1.1, seed=7)
_COLUMNS = (
    *("tokens/round", "round us", "tokens/s", "same text", "looked up", "right", "rounds", "new bytes"),
    # two graphs, what they share, and what the driver keeps of them
    *("graphs", "pool bytes", "driver bytes"),
)


def check_rounds(probe: Probe, finding: Finding) -> None:
    """Check and time rounds: a row for each attention and way of running them, first with branches, over the best
    attention alone, then with trees.

    Time that is left over goes to counting memory.
    """

    def attempt(name: str, how: str, drafts: str, work: Callable[[], Row]) -> None:
        row = {"attention": name, "how": how, "drafts": drafts, **dict.fromkeys(_COLUMNS)}
        probe.attempt(finding, row, work)

    best = probe.backends()[-1]
    for drafts in BRANCHES:
        before: list[int] = []  # what rounds one by one said
        for how in (EAGER, GRAPH):
            attempt(best, how, drafts, partial(branched, probe, finding, best, how, drafts, before))
    texts: dict[str, list[int]] = {}  # way -> the ids of a free target, greedy and sampled
    for name in probe.backends():
        for how in (HOST, EAGER, GRAPH):
            stop = time.perf_counter() + probe.left / 3
            attempt(name, how, TREE, partial(_measured, probe, finding, name, how, texts, stop))


def _measured(
    probe: Probe, finding: Finding, name: str, how: str, texts: dict[str, list[int]], stop: float
) -> Row:
    with use_backend(name):
        texts[how] = _said(probe, how)
        before = _driver_bytes(probe.device)
        engine, prompt = _led(probe, how)
        found: Row = {"same text": _compared(finding, how, texts)}
        if how == GRAPH:
            pool = MemoryWatch(str(probe.device)).graphs()
            found |= {"graphs": 2, "pool bytes": pool, "driver bytes": _driver_bytes(probe.device) - before}
        times, settled = [], 0.0
        for repetition in range(_REPETITIONS + 1):  # the first warms up
            seconds, rounds = timed(probe, engine, prompt)
            settled = tokens_per_round(rounds)
            if repetition:
                times.append(seconds / (len(rounds) - 1))
        found |= {
            "tokens/round": settled,
            "round us": 1e6 * median(times),
            "tokens/s": settled / median(times),
        }
        if how == GRAPH:
            found |= _watched(probe, finding, engine, prompt, stop)
    return found


def _driver_bytes(device: torch.device) -> int:
    """Bytes of the card in use that PyTorch's allocator does not hold; 0 without CUDA."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _led(probe: Probe, how: str) -> tuple[Engine, list[int]]:
    """An engine whose text counts upwards, so that the script decides how many tokens a round gives; and a prompt."""
    target = probe.model(probe.sizes.main).target(LED, probe.sizes.context)
    prompt = prompt_of(target, probe.sizes.prompt)
    return engine_led(probe, target, how, prompt), prompt


def _said(probe: Probe, how: str) -> list[int]:
    """Ids of two answers of a free target: a greedy one, and one with every kind of sampling."""
    target = probe.model(probe.sizes.main).target(FREE, probe.sizes.context)
    prompt = prompt_of(target, probe.sizes.prompt)
    engine = engine_led(probe, target, how, prompt)
    ids: list[int] = []
    for params in (SamplingParams(), _SAMPLED):
        engine.reset()
        rounds = engine.generate(prompt, params, reuse_prefix=False)
        for settled in rounds:
            ids += settled.ids
            if len(ids) >= probe.sizes.answer * (1 + (params is _SAMPLED)):
                break
        rounds.close()
    return ids


def _compared(finding: Finding, how: str, texts: dict[str, list[int]]) -> str:
    """Compare the ids with those of the way before.

    Graphs do the same operations as rounds on the device, so that no token may differ. The host does others.
    """
    before = {EAGER: HOST, GRAPH: EAGER}.get(how)
    if before is None or before not in texts:
        return "nothing to compare with"
    pairs = zip(texts[before], texts[how], strict=False)
    at = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return "yes"
    if how == GRAPH:
        return finding.fail(f"graphs and the same rounds one by one part at token {at}")
    return f"other rows a pass, other rounding: they part at token {at}"


def _watched(probe: Probe, finding: Finding, engine: Engine, prompt: list[int], stop: float) -> Row:
    """How much more the allocator holds after many rounds than after the first answers."""
    before, rounds = allocator(probe.device), 0
    while rounds < probe.sizes.rounds and time.perf_counter() < stop:
        rounds += len(timed(probe, engine, prompt)[1]) - 1
    after = allocator(probe.device)
    found: Row = {"rounds": rounds}
    if before is None or after is None:
        return found
    found["new bytes"] = after["allocated"] - before["allocated"]
    grown = [name for name in before if after[name] > before[name]]
    if grown:
        found["result"] = finding.fail(f"memory grew over {rounds:,} rounds: {', '.join(grown)}")
    return found
