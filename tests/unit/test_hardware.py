"""Which device is chosen, and the sentence that says why, with faked answers of NVML and PyTorch."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
from hardware_fakes import (
    MIB,
    RTX_3060,
    RTX_3070_8GB,
    RTX_3080_12GB,
    RTX_4080,
    RTX_4090,
    FakeNvml,
    FakeTorch,
)

from treeeagle_edge.errors import CannotRunError, UsageError
from treeeagle_edge.hardware.detection import detect, imagine_gpu
from treeeagle_edge.hardware.nvidia import Gpu
from treeeagle_edge.planning.model_shapes import planned_model
from treeeagle_edge.planning.run_plan import pick_profile, plan_run
from treeeagle_edge.settings import RunSettings


@pytest.mark.parametrize(
    "card", [RTX_3060, RTX_3080_12GB, RTX_4080, RTX_4090, RTX_3070_8GB], ids=lambda card: card[0]
)
def test_a_card_is_chosen_with_its_facts(machine, card):
    name, total, capability, bandwidth = card
    nvml = FakeNvml([card])
    machine(nvml, FakeTorch([card]))
    found = detect()
    assert found.device == "cuda:0" and found.kind == "cuda"
    free, driver = (total - 512) * MIB, "580.95.05"
    assert found.gpu == Gpu(0, name, total * MIB, free, capability, driver, "GPU-uuid-0", usable=True)
    assert found.gpu.bandwidth == bandwidth
    assert found.budget == found.gpu.free and found.total == found.gpu.total
    assert found.cuda_version == "12.8"
    assert name in found.why and "the only NVIDIA card" in found.why
    assert not nvml.open, "NVML was left open"


def test_the_10_gb_rtx_3080_has_the_narrower_bus():
    assert Gpu(0, "NVIDIA GeForce RTX 3080", 10240 * MIB, 0).bandwidth == 760


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 672),
        ("NVIDIA GeForce RTX 4070", 504),
        ("NVIDIA GeForce RTX 3080 Ti", 912),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA GeForce RTX 4080 Laptop GPU", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_bandwidth_is_looked_up_by_the_whole_name(name, bandwidth):
    assert Gpu(0, name, 16 * 10**9, 0).bandwidth == bandwidth


def test_of_two_cards_the_one_with_most_free_memory_is_chosen(machine):
    cards = [RTX_4090, RTX_3060]
    machine(FakeNvml(cards, free=[3000, 11000]), FakeTorch(cards))
    found = detect()
    assert found.device == "cuda:1" and found.gpu.name == RTX_3060[0]
    assert "most free memory of 2 cards" in found.why
    assert [gpu.name for gpu in found.gpus] == [RTX_4090[0], RTX_3060[0]]


def test_of_two_equal_cards_the_first_is_chosen(machine):
    cards = [RTX_3060, RTX_3060]
    machine(FakeNvml(cards), FakeTorch(cards))
    assert detect().device == "cuda:0"


def test_a_lost_card_does_not_hide_the_other(machine):
    """NVML stops at the lost one; PyTorch still sees the other, and its free memory is asked of PyTorch."""
    machine(FakeNvml([RTX_4090, RTX_3060], lost=0), FakeTorch([RTX_3060]))
    found = detect()
    assert found.gpu.name == RTX_3060[0] and found.budget == (12288 - 700) * MIB
    assert "the NVIDIA driver failed: GPU is lost" in found.notes


def plan_on(found):
    """The plan of Llama-3.1-8B as it would run on what was found."""
    run = RunSettings(model="meta-llama/Llama-3.1-8B-Instruct", context=8192)
    profile = pick_profile(run, found)
    return profile, plan_run(run, profile, found, planned_model(run, profile))


def test_a_plan_is_held_against_the_memory_that_is_free_on_the_chosen_card(machine):
    """Neither what is built in nor the sum over cards counts; profile and budget follow the card that was chosen."""
    cards = [RTX_4090, RTX_3060]
    machine(FakeNvml(cards, free=[9000, 11500]), FakeTorch(cards))
    profile, plan = plan_on(detect())
    assert (plan.device, profile.name) == ("cuda:1", "gpu-12gb")
    assert plan.memory.budget == 11500 * MIB and plan.memory.fits
    profile, plan = plan_on(detect("cuda:0"))
    assert (plan.device, profile.name) == ("cuda:0", "gpu-24gb")
    assert plan.memory.budget == 9000 * MIB
    assert plan.memory.line("reserve").nbytes == profile.reserve > 0, "a desktop's share is kept free"
    machine(FakeNvml(cards, free=[9000, 6000]), FakeTorch(cards))
    assert not plan_on(detect("cuda:1"))[1].memory.fits, "six GB are free, whatever the card has"


def test_a_device_that_is_asked_for_wins(machine):
    cards = [RTX_4090, RTX_3060]
    machine(FakeNvml(cards), FakeTorch(cards))
    assert detect("cuda:1").gpu.name == RTX_3060[0]
    assert "as --device asks" in detect("cuda:1").why
    assert detect("cuda").gpu.name == RTX_4090[0]
    with pytest.raises(CannotRunError, match="cuda:2 is not there") as error:
        detect("cuda:2")
    assert "cuda:0, cuda:1" in error.value.hint


def test_cards_are_numbered_as_pytorch_counts_them(machine):
    """NVML counts by bus, PyTorch by speed: they are matched by UUID."""
    cards = [RTX_3060, RTX_4090]
    machine(FakeNvml(cards), FakeTorch(cards, order=[1, 0]))
    found = detect()
    assert found.device == "cuda:0" and found.gpu.name == RTX_4090[0] and found.gpu.total == 24564 * MIB


def test_a_card_hidden_from_pytorch_is_listed_but_not_chosen(machine):
    cards = [RTX_4090, RTX_3060]
    machine(FakeNvml(cards), FakeTorch(cards, order=[1]))
    found = detect()
    assert found.gpu.name == RTX_3060[0]
    assert [(gpu.name, gpu.usable) for gpu in found.gpus] == [(RTX_3060[0], True), (RTX_4090[0], False)]


def test_runs_on_the_cpu_and_says_why(machine):
    """Expectations row 46: it runs on the CPU and nobody says why. Here one sentence says which device and why."""
    machine(FakeNvml(error="NVML Shared Library Not Found"), signs=False)
    found = detect()
    assert found.device == "cpu" and found.gpu is None
    assert found.why == "cpu: no NVIDIA driver answered"
    assert found.label.startswith("cpu (") and found.budget == found.ram.available

    machine(None, signs=False)
    assert detect().why == "cpu: no NVIDIA driver answered"

    machine(FakeNvml([RTX_3080_12GB]), FakeTorch(cuda=None))
    found = detect()
    assert found.why == "cpu: torch 2.13.0+cpu is a CPU build, so NVIDIA GeForce RTX 3080 stays unused"
    assert "CUDA build of torch" in found.hint
    assert [gpu.usable for gpu in found.gpus] == [False]

    machine(FakeNvml([RTX_3080_12GB]), FakeTorch([RTX_3080_12GB], available=False))
    found = detect()
    assert found.why == "cpu: torch with CUDA 12.8 cannot start on driver 580.95.05"
    assert "update the NVIDIA driver" in found.hint

    assert detect("cpu").why == "cpu: the CPU was asked for"


def test_hidden_devices_are_named_as_the_reason(machine, monkeypatch):
    machine(FakeNvml([RTX_4090]), FakeTorch([RTX_4090], available=False))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect().why == "cpu: CUDA_VISIBLE_DEVICES hides every card"


def test_a_failing_driver_is_reported_with_its_own_words(machine):
    machine(FakeNvml(error="Driver/library version mismatch"), FakeTorch(available=False))
    found = detect()
    assert found.why == "cpu: the NVIDIA driver failed: Driver/library version mismatch"
    assert "restart" in found.hint
    with pytest.raises(CannotRunError, match="mismatch") as error:
        detect("cuda")
    assert "restart" in error.value.hint


def test_a_card_is_found_without_nvml(machine):
    """The NVML package is a convenience: PyTorch alone is enough where a driver is there."""
    machine(None, FakeTorch([RTX_4080]))
    found = detect()
    assert found.device == "cuda:0" and found.gpu.total == 16376 * MIB and found.gpu.capability == (8, 9)
    assert "the package nvidia-ml-py is not installed" in found.notes


def test_no_card_listed(machine):
    machine(FakeNvml([]))
    assert detect().why == "cpu: the NVIDIA driver answered, but it lists no card"


def test_torch_is_not_imported_without_a_card(machine):
    class Untouchable(types.ModuleType):
        def __getattr__(self, name):
            raise AssertionError(f"torch was touched: {name}")

    machine(FakeNvml(error="NVML Shared Library Not Found"), Untouchable("torch"), signs=False)
    assert detect().device == "cpu"


def test_detection_imports_no_torch_on_this_machine():
    code = (
        "import sys; from treeeagle_edge.hardware.detection import detect; found = detect('cpu');"
        "assert found.cpu.threads >= found.cpu.cores >= 1 and found.ram.total >= found.ram.available > 0;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:0", ""])
def test_an_unknown_device_is_a_usage_error(device):
    with pytest.raises(UsageError, match="is unknown") as error:
        detect(device)
    assert "cuda:N" in error.value.hint


def test_a_card_can_be_imagined():
    here = detect("cpu")
    card = imagine_gpu(here, 12)
    assert card.device == "cuda:0" and card.budget == card.total == 12 * 10**9
    assert "--gpu-memory" in card.why and card.gpu.bandwidth is None
    with pytest.raises(UsageError, match="out of range"):
        imagine_gpu(here, 0)


def two_cards(machine):
    cards = [RTX_3060, RTX_3080_12GB]
    machine(FakeNvml(cards), FakeTorch(cards))
    return cards


@pytest.mark.parametrize(
    ("device", "taken", "name"),
    [
        ("cuda:1", "cuda:1", RTX_3080_12GB[0]),
        (" CUDA:0", "cuda:0", RTX_3060[0]),
        ("cuda:7", "cuda:7", RTX_3060[0]),
        ("cuda", "cuda:0", RTX_3060[0]),
        (None, "cuda:0", RTX_3060[0]),
    ],
)
def test_the_card_that_is_imagined_is_the_one_that_is_named(machine, device, taken, name):
    """With the name of the one that is here under this number, as far as it has about this size."""
    two_cards(machine)
    found = imagine_gpu(detect("cuda"), 12.9, device)
    assert (found.device, found.gpu.device, found.gpu.name) == (taken, taken, name)
    assert found.budget == 12.9e9 and found.why.startswith(f"{taken}: planned for a card with 12.9 GB")
    assert imagine_gpu(detect("cuda"), 40, device).gpu.name == "the planned card"


def test_cards_that_are_named_together_are_imagined_together(machine):
    two_cards(machine)
    found = imagine_gpu(detect("cuda"), 12.9, "cuda:1,cuda:0")
    assert (found.device, found.together, found.asked_together) == ("cuda:1", ("cuda:1", "cuda:0"), True)
    assert [card.free for card in found.cards] == [12_900_000_000] * 2
    assert [gpu.name for gpu in found.gpus] == [RTX_3080_12GB[0], RTX_3060[0]]
    assert found.why.startswith("cuda:1,cuda:0: planned for 2 cards with 12.9 GB each")


@pytest.mark.parametrize(
    ("device", "said"), [("cpu", "asks for the CPU"), ("CPU", "asks for"), ("gpu", "is unknown")]
)
def test_no_other_device_can_be_imagined(device, said):
    with pytest.raises(UsageError, match=said):
        imagine_gpu(detect("cpu"), 12, device)
