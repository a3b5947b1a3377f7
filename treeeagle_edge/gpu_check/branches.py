"""Rows of the GPU check about rounds with a branch of what the text repeats, alone and beside a tree of the head's.

A led target counts upwards, through numbers that the prompt has already: every match is right. A free one may say a few
tokens only, so that its text repeats itself: matches are right and wrong in turn.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from treeeagle_edge.drafting.round_shapes import RoundShape
from treeeagle_edge.drafting.shape_choice import OneShape
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.gpu_check.answers import engine_led, prompt_of, script_of, timed, tokens_per_round
from treeeagle_edge.gpu_check.models import FREE, LED
from treeeagle_edge.gpu_check.parity import TIE
from treeeagle_edge.gpu_check.probe import Finding, Probe, Row
from treeeagle_edge.gpu_check.sizes import Sizes
from treeeagle_edge.gpu_check.timing import EAGER, GRAPH
from treeeagle_edge.kernels.dispatch import use_backend
from treeeagle_edge.rounds import Round
from treeeagle_edge.sampling_params import SamplingParams

BESIDE, ALONE = "tree and branch", "branch"
BRANCHES = (BESIDE, ALONE)
_REPETITIONS = 3
_FEW = 5  # tokens that a free target may say
_AGAIN = 4  # tokens of the counting that the prompt has twice: as many as a match asks for


def shape_of(drafts: str, sizes: Sizes) -> RoundShape:
    """As many nodes as the check's tree has: those of a branch, or half of them."""
    if drafts == ALONE:
        return RoundShape(None, sizes.tree.nodes)
    branch = sizes.tree.nodes // 2
    return RoundShape(replace(sizes.tree, nodes=sizes.tree.nodes - branch), branch)


def branched(probe: Probe, finding: Finding, attention: str, how: str, drafts: str, before: list[int]) -> Row:
    """Check and time rounds of one shape. `before`: what rounds one by one said, which graphs must say too."""
    choice = OneShape(shape_of(drafts, probe.sizes))
    with use_backend(attention):
        found = _said(probe, finding, how, choice, before)
        target = probe.model(probe.sizes.main).target(LED, probe.sizes.context)
        counting = prompt_of(target, probe.sizes.answer + _AGAIN)
        prompt = [*counting, *counting[:_AGAIN]]
        engine = engine_led(probe, target, how, prompt)
        times, rounds = [], list[Round]()
        for repetition in range(_REPETITIONS + 1):  # the first warms up
            seconds, rounds = timed(probe, engine, prompt, choice)
            if repetition:
                times.append(seconds / (len(rounds) - 1))
    ids = [token for one in rounds for token in one.ids]
    upwards = script_of(prompt, target, len(prompt) + len(ids))[len(prompt) :].tolist()
    if ids != upwards:
        found["result"] = finding.fail("the text does not count upwards")
    settled = tokens_per_round(rounds)
    return {
        **found,
        "tokens/round": settled,
        "round us": 1e6 * median(times),
        "tokens/s": settled / median(times),
    }


def _said(probe: Probe, finding: Finding, how: str, choice: OneShape, before: list[int]) -> Row:
    """Two answers of a free target, greedy and sampled: the greedy one held to plain decoding, both to `before`."""
    target = probe.model(probe.sizes.main).target(FREE, probe.sizes.context)
    prompt = prompt_of(target, probe.sizes.prompt)
    engine = engine_led(probe, target, how, prompt)
    most, banned = probe.sizes.answer, frozenset(range(_FEW, target.config.vocab_size))
    greedy = SamplingParams(max_tokens=most, banned_ids=banned)
    sampled = replace(greedy, temperature=1.0, top_p=0.95, repetition_penalty=1.1, seed=7)
    plain = [i for one in engine.generate(prompt, greedy, speculate=False) for i in one.ids]
    rounds = [
        one
        for params in (greedy, sampled)
        for one in engine.generate(prompt, params, reuse_prefix=False, choice=choice)
    ]
    ids = [token for one in rounds for token in one.ids]
    found: Row = {
        "looked up": sum(one.tree.looked_up for one in rounds if one.tree is not None),
        "right": sum(one.looked_up_accepted for one in rounds),
        "same text": _compared(finding, engine, prompt, ids[: len(plain)], plain, strict=target.bits == 32),
    }
    if not found["right"]:
        found["result"] = finding.fail("no looked-up token was right, so that nothing was checked")
    if how == EAGER:
        before[:] = ids
    elif how == GRAPH and before and ids != before:
        found["result"] = finding.fail("graphs and the same rounds one by one say different things")
    return found


def _compared(
    finding: Finding, engine: Engine, prompt: list[int], ids: list[int], plain: list[int], *, strict: bool
) -> str:
    at = next((place for place, pair in enumerate(zip(ids, plain, strict=True)) if pair[0] != pair[1]), None)
    if at is None:
        return "yes"
    margin = engine.tie_margin([*prompt, *plain[:at]], ids[at], plain[at])
    if strict or margin > TIE:
        return finding.fail(f"branch and plain decoding part at token {at}, by {margin:.2f} logits")
    return f"a tie that rounding decides, at token {at}"
