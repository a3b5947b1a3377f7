"""Bytes of weights, KV pool and buffers, from shapes alone, as PyTorch's kernels hold them.

Where the native kernels hold something else, the figure is in `planning.native_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable

from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.limits import ATTENTION_SCORES, MAX_EXPANSIONS, PREFILL_CHUNK, ROTARY_MARGIN
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.planning import native_bytes
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.widths import Widths

_NF4_BLOCK = 64  # weights that share one fp32 scale
_LIVE_LOGIT_COPIES = 4  # raw, processed, log-probabilities, noise
_LIVE_SCORE_COPIES = 2  # attention scores and their softmax
# The int8 product of CUDA (see `kernels.reference_int8`), bytes alive at once: for each number that goes in, its levels
# twice in fp32 and its two codes; for each number that comes out, two sums in int32, their total in fp32, and the
# result.
_INT8_SPLIT, _INT8_CODES, _INT8_SUMS = 10, 2, 14


def compute_bytes(bits: int) -> int:
    """Bytes of one activation, KV element or unquantised weight: fp32 for 32 bits, a 16-bit float for the rest."""
    return 4 if bits == 32 else 2


def linear_bytes(rows: int, columns: int, bits: int) -> int:
    """Bytes of one weight [rows, columns] at 4, 8, 16 or 32 bits, scales included.

    4: NF4 with an fp32 scale for 64 weights (QLoRA, arXiv 2305.14314, without nested scales);
    8: int8 with an fp32 scale a row.
    """
    count = rows * columns
    if bits == 4:
        return (count + 1) // 2 + 4 * -(-count // _NF4_BLOCK)
    if bits == 8:
        return count + 4 * rows
    return count * compute_bytes(bits)


def block_bytes(model: ModelConfig, bits: int) -> int:
    """Bytes of all decoder layers and the final norm."""
    return sum(layer_bytes(model, bits)) + final_norm_bytes(model)


def layer_bytes(model: ModelConfig, bits: int) -> list[int]:
    """Bytes of each decoder layer: linears at `bits`, norms in fp32, biases in the compute dtype.

    Matrices that a quantised repository left as floats have 16 bits.
    """
    h, q, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes = model.linear_shapes
    linears = sum(linear_bytes(*shape, bits) for shape in shapes.values())
    norms = 2 * h + ((model.num_heads + model.num_kv_heads) * model.head_dim if model.qk_norm else 0)
    biases = (q + 2 * kv if model.attention_bias else 0) + (h if model.output_bias else 0)
    layers = [linears + norms * 4 + biases * compute_bytes(bits)] * model.num_layers
    for module in model.stored.plain if model.stored is not None else ():
        index, name = module.removeprefix("model.layers.").split(".", 1)
        layers[int(index)] += linear_bytes(*shapes[name], 16) - linear_bytes(*shapes[name], bits)
    return layers


def final_norm_bytes(model: ModelConfig) -> int:
    """Bytes of the norm after the last layer, fp32."""
    return model.hidden_size * 4


def rotary_bytes(model: ModelConfig | HeadConfig, context: int) -> int:
    """Bytes of the cosines and sines of every planned position, fp32."""
    return (context + ROTARY_MARGIN) * model.head_dim * 4


def output_bytes(model: ModelConfig, widths: Widths) -> int:
    """Bytes of lm_head as it is read each step."""
    return linear_bytes(model.vocab_size, model.hidden_size, widths.lm_head)


def embedding_bytes(model: ModelConfig, widths: Widths) -> int:
    """Bytes of the token embedding and lm_head together.

    Look-ups need the embedding as floats. So a tied pair is held once where lm_head has floats too; a quantised lm_head
    is a copy, which costs memory and saves reading.
    """
    table = model.vocab_size * model.hidden_size * compute_bytes(widths.layers)
    shared = model.tie_word_embeddings and widths.lm_head >= 16
    return table if shared else table + output_bytes(model, widths)


def head_bytes(head: HeadConfig, bits: int, *, native: bool = False) -> int:
    """Bytes of the draft head with its matrices at `bits`; norms, and an embedding of its own, are floats."""
    if native:
        return native_bytes.head_bytes(head, bits)
    matrices = sum(linear_bytes(*shape, bits) for shape in head.matrices.values())
    floats = (4 + (head.vocab_size if head.own_embedding else 0)) * head.hidden_size
    ids = 8 * head.draft_vocab_size  # an int64 map of its ids
    return matrices + floats * compute_bytes(bits) + ids


def slot_bytes(model: ModelConfig, bits: int) -> int:
    """Bytes of one slot: K and V of one token for every target layer."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * compute_bytes(bits)


def head_row_bytes(head: HeadConfig, bits: int) -> int:
    """Bytes of K and V of one token in the head's one layer."""
    return 2 * head.num_kv_heads * head.head_dim * compute_bytes(bits)


def pool_bytes(model: ModelConfig, head: HeadConfig | None, widths: Widths, slots: int) -> int:
    """Bytes of the whole pool: `slots`, one more that padding rows write to, and the head's rows, scratch included."""
    return (slots + 1) * slot_bytes(model, widths.layers) + head_pool_bytes(head, widths, slots)


def head_pool_bytes(head: HeadConfig | None, widths: Widths, slots: int) -> int:
    """Bytes of the head's rows beside `slots`, scratch included."""
    return (slots + MAX_EXPANSIONS) * head_row_bytes(head, widths.head) if head is not None else 0


def step_bytes(model: ModelConfig, widths: Widths, *, native: bool = False) -> int:
    """Bytes of weights that one target pass reads: layers and lm_head. The embedding is a look-up of a few rows."""
    if native:
        return native_bytes.layers_bytes(model, widths.layers) + native_bytes.output_bytes(model)
    return block_bytes(model, widths.layers) + output_bytes(model, widths)


def logit_bytes(model: ModelConfig, tree: TreeShape | None) -> int:
    """Bytes of the logits of a tree's rows and of what sampling makes of them."""
    return _LIVE_LOGIT_COPIES * verify_rows(tree) * model.vocab_size * 4


def verify_rows(tree: TreeShape | None) -> int:
    """Rows of the widest verify pass, the root included."""
    return tree.nodes + 1 if tree is not None else 1


def workspace_bytes(
    model: ModelConfig,
    head: HeadConfig | None,
    widths: Widths,
    slots: int,
    tree: TreeShape | None,
    *,
    device: str,
) -> int:
    """The most bytes alive at once during a PyTorch pass over a prefill chunk, or over a tree with its logits.

    Attention gathers K and V of one layer, once as stored and once in fp32, and computes scores in fp32 by blocks.
    In its place a product may have unpacked its 4-bit weight: bitsandbytes does for a chunk of a prompt.
    """
    rows = max(PREFILL_CHUNK + 1, verify_rows(tree))
    kv = model.num_kv_heads * model.head_dim
    scores = _LIVE_SCORE_COPIES * max(ATTENTION_SCORES, model.num_heads * slots) * 4
    mask = rows * slots * 4
    gathered = 2 * slots * kv * (compute_bytes(widths.layers) + 4)
    widest = max(scores + gathered, unpacked_bytes(model, head, widths))
    return rows * row_bytes(model, head, widths, device) + widest + mask + logit_bytes(model, tree)


def row_bytes(model: ModelConfig, head: HeadConfig | None, widths: Widths, device: str) -> int:
    """Bytes alive for each row of a pass, without attention and logits."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    element = compute_bytes(widths.layers)
    row = model.hidden_size * (2 * 4 + 2 * element)  # residual stream and a branch in fp32, normalised copies
    row += (q + 2 * kv) * (element + 2 * 4)  # as projected; rotated, scaled and mixed in fp32
    row += 3 * model.intermediate_size * element
    if head is not None:
        row += 2 * head.num_taps * head.target_hidden_size * compute_bytes(widths.head)
    if device.startswith("cuda"):
        row += _int8_row_bytes(model, head, widths)
    return row


def unpacked_bytes(model: ModelConfig, head: HeadConfig | None, widths: Widths) -> int:
    """Bytes of the largest 4-bit weight as a 16-bit float; 0 where there is none."""
    return max((2 * rows * columns for rows, columns in _products(model, head, widths, 4)), default=0)


def _int8_row_bytes(model: ModelConfig, head: HeadConfig | None, widths: Widths) -> int:
    """Bytes that CUDA's int8 product holds for a row of the widest matrices; lm_head's count with the logits."""
    products = _products(model, head, widths, 8)
    split = (_INT8_SPLIT * columns for _, columns in products)
    sums = (_INT8_CODES * columns + _INT8_SUMS * rows for rows, columns in products)
    return max((*split, *sums), default=0)


def _products(
    model: ModelConfig, head: HeadConfig | None, widths: Widths, bits: int
) -> list[tuple[int, int]]:
    """(out, in) of the products with weights of `bits` in the layers of model and head."""
    products: list[tuple[int, int]] = []
    if widths.layers == bits:
        products += _joined(model.linear_shapes.values())
    if head is not None and widths.head == bits:
        fc, *layer, _ = head.matrices.values()
        products += [fc, *_joined(layer)]
    return products


def _joined(layer: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(out, in) of a layer's products as they are made: Q, K and V as one matrix, gate and up as one."""
    q, k, v, o, gate, up, down = layer
    return [(q[0] + k[0] + v[0], q[1]), o, (gate[0] + up[0], gate[1]), down]
