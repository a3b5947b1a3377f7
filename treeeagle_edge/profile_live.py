"""The checks of `treeeagle profile` that compute: quantised layers, attention kernels, memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.kernels.dispatch import attention, available_backends, use_backend
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.linear import make_linear
from treeeagle_edge.profile_checks import FAIL, OK, WARN, Check
from treeeagle_edge.run_plan import RunPlan
from treeeagle_edge.tree import DraftTree

# Largest relative error a healthy layer of normal weights shows: NF4 is near 0.09, int8 near 0.007.
_ERROR_LIMIT = {4: 0.15, 8: 0.03}
_KERNEL_LIMIT = 1e-4  # relative, fp32
_BANDWIDTH_BYTES = 256 * 2**20  # beyond any desktop processor's cache
_BANDWIDTH_SECONDS = 0.15  # for each of copy and read
_VERIFY_BYTES = 8 * 2**20  # weights that the timing of a verify pass walks through
_VERIFY_REPEATS = 7


@dataclass(frozen=True)
class Bandwidth:
    """Measured memory speed in GB/s. copy counts bytes read and written."""

    copy: float
    read: float


def check_layers(device: torch.device) -> Iterator[Check]:
    """Run a 4-bit and an 8-bit layer [512, 512] on four rows and report the error against fp32."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(512, 512, generator=generator)
    x = torch.randn(4, 512, generator=generator)
    exact = x @ weight.T
    for bits, limit in _ERROR_LIMIT.items():
        name, article = f"{bits}-bit layer", "an" if bits == 8 else "a"
        try:
            layer = make_linear(weight, None, bits=bits, device=device, dtype=torch.bfloat16)
            got = layer(x.to(device=device, dtype=torch.bfloat16)).float().cpu()
        except (CannotRunError, RuntimeError, NotImplementedError) as error:
            reason = error.message if isinstance(error, CannotRunError) else str(error).strip().split("\n")[0]
            hint = error.hint if isinstance(error, CannotRunError) else None
            text = f"{article} {bits}-bit layer does not run on {device}: {reason}"
            yield Check(name, FAIL, text, hint or "use --bits 16")
            continue
        error_share = float((got - exact).norm() / exact.norm())
        good = error_share <= limit  # False for NaN
        text = f"{article} {bits}-bit layer runs on {device}, {100 * error_share:.1f} % from fp32"
        yield Check(
            name,
            OK if good else FAIL,
            text,
            None if good else f"more than {100 * limit:.0f} %: use --bits 16",
        )


def check_kernels(device: torch.device) -> Iterator[Check]:
    """Every attention backend against the reference, on a tree of six rows after a prefix of forty tokens."""
    tree = DraftTree((1, 2, 3, 4, 5, 6), (-1, 0, 0, 1, 1, 3), (0, 1, 1, 2, 2, 3), (0.0,) * 6)
    visible = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    for row, path in enumerate(tree.ancestors):
        visible[row, list(path)] = True
    generator = torch.Generator().manual_seed(11)
    slots = torch.randperm(64, generator=generator)
    view = AttentionView(slots[:40].to(device), slots[40 : 40 + len(tree)].to(device), visible.to(device))
    query = torch.randn(len(tree), 4, 32, generator=generator).to(device)
    keys, values = (torch.randn(64, 2, 32, generator=generator).to(device) for _ in range(2))
    with use_backend("reference"):
        expected = attention(query, keys, values, view)
    agreed = ["reference"]
    for name in available_backends():
        if name == "reference":
            continue
        with use_backend(name):
            worst = float(
                (attention(query, keys, values, view) - expected).abs().max() / expected.abs().max()
            )
        if worst <= _KERNEL_LIMIT:
            agreed.append(name)
        else:
            text = f"attention backend {name} is {worst:.1e} from the reference"
            yield Check("kernels", FAIL, text, "please report it")
    yield Check("kernels", OK, f"attention on a small tree: {', '.join(agreed)} agree")


def measure_bandwidth(device: torch.device) -> Bandwidth:
    """Copy and read speed of the device's memory over 256 MB, a third of a second in all."""
    source = torch.ones(_BANDWIDTH_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copy = _BANDWIDTH_BYTES * 2 / _fastest(lambda: target.copy_(source), device, _BANDWIDTH_SECONDS)
    read = _BANDWIDTH_BYTES / _fastest(source.sum, device, _BANDWIDTH_SECONDS)
    return Bandwidth(copy / 1e9, read / 1e9)


def measure_verify_cost(plan: RunPlan, device: torch.device) -> float | None:
    """Time of an MLP matrix over the tree's rows against one row, at the planned bits; None without a tree.

    Walks through several copies of the matrix, since the weights of a whole model do not stay in the cache.
    """
    if plan.tree is None:
        return None
    dtype = torch.float32 if plan.bits == 32 else torch.bfloat16
    rows, columns = plan.model.config.intermediate_size, plan.model.config.hidden_size
    first = make_linear(torch.randn(rows, columns), None, bits=plan.bits, device=device, dtype=dtype)
    copies = max(1, min(32, _VERIFY_BYTES // first.nbytes))
    layers = [first] + [
        make_linear(torch.randn(rows, columns), None, bits=plan.bits, device=device, dtype=dtype)
        for _ in range(copies - 1)
    ]

    def walk(x: Tensor) -> Callable[[], object]:
        return lambda: [layer(x) for layer in layers]

    one = walk(torch.randn(1, columns, dtype=dtype, device=device))
    many = walk(torch.randn(plan.tree.nodes + 1, columns, dtype=dtype, device=device))
    single = tree = float("inf")
    for _ in range(_VERIFY_REPEATS):  # interleaved, so that a busy moment meets both
        single = min(single, _time(one, device))
        tree = min(tree, _time(many, device))
    return min(max(1.0, tree / single), plan.tree.nodes + 1.0)


def describe_bandwidth(measured: Bandwidth, known: float | None, device: str) -> Check:
    """`known`: GB/s of the data sheet, None where there is none."""
    text = f"memory of {device}: {measured.copy:.0f} GB/s copying, {measured.read:.0f} GB/s reading"
    if known is not None:
        text += f"; {known:.0f} by the data sheet"
        if measured.read < 0.5 * known:
            return Check(
                "bandwidth", WARN, text, "another program may be using the card; nvidia-smi lists them"
            )
    return Check("bandwidth", OK, text)


def _fastest(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Shortest time of one call, in seconds, over about `seconds` of calls after a first one."""
    _time(call, device)
    best, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        best = min(best, _time(call, device))
    return best


def _time(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
