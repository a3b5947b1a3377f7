"""A target on the native CPU kernels: weights in blocks of 32, one call a pass, the same bits for any batch."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from ctypes import addressof, c_int32, c_int64, sizeof

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeeagle_edge.checkpoint.opening import Checkpoint
from treeeagle_edge.kernels.native.library import NativeError
from treeeagle_edge.kernels.native.model import Model, Request
from treeeagle_edge.kernels.native.reading import Store, View
from treeeagle_edge.kernels.native.structs import FORMAT_OF_BITS, ModelConfig, Pass, Sampling
from treeeagle_edge.kernels.native.team import Team
from treeeagle_edge.kernels.tree_view import TreeView
from treeeagle_edge.kernels.view import AttentionView, BatchView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.model.pass_rows import PassRows
from treeeagle_edge.model.rope import RotaryTable
from treeeagle_edge.model.target import TargetOutput
from treeeagle_edge.model.target_weights import TensorReader
from treeeagle_edge.model_config import BLOCK_BITS
from treeeagle_edge.sampling import Peaks
from treeeagle_edge.sampling_params import SamplingParams

_MATRICES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_FORMATS = {"Q8_0": "q8", "Q4_0": "q4_0", "Q4_1": "q4_1"}  # GGUF types, and what native code calls them


class NativeTarget:
    """The same contract as `model.target.Target`, with bf16 keys and values and activations quantised to int8 by block.

    Rounding depends neither on the number of rows of a pass nor on where an ancestor's slot comes from, so speculation
    equals plain decoding bit for bit.
    """

    batch_invariant = True
    kv_dtype = torch.bfloat16
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, model: Model, checkpoint: Checkpoint, *, bits: int, context: int) -> None:
        """`model` is filled and ready."""
        self.config = checkpoint.config
        self.bits = bits
        self.context = context
        self.model = model
        self._requests: dict[tuple[object, ...], tuple[Request, TargetOutput]] = {}
        self._pass = Pass()  # of `forward_rows`
        self._store: tuple[KVStore, Store] | None = None  # the last one that was passed
        self._sampling: tuple[SamplingParams, Sampling] | None = None  # the last ones

    @property
    def layer_devices(self) -> tuple[torch.device, ...]:
        """Where each layer lies."""
        return (self.device,) * self.config.num_layers

    @property
    def nbytes(self) -> int:
        """Bytes of weights and rotary tables."""
        shapes = self.model.config
        return self.model.nbytes + int(shapes.max_positions * shapes.head_dim) * 4

    def embed(self, ids: Tensor) -> Tensor:
        """[M] int64 -> [M, H] float32: unscaled rows of embed_tokens."""
        return torch.from_numpy(self.model.embed(ids.numpy()))

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: AttentionView | BatchView,
        store: KVStore,
        taps: tuple[int, ...],
        scored: slice = slice(None),
    ) -> TargetOutput:
        """See `model.target.Target.forward`. What it gives is overwritten by the next pass."""
        return self._run(native_pass(ids, positions, slots, view), store, taps, scored)

    def forward_rows(
        self,
        rows: PassRows,
        store: KVStore,
        taps: tuple[int, ...],
        scored: slice = slice(None),
        *,
        peaks_only: bool = False,
    ) -> TargetOutput:
        """See `model.pass_rows.TensorTarget.forward_rows`. What it gives is overwritten by the next pass."""
        return self._run(native_rows(rows, self._pass), store, taps, scored, peaks_only)

    def choose_token(self, scores: Tensor, params: SamplingParams, position: int) -> int:
        """See `sampling.choose_token`."""
        if self._sampling is None or self._sampling[0] is not params:
            how = Sampling(params.temperature, params.top_k, params.top_p, params.min_p, params.seed)
            self._sampling = (params, how)
        return self.model.team.draw(scores.numpy(), self._sampling[1], position)

    def _run(
        self, job: Pass, store: KVStore, taps: tuple[int, ...], scored: slice, peaks_only: bool = False
    ) -> TargetOutput:
        chosen = range(job.rows)[scored]
        kind = (job.rows, chosen.start, len(chosen), taps, peaks_only)
        found = self._requests.get(kind)
        if found is None:
            found = self._requests[kind] = self._request(job.rows, chosen, taps, peaks_only)
        request, output = found
        if self._store is None or self._store[0] is not store:
            self._store = (store, native_store(store))
        self.model.run(job, self._store[1], request)
        return output

    def _request(
        self, rows: int, chosen: range, taps: tuple[int, ...], peaks_only: bool
    ) -> tuple[Request, TargetOutput]:
        request = self.model.request(rows, chosen, taps or None, logits=not peaks_only, best=True)
        out = request.output
        assert out.peaks is not None
        assert out.best is not None
        logits = (
            torch.empty(0, self.config.vocab_size) if out.logits is None else torch.from_numpy(out.logits)
        )
        features = torch.empty(rows, 0) if out.features is None else torch.from_numpy(out.features)
        return request, TargetOutput(logits, features, Peaks(out.peaks, out.best))


def native_pass(ids: Tensor, positions: Tensor, slots: Tensor, view: AttentionView | BatchView) -> Pass:
    """The C structure of a pass; it keeps the tensors it points to."""
    rows = (len(ids), _int64(ids), _int64(positions), _int64(slots))
    if isinstance(view, BatchView):
        lists, counts = view.slots.to(torch.int32).contiguous(), view.lengths.to(torch.int32)
        job = Pass(*rows, None, 0, None, 0, None, None, lists.data_ptr(), counts.data_ptr(), lists.shape[1])
        job.keep = (ids, positions, slots, lists, counts)
        return job
    reads = (_int64(view.prefix), view.prefix.shape[0], _int64(view.rows), view.rows.shape[0])
    if isinstance(view, TreeView):
        parents = (c_int32 * len(view.parents))(*view.parents)
        job = Pass(*rows, *reads, None, addressof(parents), None, None, 0)
        job.keep = (ids, positions, slots, view, parents)
    else:
        visible = view.visible.contiguous()
        job = Pass(*rows, *reads, visible.data_ptr(), None, None, None, 0)
        job.keep = (ids, positions, slots, view, visible)
    return job


def native_rows(rows: PassRows, job: Pass) -> Pass:
    """Describe a pass over `rows` in `job`, which keeps what it points to until it is used again; what it had is lost.

    Written over, since a structure made anew is slow after a pass.
    """
    count, nodes = len(rows.ids), len(rows.tree)
    own = rows.tree is rows.slots
    numbers = array("q", [*rows.ids, *rows.positions, *rows.slots, *(() if own else rows.tree)])
    parents = array("i", rows.parents)
    at, step = numbers.buffer_info()[0], count * sizeof(c_int64)
    job.rows, job.ids, job.positions, job.slots = count, at, at + step, at + 2 * step
    job.prefix = rows.table.data_ptr() + rows.prefix.start * sizeof(c_int64)
    job.prefix_count = len(rows.prefix)
    job.tree, job.tree_count = at + (2 if own else 3) * step, nodes
    job.parents = parents.buffer_info()[0]
    job.keep = (numbers, parents, rows.table)
    return job


def _int64(tensor: Tensor) -> int:
    if tensor.dtype is not torch.int64 or not tensor.is_contiguous():
        raise NativeError(f"expected contiguous int64, got {tensor.dtype}, strides {tensor.stride()}")
    return tensor.data_ptr()


def native_view(view: AttentionView) -> View:
    """The same view as arrays, without copying the slots."""
    return View(view.prefix.numpy(), view.rows.numpy(), view.visible.contiguous().numpy())


def native_store(store: KVStore) -> Store:
    """The addresses of a bf16 store."""
    _, slots, kv_heads, _ = store.keys.shape
    return Store(store.keys.data_ptr(), store.values.data_ptr(), slots, kv_heads, keep=(store,))


def load_native_target(
    checkpoint: Checkpoint,
    team: Team,
    *,
    bits: int,
    context: int,
    max_rows: int,
    as_stored: bool = False,
) -> NativeTarget:
    """Load `checkpoint` at `bits` (8 or 4) for passes of up to `max_rows` rows.

    8: every matrix in blocks of 32 int8 with a scale (Q8_0). 4: blocks of 32 with scale and minimum (Q4_1) for the
    layers, 8-bit for embedding and lm_head. GGUF matrices that are stored in the format asked for load as they are,
    equal bit for bit to the file's values; at 4 bits so do an embedding and an lm_head of 4-bit blocks. With
    `as_stored` every matrix in blocks of either width does.
    """
    config = checkpoint.config
    table = RotaryTable(config.rope, config.head_dim, context, torch.device("cpu"))
    model = Model(
        team,
        ModelConfig(
            config.num_layers, config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads,
            config.head_dim, config.vocab_size, table.cos.shape[0], max_rows, config.rms_norm_eps,
            config.embedding_scale, config.residual_scale, config.logit_scale,
        ),
        scored_rows=max_rows,
    )  # fmt: skip
    model.rope(table.cos.numpy(), table.sin.numpy())
    reader = TensorReader(checkpoint)
    kept = {kind for kind, width in BLOCK_BITS.items() if as_stored or width == bits}
    tables = {kind for kind, width in BLOCK_BITS.items() if kind in kept or width == 8}
    _load_matrix(model, reader, "embedding", "model.embed_tokens.weight", 8, tables)
    if not config.tie_word_embeddings:
        _load_matrix(model, reader, "lm_head", "lm_head.weight", 8, tables)
    model.vector("final_norm", _float32(reader, "model.norm.weight"))
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, module in _MATRICES.items():
            _load_matrix(model, reader, name, f"{prefix}{module}.weight", bits, kept, layer)
        vectors = {"attention_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight"}
        if config.attention_bias:
            vectors |= {f"{p}_bias": f"self_attn.{p}_proj.bias" for p in "qkv"}
        if config.output_bias:
            vectors["o_bias"] = "self_attn.o_proj.bias"
        if config.qk_norm:
            vectors |= {f"{p}_norm": f"self_attn.{p}_norm.weight" for p in "qk"}
        for name, tensor in vectors.items():
            model.vector(name, _float32(reader, prefix + tensor), layer)
    model.ready()
    return NativeTarget(model, checkpoint, bits=bits, context=context)


def _load_matrix(
    model: Model,
    reader: TensorReader,
    name: str,
    tensor: str,
    bits: int,
    kept: Collection[str],
    layer: int = 0,
) -> None:
    """`kept`: GGUF types that load as they are."""
    raw = reader.raw(tensor)
    if raw is not None and raw[0] in kept:
        model.matrix(name, _FORMATS[raw[0]], np.ascontiguousarray(raw[1]), layer)
    else:
        model.matrix(name, FORMAT_OF_BITS[bits], _float32(reader, tensor), layer)


def _float32(reader: TensorReader, name: str) -> NDArray[np.float32]:
    return reader.tensor(name).float().contiguous().numpy()
