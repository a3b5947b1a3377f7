"""The target that a head is trained for: planned without a head at first, and loaded only when it is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from treeeagle_edge.checkpoint.opening import Checkpoint, open_checkpoint
from treeeagle_edge.errors import UsageError
from treeeagle_edge.hardware.detection import Hardware, detect
from treeeagle_edge.model.protocols import TargetModel
from treeeagle_edge.model_loading import load_planned_target, plan_and_fetch
from treeeagle_edge.planning.run_plan import RunPlan, pick_profile
from treeeagle_edge.progress import Progress
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.tokenizer.codec import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class TargetSource:
    """A target that was found and planned for, but not loaded yet."""

    checkpoint: Checkpoint
    path: Path
    plan: RunPlan
    hardware: Hardware
    threads: int

    @property
    def name(self) -> str:
        """The model's short name."""
        return self.plan.model.name

    @property
    def bits(self) -> int:
        """Bits of its weights, as they will run."""
        return self.plan.bits

    @property
    def device(self) -> str:
        """ "cpu", "cuda:0"."""
        return self.plan.device

    @property
    def kernels(self) -> str:
        """ "native" or "torch"."""
        return "native" if self.plan.backend.native else "torch"

    @property
    def free_memory(self) -> int:
        """Bytes that the device has left beside the target's weights."""
        memory = self.plan.memory
        return self.hardware.budget - sum(memory.line(name).nbytes for name in ("weights", "embedding"))

    @property
    def fast_bf16(self) -> bool:
        """Whether this machine multiplies bf16 matrices faster than fp32 ones."""
        fast = ("avx512-bf16", "amx-bf16")
        return self.hardware.kind == "cuda" or any(
            name in self.hardware.cpu.instruction_sets for name in fast
        )

    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return load_tokenizer(self.path)

    def load(self, *, context: int, max_rows: int) -> TargetModel:
        """The target, for `context` tokens and passes of up to `max_rows` rows."""
        return load_planned_target(
            self.plan, self.checkpoint, self.threads, context=context, max_rows=max_rows
        )


def find_target(settings: RunSettings, progress: Progress) -> TargetSource:
    """Plan a run without a head, check that it fits, and fetch the model where it is missing.

    Raises the same errors as `load_runtime`, and UsageError where several devices were asked for.
    """
    settings = replace(settings, speculate=False, head=None)
    hardware = detect(settings.device)
    if hardware.asked_together:
        raise UsageError("a head is made on one device", f"use --device {hardware.device}")
    hardware = replace(hardware, together=())
    path, plan = plan_and_fetch(settings, pick_profile(settings, hardware), hardware, progress)
    threads = settings.threads or hardware.cpu.cores
    torch.set_num_threads(threads)
    return TargetSource(open_checkpoint(path), path, plan, hardware, threads)
