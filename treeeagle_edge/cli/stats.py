"""The line after an answer, the totals of /stats, and what they mean for the person."""

from __future__ import annotations

from treeeagle_edge.chat.answer import ENOUGH_ROUNDS, Answer, Speculation
from treeeagle_edge.units import GB, counted

LOW_TOKENS_PER_TREE = 1.1  # a head that fits its target settles about two, with the smallest trees still 1.2
LOW_ROUNDS = 32  # with a tree, before that is believed


def resident_bytes() -> int:
    """Memory this program holds now, in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def stats_line(
    answer: Answer, *, context_used: int, context: int, memory: int, seed: int | None = None
) -> str:
    """One line: tokens, speed, tokens a round, time to the first token, context, memory (bytes), and how it ended.

    `seed` is named where it was drawn, so that the answer can be had again.
    """
    count = answer.completion_tokens
    parts = [counted(count, "token")]
    if count > 1:  # the clock runs from the first token to the last
        parts.append(f"{_speed(answer.tokens_per_second)} tok/s")
    if answer.speculation.rounds:
        parts.append(f"{answer.speculation.tokens_per_round:.1f} tokens/round")
    failures = answer.speculation.draft_failures
    if failures:
        parts.append(counted(failures, "draft failure"))
    parts += [
        f"first token {answer.ttft_s:.2f} s",
        f"context {context_used:,}/{context:,}",
        f"memory {memory / GB:.2f} GB",
    ]
    if answer.finish_reason == "length":
        full = context_used >= context
        parts.append("the context is full: /clear, or a larger --context" if full else "cut at --max-tokens")
    elif answer.finish_reason == "interrupt":
        parts.append("interrupted")
    if seed is not None:
        parts.append(f"seed {seed}")
    return "  " + " · ".join(parts)


def _speed(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def totals_lines(answers: int, tokens: int, totals: Speculation) -> list[str]:
    """What `/stats` shows since the start of the chat."""
    lines = [
        f"answers        {answers:,}",
        f"tokens         {tokens:,}",
        f"rounds         {totals.rounds:,}",
        f"tokens/round   {totals.tokens_per_round:.2f}",
        f"trees          {totals.tree_rounds:,} rounds, {totals.nodes_per_tree:.1f} nodes and"
        f" {totals.levels_per_tree:.1f} levels on average; {totals.plain_rounds:,} rounds plain",
        f"drafted        {totals.drafted:,} nodes",
        f"accepted       {totals.accepted:,} nodes",
        f"looked up      {totals.looked_up:,} of the nodes, in the text so far; {totals.looked_up_accepted:,} of them"
        " accepted",
        f"draft failures {totals.draft_failures:,}"
        + (
            " (rounds decoded plainly, since the head's scores were not finite)"
            if totals.draft_failures
            else ""
        ),
    ]
    if totals.measured:
        lines.append(f"speedup        {totals.gain:.2f}x, against the plain steps of this chat")
    elif totals.both_seen and totals.gain is not None:
        lines.append(
            f"speedup        at most {totals.gain:.2f}x: the plain steps of this chat were slower than checks of a tree"
        )
    else:
        lines.append("speedup        not measured: treeeagle bench compares both ways of decoding")
    advice = speculation_advice(totals)
    return [*lines, advice] if advice else lines


def speculation_advice(totals: Speculation) -> str | None:
    """One sentence where drafting does not pay, or accepts so little that head and model hardly belong together."""
    if totals.tree_rounds < ENOUGH_ROUNDS:
        return None
    gain = totals.gain
    if gain is not None and gain < 1.0:
        return (
            f"speculation does not pay here: {totals.tokens_per_round:.1f} tokens/round is below break-even; "
            "try /set nodes 4 or /set spec off"
        )
    heads = totals.drafted - totals.looked_up
    if heads and totals.tree_rounds >= LOW_ROUNDS and totals.tokens_per_tree < LOW_TOKENS_PER_TREE:
        return (
            f"the head's drafts are seldom right ({totals.tokens_per_tree:.1f} tokens a tree): "
            "it belongs to another model, or the temperature is high"
        )
    return None
