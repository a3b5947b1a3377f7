"""What a person should know of a run before it begins, each a sentence and a hint."""

from __future__ import annotations

from dataclasses import dataclass

from treeeagle_edge.backend import Backend
from treeeagle_edge.hardware import Hardware
from treeeagle_edge.model_config import StoredWidth
from treeeagle_edge.plan import MemoryPlan
from treeeagle_edge.profile_config import MemoryProfile


@dataclass(frozen=True)
class PlanNote:
    """What a person should know about a run before it begins."""

    text: str  # a sentence
    hint: str


def kernels_note(backend: Backend, bits: int, replaced: MemoryProfile | None) -> PlanNote | None:
    """Says what native kernels would have given; None where nothing is missing.

    `replaced`: the profile whose bits and tree gave way to `bits` and a small one, None where none did.
    """
    slower = "runs on PyTorch's kernels, which are slower"
    if replaced is not None:
        why = backend.reason or "they were asked for"
        instead = f"{bits} bits and a small tree in place of profile {replaced.name}'s {replaced.bits} bits"
        hint = backend.hint or "--bits 4 keeps 4 bits, at some cost in quality"
        return PlanNote(f"{slower}, with {instead}: {why}", hint)
    if backend.reason is None:
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
    """Says that hidden states of the model `name` are rotated, and what is made of it; None where nothing says so.

    rotation: the entry that says so; drafts: with a head, as the person asked.
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
