"""Section of the GPU check: compares every Triton kernel with its reference in plain PyTorch, on the device."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from treeeagle_edge.gpu_check.cases import cases
from treeeagle_edge.gpu_check.inputs import Case
from treeeagle_edge.gpu_check.probe import Finding, Probe
from treeeagle_edge.gpu_check.process import NOT_HERE, OK

# Limit of the largest difference, divided by the largest value. Kernels add in another order, and round attention's
# weights to 16 bits before their product.
_LIMIT = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.int8: 3e-2}
_POISON_BYTES = (2**12, 2**16, 2**20, 2**24)  # sizes of freed blocks that the allocator will give to a kernel


def check_kernels(probe: Probe, finding: Finding) -> None:
    """Find each kernel's largest relative error, and whether more runs give the same bits: a row for each shape."""
    problem = probe.triton_problem()
    if problem is not None:
        finding.rows.append(
            {"kernel": "all", "error": None, "limit": None, "result": f"{NOT_HERE}: {problem}"}
        )
        return
    for case in cases(probe.device, small=probe.sizes.name == "test"):
        if probe.left < 0:
            finding.notes.append(f"time was over before {case.name} and what follows it")
            return
        row = {"kernel": case.name, "error": None, "limit": _LIMIT[case.dtype]}
        probe.attempt(finding, row, partial(_judge, probe, finding, case))


def _judge(probe: Probe, finding: Finding, case: Case) -> dict[str, object]:
    poison(probe.device)
    first = case.ours()
    error = relative_error(first, case.expected())
    limit = _LIMIT[case.dtype]
    if not error <= limit:
        return {"error": error, "result": finding.fail(f"{case.name} is {error:.1e} from the reference")}
    for _ in range(probe.sizes.kernel_runs - 1):  # a race between threads would show as different bits
        if not all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, case.ours(), strict=True)
        ):
            return {"error": error, "result": finding.fail(f"{case.name} gives other bits when run again")}
    return {"error": error, "result": OK}


def relative_error(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Largest difference, divided by the largest expected value. Infinite where only one of the two has a NaN."""
    worst = 0.0
    for a, b in zip(ours, expected, strict=True):
        a, b = a.double(), b.double()
        if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
            return float("inf")
        a, b = a.nan_to_num(), b.nan_to_num()
        worst = max(worst, float((a - b).abs().max()) / max(float(b.abs().max()), 1e-30))
    return worst


def poison(device: torch.device) -> None:
    """Leave NaN in free memory, so that it shows where a kernel does not write its output."""
    held = [torch.full((size // 4,), float("nan"), device=device) for size in _POISON_BYTES for _ in range(4)]
    del held
