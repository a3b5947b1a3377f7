"""Stand-ins for the model under a chat: an engine that plays a script, and a tokenizer of bytes and a few words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from treeeagle_edge.config.generation_defaults import GenerationDefaults
from treeeagle_edge.engine.protocol import Reading, unwatched
from treeeagle_edge.errors import InputError, UsageError
from treeeagle_edge.planning.memory_plan import MemoryPlan, PlanLine
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tokenizer.quoting import QUOTE, unquote
from treeeagle_edge.tree import DraftTree
from treeeagle_edge.widths import Widths

START, END, OTHER_END, WORDS = 256, 257, 258, 259
SPECIALS = {START: "<|im_start|>", END: "<|im_end|>", OTHER_END: "<|endoftext|>"}
VOCABULARY = ("the ", "sky", " is", "blue", "hello", "stop", "user", "assistant", "system")


class ByteCodec:
    """Ids 0-255 are bytes, then three special tokens, then whole words: encoding takes the longest word."""

    has_chat_template = True
    stop_ids = frozenset({END, OTHER_END})

    def __init__(self, template: str = "chatml") -> None:
        self.template = template
        self.tokens = {**SPECIALS, **{WORDS + i: word for i, word in enumerate(VOCABULARY)}}
        self.ids = {text: token for token, text in self.tokens.items()}
        self.pattern = re.compile("|".join(re.escape(t) for t in sorted(self.ids, key=len, reverse=True)))

    def encode(self, text: str) -> list[int]:
        out: list[int] = []
        position = 0
        for match in self.pattern.finditer(text):
            out += text[position : match.start()].encode()
            out.append(self.ids[match.group()])
            position = match.end()
        return [*out, *text[position:].encode()]

    def quote(self, text: str, *, answer: bool = False) -> str:
        special = "|".join(re.escape(name) for name in SPECIALS.values())
        return re.sub(special, lambda found: re.sub(".", QUOTE + r"\g<0>", found.group()), text)

    def encode_quoted(self, text: str) -> list[int]:
        out: list[int] = []
        for piece in re.split(f"((?:{QUOTE}.)+)", text):
            out += unquote(piece).encode() if QUOTE in piece else self.encode(piece)
        return out

    def holds_control(self, ids: Sequence[int]) -> bool:
        return any(token in SPECIALS for token in ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        raw = b"".join(
            bytes([token])
            if token < 256
            else b""
            if skip_special and token in SPECIALS
            else self.tokens[token].encode()
            for token in ids
        )
        return raw.decode("utf-8", errors="replace")

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        start, end = SPECIALS[START], SPECIALS[END]
        gap = "\n\n" if self.template == "llama3" else "\n"
        after = "" if self.template == "llama3" else "\n"
        clean: Callable[[str], str] = str.strip if self.template == "llama3" else str
        text = "".join(f"{start}{m['role']}{gap}{clean(m['content'])}{end}{after}" for m in messages)
        return text + (f"{start}assistant{gap}" if add_generation_prompt else "")


class ScriptEngine:
    """Answers the n-th prompt with the n-th script (the last one again and again), a few ids a round."""

    has_head = speculates = True
    tree = TreeShape(depth=4, branching=2, nodes=8)
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        scripts: Sequence[Sequence[int]],
        *,
        per_round: int = 3,
        context: int = 4096,
        on_round: Callable[[int], None] = lambda number: None,
        cut: bool = True,
        seconds: tuple[float, float] = (0.001, 0.004),  # drafting, verifying
    ) -> None:
        self.scripts, self.per_round, self.context = [list(script) for script in scripts], per_round, context
        self.on_round, self.cut, self.seconds = on_round, cut, seconds
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.closed = 0

    def check_shape(self, shape: TreeShape) -> None:
        if shape.nodes > 16:
            raise UsageError(f"{shape.nodes} nodes need more slots than the 16 reserved", "use at most 16")

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        speculate: bool = True,
        reuse_prefix: bool = True,
        tree: TreeShape | None = None,
        reading: Reading = unwatched,
    ) -> Iterator[Round]:
        if len(prompt_ids) >= self.context:
            raise InputError("the prompt does not fit")
        script = self.scripts[min(len(self.prompts), len(self.scripts) - 1)]
        self.prompts.append(list(prompt_ids))
        self.params.append(params)
        try:
            yield from self._play(script, params, self.per_round if speculate else 1)
        finally:
            self.closed += 1

    def _play(self, script: list[int], params: SamplingParams, size: int) -> Iterator[Round]:
        chunks = [script[:1], *(script[i : i + size] for i in range(1, len(script), size))]
        given = 0
        for number, ids in enumerate(chunks):
            kept: list[int] = []
            reason = None
            for token in ids:
                kept.append(token)
                if self.cut and token in params.stop_ids:
                    reason = "stop"
                elif self.cut and params.max_tokens is not None and given + len(kept) >= params.max_tokens:
                    reason = "length"
                if reason:
                    break
            given += len(kept)
            if number == len(chunks) - 1:
                reason = reason or "length"
            yield self._round(number, script[max(given - len(kept) - 1, 0)], ids, kept, reason)
            if reason:
                return
            self.on_round(number)

    def _round(self, number: int, root: int, ids: list[int], kept: list[int], reason: str | None) -> Round:
        if number == 0:
            return Round(tuple(kept), "prefill", 0, 0, None, (), ids[-1], 0.0, 0.01, 0.0, reason)
        draft_s, verify_s = self.seconds
        walked = ids[:-1]
        tokens = (root, *walked, 63)
        parents = (-1, *range(len(walked)), 0)
        tree = DraftTree(
            tokens, parents, (0, *range(1, len(walked) + 1), 1), tuple(-0.5 * i for i in range(len(tokens)))
        )
        return Round(
            ids=tuple(kept),
            kind="tree",
            drafted=tree.num_nodes,
            accepted=len(walked),
            tree=tree,
            walked=tuple(range(len(walked) + 1)),
            next_token=ids[-1],
            draft_s=draft_s,
            verify_s=verify_s,
            sample_s=0.0,
            finish_reason=reason,
        )


def script(text: str, *, end: bool = True) -> list[int]:
    """`text` as single bytes, which is not how it is encoded: generated ids need not be the tokenizer's choice."""
    return [*text.encode(), *([END] if end else [])]


def fake_runtime(engine: ScriptEngine, codec: ByteCodec | None = None, **changes: Any) -> Any:
    """What `load_runtime` would return."""
    plan = MemoryPlan(
        (PlanLine("weights (int8)", 150_000_000),),
        23_400_000_000,
        engine.context,
        4200,
        8192,
        Widths(8, 8, 8),
    )
    values: dict[str, Any] = {
        "engine": engine,
        "tokenizer": codec or ByteCodec(),
        "generation": GenerationDefaults(),
        "plan": plan,
        "model_name": "toy-model",
        "head_name": "toy-head",
        "device": "cpu",
        "device_label": "cpu (2 cores, avx2)",
        "device_why": "cpu: no NVIDIA driver was found",
        "bits": 8,
        "context": engine.context,
        "tree": engine.tree,
        "kernels": "native",
        "notes": (),
    }
    return SimpleNamespace(**{**values, **changes})


def sent(chat: Any) -> str:
    """The text of the newest prompt that the engine of such a chat got."""
    return ByteCodec().decode(chat.engine.prompts[-1], skip_special=False)
