"""Refuses a plan that does not fit, before anything is loaded, and names options that would fit."""

from __future__ import annotations

from dataclasses import replace

from treeeagle_edge.errors import CannotRunError, UsageError
from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.planning.backend import choose_backend
from treeeagle_edge.planning.known_models import KNOWN_MODELS
from treeeagle_edge.planning.memory_plan import MemoryPlan
from treeeagle_edge.planning.memory_profile import MemoryProfile, load_profile, models_that_fit
from treeeagle_edge.planning.model_shapes import planned_model
from treeeagle_edge.planning.run_plan import USEFUL_CONTEXT, RunPlan, asked_widths, plan_run
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.units import format_gb
from treeeagle_edge.widths import choose_widths


def require_fit(plan: RunPlan, settings: RunSettings, hardware: Hardware) -> None:
    """Raise CannotRunError, with what would fit instead, where the plan is over budget. Before anything is loaded."""
    if plan.memory.fits:
        return
    options = alternatives(plan, settings, hardware)
    raise CannotRunError(
        f"{plan.model.name} at {plan.bits} bits with a context of {plan.context:,} needs "
        f"{format_gb(plan.memory.total)}, and {_free(plan)}",
        f"what fits: {'; '.join(options)}" if options else "free some memory, or use a smaller model",
    )


def _free(plan: RunPlan) -> str:
    """The free memory in words; for several cards, also what each would have to hold."""
    free = f"{format_gb(plan.memory.budget)} are free on {' and '.join(plan.devices)}"
    if not plan.memory.cards:
        return free
    shares = (f"{format_gb(card.nbytes)} of {format_gb(card.free)}" for card in plan.memory.cards)
    return f"{free} together ({', '.join(shares)})"


def alternatives(plan: RunPlan, settings: RunSettings, hardware: Hardware) -> list[str]:
    """Options that would fit where `plan` does not, the gentlest change first, as they are typed."""
    if settings.kernels == "native":  # other bits or devices may have none, and are worth naming all the same
        settings = replace(settings, kernels=None)
    found = []
    if plan.model.head is not None and plan.widths.head > 8:  # the gentlest: it changes no text
        lighter = _plan_if_allowed(replace(settings, head_bits=8), plan, hardware)
        if lighter is not None and lighter.fits and lighter.context >= plan.context:
            found.append("--head-bits 8")
    longest = plan.memory.longest_context
    if USEFUL_CONTEXT <= longest < plan.context:
        found.append(f"--context {longest}")
    one_width = plan.model.config.stored is not None and not plan.backend.native  # --bits would be refused
    for bits in (16, 8, 4):
        if bits < plan.bits and not one_width:
            fewer = _plan_if_allowed(replace(settings, bits=bits), plan, hardware)
            if fewer is None:
                continue
            if fewer.fits and fewer.context == plan.context:
                found.append(f"--bits {bits}")
                break
            if bits == 4 and fewer.longest_context >= max(USEFUL_CONTEXT, longest + 1):
                found.append(f"--bits {bits} --context {fewer.longest_context}")
    small = replace(plan.profile, bits=4, context=min(plan.context, plan.profile.context))
    native = choose_backend(settings.kernels, bits=4, device=hardware.device, config=plan.model.config).native
    if _has_widths(settings, plan.profile, hardware.device, native=native):
        smaller = [
            name
            for name in models_that_fit(hardware, small, native=native)
            if KNOWN_MODELS[name].config != plan.model.config
        ]
        found += [f"--model {name} --bits 4" for name in smaller[:2]]
    together = _all_cards(hardware)
    if len(together.together) > len(hardware.together):
        wider = _plan_if_allowed(settings, plan, together)
        if wider is not None and wider.fits and wider.context >= plan.context:
            found.append(f"--device {','.join(card.device for card in wider.cards)}")
    if hardware.kind == "cuda" and _fits_the_cpu(plan, settings, hardware):
        found.append("--device cpu")
    return found


def _plan_if_allowed(settings: RunSettings, plan: RunPlan, hardware: Hardware) -> MemoryPlan | None:
    """The memory of `plan` with other settings; None where its kernels do not hold the widths they ask for."""
    try:
        return plan_run(settings, plan.profile, hardware, plan.model).memory
    except UsageError:
        return None


def _all_cards(hardware: Hardware) -> Hardware:
    """The same machine where no card was named, so that all may share the layers."""
    usable = sorted((gpu for gpu in hardware.gpus if gpu.usable), key=lambda gpu: (-gpu.free, gpu.index))
    names = tuple(gpu.device for gpu in usable) if hardware.kind == "cuda" and len(usable) > 1 else ()
    return replace(hardware, together=names, asked_together=False)


def _has_widths(settings: RunSettings, profile: MemoryProfile, device: str, *, native: bool) -> bool:
    """Whether 4 bits go with the widths that were asked for draft head and lm_head."""
    head, lm_head = asked_widths(settings, profile)
    try:
        choose_widths(4, device, native=native, head=head, lm_head=lm_head)
    except UsageError:
        return False
    return True


def _fits_the_cpu(plan: RunPlan, settings: RunSettings, hardware: Hardware) -> bool:
    """Whether the same options with --device cpu would fit; where no model was named, the CPU profile's own."""
    profile = load_profile("cpu")
    on_cpu = replace(settings, device="cpu", profile=None)
    model = plan.model if settings.model is not None else planned_model(replace(on_cpu, head=None), profile)
    context = None if settings.context is None else min(settings.context, model.config.max_position)
    here = replace(hardware, device="cpu", together=(), asked_together=False)
    try:
        return plan_run(replace(on_cpu, context=context), profile, here, model).memory.fits
    except UsageError:  # native kernels hold other widths than those that were asked for
        return False
