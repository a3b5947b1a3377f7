"""The memory plan: weights + head + KV pool + workspace + reserve, from shapes alone, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from treeeagle_edge import plan_native
from treeeagle_edge.errors import UsageError
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.model_config import LINEARS, ModelConfig
from treeeagle_edge.rounds import TreeShape

PREFILL_CHUNK = 256  # rows of a prompt that go through the target at once
ALLOWED_BITS = (4, 8, 16, 32)
GB = 10**9

_WEIGHT_NAMES = {4: "NF4", 8: "int8", 16: "16-bit", 32: "fp32"}
_NATIVE_THREADS = 16  # for which buffers are planned where nobody says how many there are
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


def format_size(nbytes: float) -> str:
    """Bytes of a file as "640 B", "812 kB", "93 MB" or "16.4 GB" (powers of 1,000)."""
    for unit, size in (("GB", GB), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= 0.9995 * size:
            return f"{nbytes / size:.{1 if unit == 'GB' else 0}f} {unit}"
    return f"{nbytes:.0f} B"


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
    """Bytes of all decoder layers: linears at `bits`, norms in fp32, biases in the compute dtype.

    Matrices that a quantised repository left as floats have 16 bits.
    """
    h, inner = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes = ((q, h), (kv, h), (kv, h), (h, q), (inner, h), (inner, h), (h, inner))
    linears = sum(linear_bytes(rows, columns, bits) for rows, columns in shapes)
    plain = 0
    for module in model.stored.plain if model.stored is not None else ():
        shape = shapes[[module.endswith(name) for name in LINEARS].index(True)]
        plain += linear_bytes(*shape, 16) - linear_bytes(*shape, bits)
    norms = 2 * h + ((model.num_heads + model.num_kv_heads) * model.head_dim if model.qk_norm else 0)
    biases = (q + 2 * kv if model.attention_bias else 0) + (h if model.output_bias else 0)
    return model.num_layers * (linears + norms * 4 + biases * compute_bytes(bits)) + plain + h * 4


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


def head_bytes(head: HeadConfig, bits: int, *, native: bool = False) -> int:
    """Bytes of the draft head: a float dtype whatever the target's bits, 8 bits on native kernels."""
    if native:
        return plan_native.head_bytes(head)
    ids = 8 * head.draft_vocab_size  # an int64 map of its ids
    return head.num_parameters * compute_bytes(bits) + ids


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


def step_bytes(model: ModelConfig, bits: int, device: str, *, native: bool = False) -> int:
    """Bytes of weights that one target pass reads: layers and lm_head. The embedding is a look-up of a few rows."""
    if native:
        return plan_native.layers_bytes(model, bits) + plan_native.output_bytes(model)
    return block_bytes(model, bits) + output_bytes(model, bits, device)


def logit_bytes(model: ModelConfig, tree: TreeShape | None) -> int:
    """Bytes of the logits of a tree's rows and of what sampling makes of them."""
    return _LIVE_LOGIT_COPIES * _verify_rows(tree) * model.vocab_size * 4


def _verify_rows(tree: TreeShape | None) -> int:
    return tree.nodes + 1 if tree is not None else 1


def workspace_bytes(
    model: ModelConfig, head: HeadConfig | None, bits: int, slots: int, tree: TreeShape | None
) -> int:
    """Bytes alive at once in the widest moment of a PyTorch pass: a prefill chunk or a tree with its logits.

    Attention gathers K and V of one layer, once as stored and once in fp32, and computes scores in fp32 by blocks.
    """
    rows = max(PREFILL_CHUNK + 1, _verify_rows(tree))
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    element = compute_bytes(bits)
    row = model.hidden_size * (2 * 4 + 2 * element)  # residual stream and a branch in fp32, normalised copies
    row += (q + 2 * kv) * (element + 2 * 4)  # as projected; rotated, scaled and mixed in fp32
    row += 3 * model.intermediate_size * element
    if head is not None:
        row += 2 * head.num_taps * head.target_hidden_size * element
    scores = _LIVE_SCORE_COPIES * max(ATTENTION_SCORES, model.num_heads * slots) * 4
    mask = rows * slots * 4
    gathered = 2 * slots * kv * (element + 4)
    return rows * row + scores + mask + gathered + logit_bytes(model, tree)


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
    native: bool = False,
    threads: int = _NATIVE_THREADS,
) -> MemoryPlan:
    """Plan a run of `model` with `head` (None: plain decoding) from shapes alone.

    bits: 4, 8, 16 or 32; context: tokens; reserve and budget: bytes; device: "cpu", "cuda" or "cuda:N"; native: on the
    native kernels, with `threads` threads. Raises UsageError for bits or a context out of range. A plan over budget is
    returned with `fits` False.
    """
    if bits not in ALLOWED_BITS:
        raise UsageError(f"bits is {bits}, which is not a width this program stores", "use 4, 8, 16 or 32")
    if not 1 <= context <= model.max_position:
        raise UsageError(
            f"context is {context:,}, which is out of range for this model",
            f"use 1 to {model.max_position:,}",
        )
    run = _Run(model, head, bits, tree, reserve, device, threads if native else 0)
    return MemoryPlan(
        run.lines(context), budget, context, plan_slots(context, tree), run.longest_context(budget)
    )


@dataclass(frozen=True)
class _Run:
    """All that a plan depends on but the context."""

    model: ModelConfig
    head: HeadConfig | None
    bits: int
    tree: TreeShape | None
    reserve: int
    device: str
    threads: int  # of the native kernels, 0 where PyTorch's run

    def lines(self, context: int) -> tuple[PlanLine, ...]:
        """The plan for `context` tokens."""
        model, head, bits, tree = self.model, self.head, self.bits, self.tree
        slots = plan_slots(context, tree)
        layers = plan_native.layers_bytes(model, bits) if self.threads else block_bytes(model, bits)
        tables = (
            plan_native.embedding_bytes(model) if self.threads else embedding_bytes(model, bits, self.device)
        )
        stored = _WEIGHT_NAMES[bits] if model.stored is None else f"{model.stored.name}, as stored"
        name = f"{bits}-bit blocks" if self.threads else stored
        rotary = rotary_bytes(model, context)
        lines = [
            PlanLine(f"weights ({name})", layers + rotary, f"{model.num_layers} layers"),
            PlanLine("embedding, lm_head", tables, f"{model.vocab_size:,} tokens"),
        ]
        if head is not None:
            held = head_bytes(head, bits, native=self.threads > 0) + rotary_bytes(head, context)
            note = f"{head.draft_vocab_size:,} draft tokens"
            lines.append(PlanLine(f"head ({self._head_kind()})", held, note))
        tail = f"context {context:,}"
        if tree is not None:
            tail += f" and a tree of {'at most ' if tree.adaptive else ''}{tree.nodes} nodes"
        lines.append(PlanLine(f"KV, {slots:,} slots", pool_bytes(model, head, bits, slots), tail))
        lines.append(PlanLine("workspace", self._workspace(slots), f"chunks of {PREFILL_CHUNK} rows"))
        system = "desktop and driver" if self.device.startswith("cuda") else "the program and the desktop"
        return (*lines, PlanLine("reserve", self.reserve, system))

    def longest_context(self, budget: int) -> int:
        """Largest context whose total is within the budget: the total never shrinks as the context grows."""
        low, high = 0, self.model.max_position
        while low < high:
            middle = (low + high + 1) // 2
            fits = sum(line.nbytes for line in self.lines(middle)) <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _head_kind(self) -> str:
        if self.threads:
            return "8-bit blocks"
        return "fp32" if self.bits == 32 else "fp16" if self.device.startswith("cuda") else "bf16"

    def _workspace(self, slots: int) -> int:
        if not self.threads:
            return workspace_bytes(self.model, self.head, self.bits, slots, self.tree)
        buffers = plan_native.workspace_bytes(
            self.model, self.head, rows=PREFILL_CHUNK + 1, slots=slots, threads=self.threads
        )
        return buffers + logit_bytes(self.model, self.tree)
