"""Memory profiles: which model, head, bits, context and tree suit a class of machine. Read from YAML, validated."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from treeeagle_edge.errors import CannotRunError, InputError, reason_of
from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.paths import typed_path
from treeeagle_edge.planning.known_models import KNOWN_MODELS
from treeeagle_edge.planning.memory_plan import plan_memory
from treeeagle_edge.rounds import MAX_BRANCHING, MAX_DEPTH, MAX_NODES, TreeShape, tree_shape
from treeeagle_edge.text_file import read_text
from treeeagle_edge.units import GB, format_gb
from treeeagle_edge.widths import HEAD_BITS, LAYER_BITS, LM_HEAD_BITS

SHIPPED = ("cpu", "gpu-12gb", "gpu-16gb", "gpu-24gb")
# What PyYAML lets through from Python where a value is none of its kind, as the date 2020-13-45 and the number 0x_ are.
_UNREADABLE_VALUES = (RecursionError, ValueError, LookupError, ArithmeticError, AttributeError)
_LONGEST_SHOWN = 60  # characters of a value in a sentence about it


@dataclass(frozen=True)
class MemoryProfile:
    """Defaults for one class of machine."""

    name: str
    device: str  # "cpu" or "cuda"
    memory: int  # bytes: smallest device this profile is chosen for
    model: str
    head: str | None  # None: decode plainly, or the head known for the model
    bits: int  # 4, 8, 16 or 32
    context: int  # tokens
    tree: TreeShape
    reserve: int  # bytes left to the desktop, the driver and the program itself
    head_bits: int | None = None  # of the draft head: 4, 8, 16, or None for the usual
    lm_head_bits: int | None = None  # 8, 16, or None for the usual


@dataclass(frozen=True)
class _Rule:
    """What a key of the file may hold."""

    kinds: tuple[type, ...]
    words: str  # the allowed values, for the error message
    low: float = float("-inf")
    high: float = float("inf")
    choices: tuple[object, ...] = ()
    required: bool = True


_TEXT = _Rule((str,), "text")
_RULES: Mapping[str, _Rule] = {
    "name": _TEXT,
    "device": _Rule((str,), "cpu or cuda", choices=("cpu", "cuda")),
    "memory_gb": _Rule((int, float), "a number from 1 to 1024", 1, 1024),
    "model": _TEXT,
    "head": _Rule(
        (str, type(None)), "text, or left out for the head that goes with the model", required=False
    ),
    "bits": _Rule((int,), "4, 8, 16 or 32", choices=LAYER_BITS),
    "head_bits": _Rule((int,), "4, 8 or 16, or leave it out", choices=HEAD_BITS, required=False),
    "lm_head_bits": _Rule((int,), "8 or 16, or leave it out", choices=LM_HEAD_BITS, required=False),
    "context": _Rule((int,), "a whole number from 64 to 1048576", 64, 1 << 20),
    "tree": _Rule((dict,), "a block with depth, branching and nodes"),
    "reserve_gb": _Rule((int, float), "a number from 0 to 256", 0, 256),
}
_TREE_RULES: Mapping[str, _Rule] = {
    "depth": _Rule((int,), f"a whole number from 1 to {MAX_DEPTH}", 1, MAX_DEPTH),
    "branching": _Rule((int,), f"a whole number from 1 to {MAX_BRANCHING}", 1, MAX_BRANCHING),
    "nodes": _Rule((int,), f"a whole number from 0 (chosen while decoding) to {MAX_NODES}", 0, MAX_NODES),
}


def load_profile(name_or_path: str) -> MemoryProfile:
    """A shipped profile by name, or a YAML file by path.

    Raises InputError that names the file, the key and what is allowed.
    """
    if name_or_path in SHIPPED:
        text = (resources.files("treeeagle_edge.profiles") / f"{name_or_path}.yaml").read_text()
        return parse_profile(text, f"profile {name_or_path}")
    path = typed_path(name_or_path)
    if path.suffix not in (".yaml", ".yml") and not os.path.exists(path):
        close = difflib.get_close_matches(name_or_path, SHIPPED, n=1)
        hint = (f"did you mean {close[0]}? " if close else "") + f"shipped profiles: {', '.join(SHIPPED)}"
        raise InputError(f"profile {name_or_path!r} is unknown", f"{hint}; or give a .yaml file")
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "it is not text"
        raise InputError(f"profile {path} cannot be read: {reason}", "check the path") from error
    return parse_profile(text, str(path))


def parse_profile(text: str, source: str) -> MemoryProfile:
    """Build a profile from YAML text. `source` names it in errors. Raises InputError."""
    import yaml

    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, *_UNREADABLE_VALUES) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        hint = "write one `key: value` a line, indented with spaces"
        raise InputError(f"{source} is not valid YAML{where}", hint) from error
    if not isinstance(data, dict):
        raise InputError(f"{source} holds no keys", f"expected {', '.join(_RULES)}")
    _check(data, _RULES, source, "")
    _check(data["tree"], _TREE_RULES, source, "tree.")
    return MemoryProfile(
        name=data["name"],
        device=data["device"],
        memory=int(data["memory_gb"] * GB),
        model=data["model"],
        head=data.get("head"),
        bits=data["bits"],
        context=data["context"],
        tree=tree_shape(**data["tree"]),
        reserve=int(data["reserve_gb"] * GB),
        head_bits=data.get("head_bits"),
        lm_head_bits=data.get("lm_head_bits"),
    )


def _check(data: dict[Any, Any], rules: Mapping[str, _Rule], source: str, prefix: str) -> None:
    for key in data:
        if key not in rules:
            close = difflib.get_close_matches(str(key), rules, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known keys: {', '.join(rules)}"
            raise InputError(f"{source} has an unknown key {prefix}{key}", hint)
    for key, rule in rules.items():
        if key not in data:
            if rule.required:
                raise InputError(f"{source} lacks the key {prefix}{key}", f"add {prefix}{key}: {rule.words}")
            continue
        value = data[key]
        fits_kind = isinstance(value, rule.kinds) and not isinstance(value, bool)
        shown = _shown(value)
        if not fits_kind:
            raise InputError(
                f"{source} has {prefix}{key}: {shown}, which is of the wrong type", f"use {rule.words}"
            )
        out = isinstance(value, int | float) and not rule.low <= value <= rule.high  # also refuses NaN
        if out or (rule.choices and value not in rule.choices) or value == "":
            raise InputError(
                f"{source} has {prefix}{key}: {shown}, which is out of range", f"use {rule.words}"
            )


def choose_profile(hardware: Hardware, *, model: str | None = None) -> MemoryProfile:
    """The shipped profile for the chosen device: of those whose memory the card has, the one that asks for most.

    `model`: the one that the person named. A small card is then no reason to refuse yet: the plan decides.
    Raises CannotRunError for a card too small for every profile's default model, with what would fit there.
    """
    if hardware.gpu is None:
        return load_profile("cpu")
    profiles = [profile for profile in map(load_profile, SHIPPED) if profile.device == "cuda"]
    reached = [profile for profile in profiles if profile.memory <= hardware.total]
    if reached:
        return max(reached, key=lambda profile: profile.memory)
    smallest = min(profiles, key=lambda profile: profile.memory)
    if model is not None:
        return smallest
    raise CannotRunError(
        f"{hardware.gpu.name} has {format_gb(hardware.total)}, and the smallest profile for a card, {smallest.name}, "
        f"needs {format_gb(smallest.memory)}",
        small_card_advice(hardware, smallest),
    )


def small_card_advice(hardware: Hardware, profile: MemoryProfile) -> str:
    """What would run on a card that is too small for a profile: the largest known models that fit, and the CPU."""
    names = models_that_fit(hardware, profile)[:2]
    fit = "; ".join(f"--model {name} --bits {profile.bits}" for name in names)
    return (f"what fits this card: {fit}; or " if fit else "") + "use --device cpu"


def models_that_fit(hardware: Hardware, profile: MemoryProfile, *, native: bool = False) -> list[str]:
    """Known models whose plan fits the free memory at the profile's bits, tree and context, the best first.

    Models with a head come first, then those with the longest context, then the largest. `native`: count bytes as the
    native kernels hold them.
    """
    found = []
    for name, known in KNOWN_MODELS.items():
        context = min(profile.context, known.config.max_position)
        plan = plan_memory(
            known.config,
            known.head,
            bits=profile.bits,
            context=context,
            tree=profile.tree,
            reserve=profile.reserve,
            budget=hardware.budget,
            device=hardware.device,
            native=native,
            head_bits=None if native else profile.head_bits,
            lm_head_bits=None if native else profile.lm_head_bits,
        )
        if plan.fits:
            found.append((known.head is not None, context, plan.lines[0].nbytes, name))
    return [name for *_, name in sorted(found, reverse=True)]


def _shown(value: object) -> str:
    """`value` as an error message quotes it."""
    if isinstance(value, dict | list | set):
        return "a block"
    if (
        isinstance(value, int) and value.bit_length() > 256
    ):  # Python writes out no number of thousands of digits
        return "a huge number"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
