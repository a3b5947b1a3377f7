"""A model on disk, whatever its format: config, sampling defaults, and tensors under one set of names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from treeeagle_edge.config.generation_defaults import GenerationDefaults
from treeeagle_edge.errors import InputError
from treeeagle_edge.model_config import ModelConfig

if TYPE_CHECKING:
    import numpy as np
    import torch

    from treeeagle_edge.checkpoint.bnb import StoredMatrix


class Checkpoint(Protocol):
    """Opened, checked for completeness, and not yet loaded: tensors are read one by one."""

    path: Path
    config: ModelConfig
    generation: GenerationDefaults

    def names(self) -> frozenset[str]:
        """Canonical names, those of Hugging Face's Llama: "model.embed_tokens.weight", "model.norm.weight",
        "model.layers.0.self_attn.q_proj.weight", ... and "lm_head.weight" unless it is tied to the embedding.
        """
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name` on the CPU: fp32 for quantised ones, otherwise the stored dtype.

        Linear weights are [out, in]; rows of Q and K are in Hugging Face's order, whose rotation pairs i with
        i + head_dim / 2. Raises InputError where the file has become unreadable, KeyError for an unknown
        name.
        """
        ...

    def raw(self, name: str) -> tuple[str, np.ndarray] | None:
        """(GGUF type name such as "Q4_1", [rows, bytes per row] uint8) of a matrix stored in quantised blocks.

        Rows are in the order of `tensor`. None where the tensor is stored as floats.
        """
        ...


@runtime_checkable
class HoldsStored(Protocol):
    """A checkpoint whose matrices may come quantised by bitsandbytes."""

    def stored(self, name: str) -> StoredMatrix | None:
        """Codes and scales of the matrix `name` as they are stored, None where it is stored as floats.

        Raises InputError where its parts are missing or do not agree.
        """
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the directory or .gguf file at `path`; every name and shape is checked, no tensor is loaded.

    Raises InputError for what is missing, truncated or damaged, and by name for what does not run here.
    """
    if path.is_dir():
        from treeeagle_edge.checkpoint.hf import HFCheckpoint

        return HFCheckpoint(path)
    if not path.exists():
        raise InputError(f"{path} does not exist", "check the path, or give a model's name")
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        raise InputError(
            f"{path} holds tensors without a config", f"give the directory that holds it: {path.parent}"
        )
    from treeeagle_edge.checkpoint.gguf import GGUFCheckpoint

    return GGUFCheckpoint(path)
