"""How config.json describes weights that come quantised. Those of bitsandbytes are read, all others refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treeeagle_edge.errors import InputError, UsageError
from treeeagle_edge.model_config import LINEARS, StoredWidth

_KINDS = {"nf4": "NF4", "fp4": "FP4"}


def stored_width(config: Mapping[str, Any], layers: int, path: Path) -> StoredWidth | None:
    """How the linear layers of the repository at `path` are stored, None for plain floats.

    `layers`: its number of decoder layers. Raises InputError, by name, for a method that is not read.
    """
    said = config.get("quantization_config") or config.get("compression_config")
    if not said:
        return None
    four, eight = bool(said.get("load_in_4bit")), bool(said.get("load_in_8bit"))
    method = said.get("quant_method") or said.get("quantization_method")
    if method is None and (four or eight):
        method = "bitsandbytes"  # early exports leave it out
    if method != "bitsandbytes":
        raise InputError(
            f"{path} is already quantised ({method or 'unknown'}), and such weights are not read",
            "use the unquantised repository of the model and --bits 4 or 8, or a GGUF file of it",
        )
    if four == eight:
        raise InputError(
            f"quantization_config of {path} does not say whether its bitsandbytes weights have 4 or 8 bits",
            "one of load_in_4bit and load_in_8bit is true; download config.json again",
        )
    if four:
        kind = str(said.get("bnb_4bit_quant_type", "fp4"))
        if kind not in _KINDS:
            raise InputError(
                f"{path} has 4-bit weights of the type {kind}, which are not read",
                "bitsandbytes has nf4 and fp4; use the unquantised repository of the model and --bits 4",
            )
    skipped = tuple(str(name) for name in said.get("llm_int8_skip_modules") or ())
    return StoredWidth(
        bits=4 if four else 8,
        name=_KINDS[kind] if four else "LLM.int8",
        plain=tuple(
            module
            for layer in range(layers)
            for name in LINEARS
            if _is_skipped(module := f"model.layers.{layer}.{name}", skipped)
        ),
    )


def _is_skipped(module: str, skipped: tuple[str, ...]) -> bool:
    """Whether some version of `transformers` leaves `module` unquantised: a skipped name covers all modules inside it.

    Versions differ in where in a module's path the name may stand. Where this says yes too often, a plan counts some
    megabytes too many; what is loaded goes by the tensors themselves.
    """
    return any(f".{name}." in f".{module}." or module.endswith(name) for name in skipped)


def check_width(stored: StoredWidth | None, bits: int) -> None:
    """Raise UsageError where weights stored at one width are asked for at another: they would be quantised twice."""
    if stored is not None and bits != stored.bits:
        raise UsageError(
            f"--bits is {bits}, and the model is stored at {stored.bits} bits ({stored.name})",
            f"leave --bits out or use --bits {stored.bits}; other widths need the unquantised repository of the model",
        )
