"""What `treeeagle profile` computes on the native kernels: a layer, attention, and passes of a timed model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from treeeagle_edge.kernels.native.model import Model
from treeeagle_edge.kernels.native.reading import Store, View
from treeeagle_edge.kernels.native.structs import FORMAT_OF_BITS, ModelConfig
from treeeagle_edge.kernels.native.team import Team
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.model.native_target import native_store, native_view
from treeeagle_edge.planning.native_bytes import BLOCK, matrix_bytes

_VOCABULARY = 32  # of the timed model; small, since its layers are what is timed
_CONTEXT = 64  # positions that each row of the timed model reads


def native_layer(weight: Tensor, x: Tensor, bits: int) -> Tensor:
    """[M, n]: x [M, k] times weight [n, k], both fp32, with the native product at 4 or 8 bits."""
    product = Team(1).matmul(FORMAT_OF_BITS[bits], weight.numpy(), weight.shape[0], x.numpy())
    return torch.from_numpy(product)


def native_attention(query: Tensor, keys: Tensor, values: Tensor, view: AttentionView) -> Tensor:
    """As `kernels.dispatch.attention` for fp32 inputs. Keys and values are rounded to bf16, as a KV pool holds them."""
    store = KVStore(keys[None].bfloat16(), values[None].bfloat16())
    out = Team(1).attention(query.numpy(), native_view(view), native_store(store))
    return torch.from_numpy(out)


class TimedModel:
    """A native target whose weights are zeros, with a full MLP and narrow attention: only its time is of interest."""

    def __init__(self, hidden: int, intermediate: int, *, bits: int, rows: int, least_bytes: int) -> None:
        """rows: most rows of a pass. least_bytes: least size of the weights, so that they do not stay in the cache."""
        mlp = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
        attention = {"q": (BLOCK, hidden), "k": (BLOCK, hidden), "v": (BLOCK, hidden), "o": (hidden, BLOCK)}
        layers = max(1, -(-least_bytes // sum(matrix_bytes(*shape, bits) for shape in mlp.values())))
        shapes = ModelConfig(
            layers, hidden, intermediate, 1, 1, BLOCK, _VOCABULARY, _CONTEXT + rows, rows, 1e-5, 1.0, 1.0, 1.0
        )
        self._model = model = Model(Team(torch.get_num_threads()), shapes, scored_rows=1)
        model.matrix("embedding", "q8", _empty(_VOCABULARY, hidden, 8))
        for layer in range(layers):
            for name, shape in (mlp | attention).items():
                model.matrix(name, FORMAT_OF_BITS[bits], _empty(*shape, bits), layer)
            for name in ("attention_norm", "mlp_norm"):
                model.vector(name, np.ones(hidden, np.float32), layer)
        model.vector("final_norm", np.ones(hidden, np.float32))
        table = np.ones((_CONTEXT + rows, BLOCK // 2), np.float32)
        model.rope(table, table)
        model.ready()
        self._store = Store.allocate(layers, _CONTEXT + rows, 1, BLOCK)

    def run(self, rows: int) -> Callable[[], object]:
        """A function that runs one pass over `rows` rows."""
        slots = np.arange(_CONTEXT, _CONTEXT + rows)
        view = View(np.arange(_CONTEXT), slots)
        ids = np.zeros(rows, np.int64)
        return lambda: self._model.forward(ids, slots, slots, view, self._store, logit_rows=[rows - 1])


def _empty(rows: int, columns: int, bits: int) -> np.ndarray:
    """A weight [rows, columns] of zeros as GGUF blocks, so that nothing has to be quantised."""
    return np.zeros(rows * columns // BLOCK * (34 if bits == 8 else 20), np.uint8)
