"""Fetches and loads the target and head of a plan, on the kernels that the plan chose."""

from __future__ import annotations

from pathlib import Path

import torch

from treeeagle_edge.checkpoint.head import open_head
from treeeagle_edge.checkpoint.opening import Checkpoint
from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.limits import MAX_EXPANSIONS, MOST_THREADS, PREFILL_CHUNK
from treeeagle_edge.model.head import Head
from treeeagle_edge.model.protocols import DraftHead, TargetModel
from treeeagle_edge.model.target import Target, compute_dtype, load_target
from treeeagle_edge.planning.alternatives import require_fit
from treeeagle_edge.planning.backend import must_compile
from treeeagle_edge.planning.known_models import find_known
from treeeagle_edge.planning.memory_profile import MemoryProfile
from treeeagle_edge.planning.model_shapes import planned_model
from treeeagle_edge.planning.run_plan import RunPlan, plan_run
from treeeagle_edge.progress import Progress
from treeeagle_edge.rounds import MAX_BRANCHING
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.sources.model_names import resolve_head, resolve_model


def plan_and_fetch(
    settings: RunSettings, profile: MemoryProfile, hardware: Hardware, progress: Progress
) -> tuple[Path, RunPlan]:
    """Plan, and fetch the model where it is missing. Returns its path and the plan.

    Raises CannotRunError where the plan does not fit: before the download, where shapes are known without the files.
    """
    if must_compile(settings.kernels, bits=settings.bits, device=hardware.device):
        progress("compiling kernels for this processor, which takes about 20 seconds; later starts find them")
    name = settings.model or profile.model
    model = planned_model(settings, profile) if find_known(name) else None
    if model is not None:
        require_fit(plan_run(settings, profile, hardware, model), settings, hardware)
    path = resolve_model(name, progress)
    if model is None or not model.on_disk:
        model = planned_model(settings, profile)
    plan = plan_run(settings, profile, hardware, model)
    require_fit(plan, settings, hardware)
    return path, plan


def head_path_of(plan: RunPlan, *, fetch: bool, progress: Progress) -> Path | None:
    """The planned head; None where there is none, or it is not on this machine and may not be fetched."""
    name = plan.model.head_name
    if name is None or not (fetch or plan.model.head_on_disk):
        return None
    return resolve_head(name, plan.model.name, progress)


def load_models(
    plan: RunPlan, checkpoint: Checkpoint, threads: int, head_path: Path | None
) -> tuple[TargetModel, DraftHead | None]:
    """The target and its head on the chosen kernels, with room for the planned slots and passes."""
    slots, rows = plan.memory.slots + MAX_EXPANSIONS, PREFILL_CHUNK + 1
    # a head pass may carry one row over from the chunk before, hence one more than a chunk
    target = load_planned_target(plan, checkpoint, threads, context=plan.context, max_rows=rows)
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
    from treeeagle_edge.model.native_head import NativeHead
    from treeeagle_edge.model.native_target import NativeTarget

    assert isinstance(target, NativeTarget)
    return target, NativeHead(
        opened,
        target,
        bits=plan.widths.head,
        slots=slots,
        context=plan.context,
        max_rows=rows,
        max_scored=MAX_BRANCHING,
        max_expanded=MAX_EXPANSIONS,
    )


def load_planned_target(
    plan: RunPlan, checkpoint: Checkpoint, threads: int, *, context: int, max_rows: int
) -> TargetModel:
    """The target on the chosen kernels. max_rows: most rows of a pass; only native kernels need to know."""
    if not plan.backend.native:
        return load_target(
            checkpoint,
            bits=plan.bits,
            context=context,
            device=torch.device(plan.device),
            lm_head_bits=plan.asked_lm_head,
            places=[torch.device(device) for device in plan.layer_devices],
        )
    from treeeagle_edge.kernels.native.team import Team
    from treeeagle_edge.model.native_target import load_native_target

    team = Team(min(threads, MOST_THREADS))
    return load_native_target(
        checkpoint,
        team,
        bits=plan.bits,
        context=context,
        max_rows=max_rows,
        as_stored=plan.model.config.blocks is not None,
    )
