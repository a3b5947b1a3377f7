"""An EAGLE-3 head held by the native CPU kernels: 4- or 8-bit weights in blocks of 32, one native call a tree."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_int64, sizeof

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeeagle_edge.checkpoint.head import HeadCheckpoint
from treeeagle_edge.drafting.growth_rule import GrowthRule
from treeeagle_edge.kernels.native.head import Head, HeadRequest, TreeRoom
from treeeagle_edge.kernels.native.library import NativeError
from treeeagle_edge.kernels.native.structs import (
    FORMAT_OF_BITS,
    Growth,
    HeadConfig,
    HeadInput,
    Pass,
    TreeInput,
)
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.model.head import HeadOutput
from treeeagle_edge.model.native_target import NativeTarget, native_pass, native_rows, native_store
from treeeagle_edge.model.pass_rows import FeatureRows, PassRows
from treeeagle_edge.model.rope import RotaryTable
from treeeagle_edge.rounds import MAX_NODES
from treeeagle_edge.tree import DraftTree

_MATRICES = {
    "q": "layers.0.self_attn.q_proj.weight",
    "k": "layers.0.self_attn.k_proj.weight",
    "v": "layers.0.self_attn.v_proj.weight",
    "o": "layers.0.self_attn.o_proj.weight",
    "gate": "layers.0.mlp.gate_proj.weight",
    "up": "layers.0.mlp.up_proj.weight",
    "down": "layers.0.mlp.down_proj.weight",
    "fc": "fc.weight",
    "lm_head": "lm_head.weight",
}
_VECTORS = {
    "attention_norm": "layers.0.input_layernorm.weight",
    "hidden_norm": "layers.0.hidden_norm.weight",
    "mlp_norm": "layers.0.post_attention_layernorm.weight",
    "final_norm": "norm.weight",
}


class NativeHead:
    """The same contract as `model.head.Head`, with bf16 KV rows."""

    def __init__(
        self,
        checkpoint: HeadCheckpoint,
        target: NativeTarget,
        *,
        bits: int,
        slots: int,
        context: int,
        max_rows: int,
        max_scored: int,
        max_expanded: int,
    ) -> None:
        """`bits` of the matrices: 8 (Q8_0) or 4 (Q4_1). `slots` rows of KV, scratch rows included; passes of at most
        `max_rows` rows, `max_scored` of them scored; the head runs on at most `max_expanded` nodes of a tree.
        """
        self.config = config = checkpoint.config
        self.notes = checkpoint.notes
        table = RotaryTable(config.rope, config.head_dim, context, torch.device("cpu"))
        self._head = head = Head(
            target.model,
            HeadConfig(
                config.hidden_size, config.num_taps * config.target_hidden_size, config.intermediate_size,
                config.num_heads, config.num_kv_heads, config.head_dim, config.draft_vocab_size, table.cos.shape[0],
                max_rows, max_scored, max_expanded, config.rms_norm_eps, config.norm_before_residual,
                config.norm_output,
            ),
        )  # fmt: skip
        for name, tensor in _MATRICES.items():
            head.matrix(name, FORMAT_OF_BITS[bits], _float32(checkpoint.tensors[tensor]))
        if checkpoint.embedding is not None:
            head.matrix("embedding", "q8", _float32(checkpoint.embedding))
        for name, tensor in _VECTORS.items():
            head.vector(name, _float32(checkpoint.tensors[tensor]))
        head.rope(table.cos.numpy(), table.sin.numpy())
        head.target_ids(checkpoint.target_ids.numpy())
        head.ready()
        self._requests: dict[tuple[int, int, int], tuple[HeadRequest, HeadOutput]] = {}
        self.store = KVStore.allocate(
            1, slots, config.num_kv_heads, config.head_dim, torch.bfloat16, torch.device("cpu")
        )
        self._addresses = native_store(self.store)
        self._pass = Pass()  # of `extend_rows` and `step_rows`
        self._ids, self._feature_rows = ((c_int64 * max_rows)() for _ in range(2))  # a tree begins with
        self._tree_input = TreeInput(ids=addressof(self._ids))
        self._tree_room = TreeRoom(MAX_NODES + 1)
        # the last rule, which owns what the structure points to
        self._told: tuple[GrowthRule, Growth] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of weights, without the KV rows."""
        return self._head.nbytes

    def extend(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: AttentionView,
        top: int,
    ) -> HeadOutput:
        """See `model.head.Head.extend`."""
        source = HeadInput(
            _checked(features, len(tokens), int(self._head.config.feature_width)), None, None, 0
        )
        return _copy(self._run(native_pass(tokens, positions, slots, view), source, len(tokens) - 1, top))

    def step(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, view: AttentionView, top: int
    ) -> HeadOutput:
        """See `model.head.Head.step`."""
        source = HeadInput(None, _checked(hidden, len(tokens), self.config.hidden_size), None, len(tokens))
        return _copy(self._run(native_pass(tokens, positions, slots, view), source, 0, top))

    def extend_rows(self, features: Tensor, rows: PassRows, top: int) -> HeadOutput:
        """See `model.pass_rows.TensorHead.extend_rows`. What it gives is overwritten by the next pass."""
        count = len(rows.ids)
        source = HeadInput(_checked(features, count, int(self._head.config.feature_width)), None, None, 0)
        return self._run(native_rows(rows, self._pass), source, count - 1, top)

    def step_rows(self, states: Tensor, chosen: Sequence[int], rows: PassRows, top: int) -> HeadOutput:
        """See `model.pass_rows.TensorHead.step_rows`. What it gives is overwritten by the next pass."""
        count = states.shape[0]
        named = (c_int64 * len(chosen))(*chosen)
        source = HeadInput(None, _checked(states, count, self.config.hidden_size), addressof(named), count)
        return self._run(native_rows(rows, self._pass), source, 0, top)

    def draft_tree(
        self, features: FeatureRows, rows: PassRows, scratch: range, rule: GrowthRule
    ) -> tuple[DraftTree | None, int]:
        """See `model.protocols.TreeHead.draft_tree`."""
        count, job, room = len(rows.ids), self._tree_input, self._tree_room
        if len(features) != count:
            raise NativeError(f"features of {len(features)} rows were given for {count}")
        if count > len(self._ids):
            raise NativeError(f"a draft begins with at most {len(self._ids)} rows, not {count}")
        self._ids[:count] = [*rows.ids]
        job.rows, job.position = count, rows.positions[0]
        job.table = rows.table.data_ptr() + rows.prefix.start * sizeof(c_int64)
        job.prefix_count = len(rows.prefix)
        job.features = _checked(features.table, len(features.table), int(self._head.config.feature_width))
        job.feature_count, job.feature_rows = len(features.table), None
        if features.rows is not None:
            self._feature_rows[:count] = [*features.rows]
            job.feature_rows = addressof(self._feature_rows)
        job.scratch, job.scratch_count = scratch.start, len(scratch)
        if self._told is None or self._told[0] is not rule:
            self._told = rule, _growth(rule)
        self._head.draft_tree(job, self._addresses, self._told[1], room)
        found = room.struct
        if not found.rows:
            return None, found.levels
        kept = slice(found.rows)
        tree = DraftTree(
            tuple(room.tokens[kept]),
            tuple(room.parents[kept]),
            tuple(room.depths[kept]),
            tuple(room.log_probs[kept]),
        )
        return tree, found.levels

    def clean_rows(self, slots: Tensor) -> None:
        """See `model.head.Head.clean_rows`."""
        self.store.zero_non_finite(slots)

    def _run(self, job: Pass, source: HeadInput, first: int, top: int) -> HeadOutput:
        """Rows from `first` on are scored."""
        kind = (job.rows, first, top)
        found = self._requests.get(kind)
        if found is None:
            found = self._requests[kind] = self._request(*kind)
        request, output = found
        self._head.run(job, self._addresses, source, request)
        return output

    def _request(self, rows: int, first: int, top: int) -> tuple[HeadRequest, HeadOutput]:
        request = self._head.request(rows, range(first, rows), min(top, self.config.draft_vocab_size))
        hidden, log_probs, ids = (torch.from_numpy(array) for array in request.output)
        return request, HeadOutput(hidden[first:], log_probs, ids)


def _growth(rule: GrowthRule) -> Growth:
    """The C structure; it borrows the arrays of `rule`."""
    bounds = (rule.depth, rule.branching, rule.nodes, *rule.stop_ids.buffer_info())
    worth = rule.worth
    if worth is None:
        return Growth(*bounds)
    arrays = (worth.verify, worth.draft, worth.continues, worth.calibration)
    return Growth(*bounds, *(values.buffer_info()[0] for values in arrays), worth.least)


def _copy(output: HeadOutput) -> HeadOutput:
    return HeadOutput(output.hidden.clone(), output.log_probs.clone(), output.ids.clone())


def _checked(given: Tensor, rows: int, width: int) -> int:
    """The address of fp32 rows."""
    if given.shape != (rows, width) or given.dtype is not torch.float32 or not given.is_contiguous():
        raise NativeError(
            f"expected {(rows, width)} of contiguous float32, got {tuple(given.shape)} of {given.dtype}"
        )
    return given.data_ptr()


def _float32(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.float().contiguous().numpy()
