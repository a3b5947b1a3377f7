"""The GGUF container (ggml's docs/gguf.md): metadata and tensor directory in one pass, data on demand.

The reader of the `gguf` package makes an array for every string, which takes seconds for a vocabulary; this one walks
the header once. It takes enumerations and block sizes from the package.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from treeeagle_edge.errors import InputError, reason_of

_AGAIN = "download the file again; its size should be that of the original"
_MAX_COUNT = 1 << 24  # entries of one kind: far above any real file, so that a damaged count is not obeyed
_VOCABULARY = "tokenizer.ggml."  # its arrays are the vocabulary and what belongs to it
_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor directory."""

    name: str
    shape: tuple[int, ...]  # row-major, as in PyTorch: the reverse of the order in the file
    quant: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file whose header has been read; tensor bytes stay on disk until asked for."""

    path: Path
    metadata: dict[str, Any]  # scalars, strings, arrays as lists; those of the tokenizer only if asked for
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """`general.architecture`, or an empty string."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata of this architecture: `key` is given without the architecture's prefix."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def blocks(self, name: str) -> np.ndarray:
        """[rows, bytes per row] uint8 of tensor `name`, read from the file; a vector has one row.

        Raises InputError where the file has shrunk or gone since it was opened. (Read, not mapped: with a
        mapping that would end the process.)
        """
        tensor = self.tensors[name]
        try:
            flat = np.fromfile(self.path, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be read: {reason_of(error)}", "check the disk and the path"
            ) from error
        if len(flat) != tensor.nbytes:
            raise InputError(f"{self.path} ends before its tensor {name}, so it is truncated", _AGAIN)
        return flat.reshape(-1, tensor.nbytes // max(1, int(np.prod(tensor.shape[:-1]))))


def open_gguf(path: Path, *, vocabulary: bool = False) -> GGUFFile:
    """Read the header of the GGUF file `path` (versions 2 and 3, little-endian).

    The tokenizer's arrays, 10^5 strings of a vocabulary and as many merges, are passed over unless `vocabulary` is set:
    a model is opened several times, and Python's heap does not give back what so many strings took of it.
    Raises InputError for a missing, foreign, truncated, big-endian or split file, and unknown tensor types.
    """
    if not path.is_file():
        raise InputError(
            f"{path} does not exist" if not path.exists() else f"{path} is not a file", "check the path"
        )
    if path.stat().st_size < 24:
        raise InputError(f"{path} is too short for a GGUF file", _AGAIN)
    try:
        header = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason_of(error)}", "check its permissions") from error
    _check_magic(bytes(header[:8]), path)
    try:
        metadata, infos, end = _read_header(header.data, path, vocabulary)
    except (struct.error, IndexError, OverflowError) as error:
        raise InputError(f"{path} ends inside its header, so it is truncated", _AGAIN) from error
    if int(metadata.get("split.count", 1)) > 1:
        raise InputError(
            f"{path} is one of {metadata['split.count']} parts, and split GGUF files are not read",
            "join the parts with llama-gguf-split --merge, or take a file that is not split",
        )
    alignment = int(metadata.get("general.alignment", 32)) or 32
    start = end + (-end) % alignment
    tensors = {info[0]: _locate(info, start, len(header), path) for info in infos}
    return GGUFFile(path, metadata, tensors)


def _check_magic(head: bytes, path: Path) -> None:
    """Refuse what is not a little-endian GGUF of version 2 or 3."""
    if head[:4] != b"GGUF":
        what = "a zip archive" if head[:2] == b"PK" else "no GGUF file"
        raise InputError(f"{path} is {what}", "give a .gguf file or a Hugging Face model directory")
    version = struct.unpack("<I", head[4:8])[0]
    if version & 0xFFFF == 0:
        raise InputError(
            f"{path} is a big-endian GGUF file, which is not read", "take the little-endian file of the model"
        )
    if version not in (2, 3):
        raise InputError(
            f"{path} is GGUF version {version}, and versions 2 and 3 are read",
            "take a newer file of the model",
        )


def _read_header(buffer: memoryview, path: Path, vocabulary: bool) -> tuple[dict[str, Any], list[tuple], int]:
    """(metadata, [(name, shape, type number, offset from the data section)], bytes read)."""
    num_tensors, num_keys = struct.unpack_from("<QQ", buffer, 8)
    if num_tensors > _MAX_COUNT or num_keys > _MAX_COUNT:
        raise InputError(f"{path} has an impossible header, so it is damaged", _AGAIN)
    at = 24
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key, at = _string(buffer, at)
        kind = struct.unpack_from("<I", buffer, at)[0]
        if kind == GGUFValueType.ARRAY and key.startswith(_VOCABULARY) and not vocabulary:
            at = _past_array(buffer, at + 4, path)
        else:
            metadata[key], at = _value(buffer, at + 4, kind, path)
    infos = []
    for _ in range(num_tensors):
        name, at = _string(buffer, at)
        (ndim,) = struct.unpack_from("<I", buffer, at)
        if ndim > 4:
            raise InputError(f"{path} has a tensor of {ndim} dimensions, so it is damaged", _AGAIN)
        *dims, number, offset = struct.unpack_from(f"<{ndim}QIQ", buffer, at + 4)
        at += 4 + 8 * ndim + 12
        infos.append((name, tuple(reversed(dims)), number, offset))
    return metadata, infos, at


def _string(buffer: memoryview, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", buffer, at)
    end = at + 8 + length
    if end > len(buffer):
        raise IndexError("string past the end")
    return str(buffer[at + 8 : end], "utf-8", "replace"), end


def _value(buffer: memoryview, at: int, kind: int, path: Path) -> tuple[Any, int]:
    """The metadata value of type `kind` at `at`, and where it ends."""
    if kind == GGUFValueType.STRING:
        return _string(buffer, at)
    if kind == GGUFValueType.ARRAY:
        return _array(buffer, at, path)
    layout = _SCALARS.get(kind)  # type: ignore[call-overload]  # an int equals its IntEnum member
    if layout is None:
        raise InputError(f"{path} has metadata of unknown type {kind}, so it is damaged", _AGAIN)
    return struct.unpack_from(layout, buffer, at)[0], at + struct.calcsize(layout)


def _array(buffer: memoryview, at: int, path: Path) -> tuple[list[Any], int]:
    """A typed array. Vocabularies have 10^5 strings, so that case is a tight loop."""
    kind, count = struct.unpack_from("<IQ", buffer, at)
    at += 12
    if count > len(buffer):
        raise IndexError("array past the end")
    layout = _SCALARS.get(kind)
    if layout is not None:
        size = struct.calcsize(layout) * count
        return list(struct.unpack_from(f"<{count}{layout[1]}", buffer, at)), at + size
    values: list[Any] = []
    if kind != GGUFValueType.STRING:
        for _ in range(count):
            value, at = _value(buffer, at, kind, path)
            values.append(value)
        return values, at
    read_length, limit = struct.Struct("<Q").unpack_from, len(buffer)
    for _ in range(count):
        start = at + 8
        at = start + read_length(buffer, at)[0]
        if at > limit:
            raise IndexError("string past the end")
        values.append(str(buffer[start:at], "utf-8", "replace"))
    return values, at


def _past_array(buffer: memoryview, at: int, path: Path) -> int:
    """Where the array at `at` ends, without making anything of it.

    A count or a length that is not true leads past the end, where nothing can be read.
    """
    kind, count = struct.unpack_from("<IQ", buffer, at)
    layout = _SCALARS.get(kind)
    if layout is not None:
        return at + 12 + struct.calcsize(layout) * count
    if kind != GGUFValueType.STRING:
        return _array(buffer, at, path)[1]
    at += 12
    read_length = struct.Struct("<Q").unpack_from
    for _ in range(count):
        at += 8 + read_length(buffer, at)[0]
    return at


def _locate(info: tuple, start: int, size: int, path: Path) -> GGUFTensor:
    """Where an entry's bytes lie in the file; `start` is the data section, `size` the file's length."""
    name, shape, number, offset = info
    try:
        quant = GGMLQuantizationType(number)
    except ValueError as error:
        raise InputError(
            f"{path} stores {name} in the unknown GGUF type {number}",
            "take a Q8_0, Q4_K_M or F16 file of the model",
        ) from error
    block, block_bytes = GGML_QUANT_SIZES[quant]
    count = int(np.prod(shape, dtype=np.int64)) if shape else 1
    if (shape[-1] if shape else 1) % block:
        raise InputError(
            f"{path} stores {name} in rows that {quant.name} cannot hold, so it is damaged", _AGAIN
        )
    nbytes = count // block * block_bytes
    if start + offset + nbytes > size:
        raise InputError(f"{path} ends before its tensor {name}, so it is truncated", _AGAIN)
    return GGUFTensor(name, shape or (1,), quant, start + offset, nbytes)
