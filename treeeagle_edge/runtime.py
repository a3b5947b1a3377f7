"""Puts a run together: device, plan, target, head, engine, tokenizer. Nothing is loaded before the plan fits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from treeeagle_edge.checkpoint import Checkpoint, open_checkpoint
from treeeagle_edge.costs import load_table, save_table
from treeeagle_edge.engine import Engine
from treeeagle_edge.generation_defaults import GenerationDefaults
from treeeagle_edge.hardware import Hardware, detect
from treeeagle_edge.head import Head
from treeeagle_edge.head_checkpoint import open_head
from treeeagle_edge.kernel_shapes import head_shape, target_shape
from treeeagle_edge.kernels.dispatch import OPERATIONS, serving
from treeeagle_edge.kernels.trial import choose_kernels
from treeeagle_edge.kernels.trial_cases import ModelShape
from treeeagle_edge.known_models import find_known
from treeeagle_edge.model_protocols import DraftHead, TargetModel
from treeeagle_edge.models import resolve_head, resolve_model
from treeeagle_edge.passes import MAX_EXPANSIONS, PREFILL_CHUNK
from treeeagle_edge.paths import cache_dir
from treeeagle_edge.plan import MemoryPlan
from treeeagle_edge.profile_config import MemoryProfile
from treeeagle_edge.rounds import MAX_BRANCHING, TreeShape
from treeeagle_edge.run_alternatives import require_fit
from treeeagle_edge.run_plan import RunPlan, pick_profile, plan_run, planned_model
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.target import Target, compute_dtype, load_target
from treeeagle_edge.tokenizer import Tokenizer, load_tokenizer

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Runtime:
    """Everything a command needs to answer, and what it may tell the person about it."""

    engine: Engine
    tokenizer: Tokenizer
    generation: GenerationDefaults
    plan: MemoryPlan
    model_name: str
    head_name: str | None
    device: str  # "cpu", "cuda:0"
    device_label: str
    device_why: str  # one sentence: which device was chosen and why
    bits: int
    context: int  # tokens
    tree: TreeShape | None
    kernels: str  # "native" or "torch"
    notes: tuple[str, ...]  # sentences the person should read


def load_runtime(settings: RunSettings, *, progress: Progress | None = None) -> Runtime:
    """Plan, check that the plan fits, then load. `progress` gets one line a step.

    Raises InputError for files that cannot be read, CannotRunError where the plan does not fit, UsageError
    for options that contradict each other.
    """
    say = progress or (lambda line: None)
    hardware = detect(settings.device)
    profile = pick_profile(settings, hardware)
    path, plan = _plan_and_fetch(settings, profile, hardware, say)
    threads = settings.threads or hardware.cpu.cores
    torch.set_num_threads(threads)
    checkpoint = open_checkpoint(path)
    say(f"loading {plan.model.name} at {plan.bits} bits")
    # a head named by the profile or the person is fetched; one that merely suits the model is used if it is here
    fetch = settings.head is not None or settings.model is None
    head_path = _head_path(plan, fetch=fetch, say=say)
    target, head = _load_models(plan, checkpoint, threads, head_path)
    # before what passes cost is measured
    slower = choose_kernels(
        torch.device(plan.device), _kernel_shapes(plan, target, head), plain=settings.kernels == "torch"
    )
    engine = _build_engine(
        plan, target, head, exact=settings.exact, cache=_costs_path(plan, hardware, threads)
    )
    notes = [*hardware.notes, *slower, *engine.notes]
    notes += [f"{note.text}; {note.hint}" for note in (plan.note, plan.rotation) if note is not None]
    if head is not None:
        notes += head.notes
    elif not settings.wants_plain and plan.rotation is None:
        notes.append(f"no draft head for {plan.model.name} is on this machine, so it decodes plainly")
    return Runtime(
        engine=engine,
        tokenizer=load_tokenizer(path),
        generation=checkpoint.generation,
        plan=plan.memory,
        model_name=plan.model.name,
        head_name=plan.model.head_name if head is not None else None,
        device=plan.device,
        device_label=hardware.label,
        device_why=hardware.why,
        bits=plan.bits,
        context=plan.context,
        tree=plan.tree if head is not None else None,
        kernels="native" if plan.backend.native else "torch",
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class TargetSource:
    """A target that was found and planned for, and is loaded when needed: what making a head for it starts from."""

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
        """Bytes free on the device, less the target's weights."""
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
        return _load_target(self.plan, self.checkpoint, self.threads, context=context, max_rows=max_rows)


def find_target(settings: RunSettings, progress: Progress) -> TargetSource:
    """Plan a run without a head, check that it fits, and fetch the model where it is missing.

    Errors as `load_runtime`.
    """
    settings = replace(settings, speculate=False, head=None)
    hardware = detect(settings.device)
    path, plan = _plan_and_fetch(settings, pick_profile(settings, hardware), hardware, progress)
    threads = settings.threads or hardware.cpu.cores
    torch.set_num_threads(threads)
    return TargetSource(open_checkpoint(path), path, plan, hardware, threads)


def _plan_and_fetch(
    settings: RunSettings, profile: MemoryProfile, hardware: Hardware, say: Progress
) -> tuple[Path, RunPlan]:
    """The model's path and a plan that fits. Where shapes are known without the files, a misfit costs no download."""
    name = settings.model or profile.model
    model = planned_model(settings, profile) if find_known(name) else None
    if model is not None:
        require_fit(plan_run(settings, profile, hardware, model), settings, hardware)
    path = resolve_model(name, say)
    if model is None or not model.on_disk:
        model = planned_model(settings, profile)
    plan = plan_run(settings, profile, hardware, model)
    require_fit(plan, settings, hardware)
    return path, plan


def _build_engine(
    plan: RunPlan, target: TargetModel, head: DraftHead | None, *, exact: bool, cache: Path
) -> Engine:
    """The engine. What passes cost is measured on the first start with an adaptive tree and kept in `cache`."""
    adaptive = plan.tree is not None and plan.tree.adaptive
    known = load_table(cache) if adaptive else None
    engine = Engine(
        target, head, context=plan.context, slots=plan.memory.slots, tree=plan.tree, exact=exact, costs=known
    )
    if known is None and engine.costs is not None:
        save_table(cache, engine.costs)
    return engine


def _kernel_shapes(plan: RunPlan, target: TargetModel, head: DraftHead | None) -> list[ModelShape]:
    """What both models ask of the kernels, where they are on PyTorch's path."""
    shapes = [target_shape(target.config, target.kv_dtype, plan.widths.layers)]
    if head is not None:
        shapes.append(head_shape(head.config, head.store.keys.dtype, plan.widths.head))
    return shapes


def _costs_path(plan: RunPlan, hardware: Hardware, threads: int) -> Path:
    """One table a machine, model, head, width and kind of kernels."""
    what = (
        hardware.label,
        threads,
        plan.model.name,
        plan.model.config,
        plan.model.head,
        plan.widths,
        plan.backend,
        plan.tree,
        *([] if plan.device == "cpu" else map(serving, OPERATIONS)),
    )
    return cache_dir() / "costs" / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.json"


def _head_path(plan: RunPlan, *, fetch: bool, say: Progress) -> Path | None:
    """The planned head; None where there is none, or it is not on this machine and may not be fetched."""
    name = plan.model.head_name
    if name is None or not (fetch or plan.model.head_on_disk):
        return None
    return resolve_head(name, plan.model.name, say)


def _load_models(
    plan: RunPlan, checkpoint: Checkpoint, threads: int, head_path: Path | None
) -> tuple[TargetModel, DraftHead | None]:
    """The target and its head on the chosen kernels, with room for the planned slots and passes."""
    slots, rows = plan.memory.slots + MAX_EXPANSIONS, PREFILL_CHUNK + 1
    # a head pass may carry one row over from the chunk before, hence one more than a chunk
    target = _load_target(plan, checkpoint, threads, context=plan.context, max_rows=rows)
    if head_path is None:
        return target, None
    opened = open_head(head_path, checkpoint.config, target.embed)
    if not plan.backend.native:
        assert isinstance(target, Target)
        bits = plan.widths.head
        dtype = compute_dtype(bits, target.device, target.config.family)
        return target, Head(
            opened,
            target.embed,
            slots=slots,
            context=plan.context,
            dtype=dtype,
            device=target.device,
            bits=bits,
        )
    from treeeagle_edge.native_head import NativeHead
    from treeeagle_edge.native_target import NativeTarget

    assert isinstance(target, NativeTarget)
    return target, NativeHead(
        opened, target, slots=slots, context=plan.context, max_rows=rows, max_scored=MAX_BRANCHING
    )


def _load_target(
    plan: RunPlan, checkpoint: Checkpoint, threads: int, *, context: int, max_rows: int
) -> TargetModel:
    """The target on the chosen kernels; `max_rows` bounds the passes of native ones."""
    if not plan.backend.native:
        return load_target(
            checkpoint,
            bits=plan.bits,
            context=context,
            device=torch.device(plan.device),
            lm_head_bits=plan.asked_lm_head,
        )
    from treeeagle_edge.kernels.native.team import MOST_THREADS, Team
    from treeeagle_edge.native_target import load_native_target

    team = Team(min(threads, MOST_THREADS))
    return load_native_target(checkpoint, team, bits=plan.bits, context=context, max_rows=max_rows)
