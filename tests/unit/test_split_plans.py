"""Layers split over several cards: who gets how many, when it is done, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hardware_fakes import RTX_3060, RTX_3070_8GB, RTX_4090, FakeNvml, FakeTorch, faking
from plan_cases import machine, made_run

from treeeagle_edge.errors import CannotRunError, UsageError
from treeeagle_edge.hardware.detection import Hardware, detect
from treeeagle_edge.hardware.nvidia import Gpu
from treeeagle_edge.planning.alternatives import alternatives, require_fit
from treeeagle_edge.planning.card_shares import divide
from treeeagle_edge.planning.run_plan import RunPlan
from treeeagle_edge.profiling.checks import check_choices
from treeeagle_edge.profiling.output import report_json, report_lines
from treeeagle_edge.profiling.report import ProfileReport, Verdict
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.units import GB

LLAMA, QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-14B"


def cards(*free: float, asked: bool = False, named: str | None = None) -> Hardware:
    """A computer with cards of 12 GB of which so many GB are free; `named`: the one that --device names."""
    gpus = tuple(Gpu(i, f"card {i}", 12 * GB, int(each * GB), usable=True) for i, each in enumerate(free))
    by_room = tuple(f"cuda:{i}" for i in sorted(range(len(free)), key=lambda i: -free[i]))
    order = tuple(gpu.device for gpu in gpus) if asked else by_room
    together = () if named or len(free) < 2 else order
    return replace(
        machine(card=1), gpus=gpus, device=named or order[0], together=together, asked_together=asked
    )


def run(here: Hardware, model: str = LLAMA, bits: int = 16, context: int | None = 8192, **more) -> RunPlan:
    return made_run(RunSettings(model=model, bits=bits, context=context, **more), here)


def layers(plan: RunPlan) -> dict[str, int]:
    return {card.device: card.layers for card in plan.memory.cards}


@pytest.mark.parametrize(
    ("model", "bits", "context"), [(LLAMA, 16, 8192), (LLAMA, 16, 20_000), (QWEN, 4, 32_768), (QWEN, 8, 8192)]
)
def test_two_cards_of_12_gb_take_what_one_does_not(model: str, bits: int, context: int) -> None:
    assert not run(cards(11.5), model, bits, context).memory.fits
    plan = run(cards(11.5, 11.5), model, bits, context)
    assert plan.memory.fits and plan.context == context
    assert sum(layers(plan).values()) == plan.model.config.num_layers
    assert all(0 < card.nbytes <= card.free for card in plan.memory.cards)
    assert sum(card.nbytes for card in plan.memory.cards) == plan.memory.total, (
        "no byte is lost or counted twice"
    )
    assert plan.memory.budget == 23 * GB
    home, other = plan.memory.cards
    assert (home.device, home.home, other.home) == ("cuda:0", True, False)
    assert home.layers < other.layers, "the home also holds embedding, lm_head and head"
    assert plan.layer_devices == ("cuda:0",) * home.layers + ("cuda:1",) * other.layers


def test_unequal_cards_get_unequal_shares() -> None:
    even, uneven = layers(run(cards(11.5, 11.5))), layers(run(cards(14, 8.5)))
    assert uneven["cuda:0"] > even["cuda:0"] and uneven["cuda:1"] < even["cuda:1"]
    assert sum(uneven.values()) == 32


def test_what_a_desktop_takes_of_a_card_comes_off_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory is read, not assumed; on top a reserve is kept on each card."""
    machine_with = faking(monkeypatch)
    pair = [RTX_3060, RTX_3060]
    found = {}
    for taken in (0, 1500):
        machine_with(FakeNvml(pair, free=[11_800, 11_800 - taken]), FakeTorch(pair))
        here = detect()
        plan = run(here)
        assert here.together == ("cuda:0", "cuda:1") and plan.memory.fits
        assert plan.memory.cards[1].free == here.gpus[1].free
        assert plan.memory.line("reserve").nbytes == 2 * plan.profile.reserve
        found[taken] = layers(plan)["cuda:1"]
    assert found[1500] < found[0]


def test_one_card_with_room_is_not_split() -> None:
    plan = run(cards(11.5, 11.5), bits=4)
    assert plan.memory.cards == () and plan.split is None and plan.memory.fits
    assert plan.devices == ("cuda:0",) and set(plan.layer_devices) == {"cuda:0"}


def test_no_more_cards_than_needed_and_the_roomiest_first() -> None:
    plan = run(cards(4, 11.5, 11.5))
    assert list(layers(plan)) == ["cuda:1", "cuda:2"] and plan.device == "cuda:1"
    three = run(cards(8, 8, 8))
    assert list(layers(three)) == ["cuda:0", "cuda:1", "cuda:2"] and three.memory.fits


def test_a_card_that_is_named_stays_alone_and_the_others_are_an_alternative() -> None:
    here, settings = cards(11.5, 11.5, named="cuda:1"), RunSettings(model=LLAMA, bits=16, context=8192)
    plan = made_run(settings, here)
    assert plan.memory.cards == () and not plan.memory.fits
    assert "--device cuda:0,cuda:1" in alternatives(plan, settings, here)
    with pytest.raises(CannotRunError, match=r"are free on cuda:1$"):
        require_fit(plan, settings, here)


def test_who_names_two_cards_gets_both_in_that_order() -> None:
    plan = run(cards(11.5, 11.5, asked=True), bits=4)
    assert len(layers(plan)) == 2 and plan.memory.fits
    assert plan.split is not None and "as --device asks" in plan.split.text
    assert plan.split.hint == "--device cuda:0 keeps to one card"


def test_cards_that_do_not_suffice_together_are_refused_with_what_would_fit() -> None:
    here, settings = cards(7, 6), RunSettings(model=LLAMA, bits=16, context=8192)
    plan = made_run(settings, here)
    assert not plan.memory.fits and len(plan.memory.cards) == 2 and plan.memory.excess > GB
    with pytest.raises(
        CannotRunError, match=r"free on cuda:0 and cuda:1 together \(.* of 7.0 GB, .* of 6.0 GB\)"
    ) as e:
        require_fit(plan, settings, here)
    assert "--bits 4; " in str(e.value.hint)


def test_a_context_nobody_asked_for_is_split_before_it_is_shortened() -> None:
    whole = run(cards(11.5, 11.5), context=None)
    assert len(whole.memory.cards) == 2 and whole.context == min(whole.profile.context, 131_072)
    short = run(cards(9.9, 10.0), context=None)
    assert short.memory.fits and 1024 <= short.context < whole.context
    assert short.context == short.memory.longest_context
    assert not run(cards(9.9, 10.0), context=short.context + 64).memory.fits


def test_the_longest_context_is_that_of_the_cards_together() -> None:
    plan = run(cards(11.5, 11.5))
    assert run(cards(11.5, 11.5), context=plan.memory.longest_context).memory.fits
    assert not run(cards(11.5, 11.5), context=plan.memory.longest_context + 64).memory.fits


def test_layers_divide_by_room_and_never_past_it() -> None:
    assert divide([100, 100], 10, 10) == [5, 5]
    assert divide([300, 100], 10, 20) == [15, 5]
    assert divide([19, 81], 10, 9) == [1, 8], "in proportion 1.7 and 7.3, but there is room for one"
    assert divide([-5, 100], 10, 10) == [0, 10]
    assert divide([10, 30], 10, 8) == [2, 6], "too little room: as it would be"
    assert divide([0, 0], 10, 3) in ([2, 1], [1, 2])


def test_layers_that_a_repository_left_as_floats_are_counted_where_they_lie() -> None:
    """Exact bytes for each card, the largest layer for what fits."""
    from treeeagle_edge.model_config import StoredWidth
    from treeeagle_edge.planning.card_shares import Card
    from treeeagle_edge.planning.known_models import KNOWN_MODELS
    from treeeagle_edge.planning.memory_plan import plan_memory
    from treeeagle_edge.planning.torch_bytes import block_bytes, layer_bytes

    plain = tuple(f"model.layers.{i}.mlp.down_proj" for i in (0, 31))
    config = replace(KNOWN_MODELS[LLAMA].config, stored=StoredWidth(4, "NF4", plain))
    each = layer_bytes(config, 4)
    assert each[0] == each[31] > each[1] and sum(each) + 4096 * 4 == block_bytes(config, 4)
    over = [Card("cuda:0", 6 * GB), Card("cuda:1", 6 * GB)]
    plan = plan_memory(
        config, None, bits=4, context=4096, tree=None, reserve=GB, budget=0, device="cuda:0", cards=over
    )
    assert plan.fits and sum(card.nbytes for card in plan.cards) == plan.total


def test_the_plan_shows_one_line_for_each_card() -> None:
    here = cards(11.5, 11.0)
    plan = run(here)
    assert plan.split is not None
    assert [check.text for check in check_choices(plan) if check.name == "cards"] == [plan.split.text]
    assert "since no card has room alone" in plan.split.text and "without CUDA graphs" in plan.split.text
    assert plan.split.hint == "a shorter --context or fewer --bits may fit one card, which is faster"
    report = ProfileReport([], here, plan, [], Verdict(True, "fits", None))
    lines = [line.split() for line in report_lines(report)]
    home, other = (next(line for line in lines if line[:1] == [f"cuda:{i}"]) for i in (0, 1))
    assert home[-4:] == ["that", "is", "no", "layer"] and "layers" in home and "layers" in other
    made = json.loads(report_json(report))["plan"]["cards"]
    assert [(card["device"], card["first"]) for card in made] == [("cuda:0", 0), ("cuda:1", made[0]["stop"])]


def test_devices_are_named_one_or_several(monkeypatch: pytest.MonkeyPatch) -> None:
    trio = [RTX_4090, RTX_3060, RTX_3070_8GB]
    faking(monkeypatch)(FakeNvml(trio), FakeTorch(trio))
    assert detect().together == ("cuda:0", "cuda:1", "cuda:2") and not detect().asked_together
    assert detect("cuda").together == detect().together
    assert detect("cuda:1").together == () and detect("cpu").together == ()
    both = detect("cuda:2, cuda:1")
    assert (both.device, both.together, both.asked_together) == ("cuda:2", ("cuda:2", "cuda:1"), True)
    assert "as --device asks" in both.why
    assert both.label_of(both.together) == f"{RTX_3070_8GB[0]} (8.6 GB) + {RTX_3060[0]} (12.9 GB)"
    with pytest.raises(CannotRunError, match="device cuda:5 is not there"):
        detect("cuda:0,cuda:5")


@pytest.mark.parametrize("device", ["cuda:0,cpu", "cuda:0,cuda:0", "cuda,cuda:1", "cuda:0,", "cuda:0;cuda:1"])
def test_other_lists_are_refused(device: str) -> None:
    with pytest.raises(UsageError, match="is unknown"):
        detect(device)


def test_a_head_is_made_on_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    from treeeagle_edge.training import source

    monkeypatch.setattr(source, "detect", lambda device: cards(11.5, 11.5, asked=True))
    with pytest.raises(UsageError, match="a head is made on one device"):
        source.find_target(RunSettings(device="cuda:0,cuda:1"), print)
