"""Sections of the GPU check: whole passes of target and head, launched one by one and as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treeeagle_edge.gpu_check.inputs import random_tree
from treeeagle_edge.gpu_check.models import FREE, RandomModel, draw
from treeeagle_edge.gpu_check.probe import Finding, Probe, Row
from treeeagle_edge.gpu_check.sizes import Model
from treeeagle_edge.gpu_check.timing import EAGER, GRAPH, Arm, as_graph, interleaved, wait
from treeeagle_edge.kernels.dispatch import use_backend
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.model.head import Head
from treeeagle_edge.model.target import Target

GOAL = 1.25  # a verify pass of 16 rows should take at most 1.25 times as long as a step of plain decoding
# Relative difference. On another stream a product may be split differently, and then adds in another order.
_REPLAY_LIMIT = 0.02


class FixedPass:
    """A verify pass to repeat, in memory that stays: `rows` rows of a random tree after `prefix` tokens."""

    def __init__(self, target: Target, store: KVStore, rows: int, prefix: int, taps: tuple[int, ...]) -> None:
        device, vocab = target.device, target.config.vocab_size
        order = torch.randperm(prefix + rows, generator=torch.Generator().manual_seed(2)).to(device)
        visible = random_tree(rows)
        self._target = target
        self._store = store
        self._taps = taps
        self._ids = (torch.arange(rows) * 7 % vocab).to(device)
        self._positions = (prefix + visible.sum(dim=1) - 1).to(device)
        self._prefix, self._slots = order[:prefix], order[prefix:]
        self._visible = visible.to(device)

    def __call__(self) -> Tensor:
        """[rows, V] logits. The attention view is made anew, so that a CUDA graph contains that work too."""
        view = AttentionView(self._prefix, self._slots, self._visible)
        output = self._target.forward(self._ids, self._positions, self._slots, view, self._store, self._taps)
        return output.logits


def filled_store(target: Target, slots: int) -> KVStore:
    """A KV store of random keys and values."""
    config = target.config
    shape = (config.num_layers, slots, config.num_kv_heads, config.head_dim)
    return KVStore(*(draw(shape, target.device, target.kv_dtype, name) for name in ("keys", "values")))


def check_graphs(probe: Probe, finding: Finding) -> None:
    """For each attention and number of rows: can a pass be captured as a graph, and does a replay give the same?"""
    target = probe.model(probe.sizes.main).target(FREE, probe.sizes.context)
    store = filled_store(target, probe.sizes.prompt + probe.sizes.tree_rows)
    for name in probe.backends():
        for rows in (1, probe.sizes.tree_rows):
            call = FixedPass(target, store, rows, probe.sizes.prompt, probe.sizes.head.taps)
            row = {"attention": name, "rows": rows, "eager us": None, "graph us": None, "error": None}
            probe.attempt(finding, row, partial(_replay, probe, finding, name, call))


def _replay(probe: Probe, finding: Finding, name: str, call: FixedPass) -> Row:
    kept: list[Tensor] = []

    def captured() -> None:
        kept.append(call())

    with use_backend(name):
        expected = call().clone()
        arm = as_graph(captured, probe.device)
        kept[-1].zero_()
        arm.call()
        wait(probe.device)
        error = float((kept[-1] - expected).abs().max() / expected.abs().max())
        times = interleaved({EAGER: Arm(call), GRAPH: arm}, probe.device, probe.sizes.samples, probe.stop)
    found: Row = {"eager us": times[EAGER].us, "graph us": times[GRAPH].us, "error": error}
    if not error <= _REPLAY_LIMIT:
        found["result"] = finding.fail(f"a replay is {error:.1e} from the pass it was made of")
    return found


def check_passes(probe: Probe, finding: Finding) -> None:
    """Time a decoding step, a verify pass and the head's passes: a row for each attention and way of launching."""
    passes_of(probe, finding, probe.sizes.main, with_head=True)


def check_second_passes(probe: Probe, finding: Finding) -> None:
    """The same for the second model, without a head."""
    passes_of(probe, finding, probe.sizes.second, with_head=False)


def passes_of(probe: Probe, finding: Finding, which: Model, *, with_head: bool) -> None:
    """Time the passes of `which`, with those of the main model's head where `with_head`."""
    model = probe.model(which)
    columns = ("decode us", "verify us", "verify/decode", "extend us", "step us", "step/decode")
    for name in probe.backends():
        for how in (EAGER, GRAPH):
            row = {"model": which.name, "attention": name, "how": how, **dict.fromkeys(columns)}
            probe.attempt(
                finding,
                row,
                partial(_ratios, probe, model, name, how, with_head=with_head),
            )
    finding.notes.append(f"verify: {probe.sizes.tree_rows} rows; the goal is at most {GOAL} decoding steps")


def _ratios(probe: Probe, model: RandomModel, name: str, how: str, *, with_head: bool) -> Row:
    sizes = probe.sizes
    target = model.target(FREE, sizes.context)
    store = filled_store(target, sizes.prompt + sizes.tree_rows)
    taps = sizes.head.taps if with_head else ()
    calls: dict[str, Callable[[], object]] = {
        "decode": FixedPass(target, store, 1, sizes.prompt, taps),
        "verify": FixedPass(target, store, sizes.tree_rows, sizes.prompt, taps),
    }
    if with_head:
        calls |= head_calls(probe.head(), target, sizes.prompt, sizes.tree.branching)
    with use_backend(name):
        arms = {
            key: Arm(call) if how == EAGER else as_graph(call, probe.device) for key, call in calls.items()
        }
        times = interleaved(arms, probe.device, sizes.samples, probe.stop)
    found: Row = {f"{key} us": timing.us for key, timing in times.items()}
    if with_head:
        probe.facts |= {f"{name}.{how}.{key}": timing.us for key, timing in times.items()}
        found["step/decode"] = times["step"].us / times["decode"].us
    ratio = times["verify"].us / times["decode"].us
    return {**found, "verify/decode": ratio, "goal": "met" if ratio <= GOAL else "missed"}


def head_calls(head: Head, target: Target, prefix: int, branching: int) -> dict[str, Callable[[], Any]]:
    """The head's two kinds of passes: over one feature of the target, and over a drafted level."""
    device, config = target.device, head.config
    slots = torch.arange(prefix + branching, device=device)

    def view(rows: int) -> AttentionView:
        visible = torch.eye(rows, dtype=torch.bool, device=device)
        return AttentionView(slots[:prefix], slots[prefix : prefix + rows], visible)

    one, level = (torch.arange(rows, device=device) for rows in (1, branching))
    features = draw((1, config.num_taps * config.target_hidden_size), device, head.dtype, "features")
    hidden = draw((branching, config.hidden_size), device, head.dtype, "hidden")
    return {
        "extend": lambda: head.extend(features, one, one, slots[prefix : prefix + 1], view(1), branching),
        "step": lambda: head.step(hidden, level, level, slots[prefix:], view(branching), branching),
    }
