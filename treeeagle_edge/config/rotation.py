"""Whether a checkpoint says that its hidden states are rotated.

QuaRot (arXiv 2404.00456) and SpinQuant (arXiv 2405.16406) multiply the residual stream by an orthogonal matrix that is
folded into the weights. The text stays the same. The features that EAGLE-3 reads do not: to a draft head that was made
for the original model they are noise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treeeagle_edge.errors import InputError
from treeeagle_edge.json_file import read_json

# Where quantisers write what they did: inside config.json, and in files beside it. quant_model_description.json is
# msmodelslim's, which sets `is_rot_used` there and names the matrix under `optional.quarot.rotation_map` (read so by
# vllm-ascend's vllm_ascend/models/llama_eagle3.py and its MTP models); compressed-tensors keeps a `transform_config`.
_SECTIONS = ("quantization_config", "compression_config", "quantize_config")
_FILES = (
    "quant_model_description*.json",
    "quantize_config.json",
    "quantization_config.json",
    "quant_config.json",
)
_WORDS = re.compile(
    r"quarot|spinquant|hadamard|rotation|rotated|is_rot_used|^transform_config$", re.IGNORECASE
)
_NO = ("", "none", "null", "false", "no", "off", "identity")


def rotation_of(config: Mapping[str, Any], path: Path) -> str | None:
    """Which entry says that hidden states are rotated, such as "is_rot_used in quant_model_description.json".

    `config`: the parsed config.json of the directory `path`. None where nothing says so. A file beside config.json
    that cannot be read says nothing: no weight depends on it.
    """
    for section in _SECTIONS:
        entry = _named_in(config.get(section))
        if entry is not None:
            return f"{entry} in {section} of config.json"
    for file in sorted(file for pattern in _FILES for file in path.glob(pattern)):
        try:
            entry = _named_in(read_json(file))
        except InputError:
            continue
        if entry is not None:
            return f"{entry} in {file.name}"
    return None


def _named_in(said: object) -> str | None:
    """The name of the first entry that speaks of a rotation and is not switched off."""
    return next((name for name, value in _entries(said) if _is_rotation(name, value)), None)


def _entries(said: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Every entry with the name it stands under; an entry of a list stands under the list's."""
    if isinstance(said, Mapping):
        for key, value in said.items():
            yield str(key), value
            yield from _entries(value, str(key))
    elif isinstance(said, list):
        for value in said:
            yield name, value
            yield from _entries(value, name)


def _is_rotation(name: str, value: object) -> bool:
    if isinstance(value, str):
        text = value.strip().lower()
        return text not in _NO and bool(_WORDS.search(name) or _WORDS.search(text))
    return bool(value) and bool(_WORDS.search(name))
