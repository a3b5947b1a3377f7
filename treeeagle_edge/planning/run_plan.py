"""All that a run decides before it loads: profile, model, head, bits, context, tree, and the memory they take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.planning.backend import Backend, choose_backend, stored_bits
from treeeagle_edge.planning.card_shares import Card
from treeeagle_edge.planning.layer_split import arrange, longest_contexts
from treeeagle_edge.planning.memory_plan import MemoryPlan, plan_memory
from treeeagle_edge.planning.memory_profile import MemoryProfile, choose_profile, load_profile
from treeeagle_edge.planning.model_shapes import PlannedModel
from treeeagle_edge.planning.notes import PlanNote, kernels_note, rotation_note, split_note, stored_note
from treeeagle_edge.rounds import TreeShape, tree_shape
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.widths import Widths

USEFUL_CONTEXT = 1024  # tokens: a shorter one is no alternative worth naming
# On PyTorch's kernels, 4 bits cost small models too much quality, and passes at 8 bits get dear with every row.
_TORCH_BITS, _TORCH_TREE = 8, TreeShape(depth=3, branching=2, nodes=3)


@dataclass(frozen=True)
class RunPlan:
    """The choices of one run and the memory they take."""

    profile: MemoryProfile
    model: PlannedModel
    device: str
    bits: int
    context: int  # tokens
    tree: TreeShape | None  # None: no head, or speculation switched off
    memory: MemoryPlan
    backend: Backend
    note: PlanNote | None = None  # where faster kernels would be possible
    asked_lm_head: int | None = None  # bits; None: the usual, or what a quantised repository stores
    rotation: PlanNote | None = None  # where hidden states are rotated, so that heads seldom suit them
    split: PlanNote | None = None  # where layers are split over several cards

    @property
    def widths(self) -> Widths:
        """Bits of layers, lm_head and draft head."""
        return self.memory.widths

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices that it runs on, the home of embedding, lm_head and draft head first."""
        return tuple(card.device for card in self.memory.cards) or (self.device,)

    @property
    def layer_devices(self) -> tuple[str, ...]:
        """The device of each layer."""
        if not self.memory.cards:
            return (self.device,) * self.model.config.num_layers
        return tuple(card.device for card in self.memory.cards for _ in range(card.layers))


def pick_profile(settings: RunSettings, hardware: Hardware) -> MemoryProfile:
    """The profile asked for, else the one that suits the device. Errors as `load_profile` and `choose_profile`."""
    if settings.profile is not None:
        return load_profile(settings.profile)
    return choose_profile(hardware, model=settings.model)


def plan_run(
    settings: RunSettings, profile: MemoryProfile, hardware: Hardware, model: PlannedModel
) -> RunPlan:
    """Fill in from the profile what the person left open, and plan the memory against what is free on the device now.

    - Context: one that was asked for is kept. The profile's is shortened to what the model and the memory allow (the
      memory of all cards together, where layers may be split).
    - Width: on native kernels the blocks of a GGUF file stay as they are, and what is stored in other ways takes the 8
      or 4 bits that most of its layers have, else the profile's. Without native kernels 8 bits and a small tree replace
      both. A model that comes quantised by bitsandbytes keeps its width, or takes 8 bits on native kernels.

    The plan may not fit: see `planning.alternatives.require_fit`. Raises UsageError for a context out of range and for
    widths that cannot be had, CannotRunError where native kernels were asked for and cannot serve.
    """
    stored, shape = model.config.stored, profile.tree
    blocks = model.config.blocks.bits if model.config.blocks and hardware.device == "cpu" else None
    bits = settings.bits or (stored.bits if stored is not None else blocks or profile.bits)
    backend = choose_backend(
        settings.kernels, bits=bits, device=hardware.device, config=model.config, head=model.head
    )
    if settings.bits is not None or not backend.native:  # nothing stays as it is stored
        model = replace(model, config=replace(model.config, blocks=None))
    chosen = settings.bits is None and hardware.device == "cpu"
    replaced = chosen and (bits == 4 or blocks is not None) and not backend.native
    if replaced:
        bits, shape = _TORCH_BITS, _TORCH_TREE
    if stored is not None:
        bits, replaced = stored_bits(stored, settings.bits, backend), False
    tree = _tree(settings, shape, model, backend)
    head_bits, lm_head_bits = asked_widths(settings, profile)

    def planned(context: int, cards: tuple[Card, ...]) -> MemoryPlan:
        return plan_memory(
            model.config,
            model.head,
            bits=bits,
            context=context,
            tree=tree,
            reserve=profile.reserve,
            budget=hardware.budget,
            device=hardware.device,
            native=backend.native,
            threads=settings.threads or hardware.cpu.cores,
            head_bits=head_bits,
            lm_head_bits=lm_head_bits,
            exact=settings.exact,
            cards=cards,
        )

    wanted = settings.context or min(profile.context, model.config.max_position)
    memory = arrange(planned, wanted, hardware)
    if settings.context is None and not memory.fits:
        shorter = longest_contexts(planned, memory, wanted, hardware)
        useful = next((each for each in shorter if each >= min(USEFUL_CONTEXT, wanted)), None)
        if useful is not None:
            wanted, memory = useful, arrange(planned, useful, hardware)
    note = kernels_note(backend, bits, profile if replaced else None)
    if stored is not None and backend.native:
        note = stored_note(stored, bits)
    rotation = None
    if not settings.wants_plain:
        rotation = rotation_note(model.name, model.config.rotation, drafts=model.head is not None)
    return RunPlan(
        profile,
        model,
        hardware.device,
        bits,
        wanted,
        tree,
        memory,
        backend,
        note,
        lm_head_bits,
        rotation,
        split_note(memory, hardware),
    )


def asked_widths(settings: RunSettings, profile: MemoryProfile) -> tuple[int | None, int | None]:
    """Bits of draft head and lm_head that were asked for, None for the usual ones."""
    head = profile.head_bits if settings.head_bits is None else settings.head_bits
    return head, profile.lm_head_bits if settings.lm_head_bits is None else settings.lm_head_bits


def _tree(settings: RunSettings, shape: TreeShape, model: PlannedModel, backend: Backend) -> TreeShape | None:
    """None where the run decodes plainly. Without a head an adaptive tree can still hold what the text repeats, on
    kernels that keep the text the same to the last bit.
    """
    if settings.wants_plain:
        return None
    if model.head is None:
        looks_up = shape.adaptive and backend.native and model.config.rotation is None
        return shape if looks_up and not settings.asks_for_tree else None
    nodes = 0 if shape.adaptive else shape.nodes
    return tree_shape(
        settings.depth or shape.depth,
        settings.branching or shape.branching,
        nodes if settings.nodes is None else settings.nodes,
    )
