"""A GGUF file under Hugging Face's names: dequantised tensor by tensor, or as raw blocks for the kernels."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Quant
from gguf.quants import dequantize

from treeeagle_edge.checkpoint.tensor_shapes import check_tensors
from treeeagle_edge.config.generation_defaults import gguf_generation_defaults
from treeeagle_edge.config.gguf import gguf_model_config
from treeeagle_edge.errors import InputError
from treeeagle_edge.gguf_file import GGUFFile, open_gguf

QUANTISED = frozenset(
    {Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.IQ4_NL}
    | {Quant.Q2_K, Quant.Q3_K, Quant.Q4_K, Quant.Q5_K, Quant.Q6_K}
)
_FLOATS = {Quant.F32: torch.float32, Quant.F16: torch.float16, Quant.BF16: torch.bfloat16}

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Derived from the config and folded into it, or (attn_rot_embd) left over from old converters.
_NOT_WEIGHTS = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.?.*"
)
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_QK = re.compile(r".*self_attn\.([qk])_proj\.(weight|bias)")
# bytes handed to the dequantiser as one row: it works on 16 rows at a time, and rows of a model are short
_CHUNK = 1 << 16


def canonical_name(name: str) -> str:
    """The Hugging Face name of the GGUF tensor `name`; a name that is not known comes back unchanged."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        return name
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


class GGUFCheckpoint:
    """Opens the .gguf file `path`; see `checkpoint.Checkpoint` for what it offers, and `raw` beside it."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises InputError for a damaged file, and by name for types that are not read."""
        self._file: GGUFFile = open_gguf(path)
        self.path = path
        self.config = gguf_model_config(self._file)
        self.generation = gguf_generation_defaults(self._file.metadata)
        self._names = {
            canonical_name(name): name for name in self._file.tensors if not _NOT_WEIGHTS.fullmatch(name)
        }
        for name in self._names.values():
            quant = self._file.tensors[name].quant
            if quant not in QUANTISED and quant not in _FLOATS:
                readable = ", ".join(sorted(kind.name for kind in (*_FLOATS, *QUANTISED)))
                raise InputError(
                    f"{path} stores {name} as {quant.name}, which is not read",
                    f"take a file in one of: {readable}",
                )
        check_tensors(
            {name: self._file.tensors[stored].shape for name, stored in self._names.items()},
            self.config,
            path,
        )

    def names(self) -> frozenset[str]:
        """Canonical names of all tensors."""
        return frozenset(self._names)

    def raw(self, name: str) -> tuple[str, np.ndarray] | None:
        """(GGUF type name such as "Q4_1", [rows, bytes per row] uint8) of the quantised matrix `name`.

        Rows are in Hugging Face's order, blocks as stored. None for a tensor stored as F32, F16 or BF16.
        """
        tensor = self._file.tensors[self._names[name]]
        if tensor.quant not in QUANTISED:
            return None
        return tensor.quant.name, self._rows(name)

    def tensor(self, name: str) -> torch.Tensor:
        """fp32 for quantised types, else the stored dtype; on the CPU, a copy of its own."""
        tensor = self._file.tensors[self._names[name]]
        rows = self._rows(name)
        if tensor.quant in _FLOATS:
            return torch.from_numpy(rows).view(_FLOATS[tensor.quant]).reshape(tensor.shape)
        return torch.from_numpy(_dequantise(rows, tensor.quant)).reshape(tensor.shape)

    def _rows(self, name: str) -> np.ndarray:
        """[rows, bytes per row] uint8, the permutation of Q and K undone.

        GGUF's Llama converter interleaves the two halves of each head, because ggml rotates neighbours; Qwen
        files keep the halves apart. A bias is a vector of floats, so there every element moves.
        """
        blocks = self._file.blocks(self._names[name])
        match = _QK.fullmatch(name)
        if match is None or self.config.family not in ("llama", "minicpm"):
            return blocks
        heads = self.config.num_heads if match[1] == "q" else self.config.num_kv_heads
        half = self.config.head_dim // 2
        parts = blocks.reshape(heads, half, 2, -1).swapaxes(1, 2)
        return np.ascontiguousarray(parts).reshape(blocks.shape)


def _dequantise(rows: np.ndarray, quant: Quant) -> np.ndarray:
    """Flat fp32 values of `rows`; blocks stand alone, so they are regrouped into fewer, longer rows."""
    flat = np.ascontiguousarray(rows).reshape(-1)
    block_bytes = GGML_QUANT_SIZES[quant][1]
    chunk = max(1, _CHUNK // block_bytes) * block_bytes
    whole = len(flat) // chunk * chunk
    parts = [
        dequantize(part.reshape(-1, size), quant).reshape(-1)
        for part, size in ((flat[:whole], chunk), (flat[whole:], len(flat) - whole))
        if len(part)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
