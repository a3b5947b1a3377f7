"""`/info`: model, device and memory plan of a chat, as a table."""

from __future__ import annotations

from treeeagle_edge.cli.conversation import Conversation
from treeeagle_edge.planning.memory_plan import MemoryPlan
from treeeagle_edge.units import GB


def info_lines(conversation: Conversation) -> list[str]:
    """What runs and how much memory was planned for it: a name and a value a line."""
    rows = [*_run_rows(conversation), *_memory_rows(conversation.runtime.plan)]
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows]


def _run_rows(conversation: Conversation) -> list[tuple[str, str]]:
    runtime, session = conversation.runtime, conversation.session
    widths = runtime.plan.widths
    output = f", lm_head {widths.lm_head}-bit" if widths.lm_head != runtime.bits else ""
    if runtime.head_name:
        head = f"{runtime.head_name}, {widths.head}-bit"
    else:
        head = "none: only what the text repeats is drafted" if runtime.tree else "none: decoding plainly"
    tree = conversation.tree or runtime.tree
    shape = tree.label if tree else "none"
    return [
        ("model", f"{runtime.model_name}, {runtime.bits}-bit{output}"),
        ("head", head),
        ("device", f"{runtime.device_label}; {runtime.device_why}"),
        ("kernels", "native" if runtime.kernels == "native" else "PyTorch's"),
        ("tree", shape if conversation.speculate else f"{shape}; speculation is off"),
        ("context", f"{session.context_used:,} of {runtime.context:,} tokens"),
        ("messages", f"{len(session.turns):,}, of which {session.forgotten:,} no longer fit the context"),
        ("saved in", str(conversation.autosave.path or "nowhere: history is off")),
    ]


def _memory_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    lines = [(line.name, f"{line.nbytes / GB:.2f} GB {line.note}".rstrip()) for line in plan.lines]
    cards = [
        (card.device, f"{card.nbytes / GB:.2f} of {card.free / GB:.2f} GB {card.contents}")
        for card in plan.cards
    ]
    return [*lines, *cards, ("plan", f"{plan.total / GB:.2f} of {plan.budget / GB:.2f} GB")]
