"""Weights as bitsandbytes stores them: 4-bit codes in blocks (QLoRA, arXiv 2305.14314), int8 rows (arXiv 2208.07339).

Beside a 4-bit `X.weight` lie `X.weight.absmax`, `.quant_map` and a JSON object in bytes, for nested scales
`.nested_absmax` and `.nested_quant_map` too. Beside an int8 one lie `X.SCB` and, mostly, `X.weight_format`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treeeagle_edge.errors import InputError
from treeeagle_edge.kernels.triton.operands import INT8_MOST
from treeeagle_edge.model_config import LINEARS, ModelConfig

_STATE = ".quant_state.bitsandbytes__"


@dataclass(frozen=True)
class Stored4bit:
    """A matrix [out, in], row-major in blocks that share a scale; a weight is quant_map[code] * absmax of its block."""

    codes: Tensor  # [out * in / 2] uint8: the earlier weight in the high four bits
    absmax: Tensor  # [blocks] float32, nested scales already expanded
    quant_map: Tensor  # [16] float32
    block: int  # weights
    kind: str  # "nf4" or "fp4"
    shape: tuple[int, int]

    def dequantised(self) -> Tensor:
        """[out, in] float32."""
        rows, columns = self.shape
        nibbles = torch.stack((self.codes >> 4, self.codes & 15), dim=1).flatten()[: rows * columns]
        return _scaled(self.quant_map[nibbles.int()], self.absmax, self.block).view(self.shape)


@dataclass(frozen=True)
class StoredInt8:
    """A matrix [out, in] with one scale a row; a weight is code * absmax / 127."""

    codes: Tensor  # [out, in] int8
    absmax: Tensor  # [out] float32

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.codes.shape
        return rows, columns

    def dequantised(self) -> Tensor:
        """[out, in] float32."""
        return self.codes.float() * (self.absmax / INT8_MOST)[:, None]


StoredMatrix = Stored4bit | StoredInt8


class BnbTensors:
    """Finds the stored matrices among the tensors of a checkpoint and puts their parts together."""

    def __init__(
        self, found: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor], path: Path
    ) -> None:
        """found: stored shapes by name; `read` gives a tensor; `path` is only named in errors.

        Reads the small objects that hold the shapes of 4-bit matrices. Raises InputError for one that is damaged.
        """
        self._read = read
        self._path = path
        self._found = found
        self._states: dict[str, dict[str, Any]] = {}
        parts: set[str] = set()
        for name in found:
            weight, mark, kind = name.partition(_STATE)
            if mark:
                self._states[weight] = self._state(name) | {"kind": kind}
                parts |= {other for other in found if other.startswith(f"{weight}.")}
        self._int8 = {
            f"{name.removesuffix('.SCB')}.weight"
            for name in found
            if name.endswith(".SCB") and f"{name.removesuffix('.SCB')}.weight" in found
        }
        parts |= {
            f"{name.removesuffix('.weight')}.{part}"
            for name in self._int8
            for part in ("SCB", "weight_format")
        }
        self.shapes = {name: self._shape(name) for name in found if name not in parts}

    def __contains__(self, name: str) -> bool:
        """Whether the tensor `name` is stored quantised."""
        return name in self._states or name in self._int8

    def matrix(self, name: str) -> StoredMatrix:
        """The matrix `name`, with fp32 scales. Raises InputError where its parts are missing or do not agree."""
        return self._four_bit(name) if name in self._states else self._eight_bit(name)

    def check(self, config: ModelConfig) -> None:
        """Raise InputError where a matrix is stored as floats that config.json says is quantised."""
        if config.stored is None:
            return
        for layer in range(config.num_layers):
            for linear in LINEARS:
                module = f"model.layers.{layer}.{linear}"
                if f"{module}.weight" not in self and module not in config.stored.plain:
                    raise InputError(
                        f"{module} in {self._path} is not quantised, and config.json says {config.stored.bits} bits",
                        "if no layer is, remove quantization_config from config.json and give --bits; "
                        "else download the model again",
                    )

    def _shape(self, name: str) -> tuple[int, ...]:
        state = self._states.get(name)
        return self._found[name] if state is None else tuple(state["shape"])

    def _state(self, name: str) -> dict[str, Any]:
        """The JSON object in the bytes of the tensor `name`."""
        try:
            state = json.loads(bytes(self._read(name).tolist()))
            rows, columns = state["shape"]
            whole = [rows, columns, state["blocksize"]]
            nested = [state["nested_blocksize"], state["nested_offset"]] if "nested_offset" in state else []
            if not all(isinstance(size, int) and size > 0 for size in whole + nested[:1]):
                raise ValueError(f"sizes {whole + nested[:1]}")
            return {**state, "nested_offset": float(nested[1]) if nested else None}
        except (ValueError, TypeError, KeyError) as error:
            raise self._damaged(name, f"cannot be read ({error})") from error

    def _four_bit(self, name: str) -> Stored4bit:
        state = self._states[name]
        rows, columns = state["shape"]
        codes = self._read(name).flatten().view(torch.uint8)  # some exports store the bytes as another type
        quant_map = self._part(name, "quant_map").float()
        blocks = -(-rows * columns // state["blocksize"])
        absmax = self._part(name, "absmax").flatten()
        if state["nested_offset"] is not None:
            nested_map, scales = self._part(name, "nested_quant_map"), self._part(name, "nested_absmax")
            if absmax.dtype != torch.uint8 or len(nested_map) != 256:
                raise self._damaged(name, "has nested scales of the wrong kind")
            if len(scales) != -(-len(absmax) // state["nested_blocksize"]):
                raise self._damaged(name, f"has {len(scales)} scales for {len(absmax)} scales")
            absmax = (
                _scaled(nested_map[absmax.int()], scales, state["nested_blocksize"]) + state["nested_offset"]
            )
        sizes = (len(codes), len(absmax), len(quant_map))
        if sizes != (-(-rows * columns // 2), blocks, 16):
            raise self._damaged(
                name, f"of shape {[rows, columns]} has {sizes[0]} bytes and {sizes[1]} scales"
            )
        return Stored4bit(
            codes, absmax.float(), quant_map, state["blocksize"], state["kind"], (rows, columns)
        )

    def _eight_bit(self, name: str) -> StoredInt8:
        module = name.removesuffix(".weight")
        codes, absmax = self._read(name), self._read(f"{module}.SCB").float().flatten()
        order = f"{module}.weight_format"
        if order in self._found and int(self._read(order)) != 0:
            raise InputError(
                f"{name} in {self._path} is stored in the order of one card's kernels",
                "save it again with a newer bitsandbytes, which stores rows",
            )
        if codes.dtype != torch.int8 or codes.dim() != 2 or len(absmax) != codes.shape[0]:
            raise self._damaged(name, f"has {len(absmax)} scales for {list(codes.shape)} of {codes.dtype}")
        return StoredInt8(codes, absmax)

    def _part(self, name: str, part: str) -> Tensor:
        if f"{name}.{part}" not in self._found:
            raise self._damaged(name, f"lacks its {part}")
        return self._read(f"{name}.{part}")

    def _damaged(self, name: str, what: str) -> InputError:
        return InputError(
            f"{name} in {self._path} {what}", "download the model again; a file is damaged or incomplete"
        )


def _scaled(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """[n] float32 values, each times the scale of its block; the last block may be short."""
    whole = len(values) // block * block
    scaled = values[:whole].view(-1, block) * scales[: whole // block, None]
    rest = values[whole:] * scales[whole // block :][:1]
    return torch.cat((scaled.flatten(), rest))
