"""Section of the GPU check: which kernel multiplies each matrix of a pass, by bitsandbytes' rule and by a profiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treeeagle_edge.gpu_check.models import draw
from treeeagle_edge.gpu_check.probe import Finding, Probe, Row
from treeeagle_edge.gpu_check.sizes import Model
from treeeagle_edge.gpu_check.timing import said, wait
from treeeagle_edge.kernels.triton.fallback import installed_rule
from treeeagle_edge.model.linear import Linear
from treeeagle_edge.model_config import ModelConfig

_SEEN = 3  # a row of the table names this many kernels, the slowest first


def check_products(probe: Probe, finding: Finding) -> None:
    """Find the kernels of the main model's products: a row for each matrix and number of rows."""
    products_of(probe, finding, probe.sizes.main)


def check_second_products(probe: Probe, finding: Finding) -> None:
    """The same for the second model."""
    products_of(probe, finding, probe.sizes.second)


def products_of(probe: Probe, finding: Finding, which: Model) -> None:
    """Note the kernel that bitsandbytes' rule names for each shape, and those that a profiler sees in one call."""
    model = probe.model(which)
    layer = model.weights.layers[0]
    linears = {"qkv": layer.qkv, "o": layer.output, "gate_up": layer.gate_up, "down": layer.down}
    for name, (out_size, in_size) in matrices(model.config).items():
        linear = linears.get(name, model.weights.lm_head)
        for rows in probe.sizes.product_rows:
            x = draw((rows, in_size), probe.device, model.dtype, "x")
            row = {"model": which.name, "matrix": name, "out": out_size, "in": in_size, "rows": rows}
            row |= {"stored as": type(linear).__name__, "rule": None, "seen": None}
            packed = linear is not model.weights.lm_head
            probe.attempt(finding, row, partial(_named, linear, x, out_size, packed=packed))


def _named(linear: Linear, x: Tensor, out_size: int, *, packed: bool) -> Row:
    return {
        "rule": _by_rule(x, out_size) if packed else "PyTorch's product",
        "seen": kernels_seen(partial(linear, x), x.device),
    }


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name -> (out, in) of the products of one pass. Products that share their input are fused into one."""
    q, k, v, o, gate, up, down = config.linear_shapes.values()
    return {
        "qkv": (q[0] + k[0] + v[0], q[1]),
        "o": o,
        "gate_up": (gate[0] + up[0], gate[1]),
        "down": down,
        "lm_head": (config.vocab_size, config.hidden_size),
    }


def _by_rule(x: Tensor, out_size: int) -> str:
    rule = installed_rule()
    if rule is None:
        return "there is none here"
    fused = rule(x.device.index or 0, x.dtype, x.shape[0], out_size, x.shape[1])
    return "multiplies packed weights" if fused else "unpacks the weight, then PyTorch's product"


def kernels_seen(call: Callable[[], object], device: torch.device) -> str:
    """Names of the device's kernels in `call` (on the CPU: of operations), the slowest first."""
    from torch.profiler import ProfilerActivity, profile

    call()
    wait(device)
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    try:
        with profile(activities=[kind]) as seen:
            call()
            wait(device)
        taken = {entry.key: _microseconds(entry, device) for entry in seen.key_averages()}
    except RuntimeError as error:
        return f"not seen: {said(error)}"
    names = [name[:60] for name in sorted(taken, key=lambda name: -taken[name]) if taken[name] > 0]
    return ", ".join(names[:_SEEN]) or "not seen: the profiler named no kernel"


def _microseconds(entry: Any, device: torch.device) -> float:
    """Time on the device; 0 for calls of CUDA's API, which are no kernels."""
    return float(entry.self_device_time_total if device.type == "cuda" else entry.self_cpu_time_total)
