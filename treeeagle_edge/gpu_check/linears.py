"""Sections of the GPU check: the card's bandwidth, and how close products with 4- and 8-bit weights come to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from treeeagle_edge.gpu_check.models import draw
from treeeagle_edge.gpu_check.probe import Finding, Probe, Row
from treeeagle_edge.gpu_check.process import OK
from treeeagle_edge.gpu_check.products import matrices
from treeeagle_edge.gpu_check.sizes import Model
from treeeagle_edge.gpu_check.timing import Arm, Timing, fastest_arm, interleaved, repeated, walk
from treeeagle_edge.kernels import dispatch
from treeeagle_edge.kernels.triton.operands import BLOCK_SIZE
from treeeagle_edge.model.int8_rows import quantise_rows
from treeeagle_edge.model.linear import bitsandbytes_module

BANDWIDTH = "bandwidth"  # name of a fact, in bytes/s: later sections give their speed as a share of it
_MOST_COPIES = 64


def check_bandwidth(probe: Probe, finding: Finding) -> None:
    """Measure copying (bytes read and written) and reading. The faster one becomes the fact BANDWIDTH."""
    source = torch.ones(probe.sizes.copy_bytes // 4, device=probe.device)
    target = torch.empty_like(source)
    arms = {"copy": Arm(lambda: target.copy_(source)), "read": Arm(source.sum)}
    times = interleaved(arms, probe.device, probe.sizes.samples, probe.stop)
    nbytes = {"copy": 2 * source.nbytes, "read": source.nbytes}
    for name, timing in times.items():
        rate = nbytes[name] / (timing.fastest_us * 1e-6)
        probe.facts[BANDWIDTH] = max(rate, probe.facts.get(BANDWIDTH, 0.0))
        finding.rows.append(
            {"operation": name, "bytes": nbytes[name], "us": timing.us, "GB/s": rate / 1e9, "result": OK}
        )


@dataclass(frozen=True)
class FourBit:
    """One 4-bit weight as bitsandbytes packed it: what both products read."""

    packed: Tensor
    state: Any

    @property
    def nbytes(self) -> int:
        """Bytes that a product has to read of it."""
        return int(self.packed.nbytes + self.state.absmax.nbytes)

    def clone(self) -> FourBit:
        """The same weight in other memory."""
        state = copy.copy(self.state)
        state.absmax = state.absmax.clone()
        return FourBit(self.packed.clone(), state)


def pack(weight: Tensor) -> FourBit:
    """Quantise [out, in] to NF4 in blocks of 64 with scales in fp32, on its device."""
    functional = bitsandbytes_module().functional
    return FourBit(
        *functional.quantize_4bit(weight, blocksize=BLOCK_SIZE, quant_type="nf4", compress_statistics=False)
    )


@dataclass(frozen=True)
class EightBit:
    """One int8 weight with its scales, as the int8 product of CUDA reads it."""

    codes: Tensor
    absmax: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that a product has to read of it."""
        return self.codes.nbytes + self.absmax.nbytes

    def clone(self) -> EightBit:
        """The same weight in other memory."""
        return EightBit(self.codes.clone(), self.absmax.clone())


Packed = TypeVar("Packed", FourBit, EightBit)


def ring(weight: Packed, nbytes: int) -> list[Packed]:
    """The weight and copies of it, at least `nbytes` in all. Used in turn, none is in a cache when its turn comes."""
    found = [weight]
    while len(found) < min(_MOST_COPIES, -(-nbytes // weight.nbytes)):
        found.append(weight.clone())
    return found


def check_linears(probe: Probe, finding: Finding) -> None:
    """Time the products of the main model: bitsandbytes and Triton at 4 bits, and the int8 product.

    The table has a row for each matrix and number of rows, with times and shares of the measured bandwidth.
    """
    linears_of(probe, finding, probe.sizes.main, probe.sizes.product_rows)


def check_second_linears(probe: Probe, finding: Finding) -> None:
    """The same for the second model."""
    linears_of(probe, finding, probe.sizes.second, probe.sizes.product_rows)


def linears_of(probe: Probe, finding: Finding, which: Model, row_counts: tuple[int, ...]) -> None:
    """Time the matrices of `which` with each number of rows. Weights are drawn anew; the model need not be loaded."""
    for name, (out_size, in_size) in matrices(which.config).items():
        if probe.left < 0:
            finding.notes.append(f"time was over before {name}")
            return
        four, eight = ("bitsandbytes us", "share", "triton us", "triton share"), ("int8 us", "int8 share")
        columns = ("copies", *four, *eight, "16-bit us", "how")
        row = {"model": which.name, "matrix": name, "out": out_size, "in": in_size}
        probe.attempt(
            finding,
            {**row, "rows": None, **dict.fromkeys(columns)},
            partial(_measure, probe, finding, row, row_counts),
        )


def _measure(probe: Probe, finding: Finding, row: Row, row_counts: tuple[int, ...]) -> list[Row]:
    """Time all products with all numbers of rows, interleaved. `lm_head` is measured in 16 bits too."""
    weight = draw((row["out"], row["in"]), probe.device, torch.bfloat16, "weight")
    weights = ring(pack(weight), probe.sizes.ring_bytes)
    eight = ring(EightBit(*quantise_rows(weight, probe.device)), probe.sizes.ring_bytes)
    dense = weight if row["matrix"] == "lm_head" else None
    loops = max(1, -(-probe.sizes.graph_bytes // (weights[0].nbytes * len(weights))))
    walked = {"int8": len(eight), "16-bit": 1}
    arms: dict[str, Arm] = {}
    notes: dict[str, str] = {}
    for rows in row_counts:
        x = draw((rows, row["in"]), probe.device, torch.bfloat16, "x")
        for name, call in _calls(probe, x, weights, eight, dense).items():
            arm, reason = fastest_arm(repeated(call, loops), probe.device)
            arms[f"{name} {rows}"] = Arm(arm.call, loops * walked.get(name, len(weights)), arm.how)
            if reason is not None:
                notes[name] = reason
    times = interleaved(arms, probe.device, probe.sizes.samples, probe.stop)
    bandwidth = probe.facts.get(BANDWIDTH)
    finding.notes += [f"{name}: {reason}" for name, reason in notes.items()]
    nbytes = weights[0].nbytes, eight[0].nbytes
    return [
        {"rows": rows, "copies": len(weights), **_figures(times, rows, nbytes, bandwidth)}
        for rows in row_counts
    ]


def _calls(
    probe: Probe, x: Tensor, weights: list[FourBit], eight: list[EightBit], dense: Tensor | None
) -> dict[str, Callable[[], object]]:
    """The ways to multiply `x`, each with all weights of its ring. A 16-bit weight needs no ring: no cache holds it."""
    product = bitsandbytes_module().matmul_4bit
    walked = walk(eight, lambda each: dispatch.int8_product(x, each.codes, each.absmax))

    def int8_products() -> None:
        with dispatch.use_backend(probe.backends()[-1]):
            walked()

    calls: dict[str, Callable[[], object]] = {
        "bitsandbytes": walk(weights, lambda each: product(x, each.packed, quant_state=each.state)),
        "int8": int8_products,
    }
    if probe.triton_problem() is None:
        from treeeagle_edge.kernels.triton.matmul_4bit import matmul_4bit

        code = weights[0].state.code.float()
        calls["triton"] = walk(weights, lambda each: matmul_4bit(x, each.packed, each.state.absmax, code))
    if dense is not None:
        calls["16-bit"] = lambda: F.linear(x, dense)
    return calls


def _figures(
    times: dict[str, Timing], rows: int, nbytes: tuple[int, int], bandwidth: float | None
) -> dict[str, Any]:
    """Times and shares of one row. nbytes: of the weight at 4 and at 8 bits."""
    names = ("bitsandbytes", "triton", "int8", "16-bit")
    bnb, ours, eight, dense = (times.get(f"{name} {rows}") for name in names)

    def share(timing: Timing | None, read: int = nbytes[0]) -> float | None:
        return None if timing is None or not bandwidth else read / (timing.us * 1e-6) / bandwidth

    return {
        "bitsandbytes us": bnb.us if bnb else None,
        "share": share(bnb),
        "triton us": ours.us if ours else None,
        "triton share": share(ours),
        "int8 us": eight.us if eight else None,
        "int8 share": share(eight, nbytes[1]),
        "16-bit us": dense.us if dense else None,
        "how": bnb.how if bnb else None,
    }
