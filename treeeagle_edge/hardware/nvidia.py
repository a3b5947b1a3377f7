"""NVIDIA cards: asked through NVML, then checked against what this PyTorch can use. Both are imported when needed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# memory bandwidth in GB/s from the vendor's data sheets; a longer name is tried before a shorter one
_BANDWIDTH = {
    "RTX 3050": 224,
    "RTX 3060": 360,
    "RTX 3060 TI": 448,
    "RTX 3070": 448,
    "RTX 3070 TI": 608,
    "RTX 3080": 760,
    "RTX 3080 TI": 912,
    "RTX 3090": 936,
    "RTX 3090 TI": 1008,
    "RTX 4060": 272,
    "RTX 4060 TI": 288,
    "RTX 4070": 504,
    "RTX 4070 SUPER": 504,
    "RTX 4070 TI": 504,
    "RTX 4070 TI SUPER": 672,
    "RTX 4080": 717,
    "RTX 4080 SUPER": 736,
    "RTX 4090": 1008,
    "RTX 5060": 448,
    "RTX 5060 TI": 448,
    "RTX 5070": 672,
    "RTX 5070 TI": 896,
    "RTX 5080": 960,
    "RTX 5090": 1792,
    "RTX A4000": 448,
    "RTX A5000": 768,
    "RTX A6000": 768,
    "A100": 1555,
    "H100": 3350,
    "H200": 4800,
    "L4": 300,
    "L40S": 864,
    "T4": 320,
}
_RTX_3080_12GB = 912  # the same name as the 10 GB card, on a wider bus


@dataclass(frozen=True)
class Gpu:
    """One card. index: as PyTorch counts where it can use the card, else as NVML counts."""

    index: int
    name: str
    total: int  # bytes
    free: int  # bytes
    capability: tuple[int, int] | None = None  # CUDA compute capability
    driver: str | None = None
    uuid: str | None = None
    usable: bool = False  # PyTorch can run on it

    @property
    def device(self) -> str:
        """Its name as PyTorch has it, such as "cuda:1"."""
        return f"cuda:{self.index}"

    @property
    def bandwidth(self) -> float | None:
        """Memory bandwidth in GB/s from data sheets; None for a card the table does not know."""
        name = self.name.upper()
        if "LAPTOP" in name or "MAX-Q" in name:
            return None  # the same names on narrower buses
        words = f" {name} "
        for key in sorted(_BANDWIDTH, key=len, reverse=True):
            if f" {key} " in words or f" {key}-" in words:
                wide = key == "RTX 3080" and self.total > 11 * 10**9
                return float(_RTX_3080_12GB if wide else _BANDWIDTH[key])
        return None


@dataclass(frozen=True)
class NvidiaState:
    """Cards found and, where they cannot be used, the reason in words and what to do about it."""

    gpus: tuple[Gpu, ...]
    problem: str | None = None
    hint: str | None = None
    cuda_version: str | None = None  # of the PyTorch build
    driver_fault: bool = False  # the driver is what has to be mended


def detect_nvidia() -> NvidiaState:
    """Ask NVML for cards; import torch only when there is one, to learn whether it can be used."""
    signs = _driver_signs()
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        if not signs:
            return NvidiaState((), "no NVIDIA driver answered")
        return _torch_view((), "the package nvidia-ml-py is not installed")
    try:
        gpus = _ask_nvml(nvml)
    except nvml.NVMLError as error:
        failure = _nvml_failure(str(error).strip() or type(error).__name__, signs)
        seen = _torch_view((), failure.problem) if signs else failure
        return seen if any(gpu.usable for gpu in seen.gpus) else failure
    if not gpus:
        return NvidiaState((), "the NVIDIA driver answered, but it lists no card")
    return _torch_view(gpus, None)


def _ask_nvml(nvml: Any) -> tuple[Gpu, ...]:
    nvml.nvmlInit()
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        return tuple(_read_card(nvml, index, driver) for index in range(nvml.nvmlDeviceGetCount()))
    finally:
        nvml.nvmlShutdown()


def _read_card(nvml: Any, index: int, driver: str) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total=int(memory.total),
        free=int(memory.free),
        capability=(int(major), int(minor)),
        driver=driver,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
    )


def _nvml_failure(text: str, signs: bool) -> NvidiaState:
    if "not found" in text.lower() and not signs:
        return NvidiaState((), "no NVIDIA driver answered")
    hint = "run nvidia-smi; if it fails too, install the driver again and restart"
    if "mismatch" in text.lower():
        hint = "restart the computer: the driver was updated while in use"
    return NvidiaState((), f"the NVIDIA driver failed: {text}", hint, driver_fault=True)


def _driver_signs() -> bool:
    """True where files of an NVIDIA driver are there, native or through WSL2."""
    paths = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
    return any(Path(path).exists() for path in paths) or shutil.which("nvidia-smi") is not None


def _torch_view(gpus: tuple[Gpu, ...], nvml_problem: str | None) -> NvidiaState:
    """Mark the cards PyTorch can use, renumbered as it counts; the reason where there is none."""
    if importlib.util.find_spec("torch") is None:
        return NvidiaState(gpus, "torch is not installed", "run the installation again")
    torch = importlib.import_module("torch")
    names = " and ".join(gpu.name for gpu in gpus) or "the NVIDIA card"
    if torch.version.cuda is None:
        problem = f"torch {torch.__version__} is a CPU build, so {names} stays unused"
        return NvidiaState(gpus, problem, "install the CUDA build of torch to use the card")
    if not torch.cuda.is_available():
        if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
            return NvidiaState(gpus, "CUDA_VISIBLE_DEVICES hides every card", "unset CUDA_VISIBLE_DEVICES")
        driver = next((gpu.driver for gpu in gpus if gpu.driver), "of unknown version")
        problem = f"torch with CUDA {torch.version.cuda} cannot start on driver {driver}"
        hint = "update the NVIDIA driver, or install a torch build for an older CUDA"
        return NvidiaState(gpus, problem, hint, torch.version.cuda, driver_fault=True)
    visible = tuple(_merge(torch, index, gpus) for index in range(torch.cuda.device_count()))
    known = {gpu.uuid for gpu in visible}
    hidden = tuple(gpu for gpu in gpus if gpu.uuid not in known)
    return NvidiaState(visible + hidden, nvml_problem, None, torch.version.cuda)


def _merge(torch: Any, index: int, gpus: tuple[Gpu, ...]) -> Gpu:
    """Card `index` as PyTorch counts (fastest first) with NVML's facts (bus order), matched by UUID, else by name."""
    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-")
    matches = [gpu for gpu in gpus if uuid and (gpu.uuid or "").removeprefix("GPU-") == uuid]
    matches = matches or [gpu for gpu in gpus if not uuid and gpu.name == properties.name]
    if matches:
        return replace(matches[0], index=index, usable=True)
    free, total = torch.cuda.mem_get_info(index)
    capability = (int(properties.major), int(properties.minor))
    return Gpu(index, properties.name, int(total), int(free), capability, uuid=uuid or None, usable=True)


def _text(value: str | bytes) -> str:
    """NVML answered with bytes in its older Python packages."""
    return value.decode() if isinstance(value, bytes) else value
