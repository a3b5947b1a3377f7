"""Where the bandwidth of an expected speed comes from, and which cards stand for one that is not here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treeeagle_edge.hardware import Hardware, imagine_gpu
from treeeagle_edge.hardware_cpu import Cpu, Ram
from treeeagle_edge.hardware_nvidia import Gpu
from treeeagle_edge.profile_config import choose_profile
from treeeagle_edge.profiling.speed import TYPICAL_CARDS, Speed, check_speeds, expected_speeds
from treeeagle_edge.run_plan import plan_run
from treeeagle_edge.run_shapes import planned_model
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.units import GB

BARE = Hardware("cpu", "cpu: no card", Cpu("a processor", 4, 8, ("avx2",)), Ram(16 * GB, 12 * GB, False))


def speeds(hardware: Hardware, *, measured: float | None = None) -> tuple[Speed, ...]:
    settings = RunSettings(model="Qwen/Qwen3-1.7B")
    profile = choose_profile(hardware, model=settings.model)
    plan = plan_run(settings, profile, hardware, planned_model(settings, profile))
    return expected_speeds(plan, hardware, measured=measured, verify_cost=None)


def sources(memory: float) -> list[str]:
    """Of a planned card with `memory` GB."""
    return [speed.source.removeprefix("data sheet of ") for speed in speeds(imagine_gpu(BARE, memory))]


@pytest.mark.parametrize(
    ("memory", "cards"),
    [
        (8, ["an RTX 4060", "an RTX 3070"]),
        (8.589934592, ["an RTX 4060", "an RTX 3070"]),  # 8 GiB
        (10, ["an RTX 3080"]),
        (12, ["an RTX 3060", "an RTX 3080 with 12 GB"]),
        (15.5, ["an RTX 4060 Ti", "an RTX 4080"]),
        (24, ["an RTX 3090", "an RTX 4090"]),
    ],
)
def test_a_planned_card_is_priced_by_cards_of_its_own_memory(memory, cards):
    assert sources(memory) == cards


@pytest.mark.parametrize("memory", [4, 9.2, 14, 20, 100])
def test_no_card_of_another_memory_stands_in(memory):
    hardware = imagine_gpu(BARE, memory)
    assert sources(memory) == []
    (line,) = check_speeds((), hardware)
    assert (line.status, line.text) == (
        "warn",
        f"no card with {memory:.1f} GB is listed here, so no speed is given",
    )
    assert (
        line.hint == "cards with 6, 8, 10, 12, 16, 24, 32, 48 GB are; or measure on the machine with the card"
    )
    assert list(check_speeds(speeds(imagine_gpu(BARE, 12)), hardware)) == []


def test_typical_cards_have_the_bandwidth_their_names_have():
    """Both tables are from data sheets; the RTX 3050 has 6 GB on a narrower bus."""
    for size, card, speed in TYPICAL_CARDS:
        name = card.partition(" ")[2].partition(" with")[0]
        if size != 6:
            assert Gpu(0, name, size * GB, size * GB).bandwidth == speed, card


def test_the_nearest_source_is_taken():
    card = Gpu(0, "NVIDIA GeForce RTX 3090", 24 * GB, 24 * GB, (8, 6), usable=True)
    here = replace(BARE, device="cuda:0", gpus=(card,))
    assert [(s.source, s.estimate.bandwidth) for s in speeds(here, measured=800.0)] == [("measured", 800.0)]
    assert [(s.source, s.estimate.bandwidth) for s in speeds(here)] == [("data sheet", 936.0)]
    assert [(s.source, s.estimate.bandwidth) for s in speeds(BARE)] == [("assumed, not measured", 40.0)]
