"""Section of the GPU check: the time of attention as contexts grow, in plain PyTorch and in Triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from treeeagle_edge.gpu_check.inputs import random_tree
from treeeagle_edge.gpu_check.linears import BANDWIDTH
from treeeagle_edge.gpu_check.models import draw
from treeeagle_edge.gpu_check.probe import Finding, Probe, Row
from treeeagle_edge.gpu_check.timing import Arm, fastest_arm, interleaved, repeated
from treeeagle_edge.kernels.dispatch import attention, use_backend
from treeeagle_edge.kernels.view import AttentionView

_MOST_LAYERS = 64


def check_attention(probe: Probe, finding: Finding) -> None:
    """Time one layer: a row of the table for each context and number of query rows.

    A share compares the bytes of its keys and values, divided by the time, with the measured bandwidth.
    """
    columns = ("rows", "layers", "reference us", "share", "triton us", "triton share", "how")
    for context in probe.sizes.contexts:
        if probe.left < 0:
            finding.notes.append(f"time was over before a context of {context:,}")
            return
        row = {"context": context, **dict.fromkeys(columns)}
        probe.attempt(finding, row, partial(_measure, probe, finding, context))


def _measure(probe: Probe, finding: Finding, context: int) -> list[Row]:
    """Time one query row and a tree of them, interleaved. There are so many layers that no cache holds their keys."""
    config, device, dtype = probe.sizes.main.config, probe.device, torch.bfloat16
    row_counts = (1, probe.sizes.tree_rows)
    slots = context + row_counts[-1]
    layer_bytes = 2 * context * config.num_kv_heads * config.head_dim * dtype.itemsize
    layers = max(1, min(_MOST_LAYERS, probe.sizes.ring_bytes // layer_bytes))
    shape = (layers, slots, config.num_kv_heads, config.head_dim)
    keys, values = (draw(shape, device, dtype, name) for name in ("keys", "values"))
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(1)).to(device)
    loops = max(1, probe.sizes.graph_bytes // (16 * layers * layer_bytes))
    arms: dict[str, Arm] = {}
    for rows in row_counts:
        query = draw((rows, config.num_heads, config.head_dim), device, torch.float32, "query")
        visible = random_tree(rows).to(device)
        for name in probe.backends():
            call = _pass(
                name, query, keys, values, (order[:context], order[context : context + rows], visible)
            )
            arm, reason = fastest_arm(repeated(call, loops), device)
            arms[f"{name} {rows}"] = Arm(arm.call, loops * layers, arm.how)
            if reason is not None:
                finding.notes.append(f"{name}: {reason}")
    times = interleaved(arms, device, probe.sizes.samples, probe.stop)
    bandwidth = probe.facts.get(BANDWIDTH)
    found: list[Row] = []
    for rows in row_counts:
        row: Row = {"rows": rows, "layers": layers}
        for name, share in (("reference", "share"), ("triton", "triton share")):
            timing = times.get(f"{name} {rows}")
            if timing is not None:
                row |= {f"{name} us": timing.us, "how": timing.how}
                row[share] = layer_bytes / (timing.us * 1e-6) / bandwidth if bandwidth else None
        found.append(row)
    return found


def _pass(
    name: str, query: Tensor, keys: Tensor, values: Tensor, seen: tuple[Tensor, Tensor, Tensor]
) -> Callable[[], None]:
    """Attention of all layers of a pass. What depends only on the tree is made once, as in a target."""

    def run() -> None:
        view = AttentionView(*seen)
        with use_backend(name):
            for k, v in zip(keys, values, strict=True):
                attention(query, k, v, view, k.dtype)

    return run
