"""Notes on a run that a person should read before it begins: each a sentence and a hint."""

from __future__ import annotations

from dataclasses import dataclass

from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.model_config import StoredWidth
from treeeagle_edge.planning.backend import Backend
from treeeagle_edge.planning.memory_plan import MemoryPlan
from treeeagle_edge.planning.memory_profile import MemoryProfile


@dataclass(frozen=True)
class PlanNote:
    """What a person should know about a run before it begins."""

    text: str  # a sentence
    hint: str


def kernels_note(backend: Backend, bits: int, replaced: MemoryProfile | None) -> PlanNote | None:
    """Says that PyTorch's slower kernels run where native ones could have; None where nothing is missing.

    `replaced`: the profile whose 4 bits and tree were replaced by `bits` and a small tree; None where they were kept.
    """
    slower = "runs on PyTorch's kernels, which are slower"
    if replaced is not None:
        why = backend.reason or "they were asked for"
        instead = f"{bits} bits and a small tree in place of profile {replaced.name}'s {replaced.bits} bits"
        hint = backend.hint or "--bits 4 keeps 4 bits, at some cost in quality"
        return PlanNote(f"{slower}, with {instead}: {why}", hint)
    if backend.reason is None or backend.native:
        return None
    return PlanNote(f"{slower}: {backend.reason}", backend.hint or "use --kernels torch to choose them")


def stored_note(stored: StoredWidth, bits: int) -> PlanNote:
    """Says what native kernels make of weights that come quantised."""
    text = f"its {stored.name} weights are converted to {bits}-bit blocks of the native kernels"
    if bits == 8:
        return PlanNote(
            f"{text}, at next to no loss", "--kernels torch keeps them as they are stored, slower"
        )
    return PlanNote(
        f"{text}, which rounds them a second time", "leave --bits out for 8 bits, at next to no loss"
    )


def rotation_note(name: str, rotation: str | None, *, drafts: bool) -> PlanNote | None:
    """Says that the hidden states of the model `name` are rotated, and whether it drafts; None where nothing says so.

    rotation: the config entry that says so. drafts: with a head, because the person asked for it.
    """
    if rotation is None:
        return None
    text = f"{name} has rotated hidden states ({rotation}), which a head made for the original model misreads"
    if not drafts:
        return PlanNote(
            f"{text}, so it decodes plainly",
            "--head with a head that was made for this very checkpoint drafts; treeeagle train makes one",
        )
    return PlanNote(
        f"{text}, and it drafts as asked",
        "watch tokens/round; near 1 plain decoding is faster: leave out --head, --nodes, --depth and --branching",
    )


def split_note(plan: MemoryPlan, hardware: Hardware) -> PlanNote | None:
    """Says over which cards layers are split, and why; None where they are on one device."""
    if not plan.cards:
        return None
    held = ", ".join(f"{card.device} ({card.layers})" for card in plan.cards)
    asked = hardware.asked_together
    why = "as --device asks" if asked else "since no card has room alone"
    hint = (
        f"--device {hardware.device} keeps to one card"
        if asked
        else "a shorter --context or fewer --bits may fit one card, which is faster"
    )
    return PlanNote(
        f"layers are split over {held}, {why}; rounds are led by the host, without CUDA graphs", hint
    )
