"""Section of the GPU check: tree and plain decoding give the same greedy text, with every attention."""

from __future__ import annotations

from typing import Any

from treeeagle_edge.gpu_check.answers import answer, engine_of, prompt_of, script_of, tokens_per_round
from treeeagle_edge.gpu_check.models import FREE, RandomModel, ScriptedHead, random_head
from treeeagle_edge.gpu_check.probe import Finding, Probe
from treeeagle_edge.gpu_check.process import OK
from treeeagle_edge.kernels.dispatch import use_backend
from treeeagle_edge.model.head import Head
from treeeagle_edge.model.protocols import DraftHead
from treeeagle_edge.model.target import Target
from treeeagle_edge.planning.known_models import usual_head

EXACT = "exact"
_RIGHT = 2  # levels that the scripted head drafts right
TIE = 0.25  # logits (their deviation is about 1): rounding to 16 bits in dozens of layers may change so much


def check_parity(probe: Probe, finding: Finding) -> None:
    """Compare the texts: a row for each model, attention and kind of drafts.

    In fp32 and in exact mode no token may differ. Elsewhere a token may, where two logits are nearly equal.
    """
    sizes = probe.sizes
    small = RandomModel.load(sizes.small.config, bits=32, device=probe.device)
    target = small.target(FREE, sizes.context)
    head = random_head(usual_head(small.config, draft_vocab=small.config.vocab_size), target, sizes.slots)
    attentions = (*probe.backends(), EXACT)
    for attention in attentions:
        _Parity(probe, finding, sizes.small.name, target, head, attention).rows()
    name = f"{sizes.main.name} at {sizes.bits} bits"
    main = probe.model(sizes.main).target(FREE, sizes.context)
    for attention in attentions:
        _Parity(probe, finding, name, main, probe.head(), attention).rows()


class _Parity:
    """One model with one attention: first decodes plainly, then with trees."""

    def __init__(
        self, probe: Probe, finding: Finding, model: str, target: Target, head: Head, attention: str
    ) -> None:
        self._probe = probe
        self._finding = finding
        self._target = target
        self._head = head
        self._attention = attention
        self._strict = attention == EXACT or target.bits == 32
        self._row = {"model": model, "attention": attention}
        self._prompt = prompt_of(target, probe.sizes.prompt)
        self._plain: list[int] = []

    def rows(self) -> None:
        """Add a row for plain decoding and, unless that failed, one for each kind of drafts."""
        if self._probe.left < 0:
            self._finding.notes.append(f"time was over before {self._row['model']} with {self._attention}")
            return
        self._attempt("none", self._decode_plainly)
        if not self._plain:
            return
        self._attempt("of a random head", lambda: self._decode(self._head))
        sizes = self._probe.sizes
        text = script_of([*self._prompt, *self._plain], self._target, sizes.context + sizes.tree_rows)
        scripted = ScriptedHead(self._head, text, _RIGHT)
        self._attempt(f"{_RIGHT} right a round", lambda: self._decode(scripted))

    def _attempt(self, drafts: str, work: Any) -> None:
        columns = {"tokens": None, "tokens/round": None, "differs at": None, "margin": None}
        self._probe.attempt(self._finding, {**self._row, "drafts": drafts, **columns}, work)

    def _decode_plainly(self) -> dict[str, Any]:
        with use_backend("reference" if self._attention == EXACT else self._attention):
            engine = engine_of(self._target, self._head, self._probe.sizes, exact=self._attention == EXACT)
            self._plain, _ = answer(engine, self._prompt, self._probe.sizes.answer, speculate=False)
        return {"tokens": len(self._plain), "tokens/round": 1.0}

    def _decode(self, head: DraftHead) -> dict[str, Any]:
        plain = self._plain
        with use_backend("reference" if self._attention == EXACT else self._attention):
            engine = engine_of(self._target, head, self._probe.sizes, exact=self._attention == EXACT)
            ids, rounds = answer(engine, self._prompt, len(plain), speculate=True)
            found: dict[str, Any] = {"tokens": len(ids), "tokens/round": tokens_per_round(rounds)}
            if ids == plain:
                return found
            at = next(place for place, pair in enumerate(zip(ids, plain, strict=True)) if pair[0] != pair[1])
            margin = engine.tie_margin([*self._prompt, *plain[:at]], ids[at], plain[at])
        result = f"{OK}: a tie that rounding decides"
        if self._strict:
            result = self._finding.fail("the texts differ, which must not happen here")
        elif margin > TIE:
            result = self._finding.fail(
                f"the texts differ by {margin:.2f} logits, more than rounding explains"
            )
        return {**found, "differs at": at, "margin": margin, "result": result}
