"""The expected speed, from the best known memory bandwidth: measured, from a data sheet, or of similar cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.planning.run_plan import RunPlan
from treeeagle_edge.planning.speed_estimate import SpeedEstimate, estimate_speed, joint_bandwidth
from treeeagle_edge.profiling.checks import WARN, Check
from treeeagle_edge.units import GB, format_gb

# Common cards: (GB, card, GB/s of the data sheet). They stand for a card that this machine does not have.
TYPICAL_CARDS = (
    (6, "an RTX 3050 with 6 GB", 168.0),
    (8, "an RTX 4060", 272.0),
    (8, "an RTX 3070", 448.0),
    (10, "an RTX 3080", 760.0),
    (12, "an RTX 3060", 360.0),
    (12, "an RTX 3080 with 12 GB", 912.0),
    (16, "an RTX 4060 Ti", 288.0),
    (16, "an RTX 4080", 717.0),
    (24, "an RTX 3090", 936.0),
    (24, "an RTX 4090", 1008.0),
    (32, "an RTX 5090", 1792.0),
    (48, "an RTX A6000", 768.0),
    (48, "an L40S", 864.0),
)
# A card's bytes, divided by the GB of its class, lie between these: a driver keeps some bytes, and "GB" often means
# 2^30.
_CLASS_MARGIN = (0.95, 1.08)
_TYPICAL_DDR = 40.0  # GB/s of two channels of DDR4, assumed where nothing is measured


@dataclass(frozen=True)
class Speed:
    """An estimate, and the source of its bandwidth in words."""

    source: str
    estimate: SpeedEstimate


def expected_speeds(
    plan: RunPlan, hardware: Hardware, *, measured: Mapping[str, float], verify_cost: float | None
) -> tuple[Speed, ...]:
    """Estimates for every possible bandwidth; none where no card of this size is known, or one of several that differ
    is not.

    measured: GB/s by device, of those that were measured. verify_cost: as `estimate_speed` takes it, or None.
    """
    sheets = {gpu.device: gpu.bandwidth for gpu in hardware.gpus if gpu.usable and gpu.bandwidth is not None}
    kinds = {(gpu.name, gpu.total) for gpu in hardware.gpus if gpu.usable and gpu.device in plan.devices}
    sources: list[tuple[str, Mapping[str, float]]] = []
    if measured.keys() >= set(plan.devices):
        sources = [("measured", measured)]
    elif hardware.gpu is None:
        sources = [("assumed, not measured", {plan.device: _TYPICAL_DDR})]
    elif sheets.keys() >= set(plan.devices):
        sources = [("data sheet", sheets)]
    elif len(kinds) == 1:
        low, high = _CLASS_MARGIN
        sources = [
            (f"data sheet of {card}", dict.fromkeys(plan.devices, speed))
            for size, card, speed in TYPICAL_CARDS
            if low <= hardware.total / (size * GB) <= high
        ]
    turns = ", cards in turn" if len(plan.devices) > 1 else ""
    return tuple(
        Speed(
            source + turns,
            estimate_speed(
                plan, joint_bandwidth(plan, rates), home=rates[plan.device], verify_cost=verify_cost
            ),
        )
        for source, rates in sources
    )


def check_speeds(speeds: tuple[Speed, ...], hardware: Hardware, plan: RunPlan) -> Iterator[Check]:
    """A line that says why no speed is given, where there is none."""
    if not speeds and len(plan.devices) > 1:
        text = f"the bandwidth of one of {', '.join(plan.devices)} is not listed here, so no speed is given"
        yield Check("speed", WARN, text, "run this without --fast, which measures it")
    elif not speeds:
        sizes = ", ".join(str(size) for size in sorted({size for size, *_ in TYPICAL_CARDS}))
        text = f"no card with {format_gb(hardware.total)} is listed here, so no speed is given"
        yield Check(
            "speed", WARN, text, f"cards with {sizes} GB are; or measure on the machine with the card"
        )
