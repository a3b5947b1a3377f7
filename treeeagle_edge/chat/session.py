"""A conversation: messages in, pieces of text out, and in the end an `Answer`."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from treeeagle_edge.chat.answer import Answer, Speculation
from treeeagle_edge.chat.prompt import Prompt, TextCodec, Turn, build_messages, build_prompt
from treeeagle_edge.chat.stream import StopFilter, TextStream
from treeeagle_edge.engine.protocol import Reading, TokenEngine, unwatched
from treeeagle_edge.errors import InputError
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.sampling_params import SamplingParams

ANSWER_ROOM = 256  # tokens kept free for an answer, where no other length was asked for
SLACK_SHARE = 4  # one part in four of the context is freed when old turns have to go


@dataclass
class _Draft:
    """An answer while it is being made."""

    text: TextStream
    stops: StopFilter
    limit: int
    shown: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0

    def take(self, step: Round, stop_ids: frozenset[int]) -> str:
        """Add the ids of one round up to the earliest event that ends the answer; return the text to show."""
        now = time.perf_counter()
        self.rounds.append(step)
        pieces: list[str] = []
        for token in step.ids:
            self.ids.append(token)
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
            ended = token in stop_ids  # its text is never shown, special or not
            if not ended:
                pieces.append(self.stops.push(self.text.push((token,))))
            if ended or self.stops.stopped:
                self.finish_reason = "stop"
            elif len(self.ids) >= self.limit:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        else:
            self.finish_reason = step.finish_reason
        return self._show("".join(pieces))

    def finish(self) -> str:
        """The text still held back, once no more ids come."""
        piece = self._show(self.stops.push(self.text.flush()) + self.stops.flush())
        if self.stops.stopped:
            self.finish_reason = "stop"
        return piece

    def _show(self, text: str) -> str:
        if text:
            self.shown.append(text)
        return text


class Session:
    """Holds the messages of one conversation and asks the engine for answers.

    Undo, retry and clear only edit `turns`: the engine finds out by itself how much of a prompt it still has cached.
    """

    def __init__(
        self,
        engine: TokenEngine,
        codec: TextCodec,
        *,
        system: str | None = None,
        raw: bool = False,
        stops: Sequence[str] = (),
    ) -> None:
        """`raw` sends each message as it is, alone, without a chat template. `stops` end an answer before them."""
        self.engine = engine
        self.codec = codec
        self.system = system
        self.raw = raw
        self.stops = tuple(stops)
        self.turns: list[Turn] = []
        self.forgotten = 0  # oldest turns that no longer fit the context and are not sent
        self.rounds: list[Round] = []  # of the last answer
        self.totals = Speculation()
        self.total_tokens = 0
        self.answers = 0
        self.context_used = 0  # tokens, after the last answer

    @property
    def messages(self) -> list[dict[str, str]]:
        """The whole conversation, also what no longer fits the context."""
        return build_messages(self.system, self.turns)

    def prompt(self, text: str, params: SamplingParams) -> Prompt:
        """What would be sent for `text` now. Where the context has no room for all turns and an answer, the oldest are
        left out. Raises InputError where the message alone does not fit.
        """
        return self._fit(Turn(text), params)[0]

    def ask(
        self,
        text: str,
        params: SamplingParams,
        *,
        speculate: bool = True,
        tree: TreeShape | None = None,
        reading: Reading = unwatched,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> Generator[str | Answer, None, None]:
        """Answer `text`: pieces of text as they come, and the `Answer` at the end.

        `reading` is told how far the prompt is read. `stop_requested` is looked at after each round; where it says
        yes, what was shown stays as the answer. Raises InputError for a message that is empty, no valid text, or
        longer than the context; the conversation is then as before.
        """
        check_text(text)
        started = time.perf_counter()
        prompt, forgotten = self._fit(Turn(text), params)
        params = replace(params, stop_ids=params.stop_ids | self.codec.stop_ids)
        limit = self.engine.context - len(prompt.ids)
        draft = _Draft(
            TextStream(self.codec.decode), StopFilter(self.stops), min(params.max_tokens or limit, limit)
        )
        rounds = self.engine.generate(prompt.ids, params, speculate=speculate, tree=tree, reading=reading)
        try:
            with closing(rounds):
                for step in rounds:
                    piece = draft.take(step, params.stop_ids)
                    if piece:
                        yield piece
                    if draft.finish_reason or stop_requested():
                        break
            piece = draft.finish()
            if piece:
                yield piece
        except GeneratorExit:  # the reader went away: what was shown is the answer
            if draft.ids:
                self._keep(text, draft, forgotten, prompt)
            raise
        self._keep(text, draft, forgotten, prompt)
        yield self._answer(draft, prompt, params, started, speculate)

    def undo(self) -> Turn | None:
        """Take back the last message and its answer; None where there is none."""
        if not self.turns:
            return None
        turn = self.turns.pop()
        self.forgotten = min(self.forgotten, len(self.turns))
        return turn

    def clear(self) -> None:
        """Forget the conversation; the system prompt stays."""
        self.turns.clear()
        self.rounds = []
        self.forgotten = 0
        self.context_used = 0

    def _fit(self, turn: Turn, params: SamplingParams) -> tuple[Prompt, int]:
        """The prompt, and how many of the oldest turns it leaves out.

        Where turns have to go, at least a quarter of the context is freed: else every later turn would drop one more,
        and the whole conversation would be read again each time.
        """
        context, forgotten = self.engine.context, self.forgotten
        room = min(params.max_tokens or ANSWER_ROOM, ANSWER_ROOM, context // SLACK_SHARE)
        prompt = self._render(turn, forgotten)
        if len(prompt.ids) + room > context and not self.raw:
            while forgotten < len(self.turns) and len(prompt.ids) + room > context - context // SLACK_SHARE:
                forgotten += 1
                prompt = self._render(turn, forgotten)
        if len(prompt.ids) >= context:
            what = "the message and the system prompt take" if self.system else "the message takes"
            raise InputError(
                f"{what} {len(prompt.ids):,} tokens as sent, and the context is {context:,}",
                "send less, or start with a larger --context",
            )
        return prompt, forgotten

    def _render(self, turn: Turn, forgotten: int) -> Prompt:
        if self.raw:
            return Prompt(turn.user, tuple(self.codec.encode(turn.user)))
        return build_prompt(self.codec, self.system, [*self.turns[forgotten:], turn])

    def _keep(self, text: str, draft: _Draft, forgotten: int, prompt: Prompt) -> None:
        reason = draft.finish_reason or "interrupt"
        self.turns.append(Turn(text, "".join(draft.shown), tuple(draft.ids), reason))
        self.forgotten = forgotten
        self.rounds = draft.rounds
        self.context_used = len(prompt.ids) + len(draft.ids)

    def _answer(
        self, draft: _Draft, prompt: Prompt, params: SamplingParams, started: float, speculate: bool
    ) -> Answer:
        first = draft.first_token_at or time.perf_counter()
        used = any(step.kind == "tree" for step in draft.rounds)
        enabled = speculate and (used or self.engine.speculates)
        speculation = Speculation.of(draft.rounds, enabled=enabled)
        self.totals += speculation
        self.total_tokens += len(draft.ids)
        self.answers += 1
        return Answer(
            text="".join(draft.shown),
            token_ids=tuple(draft.ids),
            finish_reason=draft.finish_reason or "interrupt",
            prompt_tokens=len(prompt.ids),
            cached_tokens=sum(step.cached_tokens for step in draft.rounds),
            ttft_s=first - started,
            decode_s=max(draft.last_token_at - first, 0.0),
            seed=params.seed,
            speculation=speculation,
        )


def check_text(text: str) -> None:
    """Raise InputError for a message that is empty or holds bytes that were no UTF-8 where it was typed."""
    if not text.strip():
        raise InputError("the message is empty", "write something, or pipe text in")
    check_utf8(text, "message")


def check_utf8(text: str, what: str) -> None:
    """Raise InputError, which calls `text` `what`, where it holds bytes that were no UTF-8 where it was typed."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise InputError(f"the {what} is not valid UTF-8", "check the terminal's encoding") from problem
