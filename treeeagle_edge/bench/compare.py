"""Compares a result with an earlier one: ratios for each scenario, and settings that differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treeeagle_edge.bench.document import SCHEMA, Document
from treeeagle_edge.errors import InputError, reason_of
from treeeagle_edge.json_file import parse_json
from treeeagle_edge.text_file import read_text

_HINT = "give a file written by: treeeagle bench -o json > FILE"
_KEYS = ("plain_tps", "tree_tps", "speedup", "tokens_per_round")
_MUST_MATCH = (
    *("model", "head", "bits", "tree", "max_tokens", "prompts", "turns", "sampling"),
    *("threads", "kernels"),
)
_MAY_LACK = ("head_bits", "lm_head_bits")  # older documents lack them: compared only where both have them


def read_document(path: Path) -> Document:
    """Read what `bench -o json` wrote. Raises InputError for a file that is something else."""
    try:
        document = parse_json(read_text(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}", _HINT) from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise InputError(f"{path} is not JSON", _HINT) from error
    if not isinstance(document, dict) or not str(document.get("schema", "")).startswith("treeeagle-bench/"):
        raise InputError(f"{path} is not the result of a bench", _HINT)
    if document["schema"] != SCHEMA:
        raise InputError(
            f"{path} has the schema {document['schema']}, and this version reads {SCHEMA}", _HINT
        )
    try:
        complete = all(
            key in entry
            for entry in (*document["scenarios"], document["summary"])
            for key in ("name", *_KEYS)
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} is not a complete result of a bench", _HINT) from error
    if not complete:
        raise InputError(f"{path} is not a complete result of a bench", _HINT)
    return document


def with_comparison(new: Document, old: Document, name: str) -> Document:
    """`new` with a key "compare": new / old for each figure that both have. A note says where settings differ."""
    before = {entry["name"]: entry for entry in (*old["scenarios"], old["summary"])}
    ratios = [
        {"name": entry["name"], **{key: _ratio(entry[key], before[entry["name"]][key]) for key in _KEYS}}
        for entry in (*new["scenarios"], new["summary"])
        if entry["name"] in before
    ]
    differences = _differences(new, old)
    notes = [*new["notes"]]
    if differences:
        notes.append(f"compared with {name}, which ran with other settings: {'; '.join(differences)}")
    return {**new, "compare": {"with": name, "keys": list(_KEYS), "ratios": ratios}, "notes": notes}


def _ratio(new: float | None, old: float | None) -> float | None:
    return new / old if new is not None and old else None


def _differences(new: Document, old: Document) -> list[str]:
    found = [
        f"{key} {_word(_get(old, 'settings', key))}, now {_word(_get(new, 'settings', key))}"
        for key in (*_MUST_MATCH, *(name for name in _MAY_LACK if _get(old, "settings", name)))
        if _get(old, "settings", key) != _get(new, "settings", key)
    ]
    devices = _get(old, "environment", "device"), _get(new, "environment", "device")
    return found + (
        [f"device {_word(devices[0])}, now {_word(devices[1])}"] if devices[0] != devices[1] else []
    )


def _get(document: Document, part: str, key: str) -> Any:
    section = document.get(part)
    return section.get(key) if isinstance(section, Mapping) else None


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={item}" for key, item in value.items())
    return "none" if value is None else str(value)
