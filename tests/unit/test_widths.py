"""The widths of draft head and lm_head: what a wish gives, what it costs in the plan, and what is refused."""

from __future__ import annotations

import pytest

from treeeagle_edge.cli.options import MachineOptions, run_settings
from treeeagle_edge.errors import InputError, UsageError
from treeeagle_edge.hardware.cpu import Cpu, Ram
from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.hardware.nvidia import Gpu
from treeeagle_edge.planning.alternatives import alternatives
from treeeagle_edge.planning.memory_profile import parse_profile
from treeeagle_edge.planning.model_shapes import planned_model
from treeeagle_edge.planning.run_plan import RunPlan, pick_profile, plan_run
from treeeagle_edge.planning.speed_estimate import estimate_speed
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.units import GB
from treeeagle_edge.widths import Widths, choose_widths

pytestmark = pytest.mark.usefixtures("native_kernels")

LLAMA, TIED = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-4B"
PROFILE = """
name: mine
device: cpu
memory_gb: 10
model: Qwen/Qwen3-4B
bits: 4
context: 4096
tree: {depth: 3, branching: 4, nodes: 16}
reserve_gb: 0.5
head_bits: 4
lm_head_bits: 8
"""


def machine(card: float | None = None) -> Hardware:
    gpus = () if card is None else (Gpu(0, "a card", int(card * GB), int(card * GB), usable=True),)
    ram = Ram(24 * GB, 24 * GB, False)
    return Hardware("cuda:0" if gpus else "cpu", "for a test", Cpu("one", 2, 2, ("avx2",)), ram, gpus)


def made(here: Hardware, **wishes: object) -> RunPlan:
    settings = RunSettings(**wishes)  # type: ignore[arg-type]
    profile = pick_profile(settings, here)
    return plan_run(settings, profile, here, planned_model(settings, profile))


@pytest.mark.parametrize(
    ("bits", "device", "usual"),
    [
        (4, "cuda:0", Widths(4, 16, 16)),
        (8, "cuda", Widths(8, 16, 16)),
        (4, "cpu", Widths(4, 8, 16)),
        (16, "cpu", Widths(16, 16, 16)),
        (32, "cuda:0", Widths(32, 32, 32)),
    ],
)
def test_the_usual_widths_are_those_of_before(bits: int, device: str, usual: Widths) -> None:
    assert choose_widths(bits, device, native=False) == usual


def test_wishes_are_met_one_by_one() -> None:
    assert choose_widths(4, "cuda", native=False, head=8) == Widths(4, 16, 8)
    assert choose_widths(4, "cuda", native=False, lm_head=8) == Widths(4, 8, 16)
    assert choose_widths(4, "cpu", native=False, head=4, lm_head=16) == Widths(4, 16, 4)
    assert choose_widths(32, "cpu", native=False, head=16) == Widths(32, 32, 16)
    assert choose_widths(4, "cpu", native=True) == Widths(4, 8, 4)
    assert choose_widths(8, "cpu", native=True, head=8, lm_head=8) == Widths(8, 8, 8)


@pytest.mark.parametrize(
    ("wish", "message", "hint"),
    [
        (
            {"head_bits": 16},
            "native kernels hold a draft head at 4 or 8 bits, not 16",
            "--head-bits 4 or 8, or --kernels",
        ),
        (
            {"lm_head_bits": 16},
            "native kernels hold lm_head at 8 bits, not 16",
            "--lm-head-bits 8, or --kern",
        ),
        ({"bits": 32, "lm_head_bits": 8}, "lm_head has 32 bits beside layers of 32 bits, not 8", "--bits 16"),
    ],
)
def test_what_cannot_be_had_is_refused(wish: dict[str, int], message: str, hint: str) -> None:
    """An option that cannot be honoured is an error; the same wish is met by PyTorch's kernels, or at other bits."""
    with pytest.raises(UsageError) as caught:
        made(machine(), **wish)
    assert caught.value.message == message and hint in (caught.value.hint or "")
    elsewhere = made(machine(), **{"bits": 8, **wish, "kernels": "torch"} | {"bits": 8})
    for name, bits in wish.items():
        if name != "bits":
            assert getattr(elsewhere.widths, name.removesuffix("_bits")) == bits


def test_without_a_head_its_width_is_no_matter() -> None:
    assert made(machine(), head_bits=4, speculate=False).backend.native


def test_the_options_name_what_they_take() -> None:
    settings = run_settings(MachineOptions(head_bits=8, lm_head_bits=16))
    assert (settings.head_bits, settings.lm_head_bits) == (8, 16)
    for wish, option, hint in (
        ({"head_bits": 32}, "--head-bits is 32", "use 4, 8 or 16"),
        ({"lm_head_bits": 4}, "--lm-head-bits is 4", "use 8 or 16"),
        ({"bits": 5}, "--bits is 5", "use 4, 8, 16 or 32"),
    ):
        with pytest.raises(UsageError) as caught:
            run_settings(MachineOptions(**wish))  # type: ignore[arg-type]
        assert caught.value.message.startswith(option) and caught.value.hint == hint


def test_a_profile_may_name_them_and_options_win() -> None:
    profile = parse_profile(PROFILE, "f")
    assert (profile.head_bits, profile.lm_head_bits) == (4, 8)
    here = machine(12)
    model = planned_model(RunSettings(), profile)
    assert plan_run(RunSettings(), profile, here, model).widths == Widths(4, 8, 4)
    assert plan_run(RunSettings(head_bits=8, lm_head_bits=16), profile, here, model).widths == Widths(
        4, 16, 8
    )
    with pytest.raises(UsageError, match="native kernels hold a draft head at 4 or 8 bits, not 16"):
        plan_run(RunSettings(head_bits=16), profile, machine(), model)
    for line in ("head_bits: 32", "lm_head_bits: 4"):
        key = line.partition(":")[0]
        with pytest.raises(InputError, match=f"f has {line}, which is out of range"):
            parse_profile(
                "\n".join(it for it in PROFILE.splitlines() if not it.startswith(key)) + f"\n{line}\n", "f"
            )


def test_a_narrower_head_saves_room_and_time() -> None:
    """Llama-3.1-8B at 4 bits: a head of 0.85 GB becomes one of 0.43 or 0.24, its KV rows stay."""
    plans = {bits: made(machine(12), model=LLAMA, head_bits=bits) for bits in (16, 8, 4)}
    lines = {bits: plan.memory.line("head") for bits, plan in plans.items()}
    assert [line.name for line in lines.values()] == ["head (16-bit)", "head (int8)", "head (NF4)"]
    assert [round(line.nbytes / GB, 2) for line in lines.values()] == [0.85, 0.43, 0.24]
    assert len({plan.memory.line("KV").nbytes for plan in plans.values()}) == 1
    speeds = [estimate_speed(plan, 360) for plan in plans.values()]
    assert len({speed.plain for speed in speeds}) == 1, "without a tree the head is not read"
    assert speeds[0].tree < speeds[1].tree < speeds[2].tree  # type: ignore[operator]


@pytest.mark.parametrize(("model", "saves_memory"), [(LLAMA, True), (TIED, False)])
def test_a_narrower_lm_head_saves_reading_and_a_tied_one_costs_memory(model: str, saves_memory: bool) -> None:
    wide, narrow = (made(machine(12), model=model, lm_head_bits=bits) for bits in (16, 8))
    assert wide.memory == made(machine(12), model=model).memory, "16 bits are the usual on a card"
    config = wide.model.config
    matrix = config.vocab_size * config.hidden_size
    before, after = (plan.memory.line("embedding") for plan in (wide, narrow))
    copy = matrix + 4 * config.vocab_size
    assert after.nbytes - before.nbytes == (copy - 2 * matrix if saves_memory else copy)
    assert ("an int8 copy: more memory, less to read" in after.note) != saves_memory
    read = [estimate_speed(plan, 360).step_bytes for plan in (wide, narrow)]
    assert read[0] - read[1] == 2 * matrix - copy
    assert estimate_speed(narrow, 360).ceiling > 1.1 * estimate_speed(wide, 360).ceiling


def test_int8_on_a_card_plans_for_its_sums() -> None:
    """257 rows of Llama's gate and up: two codes in, two sums and their total out; on the CPU there are none."""
    extra = 257 * (2 * 4096 + 14 * 2 * 14_336)
    plain = made(machine(24), model=LLAMA, context=2048, bits=16)
    for wish in ({"bits": 8}, {"bits": 16, "head_bits": 8}):
        held = made(machine(24), model=LLAMA, context=2048, **wish)
        assert held.memory.line("workspace").nbytes - plain.memory.line("workspace").nbytes == extra
    cpu = [
        made(machine(), model=LLAMA, context=2048, bits=8, kernels="torch", head_bits=bits)
        for bits in (16, 8)
    ]
    assert cpu[0].memory.line("workspace").nbytes == cpu[1].memory.line("workspace").nbytes


def test_a_narrower_head_is_offered_where_it_makes_the_plan_fit() -> None:
    """And no option is that the run would then refuse: native kernels hold other widths than those asked for."""
    settings = RunSettings(model=LLAMA, bits=8, context=7168)
    misfit = made(machine(12), model=LLAMA, bits=8, context=7168)
    assert not misfit.memory.fits and alternatives(misfit, settings, machine(12))[0] == "--head-bits 8"
    assert made(machine(12), model=LLAMA, bits=8, context=7168, head_bits=8).memory.fits
    asked = RunSettings(model=LLAMA, bits=8, context=32_768, head_bits=16)
    misfit = made(machine(12), model=LLAMA, bits=8, context=32_768, head_bits=16)
    options = alternatives(misfit, asked, machine(12))
    assert options and "--device cpu" not in options and "--head-bits 8" not in options
    wide = made(machine(), model=LLAMA, bits=16, context=65_536, head_bits=16)
    assert not wide.memory.fits
    assert all("--bits" not in option for option in alternatives(wide, RunSettings(
        model=LLAMA, bits=16, context=65_536, head_bits=16), machine()))  # fmt: skip
