"""A small engine and tokenizer whose every figure a reader can work out, for the tests of the bench."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from treeeagle_edge.planning.memory_plan import MemoryPlan, PlanLine
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree
from treeeagle_edge.units import GB
from treeeagle_edge.widths import Widths


class FakeClock:
    """A clock that moves only when the engine works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeWatch:
    """Memory that is always the same."""

    device, source = "cpu", "peak resident memory"

    def reset(self) -> None: ...

    def note(self) -> None: ...

    def current(self) -> int:
        return GB

    def graphs(self) -> int:
        return 0

    def peak(self) -> int:
        return 2 * GB


class FakeTokenizer:
    """One token a character; <u> and <a> stand for the chat template."""

    stop_ids = frozenset({0})

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def quote(self, text: str, *, answer: bool = False) -> str:
        return text

    encode_quoted = encode

    def holds_control(self, ids: Sequence[int]) -> bool:
        return False

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(chr(token) for token in ids if token)

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        body = "".join(f"<{message['role'][0]}>{message['content']}" for message in messages)
        return body + "<a>" * add_generation_prompt


def chain(tokens: Sequence[int]) -> DraftTree:
    """A tree of one branch; tokens[0] is the root."""
    count = len(tokens)
    return DraftTree(tuple(tokens), tuple(range(-1, count - 1)), tuple(range(count)), (0.0,) * count)


@dataclass
class FakeEngine:
    """Says `text` over and over. A plain token takes 10 ms, a tree round 15 ms, a prompt token 1 ms.

    Trees have two levels; rounds accept 2, 0, 2, 0, ... of them: 1 in 2, and 2 tokens a round. With `slip`, the
    tree arm says "?" as that token of its answer.
    """

    clock: FakeClock
    text: str = "abcdefgh"
    context: int = 1000
    speculates: bool = True
    slip: int | None = None
    interrupt_at_call: int | None = None
    calls: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    margins: list[tuple[tuple[int, ...], int, int]] = field(default_factory=list)
    closed: int = 0
    slowness: float = 1.0
    params: SamplingParams | None = None  # of the last call

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        speculate: bool = True,
        reuse_prefix: bool = True,
    ) -> Iterator[Round]:
        assert not reuse_prefix
        self.calls.append("tree" if speculate else "plain")
        self.prompts.append("".join(chr(token) for token in prompt_ids))
        if self.interrupt_at_call is not None and len(self.calls) > self.interrupt_at_call:
            raise KeyboardInterrupt
        assert params.max_tokens is not None
        self.params = params
        answer = [ord(self.text[at % len(self.text)]) for at in range(params.max_tokens)]
        if speculate and self.slip is not None and self.slip < len(answer):
            answer[self.slip] = ord("?")
        try:
            yield from self._rounds(len(prompt_ids), answer, speculate)
        finally:
            self.closed += 1

    def _rounds(self, prompt_tokens: int, answer: list[int], speculate: bool) -> Iterator[Round]:
        self.clock.now += 0.001 * self.slowness * prompt_tokens
        yield self._round(answer[:1], "prefill", None, 0, len(answer) == 1)
        done, number = 1, 0
        while done < len(answer):
            accepted = (2, 0)[number % 2] if speculate else 0
            number += 1
            ids = answer[done : done + accepted + 1]
            self.clock.now += self.slowness * (0.015 if speculate else 0.010)
            tree = chain((answer[done - 1], 65, 66)) if speculate else DraftTree.root_only(answer[done - 1])
            done += len(ids)
            yield self._round(ids, "tree" if speculate else "plain", tree, accepted, done == len(answer))

    def _round(self, ids: list[int], kind: str, tree: DraftTree | None, accepted: int, last: bool) -> Round:
        return Round(
            ids=tuple(ids),
            kind=kind,
            drafted=tree.num_nodes if tree else 0,
            accepted=accepted,
            tree=tree,
            walked=tuple(range(accepted + 1)),
            next_token=ids[-1],
            draft_s=0.005,
            verify_s=0.009,
            sample_s=0.001,
            finish_reason="length" if last else None,
        )

    def tie_margin(self, ids: Sequence[int], a: int, b: int) -> float:
        self.margins.append((tuple(ids), a, b))
        return 0.0125


def fake_runtime(engine: FakeEngine, *, bits: int = 16, notes: tuple[str, ...] = ()) -> SimpleNamespace:
    """What `load_runtime` would return, around a FakeEngine."""
    engine_parts = {"target": SimpleNamespace(nbytes=270_000_000), "kv_nbytes": 90_000_000}
    head = SimpleNamespace(nbytes=50_000_000) if engine.speculates else None
    for name, value in {**engine_parts, "head": head}.items():
        setattr(engine, name, value)
    lines = (
        PlanLine("weights (16-bit)", 212_000_000, "30 layers"),
        PlanLine("embedding, lm_head", 57_000_000, "49,152 tokens"),
        PlanLine("head (16-bit)", 51_000_000, "16,000 draft tokens"),
        PlanLine("KV, 8,465 slots", 90_000_000, "context 8,192 and a tree of 16 nodes"),
        PlanLine("workspace", 120_000_000, "chunks of 256 rows"),
        PlanLine("reserve", 1_500_000_000, "the program and the desktop"),
    )
    return SimpleNamespace(
        engine=engine,
        tokenizer=FakeTokenizer(),
        generation=SimpleNamespace(stop_ids=frozenset({1})),
        plan=MemoryPlan(lines, 8 * GB, 8192, 8465, 8192, Widths(bits, bits, 16)),
        model_name="fake-1m",
        head_name="fake-head" if engine.speculates else None,
        device="cpu",
        other_devices=(),
        device_label="cpu (2 cores, avx2)",
        bits=bits,
        context=engine.context,
        tree=TreeShape(2, 2, 4) if engine.speculates else None,
        kernels="native",
        notes=notes,
    )
