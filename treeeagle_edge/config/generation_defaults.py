"""How a publisher wants a model sampled and stopped: generation_config.json, or GGUF metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeeagle_edge.errors import InputError, UsageError
from treeeagle_edge.json_file import read_json
from treeeagle_edge.sampling_params import SamplingParams


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling values the checkpoint recommends (None: it has no view) and the ids that end an answer."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_ids: frozenset[int] = frozenset()


def as_ids(value: Any) -> frozenset[int]:
    """The ids in an `eos_token_id` entry, which is absent, an int or a list of ints."""
    values: Iterable[Any] = value if isinstance(value, list) else (value,)
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def read_generation_defaults(directory: Path, config: Mapping[str, Any]) -> GenerationDefaults:
    """Defaults of a Hugging Face directory; `config` is its parsed config.json.

    Sampling values count unless generation_config.json says `do_sample: false`. Stop ids are the union of
    both, because Llama 3 names its end-of-turn token in generation_config.json only. Raises InputError for values that
    nothing could be sampled with.
    """
    file = directory / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    stop_ids = as_ids(generation.get("eos_token_id")) | as_ids(config.get("eos_token_id"))
    if generation.get("do_sample") is False:
        return GenerationDefaults(stop_ids=stop_ids)
    temperature, top_p, top_k = (generation.get(key) for key in ("temperature", "top_p", "top_k"))
    try:
        defaults = GenerationDefaults(
            temperature=None if temperature is None else float(temperature),
            top_p=None if top_p is None else float(top_p),
            top_k=None if top_k is None else max(int(top_k), 0),  # -1 is "off" to some publishers
            stop_ids=stop_ids,
        )
        SamplingParams(temperature=defaults.temperature or 0.0, top_p=1.0 if top_p is None else float(top_p))
    except (TypeError, ValueError, OverflowError, UsageError) as error:
        raise InputError(f"{file} asks for sampling that cannot be: {error}", "correct the file") from error
    return defaults


def gguf_generation_defaults(metadata: Mapping[str, Any]) -> GenerationDefaults:
    """Defaults of a GGUF file: the ids that end text, turn and message; it carries no sampling values."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (as_ids(metadata.get(f"tokenizer.ggml.{key}")) for key in keys)
    return GenerationDefaults(stop_ids=frozenset().union(*found))
