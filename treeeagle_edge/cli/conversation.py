"""A chat as the commands see it: the runtime, the session, and what the person chose for it."""

from __future__ import annotations

import secrets
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from treeeagle_edge.chat.answer import Answer
from treeeagle_edge.chat.autosave import Autosave, file_state
from treeeagle_edge.chat.history import SavedSession, load_session, new_session_path, path_to_go_on
from treeeagle_edge.chat.session import Session
from treeeagle_edge.cli.console import is_terminal, note, say
from treeeagle_edge.cli.interrupt import Interrupts
from treeeagle_edge.cli.printer import Printer, choose_printer, harmless
from treeeagle_edge.cli.reading_line import ReadingLine
from treeeagle_edge.cli.sampling_options import SamplingChoices
from treeeagle_edge.cli.saved_settings import Flags, brought_back, chosen, saved_choices, under_flags
from treeeagle_edge.cli.stats import resident_bytes, speculation_advice, stats_line
from treeeagle_edge.errors import InputError
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.units import GB

if TYPE_CHECKING:
    from treeeagle_edge.config.generation_defaults import GenerationDefaults
    from treeeagle_edge.runtime import Runtime

TEMPERATURE = 0.7  # where the model recommends none
TOP_P = 0.95


@dataclass
class Conversation:
    """Everything that a slash command may look at or change."""

    runtime: Runtime
    session: Session
    choices: SamplingChoices
    autosave: Autosave
    flags: Flags = field(default_factory=Flags)
    speculate: bool = True
    tree: TreeShape | None = None  # None: as planned
    markdown: bool = False
    wrap: bool = True  # break lines between words, on a terminal
    show_prompt: bool = False
    show_stats: bool = True
    silent: bool = False
    interrupts: Interrupts = field(default_factory=Interrupts)
    advised: bool = False
    told: list[str] = field(default_factory=list)  # notes that came with answers

    def params(self) -> SamplingParams:
        """Sampling for the next answer: what was chosen, over what the model recommends. A seed not chosen is drawn."""
        return self.choices.resolve(
            sampling_defaults(self.runtime.generation, self.runtime.tokenizer.stop_ids)
        )

    def answer(self, text: str) -> Answer:
        """Ask, stream the answer to stdout, then save and show the stats. Raises InputError, with nothing lost."""
        with self.interrupts.watch():
            return self._answer(text, self.params())

    def _answer(self, text: str, params: SamplingParams) -> Answer:
        if self.show_prompt:
            prompt = self.session.prompt(text, params).text
            say(harmless(prompt) if is_terminal(sys.stderr) else prompt)
        forgotten = self.session.forgotten
        try:
            printer = choose_printer(markdown=self.markdown, wrap=self.wrap, silent=self.silent)
            answer = self._stream(text, params, printer)
        except (OSError, KeyboardInterrupt):  # nobody reads on; what was answered so far is kept
            self.save()
            raise
        self.save()
        self._tell_news()
        if self.session.forgotten > forgotten:
            count = self.session.forgotten
            note(
                f"the context is full: the first {f'{count} messages are' if count > 1 else 'message is'} no longer "
                "sent; the system prompt is kept"
            )
        if self.show_stats:
            self._show_stats(answer)
        return answer

    def retry(self) -> Answer:
        """Ask the last message again. Raises InputError where there is none; a failure keeps the old answer."""
        turn = self.session.undo()
        if turn is None:
            raise InputError("there is no message to try again", "write one first")
        if self.params().greedy:
            note("temperature is 0, so the answer stays the same; /set temperature 0.7 varies it")
        elif self.choices.seed is not None:
            note("the seed is fixed, so the answer stays the same; /set seed default draws a new one")
        left = len(self.session.turns)
        try:
            return self.answer(turn.user)
        finally:
            if len(self.session.turns) == left:  # no new answer came of it
                self.session.turns.append(turn)

    def save(self) -> None:
        """Write the conversation to its own file, where history is on."""
        news = self.autosave.save(self.saved())
        if news:
            note(news)

    def saved(self) -> SavedSession:
        """The conversation as a file holds it."""
        model, turns = self.runtime.model_name, tuple(self.session.turns)
        return SavedSession(model, turns, self.session.system, chosen(self.choices))

    def load(self, path: Path, *, keep_file: bool) -> None:
        """Replace the conversation by the one in `path`, with the settings it was held with, except where the command
        line gave others; saves go there where `keep_file`, else to a new file.

        Raises InputError for a file that is no session; the conversation is then as before.
        """
        state = file_state(path)
        saved = load_session(path)
        choices = saved_choices(path, saved)
        self.session.clear()
        self.session.turns = saved.turns_for(self.runtime.model_name)
        self.session.system = saved.system if self.flags.system is None else self.flags.system or None
        self.choices = under_flags(choices, self.flags)
        sentence = brought_back(choices, bool(saved.system) and not self.session.raw, self.flags)
        if sentence:
            say(sentence)
        if saved.model != self.runtime.model_name:
            note(
                f"that chat was held with {harmless(saved.model)}; it is read again by {self.runtime.model_name}"
            )
        if keep_file:
            self._save_in(Autosave(path_to_go_on(path), before=path, state=state))
        else:
            self.save_elsewhere()

    def save_elsewhere(self) -> None:
        """Begin another file: the one so far stays as it is."""
        self._save_in(Autosave(new_session_path()))

    def _save_in(self, place: Autosave) -> None:
        if self.autosave.path is not None:  # history is on
            self.autosave = place

    def header(self) -> str:
        """One line: model, bits, head and its bits, device, context, plan."""
        runtime = self.runtime
        plan = runtime.plan
        memory = f"plan {plan.total / GB:.2f} of {plan.budget / GB:.1f} GB"
        head = f"head {runtime.head_name}, {plan.widths.head}-bit" if runtime.head_name else "no head"
        parts = (runtime.model_name, f"{runtime.bits}-bit", head, runtime.device_label)
        return " · ".join((*parts, f"context {runtime.context:,}", memory))

    def show_header(self) -> None:
        """Say what runs, on which device and why, and what the person should know."""
        say(self.header(), wrap=True)
        say(f"runs on {self.runtime.device_why}", style="dim", wrap=True)
        for sentence in self.runtime.notes:
            note(sentence)

    def _stream(self, text: str, params: SamplingParams, printer: Printer) -> Answer:
        reading = ReadingLine(silent=self.silent)
        pieces = self.session.ask(
            text,
            params,
            speculate=self.speculate,
            tree=self.tree,
            reading=reading,
            stop_requested=lambda: self.interrupts.requested,
        )
        self.interrupts.reading = True
        with reading, closing(pieces):
            for piece in pieces:
                self.interrupts.reading = False
                if isinstance(piece, Answer):
                    printer.finish()
                    return piece
                printer.write(piece)
        raise AssertionError("a session ends with an answer")

    def _tell_news(self) -> None:
        """What the engine found out while it answered, once each."""
        for sentence in self.runtime.engine.notes:
            if sentence not in (*self.runtime.notes, *self.told):
                self.told.append(sentence)
                note(sentence)

    def _show_stats(self, answer: Answer) -> None:
        sampled = not self.params().greedy
        line = stats_line(
            answer,
            context_used=self.session.context_used,
            context=self.runtime.context,
            memory=resident_bytes(),
            seed=answer.seed if sampled and self.choices.seed is None else None,
        )
        say(line, style="dim", wrap=True)
        advice = None if self.advised else speculation_advice(self.session.totals)
        if advice:
            self.advised = True
            note(advice)


def sampling_defaults(generation: GenerationDefaults, stop_ids: frozenset[int]) -> SamplingParams:
    """What the model recommends, else temperature 0.7 and top-p 0.95; a seed is drawn from the system."""
    return SamplingParams(
        temperature=TEMPERATURE if generation.temperature is None else generation.temperature,
        top_p=TOP_P if generation.top_p is None else generation.top_p,
        top_k=generation.top_k or 0,
        seed=secrets.randbits(32),  # short enough to type again
        stop_ids=stop_ids | generation.stop_ids,
    )
