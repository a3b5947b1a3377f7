"""At how many bits the parts of a run are stored: the target's layers, its lm_head, the draft head."""

from __future__ import annotations

from dataclasses import dataclass

from treeeagle_edge.errors import UsageError

LAYER_BITS = (4, 8, 16, 32)
HEAD_BITS = (4, 8, 16)
LM_HEAD_BITS = (8, 16)
_NATIVE_HEAD_BITS, _NATIVE_LM_HEAD_BITS = (4, 8), (8,)  # the usual first, whatever the layers have


@dataclass(frozen=True)
class Widths:
    """Bits of each part. 16 is a 16-bit float, 32 is fp32."""

    layers: int  # one of LAYER_BITS
    lm_head: int  # 8, 16 or 32
    head: int  # of the draft head: 4, 8, 16 or 32


def choose_widths(
    bits: int, device: str, *, native: bool, head: int | None = None, lm_head: int | None = None
) -> Widths:
    """The widths of a run whose layers have `bits`. head, lm_head: the width asked for, None for the usual one.

    The usual widths, and why:

    - Native kernels: 8 bits for lm_head, 4 for the draft head. No text depends on the draft head; at 4 bits a draft
      takes a quarter less time, and rounds settle 2 % fewer tokens.
    - PyTorch with layers of 16 or 32 bits: the same width everywhere.
    - PyTorch with layers of 4 or 8 bits: 16 for the draft head, and for lm_head on CUDA. On the CPU lm_head has 8: it
      is a quarter of a small model's bytes, and int8 is read twice as fast as bf16 at next to no loss. 4 bits would
      show in every token.

    Raises UsageError for a width that cannot be had. Whether `bits` itself is a width is not checked here.
    """
    if native:
        return Widths(
            bits,
            _native("lm_head", "--lm-head-bits", lm_head, _NATIVE_LM_HEAD_BITS),
            _native("a draft head", "--head-bits", head, _NATIVE_HEAD_BITS),
        )
    if bits == 32 and lm_head is not None:
        raise UsageError(
            f"lm_head has 32 bits beside layers of 32 bits, not {lm_head}",
            "leave --lm-head-bits out, or use --bits 16",
        )
    usual = bits if bits >= 16 else 8 if device.startswith("cpu") else 16
    return Widths(bits, lm_head or usual, head or (32 if bits == 32 else 16))


def _native(part: str, option: str, asked: int | None, held: tuple[int, ...]) -> int:
    if asked is not None and asked not in held:
        widths = " or ".join(map(str, held))
        raise UsageError(
            f"native kernels hold {part} at {widths} bits, not {asked}",
            f"use {option} {widths}, or --kernels torch",
        )
    return asked or held[0]


def check_choice(name: str, value: int | None, allowed: tuple[int, ...]) -> None:
    """Raise UsageError where `value` was given and is none of `allowed`. `name` is the option's."""
    if value is not None and value not in allowed:
        words = f"{', '.join(map(str, allowed[:-1]))} or {allowed[-1]}"
        raise UsageError(f"{name} is {value}, which is not a width we run", f"use {words}")
