"""Where the bandwidth of an expected speed comes from, and which cards stand for one that is not here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treeeagle_edge.hardware.cpu import Cpu, Ram
from treeeagle_edge.hardware.detection import Hardware, imagine_gpu
from treeeagle_edge.hardware.nvidia import Gpu
from treeeagle_edge.planning.memory_profile import choose_profile
from treeeagle_edge.planning.model_shapes import planned_model
from treeeagle_edge.planning.run_plan import RunPlan, plan_run
from treeeagle_edge.planning.speed_estimate import joint_bandwidth
from treeeagle_edge.planning.torch_bytes import block_bytes, final_norm_bytes, output_bytes
from treeeagle_edge.profiling.speed import TYPICAL_CARDS, Speed, check_speeds, expected_speeds
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.units import GB

BARE = Hardware("cpu", "cpu: no card", Cpu("a processor", 4, 8, ("avx2",)), Ram(16 * GB, 12 * GB, False))


def planned(hardware: Hardware, settings: RunSettings) -> RunPlan:
    profile = choose_profile(hardware, model=settings.model)
    return plan_run(settings, profile, hardware, planned_model(settings, profile))


def speeds(hardware: Hardware, *, measured: dict[str, float] | None = None) -> tuple[Speed, ...]:
    plan = planned(hardware, RunSettings(model="Qwen/Qwen3-1.7B"))
    return expected_speeds(plan, hardware, measured=measured or {}, verify_cost=None)


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
    plan = planned(hardware, RunSettings(model="Qwen/Qwen3-1.7B"))
    (line,) = check_speeds((), hardware, plan)
    assert (line.status, line.text) == (
        "warn",
        f"no card with {memory:.1f} GB is listed here, so no speed is given",
    )
    assert (
        line.hint == "cards with 6, 8, 10, 12, 16, 24, 32, 48 GB are; or measure on the machine with the card"
    )
    assert list(check_speeds(speeds(imagine_gpu(BARE, 12)), hardware, plan)) == []


def test_typical_cards_have_the_bandwidth_their_names_have():
    """Both tables are from data sheets; the RTX 3050 has 6 GB on a narrower bus."""
    for size, card, speed in TYPICAL_CARDS:
        name = card.partition(" ")[2].partition(" with")[0]
        if size != 6:
            assert Gpu(0, name, size * GB, size * GB).bandwidth == speed, card


def test_the_nearest_source_is_taken():
    card = Gpu(0, "NVIDIA GeForce RTX 3090", 24 * GB, 24 * GB, (8, 6), usable=True)
    here = replace(BARE, device="cuda:0", gpus=(card,))
    assert [(s.source, s.estimate.bandwidth) for s in speeds(here, measured={"cuda:0": 800.0})] == [
        ("measured", 800.0)
    ]
    assert [(s.source, s.estimate.bandwidth) for s in speeds(here)] == [("data sheet", 936.0)]
    assert [(s.source, s.estimate.bandwidth) for s in speeds(BARE)] == [("assumed, not measured", 40.0)]
    elsewhere = speeds(here, measured={"cpu": 30.0})  # a card that is only planned for
    assert [s.source for s in elsewhere] == ["data sheet"]


def split_over(*names: str) -> tuple[Hardware, RunPlan]:
    """Llama-3.1-8B in 16 bits, which needs both cards."""
    cards = tuple(
        Gpu(index, f"NVIDIA GeForce {name}", 12 * GB, 11 * GB, (8, 6), usable=True)
        for index, name in enumerate(names)
    )
    devices = tuple(card.device for card in cards)
    hardware = replace(BARE, device="cuda:0", gpus=cards, together=devices)
    settings = RunSettings(model="meta-llama/Llama-3.1-8B-Instruct", bits=16, context=2048)
    plan = planned(hardware, settings)
    assert plan.devices == devices
    return hardware, plan


def test_cards_that_share_the_layers_are_priced_by_what_each_reads() -> None:
    """In turn: seconds add up, so a slow second card shows; the draft head is read at home."""
    same, slower, faster = (
        expected_speeds(plan, hardware, measured={}, verify_cost=None)[0].estimate
        for hardware, plan in (
            split_over("RTX 3060", "RTX 3060"),
            split_over("RTX 3060", "RTX 3050"),
            split_over("RTX 3060", "RTX 3090"),
        )
    )
    assert same.bandwidth == pytest.approx(360) and 224 < slower.bandwidth < 360 < faster.bandwidth < 936
    assert slower.plain < same.plain < faster.plain
    hardware, plan = split_over("RTX 3060", "RTX 3050")
    (measured,) = expected_speeds(
        plan, hardware, measured={"cuda:0": 300.0, "cuda:1": 300.0}, verify_cost=None
    )
    assert (measured.source, round(measured.estimate.bandwidth)) == ("measured, cards in turn", 300)
    by_hand = joint_bandwidth(plan, {"cuda:0": 100.0, "cuda:1": 300.0})
    layers = block_bytes(plan.model.config, 16) - final_norm_bytes(plan.model.config)
    there = layers * plan.layer_devices.count("cuda:1") // 32
    here = layers - there + output_bytes(plan.model.config, plan.widths) + final_norm_bytes(plan.model.config)
    assert by_hand == pytest.approx((here + there) / (here / 100 + there / 300))


def test_a_card_of_a_split_that_nobody_knows_leaves_no_speed() -> None:
    hardware, plan = split_over("RTX 3060", "RTX 9999")
    found = expected_speeds(plan, hardware, measured={"cuda:0": 300.0}, verify_cost=None)
    (line,) = check_speeds(found, hardware, plan)
    assert line.text == "the bandwidth of one of cuda:0, cuda:1 is not listed here, so no speed is given"
    assert "--fast" in str(line.hint)
