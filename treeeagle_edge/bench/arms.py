"""Measures the two arms, plain and tree decoding, on the same prompts, and checks that they give the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from treeeagle_edge.bench.prompts import BenchPrompt, check_room
from treeeagle_edge.bench.samples import (
    PLAIN,
    TREE,
    BenchRun,
    Case,
    Divergence,
    Limits,
    Pace,
    Pair,
    Sample,
    first_difference,
)
from treeeagle_edge.chat.prompt import Prompt, TextCodec, Turn, build_prompt
from treeeagle_edge.engine.protocol import TokenEngine
from treeeagle_edge.hardware.memory_watch import MemoryWatch
from treeeagle_edge.progress import Progress, silent
from treeeagle_edge.rounds import Round
from treeeagle_edge.sampling_params import SamplingParams

WARM_UP_TOKENS = 16
QUICK_TOKENS = (64, 48, 32, 24, 16)
QUICK_REPETITIONS = 3


def size_quick(pace: Pace, prompt_tokens: int, prompts: int, seconds: float) -> Limits:
    """Limits for a quick bench: the longest answers of which two repetitions fit in `seconds`.

    A third repetition is made where it fits too; only one where not even two of the shortest answers fit.
    prompt_tokens: of all prompts together.
    """
    for tokens in QUICK_TOKENS:
        if 2 * (prompt_tokens * pace.prefill_s + prompts * tokens * pace.decode_s) <= seconds:
            return Limits(tokens, QUICK_REPETITIONS, seconds)
    return Limits(QUICK_TOKENS[-1], 1, seconds)


@dataclass
class Bench:
    """One run over a set of prompts.

    The arms change their order with every prompt and repetition (plain, tree, tree, plain, ...), so that a machine that
    becomes faster or slower does so for both. No prefix is reused between answers.
    """

    engine: TokenEngine
    tokenizer: TextCodec
    prompts: Sequence[BenchPrompt]
    params: SamplingParams
    speculate: bool = True
    system: str | None = None
    raw: bool = False
    stops: tuple[str, ...] = ()
    watch: MemoryWatch = field(default_factory=MemoryWatch)
    progress: Progress = silent
    clock: Callable[[], float] = time.perf_counter

    @property
    def arms(self) -> tuple[str, ...]:
        """Both arms; only the plain one where there is nothing to make trees of, or speculation is switched off."""
        return (PLAIN, TREE) if self.speculate and self.engine.speculates else (PLAIN,)

    def case(self, prompt: BenchPrompt, turn: int = 1, answers: Sequence[str] = ()) -> Case:
        """Render one turn (1 is the first) with the answers to the turns before it.

        Raises InputError where the prompt leaves no room for an answer of two tokens.
        """
        ids = self.prompt(prompt, turn, answers).ids
        check_room(prompt, len(ids), self.engine.context)
        return Case(prompt.scenario, prompt.name, turn, ids)

    def prompt(self, prompt: BenchPrompt, turn: int = 1, answers: Sequence[str] = ()) -> Prompt:
        """What goes to the model: the prompt through its chat template, or without it where `raw`."""
        said = prompt.turns[:turn]
        if self.raw:
            text = "".join(text for pair in zip_longest(said, answers, fillvalue="") for text in pair)
            return Prompt(text, tuple(self.tokenizer.encode(text)))
        turns = [Turn(text, answer) for text, answer in zip_longest(said, answers)]
        return build_prompt(self.tokenizer, self.system, turns)

    def warm_up(self) -> Pace:
        """Run each arm twice on the first prompt. Only the second answer is timed, since the first one fills caches."""
        case = self.case(self.prompts[0])
        params = replace(self.params, max_tokens=WARM_UP_TOKENS, stop_ids=frozenset())
        prefill = decode = 0.0
        for arm in self.arms:
            self.progress(f"warm-up, {arm} arm")
            self.answer(case, params, arm)
            sample = self.answer(case, params, arm)
            prefill += sample.ttft_s / sample.prompt_tokens
            decode += sample.decode_s / max(sample.decoded, 1)
        return Pace(prefill, decode)

    def run(self, limits: Limits) -> BenchRun:
        """Measure. Ctrl-C ends the run early: complete repetitions are kept, or a part of the first where none is."""
        pairs: list[Pair] = []
        complete, done, interrupted = 0, 0, False
        started = self.clock()
        try:
            for repetition in range(limits.repetitions):
                begun = self.clock()
                for pair in self._repetition(repetition, limits):
                    pairs.append(pair)
                complete, done = repetition + 1, len(pairs)
                now = self.clock()
                if limits.seconds is not None and (now - started) + (now - begun) > limits.seconds:
                    break
        except KeyboardInterrupt:
            if not pairs:
                raise
            interrupted = True
        kept = pairs[:done] if complete else pairs
        samples = tuple(sample for pair in kept for sample in pair.samples)
        found = [self._divergence(pair) for pair in kept] if TREE in self.arms else []
        return BenchRun(
            self.arms,
            limits,
            complete,
            samples,
            tuple(item for item in found if item is not None),
            interrupted,
        )

    def _repetition(self, repetition: int, limits: Limits) -> Iterator[Pair]:
        """Every prompt once, by both arms. In later turns both arms see the plain arm's earlier answers."""
        params = replace(self.params, max_tokens=limits.max_tokens)
        turn_count = sum(len(prompt.turns) for prompt in self.prompts)
        asked = 0
        for prompt in self.prompts:
            answers: list[str] = []
            for turn in range(1, len(prompt.turns) + 1):
                case = self.case(prompt, turn, answers)
                order = self.arms if (asked + repetition) % 2 == 0 else self.arms[::-1]
                asked += 1
                where = f"repetition {repetition + 1}, prompt {asked} of {turn_count}"
                self.progress(f"{where}: {prompt.scenario}, {prompt.name}")
                pair = Pair(case, tuple(self.answer(case, params, arm, repetition) for arm in order))
                answers.append(self.tokenizer.decode(pair.arm(PLAIN).ids))
                yield pair

    def answer(self, case: Case, params: SamplingParams, arm: str, repetition: int = 0) -> Sample:
        """One answer of one arm, timed. Only time inside the engine counts, none that the bench takes itself."""
        self.watch.reset()
        waits: list[float] = []
        rounds: list[Round] = []
        ids: list[int] = []
        stopped: int | None = None
        stream = self.engine.generate(case.ids, params, speculate=arm == TREE, reuse_prefix=False)
        with closing(stream):
            while stopped is None and not (rounds and rounds[-1].finish_reason):
                began = self.clock()
                item = next(stream, None)
                waits.append(self.clock() - began)
                if item is None:
                    break
                rounds.append(item)
                ids += item.ids
                self.watch.note()
                stopped = self._stop_at(ids, len(item.ids))
        return self._sample(case, arm, repetition, rounds, waits, ids if stopped is None else ids[:stopped])

    def _stop_at(self, ids: list[int], fresh: int) -> int | None:
        """How many tokens there are up to the end of a stop string, which one of the last `fresh` completes.

        None where no stop string is complete.
        """
        if not self.stops:
            return None
        for length in range(len(ids) - fresh + 1, len(ids) + 1):
            text = self.tokenizer.decode(ids[:length])
            if any(stop in text for stop in self.stops):
                return length
        return None

    def _sample(
        self, case: Case, arm: str, repetition: int, rounds: list[Round], waits: list[float], ids: list[int]
    ) -> Sample:
        passes = [item for item in rounds if item.kind != "prefill"]
        levels = [max(item.tree.depths) if item.tree else 0 for item in passes]
        deepest = range(1, max(levels, default=0) + 1)
        return Sample(
            scenario=case.scenario,
            prompt=case.prompt,
            turn=case.turn,
            arm=arm,
            repetition=repetition,
            prompt_tokens=len(case.ids),
            ids=tuple(ids),
            # the engine gives no reason where a stop string ended the answer
            finish_reason=rounds[-1].finish_reason or "stop",
            ttft_s=waits[0],
            decode_s=sum(waits[1:]),
            rounds=len(passes),
            drafted=sum(item.drafted for item in passes),
            accepted=sum(item.accepted for item in passes),
            offered=tuple(sum(level >= depth for level in levels) for depth in deepest),
            reached=tuple(sum(item.accepted >= depth for item in passes) for depth in deepest),
            draft_s=sum(item.draft_s for item in passes),
            verify_s=sum(item.verify_s for item in passes),
            sample_s=sum(item.sample_s for item in passes),
            draft_failures=sum(item.draft_failures for item in passes),
            peak_bytes=self.watch.peak(),
        )

    def _divergence(self, pair: Pair) -> Divergence | None:
        """Where the two answers differ first, with the tie margin where only logits decide (greedy, no penalty)."""
        plain, tree = pair.arm(PLAIN).ids, pair.arm(TREE).ids
        token = first_difference(plain, tree)
        if token is None:
            return None
        a = plain[token] if token < len(plain) else None
        b = tree[token] if token < len(tree) else None
        margin = None
        if a is not None and b is not None and self.params.greedy and not self.params.uses_history:
            margin = self.engine.tie_margin((*pair.case.ids, *plain[:token]), a, b)
        return Divergence(
            pair.case.scenario,
            pair.case.prompt,
            pair.case.turn,
            pair.arm(TREE).repetition,
            token,
            a,
            b,
            margin,
        )
