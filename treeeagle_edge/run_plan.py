"""Everything a run decides before it loads: profile, model, head, bits, context, tree, and the memory that costs."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from treeeagle_edge.backend import Backend, choose_backend, stored_bits
from treeeagle_edge.errors import InputError
from treeeagle_edge.fetch import DEMO_MODEL
from treeeagle_edge.hardware import Hardware
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.hub.fetch import cached_repository, is_repository
from treeeagle_edge.known_models import KNOWN_MODELS, find_known
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.models import BUNDLED_HEADS, model_label, resolve_head, resolve_model
from treeeagle_edge.plan import MemoryPlan, plan_memory
from treeeagle_edge.plan_split import Card
from treeeagle_edge.profile_config import MemoryProfile, choose_profile, load_profile
from treeeagle_edge.rounds import TreeShape, tree_shape
from treeeagle_edge.run_notes import PlanNote, kernels_note, rotation_note, split_note, stored_note
from treeeagle_edge.run_split import arrange, longest_contexts
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.widths import Widths

USEFUL_CONTEXT = 1024  # tokens: a shorter one is no alternative worth naming
# PyTorch's own 4-bit layers cost small models too much quality, and its 8-bit ones get dear with the rows of a pass.
_TORCH_BITS, _TORCH_TREE = 8, TreeShape(depth=3, branching=2, nodes=3)


@dataclass(frozen=True)
class PlannedModel:
    """A target and its head as shapes only."""

    name: str
    config: ModelConfig
    head_name: str | None
    head: HeadConfig | None
    on_disk: bool  # False: shapes from the table of known models, the weights are not on this machine
    head_on_disk: bool = False


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
    note: PlanNote | None = None  # where the kernels are not the best thinkable
    asked_lm_head: int | None = None  # bits, None for the usual: a repository may store its own
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
    """Fill what the person left open from the profile and plan the memory against what is free on the device now.

    A context that was asked for is kept. The profile's own is shortened to what the model and the memory allow, those
    of all cards together where layers may be split. On a
    CPU without native kernels, a profile's 4 bits become 8 and its tree a small one. A model that comes quantised keeps
    its width, or takes 8 bits on native kernels. Raises UsageError for a context out of range and for widths that
    cannot be had, CannotRunError where native kernels were asked for and cannot serve. The plan may not fit: see
    `run_alternatives.require_fit`.
    """
    stored, shape = model.config.stored, profile.tree
    bits = settings.bits or (profile.bits if stored is None else stored.bits)
    backend = choose_backend(
        settings.kernels, bits=bits, device=hardware.device, config=model.config, head=model.head
    )
    replaced = settings.bits is None and bits == 4 and hardware.device == "cpu" and not backend.native
    if replaced:
        bits, shape = _TORCH_BITS, _TORCH_TREE
    if stored is not None:
        bits, replaced = stored_bits(stored, settings.bits, backend), False
    tree = _tree(settings, shape, model.head)
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


def _tree(settings: RunSettings, shape: TreeShape, head: HeadConfig | None) -> TreeShape | None:
    if head is None or not settings.speculate:
        return None
    nodes = 0 if shape.adaptive else shape.nodes
    return tree_shape(
        settings.depth or shape.depth,
        settings.branching or shape.branching,
        nodes if settings.nodes is None else settings.nodes,
    )


def planned_model(settings: RunSettings, profile: MemoryProfile) -> PlannedModel:
    """Shapes of the model and head that a run would load, without downloading anything.

    Files on this machine come first, then the table of known models. Where hidden states are rotated there is no head
    unless the person asks for one, or for a tree. Raises InputError for a name that is neither.
    """
    name = settings.model or profile.model
    local = _local_model(name)
    known = find_known(name)
    if local is not None:
        from treeeagle_edge.config_reader import read_config

        config, label = read_config(local), model_label(name)
        known = known or find_known(label)
    elif known is not None:
        config, label = known.config, next(key for key in KNOWN_MODELS if key.lower() == name.strip().lower())
    else:
        raise _unknown_model(name)
    own_head = profile.head if settings.model is None else None
    head_name = settings.head or own_head or (known.head_name if known else None)
    unsuited = config.rotation is not None and not settings.asks_for_tree
    if settings.wants_plain or head_name is None or head_name.lower() == "none" or unsuited:
        return PlannedModel(label, config, None, None, local is not None)
    there = _local_head(head_name) is not None
    return PlannedModel(label, config, head_name, _head_shapes(head_name, config), local is not None, there)


def _unknown_model(name: str) -> InputError:
    names = {known.lower(): known for known in KNOWN_MODELS}
    names.update({known.lower().rpartition("/")[2]: known for known in KNOWN_MODELS})
    close = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {names[close[0]]}?" if close else "check the name or path"
    if is_repository(name):
        hint += (
            f", or fetch it first: treeeagle pull {name}"
            if not close
            else f" else fetch it first: treeeagle pull {name}"
        )
    message = (
        f"{name} is neither on this machine nor among the {len(KNOWN_MODELS)} models whose shapes are known"
    )
    return InputError(message, hint)


def _local_model(name: str) -> Path | None:
    """Path of a model that is already on this machine, None where it would have to be fetched."""
    if name.strip().lower() == DEMO_MODEL.name:
        return DEMO_MODEL.path if DEMO_MODEL.path.is_file() else None
    if Path(name).expanduser().exists():
        return resolve_model(name)
    return cached_repository(name, "model") if is_repository(name) else None


def _head_shapes(name: str, target: ModelConfig) -> HeadConfig | None:
    """Shapes of a head: from the table where its name is known, else from its files where they are on this machine."""
    for known in KNOWN_MODELS.values():
        if known.head_name is not None and known.head_name.lower() == name.lower() and known.head is not None:
            if (
                known.head.target_hidden_size == target.hidden_size
                and known.head.vocab_size == target.vocab_size
            ):
                return known.head
            raise InputError(
                f"the head {name} belongs to a target of width {known.head.target_hidden_size} with "
                f"{known.head.vocab_size:,} tokens, this model has {target.hidden_size} and {target.vocab_size:,}",
                "leave --head out to get the head that goes with the model",
            )
    folder = _local_head(name)
    if folder is None:
        if not is_repository(name):
            resolve_head(name, "")  # says that no head has this name, and which is near
        raise InputError(
            f"the head {name} is not on this machine, so its shapes are not known",
            f"fetch it first: treeeagle pull {name}; --head none does without one",
        )
    from treeeagle_edge.head_checkpoint import read_head_config

    return read_head_config(folder, target)


def _local_head(name: str) -> Path | None:
    """Folder of a head that is already on this machine, None where it would have to be fetched."""
    if Path(name).expanduser().exists():
        return resolve_head(name, "")  # refuses what is no head at all
    if (BUNDLED_HEADS / name.lower() / "config.json").is_file():
        return BUNDLED_HEADS / name.lower()
    return cached_repository(name, "head") if is_repository(name) else None
