"""Builds the report of `treeeagle profile`: checks, plan, expected speed and verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.hardware.detection import Hardware, detect, imagine_gpu
from treeeagle_edge.planning.alternatives import alternatives
from treeeagle_edge.planning.backend import choose_backend
from treeeagle_edge.planning.known_models import find_known
from treeeagle_edge.planning.memory_profile import choose_profile
from treeeagle_edge.planning.model_shapes import PlannedModel, planned_model
from treeeagle_edge.planning.run_plan import RunPlan, pick_profile, plan_run
from treeeagle_edge.profiling import checks
from treeeagle_edge.profiling.checks import FAIL, OK, WARN, Check, download_bytes
from treeeagle_edge.profiling.speed import Speed, check_speeds, expected_speeds
from treeeagle_edge.progress import Progress, silent
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.sources.demo_model import DEMO_MODEL
from treeeagle_edge.units import format_gb


@dataclass(frozen=True)
class Verdict:
    """The last line: whether it can run, and what to type next."""

    can_run: bool
    text: str
    next_command: str | None
    alternatives: tuple[str, ...] = ()  # options that would fit, where this plan does not


@dataclass(frozen=True)
class ProfileReport:
    """Everything `treeeagle profile` found."""

    checks: tuple[Check, ...]
    hardware: Hardware | None  # None where the system itself is not supported
    plan: RunPlan | None
    speeds: tuple[Speed, ...]
    verdict: Verdict


def build_report(
    settings: RunSettings,
    *,
    gpu_memory: float | None = None,
    fast: bool = False,
    progress: Progress = silent,
) -> ProfileReport:
    """Check this machine and plan a run of `settings` on it.

    gpu_memory: plan for a card of so many GB, which this machine need not have. fast: compute nothing; torch is then
    not imported, unless a card was found or a head's files have to be read. Raises UsageError and InputError for wrong
    settings. What this machine cannot do is not an error, but a part of the report.
    """
    found = list(checks.check_versions())
    hardware, problem = _look(settings, gpu_memory)
    if problem is not None:
        found.append(Check("device", FAIL, problem.message, problem.hint))
    if hardware is None:
        return ProfileReport(tuple(found), None, None, (), _cannot(problem))
    found += _device_checks(hardware, imagined=gpu_memory is not None, failed=problem is not None)
    found += checks.check_cpu(hardware)
    plan, refusal = _plan(settings, hardware)
    problem = problem or refusal
    found += [*checks.check_backend(plan), *checks.check_choices(plan)]
    found += checks.check_disk(plan.model, imagined=gpu_memory is not None)
    live_device = "cpu" if gpu_memory is not None else hardware.device
    measured: dict[str, float] = {}
    verify_cost = None
    if not fast:
        live, measured, verify_cost = _live(settings, plan, hardware, live_device, progress)
        found += live
    speeds = expected_speeds(plan, hardware, measured=measured, verify_cost=verify_cost)
    found += check_speeds(speeds, hardware, plan)
    verdict = _verdict(settings, hardware, plan, found, problem, imagined=gpu_memory is not None)
    return ProfileReport(tuple(found), hardware, plan, speeds, verdict)


def _look(settings: RunSettings, gpu_memory: float | None) -> tuple[Hardware | None, CannotRunError | None]:
    """The hardware. Where the device that was asked for cannot be used: the CPU instead, and the reason."""
    try:
        here = detect(settings.device)
    except CannotRunError as problem:
        try:
            here = detect("cpu")
        except CannotRunError:
            return None, problem
        if gpu_memory is None:
            return here, problem
    return (here if gpu_memory is None else imagine_gpu(here, gpu_memory, settings.device)), None


def _device_checks(hardware: Hardware, *, imagined: bool, failed: bool) -> list[Check]:
    if imagined:
        size, count = format_gb(hardware.total), len(hardware.gpus)
        text = f"planning for a card with {size}, whether or not it is here"
        if count > 1:
            text = f"planning for {count} cards with {size} each, whether or not they are here"
        return [
            Check(
                "device",
                WARN,
                text,
                "run this without --gpu-memory on the machine with the card to measure it",
            )
        ]
    lines = list(checks.check_device(hardware))
    return [line for line in lines if not (failed and line.name == "device")]


def _plan(settings: RunSettings, hardware: Hardware) -> tuple[RunPlan, CannotRunError | None]:
    """The plan, and what stands against it. There is a plan even for a card that is too small for every profile."""
    refusal = None
    try:
        profile = pick_profile(settings, hardware)
    except CannotRunError as error:
        refusal = error
        profile = choose_profile(hardware, model="")
    model = planned_model(settings, profile)
    try:
        return plan_run(settings, profile, hardware, model), refusal
    except CannotRunError as error:  # the native kernels were asked for and cannot run
        return plan_run(replace(settings, kernels=None), profile, hardware, model), refusal or error


def _live(
    settings: RunSettings, plan: RunPlan, hardware: Hardware, device_name: str, say: Progress
) -> tuple[list[Check], dict[str, float], float | None]:
    """Run the checks that compute on `device_name`.

    Also returns GB/s by device, of its memory and of that of the plan's other cards, and the measured cost of a verify
    pass.
    """
    say("importing torch")
    try:
        import torch

        from treeeagle_edge.profiling import live
    except ImportError as error:
        hint = "run ./install.sh again"
        return (
            [Check("torch", FAIL, f"torch cannot be imported: {str(error).splitlines()[0]}", hint)],
            {},
            None,
        )
    device = torch.device(device_name)
    say("running a 4-bit and an 8-bit layer")
    native = _native_layers(settings, plan, device_name)
    found = list(live.check_layers(device, native=native))
    found += live.check_kernels(device, native=native)
    say("measuring memory bandwidth")
    measured: dict[str, float] = {}
    for name in plan.devices if device_name == plan.device else (device_name,):
        try:
            bandwidth = live.measure_bandwidth(torch.device(name))
        except torch.OutOfMemoryError:
            found.append(live.no_room(name))
            continue
        known = next((gpu.bandwidth for gpu in hardware.gpus if gpu.usable and gpu.device == name), None)
        found.append(live.describe_bandwidth(bandwidth, known, name))
        measured[name] = bandwidth.best
    runs = all(check.status == OK for check in found if check.name == f"{plan.bits}-bit layer")
    if not runs or device_name != plan.device:
        return found, measured, None
    try:
        return found, measured, live.measure_verify_cost(plan, device)
    except torch.OutOfMemoryError:
        return [*found, live.no_room(device_name)], measured, None


def _native_layers(settings: RunSettings, plan: RunPlan, device_name: str) -> bool:
    """Whether 4- and 8-bit layers of this model would run on native kernels, whatever the planned bits."""
    wanted = "torch" if settings.kernels == "torch" else None
    model = plan.model
    return choose_backend(wanted, bits=8, device=device_name, config=model.config, head=model.head).native


def _verdict(
    settings: RunSettings,
    hardware: Hardware,
    plan: RunPlan,
    found: list[Check],
    problem: CannotRunError | None,
    *,
    imagined: bool,
) -> Verdict:
    if problem is not None:
        no_kernels = settings.kernels == "native" and not plan.backend.native
        if plan.memory.fits and (no_kernels or hardware.kind == "cpu"):
            return _cannot(problem, ("--kernels torch" if no_kernels else "--device cpu",))
        return _cannot(problem, tuple(alternatives(plan, settings, hardware)))
    if not plan.memory.fits:
        options = alternatives(plan, settings, hardware)
        over = format_gb(plan.memory.excess)
        advice = f"; what fits: {'; '.join(options)}" if options else ""
        return Verdict(False, f"does not fit, {over} too much{advice}", None, tuple(options))
    blocking = [check for check in found if check.status == FAIL and _blocks(check, plan)]
    if blocking:
        return Verdict(False, f"cannot run: {blocking[0].text}", None)
    command = _next_command(settings, plan)
    fetch = download_bytes(plan.model)
    suffix = f" (fetches {format_gb(fetch)} first)" if fetch else ""
    where = " on the machine with the card" if imagined else ""
    return Verdict(True, f"fits. next{where}: {command}{suffix}", command)


def _cannot(problem: CannotRunError | None, options: tuple[str, ...] = ()) -> Verdict:
    reason = problem.message if problem is not None else "this machine is not supported"
    hint = f"; what fits: {'; '.join(options)}" if options else ""
    return Verdict(False, f"cannot run: {reason}{hint}", None, options)


def _blocks(check: Check, plan: RunPlan) -> bool:
    """Whether a failed check is an obstacle to this plan. Layers of a width that the plan does not use are none."""
    used = {plan.bits, plan.widths.lm_head, *([] if plan.model.head is None else [plan.widths.head])}
    return check.name in {f"{bits}-bit layer" for bits in used} or not check.name.endswith("-bit layer")


def _next_command(settings: RunSettings, plan: RunPlan) -> str:
    """The command that runs exactly this plan. Commands that fetch what is missing come first."""
    model, words = plan.model, ["treeeagle chat"]
    if settings.model is not None:
        words.append(f"--model {model.name if not model.on_disk else settings.model}")
    if settings.head is not None:
        words.append(f"--head {settings.head}")
    given = (
        ("bits", settings.bits),
        ("head-bits", settings.head_bits),
        ("lm-head-bits", settings.lm_head_bits),
        ("context", settings.context),
        ("device", settings.device),
        ("profile", settings.profile),
        ("kernels", settings.kernels),
    )
    words += [f"--{name} {value}" for name, value in given if value is not None]
    return " && ".join([*_pulls(settings, model), " ".join(words)])


def _pulls(settings: RunSettings, model: PlannedModel) -> list[str]:
    """The commands that fetch missing parts of this plan. The demo model needs none: the first chat fetches it."""
    head_missing = model.head_name is not None and not model.head_on_disk
    if model.name == DEMO_MODEL.name or (model.on_disk and not head_missing):
        return []
    if (settings.model, settings.head, settings.profile, settings.device) == (None,) * 4:
        return ["treeeagle pull"]  # without a name it chooses as this plan did
    known = find_known(model.name)
    if not model.on_disk and head_missing and known is not None and known.head_name == model.head_name:
        return [f"treeeagle pull {model.name} --head"]
    names = (None if model.on_disk else model.name, model.head_name if head_missing else None)
    return [f"treeeagle pull {name}" for name in names if name is not None]
