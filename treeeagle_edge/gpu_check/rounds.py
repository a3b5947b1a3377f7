"""Section of the GPU check: rounds led by the host, rounds on the device, and the same as CUDA graphs.

Graphs must give the tokens that the same operations give one by one, and a thousand of them must take no more memory
than the first.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import torch

from treeeagle_edge.engine import Engine
from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.gpu_check.answers import engine_of, prompt_of, script_of, tokens_per_round
from treeeagle_edge.gpu_check.memory import allocator
from treeeagle_edge.gpu_check.models import FREE, LED, ScriptedHead
from treeeagle_edge.gpu_check.probe import Finding, Probe, Row
from treeeagle_edge.gpu_check.timing import EAGER, GRAPH, wait
from treeeagle_edge.kernels.dispatch import use_backend
from treeeagle_edge.memory_watch import MemoryWatch
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.target import Target

HOST = "led by the host"
_RIGHT = 2  # levels that the scripted head has right
_REPETITIONS = 3
_SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, repetition_penalty=1.1, seed=7)
_COLUMNS = (
    *("tokens/round", "round us", "tokens/s", "same text", "rounds", "new bytes"),
    *(
        "graphs",
        "pool bytes",
        "driver bytes",
    ),  # two graphs, what they share, and what the driver keeps of them
)


def check_rounds(probe: Probe, finding: Finding) -> None:
    """A row an attention and way of running rounds. Time that is left after the other ways goes to counting memory."""
    texts: dict[str, list[int]] = {}  # how -> what a free target said, greedily and sampled
    for name in probe.backends():
        for how in (HOST, EAGER, GRAPH):
            row = {"attention": name, "how": how, **dict.fromkeys(_COLUMNS)}
            stop = time.perf_counter() + probe.left / 3
            probe.attempt(finding, row, partial(_measured, probe, finding, name, how, texts, stop))


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
            seconds, rounds, settled = _timed(probe, engine, prompt)
            if repetition:
                times.append(seconds / rounds)
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


def _engine(probe: Probe, target: Target, how: str, text: list[int]) -> Engine:
    """Raises CannotRunError where graphs are wanted and there is no CUDA, RuntimeError where capturing failed."""
    if how == GRAPH and probe.device.type != "cuda":
        raise CannotRunError("CUDA graphs need a CUDA device", "run this on the machine with the card")
    places = probe.sizes.context + probe.sizes.tree_rows
    head = ScriptedHead(probe.head(), script_of(text, target, places), _RIGHT)
    engine = engine_of(target, head, probe.sizes, on_device=how != HOST, graphs=how == GRAPH)
    if how == GRAPH and engine.notes:
        raise RuntimeError(engine.notes[0])
    return engine


def _led(probe: Probe, how: str) -> tuple[Engine, list[int]]:
    """An engine whose text counts upwards, so that a round settles what the script wants; and a prompt."""
    target = probe.model(probe.sizes.main).target(LED, probe.sizes.context)
    prompt = prompt_of(target, probe.sizes.prompt)
    return _engine(probe, target, how, prompt), prompt


def _said(probe: Probe, how: str) -> list[int]:
    """Two answers of a target whose layers decide: greedy, and with every step of sampling."""
    target = probe.model(probe.sizes.main).target(FREE, probe.sizes.context)
    prompt = prompt_of(target, probe.sizes.prompt)
    engine = _engine(probe, target, how, prompt)
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
    """With the way before: graphs hold the same operations as the rounds one by one, the host does others."""
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


def _timed(probe: Probe, engine: Engine, prompt: list[int]) -> tuple[float, int, float]:
    """Seconds, rounds and tokens a round of one greedy answer after its first token."""
    engine.reset()
    rounds = engine.generate(prompt, SamplingParams(max_tokens=probe.sizes.answer), reuse_prefix=False)
    settled = [next(rounds)]
    wait(probe.device)
    started = time.perf_counter()
    settled += rounds
    wait(probe.device)
    return time.perf_counter() - started, len(settled) - 1, tokens_per_round(settled)


def _watched(probe: Probe, finding: Finding, engine: Engine, prompt: list[int], stop: float) -> Row:
    """What the allocator holds after many rounds, less what it held after the first answers."""
    before, rounds = allocator(probe.device), 0
    while rounds < probe.sizes.rounds and time.perf_counter() < stop:
        rounds += _timed(probe, engine, prompt)[1]
    after = allocator(probe.device)
    found: Row = {"rounds": rounds}
    if before is None or after is None:
        return found
    found["new bytes"] = after["allocated"] - before["allocated"]
    grown = [name for name in before if after[name] > before[name]]
    if grown:
        found["result"] = finding.fail(f"memory grew over {rounds:,} rounds: {', '.join(grown)}")
    return found
