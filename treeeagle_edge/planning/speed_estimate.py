"""The speed to expect, by arithmetic: bytes that a step reads over memory bandwidth; what a tree costs and brings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from treeeagle_edge.planning.run_plan import RunPlan
from treeeagle_edge.planning.torch_bytes import (
    final_norm_bytes,
    head_bytes,
    layer_bytes,
    output_bytes,
    slot_bytes,
    step_bytes,
)

# Tokens of context whose K and V the expected speed reads along with the weights.
_TYPICAL_CONTEXT = 512
# Share of the bandwidth that matrix-vector kernels reach, low and high. "native" is measured.
_KERNEL_SHARE = {"cpu": (0.60, 0.75), "cuda": (0.60, 0.75), "native": (0.70, 1.00)}
# Seconds a decoder layer costs beyond its weights (small operations and their dispatch), low and high. "native" is
# measured.
_LAYER_OVERHEAD = {"cpu": (150e-6, 300e-6), "cuda": (10e-6, 60e-6), "native": (2e-6, 15e-6)}
# Tokens a round (accepted + 1) on chat: of a briefly trained EAGLE-3 head, and of a healthy one.
_TOKENS_PER_ROUND = (1.8, 3.0)
# Cost of a pass over M rows against one row, by kernels and bits: (rows, ratio), measured; between them interpolated.
# "cpu" and "cuda" are PyTorch's.
_VERIFY_COST = {
    ("native", 4): ((1, 1.0), (4, 1.0), (8, 1.36), (12, 1.84), (16, 2.4), (32, 4.6)),
    ("native", 8): ((1, 1.0), (4, 1.0), (8, 1.12), (12, 1.4), (16, 1.8), (32, 3.4)),
    ("cpu", 4): ((1, 1.0), (2, 1.05), (8, 1.6), (16, 2.4), (64, 9.0)),
    ("cpu", 8): ((1, 1.0), (2, 1.3), (4, 1.8), (8, 3.5), (16, 6.8), (64, 27.0)),
    ("cpu", 16): ((1, 1.0), (4, 1.0), (8, 1.2), (16, 2.2), (32, 2.2), (64, 3.4)),
    ("cpu", 32): ((1, 1.0), (2, 1.8), (16, 1.8), (32, 3.2), (64, 5.3)),
    ("cuda", 0): ((1, 1.0), (16, 1.05), (32, 1.3), (64, 2.1), (256, 8.0)),
}


@dataclass(frozen=True)
class SpeedEstimate:
    """Tokens per second. The ceiling is bandwidth over bytes; ranges are (low, high)."""

    bandwidth: float  # GB/s
    step_bytes: int  # weights that one step reads
    ceiling: float
    plain: tuple[float, float]
    tree: tuple[float, float] | None  # None without a head
    verify_cost: float | None  # a pass over the tree against a pass over one row


def estimate_speed(
    plan: RunPlan, bandwidth: float, *, home: float | None = None, verify_cost: float | None = None
) -> SpeedEstimate:
    """Expected speed of `plan` on memory of `bandwidth` GB/s.

    `home`: that of the card with the draft head, where layers lie on several; `verify_cost`: measured cost of a pass
    over the tree's rows against one row; without it the table serves.
    A tree round costs depth passes of the head and one verify pass, and yields 1.8 to 3 tokens with a head that fits.
    """
    native = plan.backend.native
    kind = "native" if native else plan.device.partition(":")[0]
    model, head = plan.model.config, plan.model.head
    tree = plan.tree.typical if plan.tree is not None else None
    widths = plan.memory.widths
    nbytes = step_bytes(model, widths, native=native)
    ideal = nbytes / (bandwidth * 1e9)
    real = ideal + min(_TYPICAL_CONTEXT, plan.context) * slot_bytes(model, plan.bits) / (bandwidth * 1e9)
    share, overhead = _KERNEL_SHARE[kind], _LAYER_OVERHEAD[kind]
    slow = real / share[0] + overhead[1] * model.num_layers
    fast = real / share[1] + overhead[0] * model.num_layers
    if tree is None or head is None:
        return SpeedEstimate(bandwidth, nbytes, 1 / ideal, (1 / slow, 1 / fast), None, None)
    cost = verify_cost if verify_cost is not None else table_verify_cost(kind, plan.bits, tree.nodes + 1)
    draft_ideal = head_bytes(head, widths.head, native=native) / ((home or bandwidth) * 1e9)
    slow_draft = tree.depth * (draft_ideal / share[0] + 2 * overhead[1])
    fast_draft = tree.depth * (draft_ideal / share[1] + 2 * overhead[0])
    low, high = _TOKENS_PER_ROUND
    rounds = (low / (slow * cost + slow_draft), high / (fast * cost + fast_draft))
    return SpeedEstimate(bandwidth, nbytes, 1 / ideal, (1 / slow, 1 / fast), rounds, cost)


def joint_bandwidth(plan: RunPlan, rates: Mapping[str, float]) -> float:
    """GB/s at which a step reads its weights, from those of each device of the plan: cards work in turn, so the seconds
    that each takes for its own part add up.
    """
    if len(plan.devices) == 1:
        return rates[plan.device]
    model, widths = plan.model.config, plan.widths
    read: Counter[str] = Counter({plan.device: output_bytes(model, widths) + final_norm_bytes(model)})
    for device, nbytes in zip(plan.layer_devices, layer_bytes(model, widths.layers), strict=True):
        read[device] += nbytes
    return read.total() / sum(nbytes / rates[device] for device, nbytes in read.items())


def table_verify_cost(kind: str, bits: int, rows: int) -> float:
    """Cost of a pass over `rows` rows against one row: interpolated in the table, in proportion beyond its end.

    kind: "native", or "cpu" or "cuda" for PyTorch's kernels there.
    """
    points = _VERIFY_COST.get((kind, bits)) or _VERIFY_COST[("cuda", 0)]
    for (low, low_cost), (high, high_cost) in pairwise(points):
        if rows <= high:
            return low_cost + (high_cost - low_cost) * (rows - low) / (high - low)
    last_rows, last_cost = points[-1]
    return last_cost * rows / last_rows
