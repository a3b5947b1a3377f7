"""Sets up a run: device, plan, target, head, engine, tokenizer. Nothing is loaded unless the plan fits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from treeeagle_edge.checkpoint.opening import open_checkpoint
from treeeagle_edge.config.generation_defaults import GenerationDefaults
from treeeagle_edge.drafting.costs import load_table, save_table
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.hardware.detection import Hardware, detect
from treeeagle_edge.heap import give_back_freed
from treeeagle_edge.kernels.dispatch import OPERATIONS, serving
from treeeagle_edge.kernels.trial import choose_kernels
from treeeagle_edge.kernels.trial_cases import ModelShape
from treeeagle_edge.model.kernel_shapes import head_shape, target_shape
from treeeagle_edge.model.protocols import DraftHead, TargetModel
from treeeagle_edge.model_loading import head_path_of, load_models, plan_and_fetch
from treeeagle_edge.paths import cache_dir
from treeeagle_edge.planning.memory_plan import MemoryPlan
from treeeagle_edge.planning.run_plan import RunPlan, pick_profile
from treeeagle_edge.progress import Progress, silent
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.tokenizer.codec import Tokenizer, load_tokenizer
from treeeagle_edge.units import format_gb


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
    other_devices: tuple[str, ...] = ()  # cards that hold layers beside `device`


def load_runtime(settings: RunSettings, *, progress: Progress = silent) -> Runtime:
    """Plan, check that the plan fits, then load.

    Raises InputError for files that cannot be read, CannotRunError where the plan does not fit or a card has less room
    than it said, UsageError for options that contradict each other.
    """
    hardware = detect(settings.device)
    profile = pick_profile(settings, hardware)
    path, plan = plan_and_fetch(settings, profile, hardware, progress)
    threads = settings.threads or hardware.cpu.cores
    torch.set_num_threads(threads)
    checkpoint = open_checkpoint(path)
    progress(f"loading {plan.model.name} at {plan.bits} bits")
    tokenizer = load_tokenizer(path)  # first: what making it leaves in the heap is used again, or given back
    # a head that the person or the profile names is fetched; one that only suits the model is used if it is here
    fetch = settings.head is not None or settings.model is None
    head_path = head_path_of(plan, fetch=fetch, progress=progress)
    with _memory_of(plan):
        target, head = load_models(plan, checkpoint, threads, head_path)
        give_back_freed()  # before the pool is taken
        if plan.backend.native:
            # PyTorch's idle threads would spin on the cores that native passes need: sampled answers took 1.4 times as
            # long. PyTorch has little to compute here.
            torch.set_num_threads(1)
        if plan.device.startswith("cuda"):
            progress(
                "trying kernels and capturing rounds; the first start compiles them, which may take a minute"
            )
        # must come before the costs of passes are measured, which depend on the kernels
        slower = choose_kernels(
            torch.device(plan.device),
            _kernel_shapes(plan, target, head),
            plain=settings.kernels == "torch",
            others=[torch.device(device) for device in plan.devices[1:]],
        )
        engine = _build_engine(
            plan,
            target,
            head,
            exact=settings.exact,
            cache=_costs_path(plan, hardware, threads, drafts=head is not None),
        )
    return Runtime(
        engine=engine,
        tokenizer=tokenizer,
        generation=checkpoint.generation,
        plan=plan.memory,
        model_name=plan.model.name,
        head_name=plan.model.head_name if head is not None else None,
        device=plan.device,
        device_label=hardware.label_of(plan.devices),
        device_why=hardware.why,
        bits=plan.bits,
        context=plan.context,
        tree=engine.tree,
        kernels="native" if plan.backend.native else "torch",
        notes=(
            *hardware.notes,
            *slower,
            *engine.notes,
            *_plan_notes(plan),
            *_head_notes(plan, settings, engine),
        ),
        other_devices=plan.devices[1:],
    )


def _plan_notes(plan: RunPlan) -> list[str]:
    """What a person should know of kernels, stored widths, rotation and the split over cards, in sentences."""
    backend, notes = plan.backend, []
    if backend.native and backend.reason is not None:
        notes.append(f"{backend.reason}; {backend.hint}")
    found = (plan.note, plan.rotation, plan.split)
    return notes + [f"{note.text}; {note.hint}" for note in found if note is not None]


def _head_notes(plan: RunPlan, settings: RunSettings, engine: Engine) -> tuple[str, ...]:
    """What to know about the draft head, or that there is none although nobody asked to do without."""
    if engine.head is not None:
        return engine.head.notes
    if settings.wants_plain or plan.rotation is not None:
        return ()
    if settings.model is None and (plan.profile.head or "").lower() == "none":
        said = f"profile {plan.profile.name} asks for no draft head, so it decodes plainly; --head names one"
        return (said,) if settings.asks_for_tree else ()
    drafted = "only what the text repeats is drafted" if engine.speculates else "it decodes plainly"
    return (f"no draft head for {plan.model.name} is on this machine, so {drafted}",)


@contextmanager
def _memory_of(plan: RunPlan) -> Iterator[None]:
    """Says in a sentence that a card has less room than it had when the plan was made."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CannotRunError(
            f"the memory of {' and '.join(plan.devices)} ran out while loading; "
            f"{format_gb(plan.memory.budget)} were free when the plan was made",
            "close what else uses the card, give a shorter --context, or fewer --bits",
        ) from error


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
    """Shapes of the models that run on PyTorch's kernels: the shapes that GPU kernels are tried in."""
    shapes = [target_shape(target.config, target.kv_dtype, plan.widths.layers, plan.widths.lm_head)]
    if head is not None:
        shapes.append(head_shape(head.config, head.store.keys.dtype, plan.widths.head))
    return shapes


def _costs_path(plan: RunPlan, hardware: Hardware, threads: int, *, drafts: bool) -> Path:
    """Where the costs of passes are kept: one file for each machine, model, head, width and kind of kernels."""
    what = (
        hardware.label,
        threads,
        plan.model.name,
        plan.model.config,
        plan.model.head if drafts else None,
        plan.widths,
        plan.backend,
        plan.tree,
        plan.layer_devices,
        *([] if plan.device == "cpu" else map(serving, OPERATIONS)),
    )
    return cache_dir() / "costs" / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.json"
