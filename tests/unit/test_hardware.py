"""Which device is chosen, and the sentence that says why, with faked answers of NVML and PyTorch."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from treeeagle_edge import hardware, hardware_cpu, hardware_nvidia
from treeeagle_edge.errors import CannotRunError, UsageError
from treeeagle_edge.hardware import detect, imagine_gpu
from treeeagle_edge.hardware_nvidia import Gpu
from treeeagle_edge.run_plan import pick_profile, plan_run, planned_model
from treeeagle_edge.settings import RunSettings

MIB = 1 << 20

# name, total MiB as NVML reports it, compute capability, GB/s of the data sheet
RTX_3060 = ("NVIDIA GeForce RTX 3060", 12288, (8, 6), 360)
RTX_3080_12GB = ("NVIDIA GeForce RTX 3080", 12288, (8, 6), 912)
RTX_4080 = ("NVIDIA GeForce RTX 4080", 16376, (8, 9), 717)
RTX_4090 = ("NVIDIA GeForce RTX 4090", 24564, (8, 9), 1008)
RTX_3070_8GB = ("NVIDIA GeForce RTX 3070", 8192, (8, 6), 448)


class FakeNvml(types.ModuleType):
    """Answers as NVML does for a list of (name, total MiB, capability, ...) cards; `free` in MiB."""

    class NVMLError(Exception):
        pass

    def __init__(self, cards=(), free=None, error=None, lost=None):
        super().__init__("pynvml")
        self.cards, self.error, self.lost = cards, error, lost
        self.free = free or [total - 512 for _, total, *_ in cards]
        self.open = False

    def nvmlInit(self):
        if self.error:
            raise self.NVMLError(self.error)
        self.open = True

    def nvmlShutdown(self):
        self.open = False

    def nvmlSystemGetDriverVersion(self):
        return b"580.95.05"  # older packages answer with bytes

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index == self.lost:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(total=self.cards[handle][1] * MIB, free=self.free[handle] * MIB)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return self.cards[handle][2]

    def nvmlDeviceGetName(self, handle):
        return self.cards[handle][0]

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-uuid-{handle}"


class FakeTorch(types.ModuleType):
    """The part of torch that detection asks. `order`: which NVML card is CUDA device 0, 1, ..."""

    def __init__(self, cards=(), order=None, cuda="12.8", available=True):
        super().__init__("torch")
        self.__version__ = "2.13.0" if cuda else "2.13.0+cpu"
        self.version = types.SimpleNamespace(cuda=cuda)
        order = list(range(len(cards))) if order is None else order

        def properties(index):
            name, total, (major, minor), *_ = cards[order[index]]
            return types.SimpleNamespace(
                name=name, major=major, minor=minor, total_memory=total * MIB, uuid=f"uuid-{order[index]}"
            )

        def mem_get_info(index):
            total = cards[order[index]][1] * MIB
            return total - 700 * MIB, total

        self.cuda = types.SimpleNamespace(
            is_available=lambda: available,
            device_count=lambda: len(order),
            get_device_properties=properties,
            mem_get_info=mem_get_info,
        )


@pytest.fixture
def machine(monkeypatch):
    """Put fakes in place of pynvml and torch; `signs`: files of an NVIDIA driver are there."""

    def build(nvml=None, torch=None, signs=True):
        modules = {"pynvml": nvml, "torch": torch}
        real_import, real_find = (
            hardware_nvidia.importlib.import_module,
            hardware_nvidia.importlib.util.find_spec,
        )

        def import_module(name):
            if name not in modules:
                return real_import(name)
            if modules[name] is None:
                raise ModuleNotFoundError(name)
            return modules[name]

        def find_spec(name):
            return modules[name] if name in modules else real_find(name)

        fake = types.SimpleNamespace(
            import_module=import_module, util=types.SimpleNamespace(find_spec=find_spec)
        )
        monkeypatch.setattr(hardware_nvidia, "importlib", fake)
        monkeypatch.setattr(hardware_nvidia, "_driver_signs", lambda: signs)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return build


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
        "import sys; from treeeagle_edge.hardware import detect; found = detect('cpu');"
        "assert found.cpu.threads >= found.cpu.cores >= 1 and found.ram.total >= found.ram.available > 0;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:0", ""])
def test_an_unknown_device_is_a_usage_error(device):
    with pytest.raises(UsageError, match="is unknown") as error:
        detect(device)
    assert "cuda:N" in error.value.hint


def test_native_windows_is_pointed_to_wsl2(monkeypatch):
    monkeypatch.setattr(hardware, "sys", types.SimpleNamespace(platform="win32"))
    with pytest.raises(CannotRunError, match="native Windows is not supported") as error:
        detect()
    assert "WSL2" in error.value.hint


def test_wsl2_is_noted(monkeypatch):
    version = "Linux version 5.15.167.4-microsoft-standard-WSL2"
    monkeypatch.setattr(hardware, "_kernel_version", lambda: version)
    assert any("WSL2" in note for note in detect("cpu").notes)


@pytest.fixture
def wsl(monkeypatch):
    monkeypatch.setattr(hardware, "_kernel_version", lambda: "Linux version 6.6.87.2-microsoft-standard-WSL2")


def test_on_wsl2_a_card_is_found_as_anywhere(machine, wsl):
    """Its library may be out of NVML's sight there: PyTorch sees the card, and knows what is free of it."""
    for nvml, free in (
        (FakeNvml([RTX_4080], free=[14000]), 14000),
        (FakeNvml(error="NVML Shared Library Not Found"), 16376 - 700),
        (None, 16376 - 700),
    ):
        machine(nvml, FakeTorch([RTX_4080]))
        found = detect()
        assert found.device == "cuda:0" and found.budget == free * MIB
        assert any(note.startswith("this is WSL2") for note in found.notes) and found.hint is None


def test_on_wsl2_a_driver_is_mended_in_windows(machine, wsl):
    """Expectations row 36: WSL sees no device. The advice is the one that helps there, where Linux has no driver."""
    for nvml in (FakeNvml(error="Driver/library version mismatch"), FakeNvml([RTX_3060])):
        machine(nvml, FakeTorch([RTX_3060], available=False))
        found = detect()
        assert found.device == "cpu" and "driver" in found.why
        assert found.hint.startswith("update the NVIDIA driver in Windows")
        with pytest.raises(CannotRunError) as error:
            detect("cuda")
        assert "wsl --shutdown" in error.value.hint
    machine(FakeNvml([RTX_3060]), FakeTorch(cuda=None))
    assert "CUDA build of torch" in detect().hint, "that is no fault of the driver"


def test_a_card_can_be_imagined():
    here = detect("cpu")
    card = imagine_gpu(here, 12)
    assert card.device == "cuda:0" and card.budget == card.total == 12 * 10**9
    assert "--gpu-memory" in card.why and card.gpu.bandwidth is None
    with pytest.raises(UsageError, match="out of range"):
        imagine_gpu(here, 0)


def test_instruction_sets_are_read_from_x86_and_arm():
    x86 = "processor : 0\nmodel name : Some CPU\nflags : fpu fma avx2 avx512f avx512_vnni amx_int8\n"
    assert hardware_cpu.parse_cpuinfo(x86) == (
        "Some CPU",
        ("amx-int8", "avx512-vnni", "avx512", "avx2", "fma"),
    )
    arm = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n"
    assert hardware_cpu.parse_cpuinfo(arm) == ("processor of unknown name", ("i8mm", "dotprod", "neon"))


@pytest.mark.parametrize(
    ("sets", "cores", "label"),
    [
        (("amx-int8", "avx512-vnni", "avx2"), 2, "cpu (2 cores, avx512-vnni)"),
        (("avx2",), 1, "cpu (1 core, avx2)"),
        ((), 4, "cpu (4 cores)"),
    ],
)
def test_the_label_names_the_best_instruction_set(sets, cores, label):
    assert hardware_cpu.Cpu("x", cores, cores, sets).label == label


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_caps_memory(tmp_path: Path, version):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    if version == 2:
        (proc / "self" / "cgroup").write_text("0::/box\n")
        folder, names, inactive = groups / "box", ("memory.max", "memory.current"), "inactive_file"
    else:
        (proc / "self" / "cgroup").write_text("4:memory:/box\n1:cpu:/\n")
        folder, names = groups / "memory" / "box", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        inactive = "total_inactive_file"
    folder.mkdir(parents=True)
    (folder / names[0]).write_text(f"{64 * MIB}\n")
    (folder / names[1]).write_text(f"{40 * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{inactive} {10 * MIB}\n")
    ram = hardware_cpu.detect_ram(proc, groups)
    assert ram == hardware_cpu.Ram(64 * MIB, 34 * MIB, limited=True)


def test_no_limit_leaves_memory_alone(tmp_path: Path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    (tmp_path / "memory.max").write_text("max\n")
    ram = hardware_cpu.detect_ram(tmp_path, tmp_path)
    assert not ram.limited and ram.total > 0


def test_a_cpu_quota_is_respected(tmp_path: Path):
    assert hardware_cpu._quota_threads(tmp_path) > 1000
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert hardware_cpu._quota_threads(tmp_path) == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert hardware_cpu._quota_threads(tmp_path) > 1000
