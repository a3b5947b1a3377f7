"""NVML and PyTorch as they answer on machines with cards that are not here."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest

from treeeagle_edge.hardware import nvidia

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


def faking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts fakes in place of pynvml and torch; `signs`: files of an NVIDIA driver are there."""

    def build(nvml=None, torch=None, signs=True):
        modules = {"pynvml": nvml, "torch": torch}
        real_import, real_find = (
            nvidia.importlib.import_module,
            nvidia.importlib.util.find_spec,
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
        monkeypatch.setattr(nvidia, "importlib", fake)
        monkeypatch.setattr(nvidia, "_driver_signs", lambda: signs)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return build
