"""Bytes of rounds that stay on the device, from shapes alone: their buffers, and the CUDA graphs that hold them."""

from __future__ import annotations

from treeeagle_edge.drafting.round_shapes import rounds_within
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.limits import CAPTURED_KINDS, FEATURES_KEPT
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.planning.torch_bytes import (
    compute_bytes,
    logit_bytes,
    row_bytes,
    unpacked_bytes,
    verify_rows,
)
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.widths import Widths

PACKED_ROWS = 64  # beyond them a product may unpack its 4-bit weight

# what the driver keeps of a graph with a thousand launches: an allowance, not a measurement, in which the lines of some
# kilobytes that host and device exchange are lost
_EACH_GRAPH = 12 * 10**6
# workspace of cuBLAS on the stream of the captures: 32 MB on the newest cards, 8 on the others
_CUBLAS = 32 * 2**20
# for each token of the vocabulary: bias and two counts in fp32, and whether it ends the text
_TOKEN_BYTES = 13
_NOISE_COPIES = 3  # of 8 bytes for each token and level: random words, and two steps on their way to noise
# attention's results by pieces of the prefix: two programs a multiprocessor, of at most so many rows
_PROCESSORS, _TILE_ROWS = 192, 128


def graph_bytes(
    model: ModelConfig, head: HeadConfig | None, widths: Widths, tree: TreeShape | None, device: str
) -> int:
    """Bytes that rounds on the device hold beside weights, slots and the workspace of a prompt.

    All graphs share one pool of memory, as large as the widest of them needs.
    """
    taps = head.num_taps * head.target_hidden_size if head is not None else 0
    buffers = (FEATURES_KEPT + 1) * taps * compute_bytes(widths.layers) + _TOKEN_BYTES * model.vocab_size
    graphs = CAPTURED_KINDS * len(rounds_within(tree)) * _EACH_GRAPH + _CUBLAS
    return buffers + graphs + _pool_bytes(model, head, widths, tree, device)


def _pool_bytes(
    model: ModelConfig, head: HeadConfig | None, widths: Widths, tree: TreeShape | None, device: str
) -> int:
    """What is alive at once in the widest moment of a round. A branch takes rows that a larger tree would have; its
    walk may have more levels than any tree's.
    """
    rows, levels = verify_rows(tree), 1 + max(shape.levels for shape in rounds_within(tree))
    attention = 2 * _PROCESSORS * _TILE_ROWS * model.head_dim * 4
    unpacked = unpacked_bytes(model, head, widths) if rows > PACKED_ROWS else 0
    noise = _NOISE_COPIES * 8 * levels * model.vocab_size
    passes = rows * row_bytes(model, head, widths, device) + max(attention, unpacked)
    return passes + logit_bytes(model, tree) + noise
