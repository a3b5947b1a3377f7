"""The checks of `treeeagle profile` that compute: quantised layers, attention kernels, memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.gpu_check.timing import fastest_arm, walk
from treeeagle_edge.kernels import trial
from treeeagle_edge.kernels.dispatch import attention, available_backends, use_backend
from treeeagle_edge.kernels.trial_cases import SmallTree, small_tree
from treeeagle_edge.kernels.triton import availability
from treeeagle_edge.model.linear import Linear, make_linear
from treeeagle_edge.planning.run_plan import RunPlan
from treeeagle_edge.profiling.checks import FAIL, OK, WARN, Check
from treeeagle_edge.units import format_gb

# Largest relative error of a healthy layer with normally distributed weights. Usual are 0.09 at 4 bits, 0.007 at 8.
_ERROR_LIMIT = {4: 0.15, 8: 0.03}
_NATIVE_LIMIT = 0.02  # relative error: native attention rounds queries, keys, values and weights to bf16
_BANDWIDTH_BYTES = 256 * 2**20  # more than the cache of any desktop processor
_BANDWIDTH_SECONDS = 0.15  # for copying, and again for reading
_VERIFY_BYTES = 8 * 2**20  # size of the weights that a timed verify pass reads
_CUDA_VERIFY_BYTES = 256 * 2**20  # more than the L2 cache of any card, 96 MB
_NATIVE_VERIFY_BYTES = 64 * 2**20  # more, since native products from a large cache would not wait for memory
_VERIFY_REPEATS = 7


@dataclass(frozen=True)
class Bandwidth:
    """Measured memory speed in GB/s. For copy, bytes read and bytes written both count."""

    copy: float
    read: float

    @property
    def best(self) -> float:
        """The faster of the two, since the operation that measures may itself be a limit."""
        return max(self.copy, self.read)


def check_layers(device: torch.device, *, native: bool = False) -> Iterator[Check]:
    """Run a 4-bit and an 8-bit layer [512, 512] on four rows, and compare with fp32.

    native: whether they run on the native kernels, else on PyTorch's.
    """
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(512, 512, generator=generator)
    x = torch.randn(4, 512, generator=generator)
    exact = x @ weight.T
    for bits, limit in _ERROR_LIMIT.items():
        name = f"{bits}-bit layer"
        article = "a native" if native else "an" if bits == 8 else "a"
        try:
            got = _native_layer(weight, x, bits) if native else _torch_layer(weight, x, bits, device)
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


def _torch_layer(weight: Tensor, x: Tensor, bits: int, device: torch.device) -> Tensor:
    layer = make_linear(weight, None, bits=bits, device=device, dtype=torch.bfloat16)
    return layer(x.to(device=device, dtype=torch.bfloat16)).float().cpu()


def _native_layer(weight: Tensor, x: Tensor, bits: int) -> Tensor:
    from treeeagle_edge.profiling.native import native_layer

    return native_layer(weight, x, bits)


def check_kernels(device: torch.device, *, native: bool = False) -> Iterator[Check]:
    """Compare every attention backend with the reference, on a tree of six rows after a prefix of three hundred tokens.

    native: whether the native attention is one of them. On CUDA all Triton kernels are tried, in another process, since
    a broken kernel may break its process. One that fails or is wrong gives a warning: the reference runs in its place.
    """
    tree = small_tree(device)
    agreed = []
    for name in available_backends():
        apart = name == "triton" and device.type == "cuda"
        reason = trial.refusal_apart(name, device) if apart else trial.refusal(name, tree.case)
        if reason is None:
            agreed.append(name)
        elif name == "triton":
            hint = "the reference serves in its place, and is slower; please report it"
            yield Check("kernels", WARN, f"triton does not serve: {reason}", hint)
        else:
            yield Check("kernels", FAIL, f"attention backend {reason}", "please report it")
    missing = availability.problem() if device.type == "cuda" else None
    if missing is not None:
        yield Check("kernels", WARN, f"slower without Triton's kernels: {missing.message}", missing.hint)
    if native:
        worst = _native_error(tree)
        if worst <= _NATIVE_LIMIT:
            agreed.append("native")
        else:
            text = f"attention backend native is {worst:.1e} from the reference"
            yield Check("kernels", FAIL, text, "please report it")
    yield Check("kernels", OK, f"attention on a small tree: {', '.join(agreed)} agree")


def _native_error(tree: SmallTree) -> float:
    from treeeagle_edge.profiling.native import native_attention

    with use_backend("reference"):
        expected = attention(tree.query, tree.keys, tree.values, tree.view)
    got = native_attention(tree.query, tree.keys, tree.values, tree.view)
    return float((got - expected).abs().max() / expected.abs().max())


def measure_bandwidth(device: torch.device) -> Bandwidth:
    """Copy and read speed of the device's memory over 256 MB; takes a third of a second."""
    source = torch.ones(_BANDWIDTH_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copy = _BANDWIDTH_BYTES * 2 / _fastest(lambda: target.copy_(source), device, _BANDWIDTH_SECONDS)
    read = _BANDWIDTH_BYTES / _fastest(source.sum, device, _BANDWIDTH_SECONDS)
    return Bandwidth(copy / 1e9, read / 1e9)


def measure_verify_cost(plan: RunPlan, device: torch.device) -> float | None:
    """Time of an MLP's products with all rows of a tree, divided by that with one row. None without a tree.

    Uses the planned bits and kernels, and several copies of the weights, since those of a whole model do not stay in
    the cache.
    """
    if plan.tree is None:
        return None
    rows = plan.tree.typical.nodes + 1
    one, many = _native_calls(plan, rows) if plan.backend.native else _torch_calls(plan, rows, device)
    if device.type == "cuda":  # launched one by one, either would take as long as its launches
        one, many = (fastest_arm(call, device)[0].call for call in (one, many))
    single = tree = float("inf")
    for _ in range(_VERIFY_REPEATS):  # interleaved, so that a busy moment slows both
        single = min(single, _time(one, device))
        tree = min(tree, _time(many, device))
    return min(max(1.0, tree / single), float(rows))


def _native_calls(plan: RunPlan, rows: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Passes of the native kernels over one row and over `rows` rows."""
    from treeeagle_edge.profiling.native import TimedModel

    config = plan.model.config
    model = TimedModel(
        config.hidden_size,
        config.intermediate_size,
        bits=plan.bits,
        rows=rows,
        least_bytes=_NATIVE_VERIFY_BYTES,
    )
    return model.run(1), model.run(rows)


def _torch_calls(
    plan: RunPlan, rows: int, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """PyTorch's products with one row and with `rows` rows."""
    dtype = torch.float32 if plan.bits == 32 else torch.bfloat16
    n, k = plan.model.config.intermediate_size, plan.model.config.hidden_size
    least = _CUDA_VERIFY_BYTES if device.type == "cuda" else _VERIFY_BYTES
    weight = torch.randn(n, k)

    def layer() -> Linear:
        return make_linear(weight.clone(), None, bits=plan.bits, device=device, dtype=dtype)

    layers = [layer()]
    layers += [layer() for _ in range(min(32, least // layers[0].nbytes) - 1)]
    x = torch.randn(rows, k, dtype=dtype).to(device)
    return walk(layers, lambda layer: layer(x[:1])), walk(layers, lambda layer: layer(x))


def no_room(device: str) -> Check:
    """The line about a card that is too full to be measured."""
    text = f"{device} has less than {format_gb(2 * _BANDWIDTH_BYTES)} free, so it was not measured"
    return Check("bandwidth", WARN, text, "close what else uses the card; nvidia-smi lists it")


def describe_bandwidth(measured: Bandwidth, known: float | None, device: str) -> Check:
    """The line about memory bandwidth. known: GB/s of the card's data sheet, None where there is none."""
    text = f"memory of {device}: {measured.copy:.0f} GB/s copying, {measured.read:.0f} GB/s reading"
    if known is not None:
        text += f"; {known:.0f} by the data sheet"
        if measured.best < 0.5 * known:
            return Check(
                "bandwidth", WARN, text, "another program may be using the card; nvidia-smi lists them"
            )
    return Check("bandwidth", OK, text)


def _fastest(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Shortest time of one call, in seconds. After a first call, about `seconds` are spent on calling."""
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
