"""Bytes that the native CPU kernels hold: weights in blocks of 32, and buffers that are sized once for a whole run.

Mirrors `kernels/native/src`: blocks.cpp (weights), workspace.cpp (workspace), attention_impl.h (scratch of a
thread), growth.cpp (scored nodes).
"""

from __future__ import annotations

from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.model_config import BLOCK_BITS, ModelConfig
from treeeagle_edge.rounds import MAX_BRANCHING

BLOCK = 32  # weights that share a scale
_BLOCK_BYTES = {8: 32 + 2, 4: 16 + 4}  # quants; an fp16 scale, at 4 bits an fp16 minimum beside it
_STORED_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}  # GGUF's, of which Q4_0 has no minimum

_TILE = 16  # output channels packed side by side; a matrix is padded to whole tiles
_FIRST_PLANE, _SECOND_PLANE = 384, 128  # bytes of a tile's block: the upper six bits and the lower two
_LINE = 64  # bytes: tiles and scratch begin at cache lines
_BLOCK_INFO = 16  # bytes beside each block of 32 int8 activations
_PEAK = 16  # bytes: a logit and its token
_ROWS_SCREENED = 12  # rows of a pass, at most, whose best tokens are looked for in the first plane alone
_ROWS_TOGETHER = 16  # query rows that a thread attends for at once
_KEYS_TOGETHER = 64  # positions whose keys and values it prepares at once
_CHUNK = 128  # positions whose softmax begins anew
_PART_TAIL = 16  # floats that a chunk leaves of a query beside its weighted sum
_CANDIDATE = 32 + 4  # a scored node, and its place in the order
# features of a chunk: the buffer, its copy, the copy joined with the row carried over, and those of the chunk before
_LIVE_FEATURES = 4


def matrix_bytes(rows: int, columns: int, bits: int) -> int:
    """Bytes of one weight [rows, columns] at 8 bits (Q8_0: 34/32 a weight) or 4 bits (Q4_1: 20/32 a weight)."""
    return _tiles_bytes(rows, columns, _BLOCK_BYTES[bits])


def layers_bytes(model: ModelConfig, bits: int) -> int:
    """Bytes of all decoder layers and the final norm: matrices as the file stores them where it has blocks, else at
    `bits`; norms and biases in fp32.
    """
    h, q, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    matrices = model.num_layers * sum(matrix_bytes(*shape, bits) for shape in model.linear_shapes.values())
    for kind, rows, columns in model.blocks.layers if model.blocks else ():
        matrices += _tiles_bytes(rows, columns, _STORED_BYTES[kind]) - matrix_bytes(rows, columns, bits)
    vectors = 2 * h + (2 * model.head_dim if model.qk_norm else 0)
    vectors += (q + 2 * kv if model.attention_bias else 0) + (h if model.output_bias else 0)
    return matrices + (model.num_layers * vectors + h) * 4


def output_bytes(model: ModelConfig) -> int:
    """Bytes of lm_head."""
    return _table_bytes(model, model.blocks.lm_head if model.blocks else None)


def embedding_bytes(model: ModelConfig) -> int:
    """Bytes of the token embedding and lm_head together; a tied pair is held once."""
    if model.tie_word_embeddings:
        return output_bytes(model)
    return output_bytes(model) + _table_bytes(model, model.blocks.embedding if model.blocks else None)


def _table_bytes(model: ModelConfig, stored: str | None) -> int:
    """Of one table [vocabulary, hidden]: blocks of 4 bits where the file has them, else 8 bits in two planes, with a
    bound for each channel.
    """
    if stored is not None and BLOCK_BITS[stored] == 4:
        return _tiles_bytes(model.vocab_size, model.hidden_size, _STORED_BYTES[stored])
    blocks = model.hidden_size // BLOCK
    tile = _aligned(blocks * (_FIRST_PLANE + 2 * _TILE) + 4 * _TILE) + blocks * _SECOND_PLANE
    return -(-model.vocab_size // _TILE) * tile


def _tiles_bytes(rows: int, columns: int, block: int) -> int:
    return -(-rows // _TILE) * _aligned(_TILE * (columns // BLOCK) * block)


def head_bytes(head: HeadConfig, bits: int) -> int:
    """Bytes of the draft head: matrices at `bits`, its own embedding at 8, norms in fp32, its map of ids in int64."""
    matrices = sum(matrix_bytes(*shape, bits) for shape in head.matrices.values())
    embedding = matrix_bytes(head.vocab_size, head.hidden_size, 8) if head.own_embedding else 0
    norms = 4 * head.hidden_size * 4
    return matrices + embedding + norms + 8 * head.draft_vocab_size


def workspace_bytes(
    model: ModelConfig, head: HeadConfig | None, *, rows: int, slots: int, expanded: int, threads: int
) -> int:
    """Bytes of the buffers of target and head, and of the lists of slots that are read.

    rows: of the largest pass. expanded: the most nodes of a tree that are expanded. Logits are not counted: their
    buffer is [rows, vocabulary], but only the rows that are scored are ever touched.
    """
    widest = max(model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim)
    total = _pass_bytes(model, widest, rows, threads, slots)
    total += rows * model.hidden_size * 4  # hidden states of each scored row,
    total += rows * (8 + 4 + threads * _PEAK)  # the likeliest token, its logit, and what each thread found
    # bounds of what a tile of logits holds for a row
    total += -(-model.vocab_size // _TILE) * _ROWS_SCREENED * 4
    total += 2 * (slots + rows) * 8  # slots of the prefix and of the rows, target and head
    if head is None:
        return total
    features = head.num_taps * head.target_hidden_size
    widest = max(2 * head.hidden_size, head.intermediate_size, features, head.num_heads * head.head_dim)
    total += _pass_bytes(head, widest, rows, threads, slots) + MAX_BRANCHING * head.draft_vocab_size * 4
    total += (1 + expanded) * MAX_BRANCHING * _CANDIDATE
    return total + rows * (_LIVE_FEATURES * features + 3 * head.hidden_size) * 4


def _pass_bytes(shape: ModelConfig | HeadConfig, widest: int, rows: int, threads: int, slots: int) -> int:
    """One model's workspace: residual stream, projections, activations twice, reading lists, what chunks of attention
    leave when every slot is read, each thread's own.
    """
    projected = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    activations = 2 * rows * (widest + widest // BLOCK * _BLOCK_INFO)
    shared = rows * (shape.hidden_size + projected) * 4 + activations + (rows + 1) * rows * 4
    chunks = -(-slots // _CHUNK) * min(rows, _ROWS_TOGETHER)
    shared += chunks * shape.num_heads * (shape.head_dim + _PART_TAIL) * 4
    own = widest * 4 + rows * 2 * BLOCK * 4 + _attention_bytes(shape)
    return shared + threads * own


def _attention_bytes(shape: ModelConfig | HeadConfig) -> int:
    """One thread's scratch: two prepared blocks of keys and values, its queries, and their sums so far."""
    dim, queries = shape.head_dim, _ROWS_TOGETHER * (shape.num_heads // shape.num_kv_heads)
    prepared = 2 * 2 * _aligned(_KEYS_TOGETHER * dim // 2 * 4)
    part = queries * (dim + _PART_TAIL) * 4  # of the chunk at hand, and of those before it
    state = (queries * dim // 2 * 4, part, part, queries * _KEYS_TOGETHER * 4, queries * _KEYS_TOGETHER * 2)
    return prepared + sum(map(_aligned, state))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
