"""The memory plan: weights + head + KV pool + workspace + reserve, from shapes alone, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from treeeagle_edge.errors import UsageError
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.rounds import TreeShape

PREFILL_CHUNK = 256  # rows of a prompt that go through the target at once
ALLOWED_BITS = (4, 8, 16, 32)
GB = 10**9

_WEIGHT_NAMES = {4: "NF4", 8: "int8", 16: "16-bit", 32: "fp32"}
_NF4_BLOCK = 64  # weights that share one fp32 scale
_LIVE_LOGIT_COPIES = 4  # raw, processed, log-probabilities, noise
_LIVE_SCORE_COPIES = 2  # attention scores and their softmax
ATTENTION_SCORES = 8 * 2**20  # elements the attention computes at a time; more where one row alone needs them
SCRATCH_ROWS = 512  # rows of the head's KV that drafting writes and never commits
_ROTARY_MARGIN = 64  # positions beyond the context that the rotary tables cover
_SLACK_SHARE = (
    32  # one slot in 32 beyond the context: cached prefixes do not fight the live one for the last slot
)


@dataclass(frozen=True)
class PlanLine:
    """One row of the plan. nbytes: bytes; note: what a person may want to know about it."""

    name: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """What a run will hold, in bytes, and whether the budget covers it."""

    lines: tuple[PlanLine, ...]
    budget: int  # bytes
    context: int  # tokens
    slots: int  # rows of the KV pool
    longest_context: int  # tokens; 0 where not even an empty context fits

    @property
    def total(self) -> int:
        """Sum of all lines in bytes."""
        return sum(line.nbytes for line in self.lines)

    @property
    def fits(self) -> bool:
        """True where the total is within the budget."""
        return self.total <= self.budget

    def line(self, start: str) -> PlanLine:
        """The first line whose name begins with `start`. Raises KeyError where there is none."""
        for line in self.lines:
            if line.name.startswith(start):
                return line
        raise KeyError(start)


def format_gb(nbytes: float) -> str:
    """Bytes as "8.3 GB" (10^9 bytes), with two digits after the point below 1 GB."""
    value = nbytes / GB
    return f"{value:.2f} GB" if abs(value) < 0.995 else f"{value:.1f} GB"


def compute_bytes(bits: int) -> int:
    """Bytes of one activation, KV element or unquantised weight: fp32 for 32 bits, a 16-bit float for the rest."""
    return 4 if bits == 32 else 2


def plan_slots(context: int, tree: TreeShape | None) -> int:
    """Rows of the KV pool: the context, room for one tree and its root, and a few per cent of slack."""
    nodes = tree.nodes if tree is not None else 0
    return context + nodes + 1 + context // _SLACK_SHARE


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
    """Bytes of all decoder layers: linears at `bits`, norms in fp32, biases in the compute dtype."""
    h, inner = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes = ((q, h), (kv, h), (kv, h), (h, q), (inner, h), (inner, h), (h, inner))
    linears = sum(linear_bytes(rows, columns, bits) for rows, columns in shapes)
    norms = 2 * h + ((model.num_heads + model.num_kv_heads) * model.head_dim if model.qk_norm else 0)
    biases = (q + 2 * kv if model.attention_bias else 0) + (h if model.output_bias else 0)
    return model.num_layers * (linears + norms * 4 + biases * compute_bytes(bits)) + h * 4


def rotary_bytes(model: ModelConfig | HeadConfig, context: int) -> int:
    """Bytes of the cosines and sines of every planned position, fp32."""
    return (context + _ROTARY_MARGIN) * model.head_dim * 4


def output_bytes(model: ModelConfig, bits: int, device: str) -> int:
    """Bytes of lm_head as it is read each step.

    On CUDA it keeps 16 bits beside quantised layers; on the CPU it is int8 at 4 and 8 bits.
    """
    if bits <= 8 and not device.startswith("cuda"):
        return linear_bytes(model.vocab_size, model.hidden_size, 8)
    return model.vocab_size * model.hidden_size * compute_bytes(bits)


def embedding_bytes(model: ModelConfig, bits: int, device: str) -> int:
    """Bytes of the token embedding and lm_head together; a tied pair is held once unless lm_head is quantised."""
    table = model.vocab_size * model.hidden_size * compute_bytes(bits)
    shared = model.tie_word_embeddings and (bits > 8 or device.startswith("cuda"))
    return table if shared else table + output_bytes(model, bits, device)


def head_bytes(head: HeadConfig, bits: int) -> int:
    """Bytes of the draft head, which keeps a float dtype whatever the target's bits."""
    return (
        head.num_parameters * compute_bytes(bits) + 8 * head.draft_vocab_size
    )  # with an int64 map of its ids


def slot_bytes(model: ModelConfig, head: HeadConfig | None, bits: int) -> int:
    """Bytes of one slot: K and V of one token for every target layer, and the head's row for it."""
    width = model.num_layers * model.num_kv_heads * model.head_dim
    return 2 * width * compute_bytes(bits) + (head_row_bytes(head, bits) if head is not None else 0)


def head_row_bytes(head: HeadConfig, bits: int) -> int:
    """Bytes of K and V of one token in the head's one layer."""
    return 2 * head.num_kv_heads * head.head_dim * compute_bytes(bits)


def pool_bytes(model: ModelConfig, head: HeadConfig | None, bits: int, slots: int) -> int:
    """Bytes of the whole pool: `slots`, one more that padding rows write to, and the head's scratch rows."""
    drafting = (slots + SCRATCH_ROWS) * head_row_bytes(head, bits) if head is not None else 0
    return (slots + 1) * slot_bytes(model, None, bits) + drafting


def step_bytes(model: ModelConfig, bits: int, device: str) -> int:
    """Bytes of weights that one target pass reads: layers and lm_head. The embedding is a look-up of a few rows."""
    return block_bytes(model, bits) + output_bytes(model, bits, device)


def workspace_bytes(
    model: ModelConfig, head: HeadConfig | None, bits: int, slots: int, tree: TreeShape | None
) -> int:
    """Bytes alive at once in the widest moment of a pass: a prefill chunk or a tree with its logits.

    Attention gathers K and V of one layer, once as stored and once in fp32, and computes scores in fp32 by blocks.
    """
    rows = max(PREFILL_CHUNK + 1, tree.nodes + 1 if tree is not None else 1)
    verify_rows = tree.nodes + 1 if tree is not None else 1
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    element = compute_bytes(bits)
    row = model.hidden_size * (2 * 4 + 2 * element)  # residual stream and a branch in fp32, normalised copies
    row += (q + 2 * kv) * (element + 2 * 4)  # as projected; rotated, scaled and mixed in fp32
    row += 3 * model.intermediate_size * element
    if head is not None:
        row += 2 * head.num_taps * head.target_hidden_size * element
    activations = rows * row
    scores = _LIVE_SCORE_COPIES * max(ATTENTION_SCORES, model.num_heads * slots) * 4
    mask = rows * slots * 4
    gathered = 2 * slots * kv * (element + 4)
    logits = _LIVE_LOGIT_COPIES * verify_rows * model.vocab_size * 4
    return activations + scores + mask + gathered + logits


def plan_memory(
    model: ModelConfig,
    head: HeadConfig | None,
    *,
    bits: int,
    context: int,
    tree: TreeShape | None,
    reserve: int,
    budget: int,
    device: str,
) -> MemoryPlan:
    """Plan a run of `model` with `head` (None: plain decoding) from shapes alone.

    bits: 4, 8, 16 or 32; context: tokens; reserve and budget: bytes; device: "cpu", "cuda" or "cuda:N".
    Raises UsageError for bits or a context out of range. A plan over budget is returned with `fits` False.
    """
    if bits not in ALLOWED_BITS:
        raise UsageError(f"bits is {bits}, which is not a width this program stores", "use 4, 8, 16 or 32")
    if not 1 <= context <= model.max_position:
        raise UsageError(
            f"context is {context:,}, which is out of range for this model",
            f"use 1 to {model.max_position:,}",
        )
    lines = _lines(model, head, bits, context, tree, reserve, device)
    longest = _longest_context(model, head, bits, tree, reserve, budget, device)
    return MemoryPlan(lines, budget, context, plan_slots(context, tree), longest)


def _lines(
    model: ModelConfig,
    head: HeadConfig | None,
    bits: int,
    context: int,
    tree: TreeShape | None,
    reserve: int,
    device: str,
) -> tuple[PlanLine, ...]:
    slots = plan_slots(context, tree)
    name = _WEIGHT_NAMES[bits]
    lines = [
        PlanLine(
            f"weights ({name})",
            block_bytes(model, bits) + rotary_bytes(model, context),
            f"{model.num_layers} layers",
        ),
        PlanLine("embedding, lm_head", embedding_bytes(model, bits, device), f"{model.vocab_size:,} tokens"),
    ]
    if head is not None:
        kind = "fp32" if bits == 32 else "fp16" if device.startswith("cuda") else "bf16"
        lines.append(
            PlanLine(
                f"head ({kind})",
                head_bytes(head, bits) + rotary_bytes(head, context),
                f"{head.draft_vocab_size:,} draft tokens",
            )
        )
    tail = f"context {context:,}" + (f" and a tree of {tree.nodes} nodes" if tree is not None else "")
    lines.append(PlanLine(f"KV, {slots:,} slots", pool_bytes(model, head, bits, slots), tail))
    lines.append(
        PlanLine(
            "workspace", workspace_bytes(model, head, bits, slots, tree), f"chunks of {PREFILL_CHUNK} rows"
        )
    )
    system = "desktop and driver" if device.startswith("cuda") else "the program and the desktop"
    lines.append(PlanLine("reserve", reserve, system))
    return tuple(lines)


def _longest_context(
    model: ModelConfig,
    head: HeadConfig | None,
    bits: int,
    tree: TreeShape | None,
    reserve: int,
    budget: int,
    device: str,
) -> int:
    """Largest context whose total is within the budget: the total never shrinks as the context grows."""

    def total(context: int) -> int:
        return sum(line.nbytes for line in _lines(model, head, bits, context, tree, reserve, device))

    low, high = 0, model.max_position
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total(middle) <= budget else (low, middle - 1)
    return low
