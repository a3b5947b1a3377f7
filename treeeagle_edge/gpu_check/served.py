"""Section of the GPU check: which Triton kernels pass their trial in the shapes of a model, and run in its passes.

A kernel that fails its trial is not used by later sections either, as at a start of the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch

from treeeagle_edge.gpu_check.models import FREE
from treeeagle_edge.gpu_check.passes import FixedPass, filled_store, head_calls
from treeeagle_edge.gpu_check.probe import Finding, Probe, Row
from treeeagle_edge.gpu_check.process import NOT_HERE, OK
from treeeagle_edge.gpu_check.timing import wait
from treeeagle_edge.kernels import trial
from treeeagle_edge.kernels.dispatch import TRITON, leave_out, use_backend
from treeeagle_edge.model.kernel_shapes import head_shape, target_shape

_PRODUCT = "matmul_4bit_kernel"
_SERVES = {  # kernel -> the operations that it computes
    "ancestors_kernel": ("attention",),
    "rms_norm_kernel": ("rms_norm", "add_rms_norm"),
    "write_kernel": ("rotate_and_write",),
    "silu_gate_kernel": ("silu_gate",),
    _PRODUCT: ("matmul_4bit",),
}
_PASSES = ("decode", "verify", "extend", "step")


def check_served(probe: Probe, finding: Finding) -> None:
    """For each kernel: its trial, and how often a decoding step, a verify pass and the head's passes launch it."""
    problem = probe.triton_problem()
    if problem is not None:
        finding.rows.append({"kernel": "all", **dict.fromkeys(_PASSES), "result": f"{NOT_HERE}: {problem}"})
        return
    sizes = probe.sizes
    target = probe.model(sizes.main).target(FREE, sizes.context)
    head = probe.head()
    shapes = (
        target_shape(target.config, target.kv_dtype, target.bits),
        head_shape(head.config, head.dtype, 16),
    )
    refused = trial.refusals(TRITON, probe.device, shapes)
    leave_out(refused)
    store = filled_store(target, sizes.prompt + sizes.tree_rows)
    verify = FixedPass(target, store, sizes.tree_rows, sizes.prompt, sizes.head.taps)
    calls: dict[str, Callable[[], object]] = {
        "decode": FixedPass(target, store, 1, sizes.prompt, sizes.head.taps),
        "verify": verify,
        **head_calls(head, target, sizes.prompt, sizes.tree.branching),
    }
    launches = {name: _launches(call, probe.device) for name, call in calls.items()}
    for kernel, operations in _SERVES.items():
        row = {
            "kernel": ", ".join(trial.NAMES[operation] for operation in operations),
            **{name: launches[name][kernel] for name in _PASSES},
        }
        reasons = [refused[operation] for operation in operations if operation in refused]
        probe.attempt(finding, row, partial(_judge, finding, row, reasons, optional=kernel == _PRODUCT))
    finding.notes.append(_distance(verify))


def _launches(call: Callable[[], object], device: torch.device) -> Counter[str]:
    from treeeagle_edge.kernels.triton.launch import counted  # imports triton, so only where it can run

    with use_backend(TRITON), counted() as counter:
        call()
        wait(device)
    return counter


def _judge(finding: Finding, row: Mapping[str, object], reasons: list[str], *, optional: bool) -> Row:
    """Add the result to a row. optional: the kernel need not run, since bitsandbytes may multiply every matrix."""
    if reasons:
        return {"result": finding.fail(f"{row['kernel']}: {'; '.join(dict.fromkeys(reasons))}")}
    if all(row[name] for name in _PASSES):
        return {"result": OK}
    if optional:
        return {"result": f"{OK}: where there is no launch, bitsandbytes multiplies without unpacking"}
    return {"result": finding.fail(f"{row['kernel']} passed its trial and is missing from a pass")}


def _distance(verify: FixedPass) -> str:
    with use_backend("reference"):
        expected = verify().clone()
    with use_backend(TRITON):
        ours = verify()
    error = float((ours - expected).abs().max() / expected.abs().max())
    return f"logits of a verify pass differ from the reference's by {error:.1e} of the largest"
