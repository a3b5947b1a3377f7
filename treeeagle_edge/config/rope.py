"""Rotary embedding settings in config.json: `rope_parameters`, or `rope_theta` with `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treeeagle_edge.errors import InputError
from treeeagle_edge.model_config import RopeConfig

_ALIASES = {"su": "longrope", "longrope": "longrope"}
_KINDS = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")


def rope_from_config(config: Mapping[str, Any], max_position: int, path: Path) -> RopeConfig:
    """`max_position` is the declared context, `path` is only named in errors.

    Reads `type` as well as `rope_type`. Raises InputError, by name, for a scaling that does not run here.
    """
    given: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise InputError(
            f"{path} has rope settings that differ by layer, which is not supported", "use another model"
        )
    kind = str(given.get("rope_type") or given.get("type") or "default")
    kind = _ALIASES.get(kind, kind)
    if kind not in _KINDS or given.get("mrope_section"):
        name = kind if kind not in _KINDS else "mrope"
        raise InputError(
            f"{path} uses rope scaling {name}, which is not supported", f"supported: {', '.join(_KINDS)}"
        )
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if float(partial) != 1.0:
        raise InputError(
            f"{path} rotates {partial} of each head (partial_rotary_factor), not supported",
            "use another model",
        )
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    original = given.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return _scaled(kind, theta, given, int(original) if original else None, max_position, path)


def _scaled(
    kind: str, theta: float, given: Mapping[str, Any], original: int | None, max_position: int, path: Path
) -> RopeConfig:
    """RopeConfig of a scaled kind, each with the keys it needs."""
    needed = {
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
    }
    for key in needed.get(kind, ("factor",)):
        if given.get(key) is None:
            raise InputError(
                f"config.json of {path} lacks {key} for rope scaling {kind}", "download the file again"
            )
    if kind == "llama3" and original is None:
        raise InputError(
            f"config.json of {path} lacks original_max_position_embeddings for rope scaling llama3",
            "download it again",
        )
    if kind in ("dynamic", "yarn", "longrope"):
        original = original or max_position
    factor = float(
        given.get("factor") or (max_position / original if kind == "longrope" and original else 1.0)
    )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=_optional(given, "low_freq_factor"),
        high_freq_factor=_optional(given, "high_freq_factor"),
        short_factor=_factors(given, "short_factor") if kind == "longrope" else None,
        long_factor=_factors(given, "long_factor") if kind == "longrope" else None,
        attention_factor=_attention_factor(kind, given, factor, original, path),
    )


def _attention_factor(
    kind: str, given: Mapping[str, Any], factor: float, original: int | None, path: Path
) -> float | None:
    """What multiplies cosine and sine: declared, or for longrope and yarn the formula `transformers` uses."""
    declared = _optional(given, "attention_factor")
    if kind == "longrope":
        if declared is not None or original is None:
            return declared
        return longrope_scale(factor, original)
    if kind != "yarn":
        return None
    if given.get("beta_fast", 32) not in (None, 32) or given.get("beta_slow", 1) not in (None, 1):
        raise InputError(
            f"{path} uses yarn with its own beta_fast or beta_slow, not supported", "use 32 and 1"
        )
    if given.get("truncate", True) is False:
        raise InputError(f"{path} uses yarn with truncate false, which is not supported", "use another model")
    if declared is not None:
        return declared
    mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_scale(factor, float(mscale)) / yarn_scale(factor, float(all_dim))
    return yarn_scale(factor)


def longrope_scale(factor: float, original: int) -> float:
    """LongRoPE's factor on cosine and sine (arXiv 2402.13753): `original` tokens are stretched `factor` times."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Equation 22 of YaRN (arXiv 2309.00071), as a factor on cosine and sine."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _optional(given: Mapping[str, Any], key: str) -> float | None:
    value = given.get(key)
    return None if value is None else float(value)


def _factors(given: Mapping[str, Any], key: str) -> tuple[float, ...]:
    return tuple(float(value) for value in given[key])


def longest_position(rope: RopeConfig, declared: int) -> int:
    """The longest context. A config whose scaling stretches an original context may declare only the original one."""
    if rope.kind in ("dynamic", "linear", "yarn") and rope.original_max_position:
        return max(declared, int(rope.original_max_position * rope.factor))
    return declared
