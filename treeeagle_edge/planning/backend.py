"""Which kernels run a model: the native ones where they can serve, PyTorch's elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from treeeagle_edge.config.quantised import check_width
from treeeagle_edge.errors import CannotRunError, UsageError
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.model_config import ModelConfig, StoredWidth
from treeeagle_edge.planning.native_bytes import BLOCK

NATIVE_BITS = (4, 8)
COMPILED_AGAIN = "they were compiled for this run alone"


@dataclass(frozen=True)
class Backend:
    """A choice of kernels and, where it could be better, why it is not: faster ones, or ones that need no compiling at
    every start.
    """

    native: bool
    reason: str | None = None  # a sentence, None where the best choice was possible
    hint: str | None = None


def choose_backend(
    wanted: str | None, *, bits: int, device: str, config: ModelConfig, head: HeadConfig | None = None
) -> Backend:
    """Native kernels for 4 and 8 bits on the CPU, PyTorch for the rest. Target and head run on the same.

    `wanted`: "native", "torch" or None. Raises UsageError for another name, CannotRunError where native kernels were
    asked for and cannot serve.
    """
    if wanted not in (None, "native", "torch"):
        raise UsageError(f"there are no kernels named {wanted}", "use native or torch")
    if wanted == "torch":
        return Backend(native=False)
    backend = _native_or_reason(bits, device, config, head)
    if wanted == "native" and not backend.native:
        raise CannotRunError(
            f"native kernels cannot run this: {backend.reason}", backend.hint or "use --kernels torch"
        )
    if bits not in NATIVE_BITS or device != "cpu":
        # without a reason: nobody expects native kernels for these widths and devices
        return Backend(native=False)
    return backend


def must_compile(wanted: str | None, *, bits: int | None, device: str) -> bool:
    """Whether a choice like this compiles native kernels first. bits: None where the profile or the model decides."""
    if wanted == "torch" or device != "cpu" or bits not in (None, *NATIVE_BITS):
        return False
    from treeeagle_edge.kernels.native import loader

    return loader.must_compile()


def stored_bits(stored: StoredWidth, asked: int | None, backend: Backend) -> int:
    """Bits that a repository of quantised weights runs at: as stored on PyTorch's kernels, 8 on native ones.

    Native kernels convert stored weights to blocks of their own. At 8 bits that loses next to nothing. At 4, which a
    person may ask for, the values are rounded once more. Raises UsageError for a width that PyTorch's kernels would
    have to quantise again for.
    """
    if backend.native:
        return asked or 8
    if asked is not None:
        check_width(stored, asked)
    return stored.bits


def _native_or_reason(bits: int, device: str, config: ModelConfig, head: HeadConfig | None) -> Backend:
    if device != "cpu":
        return Backend(False, f"they are for the CPU, and the device is {device}", "use --device cpu")
    if bits not in NATIVE_BITS:
        return Backend(False, f"they hold 4 or 8 bits, not {bits}", "use --bits 4 or --bits 8")
    shapes: tuple[ModelConfig | HeadConfig, ...] = (config,) if head is None else (config, head)
    widths = [width for it in shapes for width in (it.hidden_size, it.intermediate_size, it.head_dim)]
    odd = [width for width in widths if width % BLOCK]
    if odd:
        return Backend(False, f"a width of {odd[0]} is no multiple of {BLOCK}")
    from treeeagle_edge.kernels.native import loader

    found = loader.problem()
    if found is not None:
        return Backend(False, found.reason, found.hint)
    kept = loader.not_kept()
    return Backend(True) if kept is None else Backend(True, f"{kept.reason}; {COMPILED_AGAIN}", kept.hint)
