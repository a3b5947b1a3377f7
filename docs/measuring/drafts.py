"""Records what a head drafts at every position of plain answers, and keeps it in a file.

The answer is greedy and its rounds are plain, so that each position is a root once. There the head drafts as large a
tree as is wanted, which is kept and not verified.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from measuring.runs import PromptIds, say
from treeeagle_edge.drafting.controller import Controller
from treeeagle_edge.drafting.costs import CostTable
from treeeagle_edge.drafting.growth import Growth
from treeeagle_edge.engine.host_rounds import HostRounds
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.engine.passes import Passes
from treeeagle_edge.engine.protocol import unwatched
from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.kv.pool import KVPool
from treeeagle_edge.kv.sequence import LiveSequence
from treeeagle_edge.model.protocols import DraftHead, TargetModel
from treeeagle_edge.rounds import Round, TreeShape, tree_shape
from treeeagle_edge.sampling import Sampler
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree

SCHEMA = "treeeagle-drafts/1"


@dataclass(frozen=True)
class RecordedAnswer:
    """A plain greedy answer, and the head's tree at its positions."""

    case: PromptIds
    text: tuple[int, ...]  # ids of the answer
    trees: tuple[
        DraftTree, ...
    ]  # below text[0], text[1], ...; none where no more than one token could follow


@dataclass(frozen=True)
class Recording:
    """Answers of one model, and what was true of all of them."""

    model: str  # as it was named
    bits: int
    tokens: int  # of an answer, at most
    stop_ids: frozenset[int]
    shape: TreeShape  # of the recorded trees
    costs: CostTable  # of passes, as measured when the model was loaded
    answers: tuple[RecordedAnswer, ...] = ()

    @property
    def scenarios(self) -> list[str]:
        """In the order in which they were recorded."""
        return list(dict.fromkeys(answer.case.scenario for answer in self.answers))

    @property
    def bounds(self) -> TreeShape:
        """Of an adaptive tree: those that it has in a chat, no larger than what was recorded."""
        found = tree_shape(self.shape.depth, self.shape.branching, 0)
        return replace(found, nodes=min(found.nodes, self.shape.nodes))

    @property
    def params(self) -> SamplingParams:
        """What the answers were made with."""
        return SamplingParams(max_tokens=self.tokens, stop_ids=self.stop_ids)


def slots_for(prompt: Sequence[int], params: SamplingParams, nodes: int) -> int:
    """Slots that one answer needs, and a throwaway row. `nodes`: the most that are verified in a round."""
    assert params.max_tokens is not None
    return len(prompt) + params.max_tokens + nodes + 2


def rounds_of(
    passes: Passes,
    prompt: Sequence[int],
    params: SamplingParams,
    shape: TreeShape | None,
    controller: Controller | None,
    *,
    slots: int,
) -> Iterator[Round]:
    """The rounds of one answer in a pool of its own, led by the host as an engine has them led; the first is the
    prefill's. `slots`: those that `passes` were made with.
    """
    target = passes.target
    sequence = LiveSequence(
        KVPool(slots), prompt, with_head=shape is not None, reuse=False, capacity=slots, device=target.device
    )  # fmt: skip
    sampler = Sampler(params, prompt, target.config.vocab_size, target.device)
    rounds = HostRounds(passes, sequence, prompt, sampler, shape, controller)
    assert params.max_tokens is not None
    last = rounds.first(params.max_tokens, unwatched)
    settled = len(last.ids)
    yield last
    while last.finish_reason is None:
        last = rounds.next(last.next_token, params.max_tokens - settled)
        settled += len(last.ids)
        yield last


class _RecordingPasses(Passes):
    """Keeps what the head drafts, and has the round go on without it."""

    def __init__(self, target: TargetModel, head: DraftHead, *, slots: int) -> None:
        super().__init__(target, head, slots=slots, fixed_rows=None)
        self.trees: list[DraftTree] = []

    def draft(self, sequence: LiveSequence, root: int, growth: Growth) -> DraftTree:
        """See `Passes.draft`. Raises CannotRunError where the head's scores are not finite."""
        tree = super().draft(sequence, root, growth)
        if tree is None:
            raise CannotRunError("the head gave scores that are not finite", "record with more --bits")
        self.trees.append(tree)
        return DraftTree.root_only(root)


def record(
    target: TargetModel, head: DraftHead, case: PromptIds, params: SamplingParams, shape: TreeShape
) -> RecordedAnswer:
    """The greedy answer to `case`, with a fixed tree of `shape` at each of its positions."""
    slots = slots_for(case.ids, params, nodes=0)
    passes = _RecordingPasses(target, head, slots=slots)
    rounds = rounds_of(passes, case.ids, params, shape, None, slots=slots)
    text = tuple(token for each in rounds for token in each.ids)
    return RecordedAnswer(case, text, tuple(passes.trees))


def record_all(engine: Engine, cases: Sequence[PromptIds], empty: Recording) -> Recording:
    """`empty` with the answers to `cases`; those of one token are left out, since they have no rounds.

    Raises InputError for a prompt that is too long, and where no answer is left.
    """
    assert engine.head is not None
    answers = []
    for number, case in enumerate(cases, start=1):
        if len(case.ids) + empty.tokens > engine.context:
            raise InputError(
                f"{case.name} has {len(case.ids)} tokens; with {empty.tokens} of an answer they are more than "
                f"{engine.context}",
                "give fewer --tokens, or leave that prompt out",
            )
        answers.append(record(engine.target, engine.head, case, empty.params, empty.shape))
        say(f"recorded {number}/{len(cases)}: {case.scenario}, {case.name}")
    found = tuple(answer for answer in answers if len(answer.text) > 1)
    if not found:
        raise InputError("no answer has more than one token", "give more --tokens, or other prompts")
    return replace(empty, answers=found)


def save(path: Path, recording: Recording) -> None:
    """Write an .npz without pickles: `about`, a JSON document, and the rows of all trees one after another."""
    trees = [tree for answer in recording.answers for tree in answer.trees]
    about = {
        "schema": SCHEMA,
        "model": recording.model,
        "bits": recording.bits,
        "tokens": recording.tokens,
        "stop_ids": sorted(recording.stop_ids),
        "shape": asdict(recording.shape),
        "costs": asdict(recording.costs),
        "answers": [
            {"case": asdict(answer.case), "text": answer.text, "trees": len(answer.trees)}
            for answer in recording.answers
        ],
    }
    with path.open("wb") as file:
        np.savez_compressed(
            file,
            about=np.array(json.dumps(about)),
            rows=np.array([len(tree) for tree in trees], dtype=np.int32),
            tokens=np.array([token for tree in trees for token in tree.tokens], dtype=np.int32),
            parents=np.array([parent for tree in trees for parent in tree.parents], dtype=np.int16),
            log_probs=np.array([value for tree in trees for value in tree.log_probs], dtype=np.float64),
        )


def load_recording(path: Path) -> Recording:
    """What `save` wrote. Raises InputError for any other file."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return _recording(stored)
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        raise InputError(
            f"{path} holds no recorded drafts", "make it with --record, and name the same file"
        ) from error


def _recording(stored: Mapping[str, Any]) -> Recording:
    about = json.loads(str(stored["about"]))
    if about.pop("schema") != SCHEMA:
        raise ValueError("another schema")
    ends = np.cumsum(stored["rows"])[:-1]
    parts = [np.split(stored[name], ends) for name in ("tokens", "parents", "log_probs")]
    trees = (_tree(*(part.tolist() for part in row)) for row in zip(*parts, strict=True))
    answers = []
    for each in about.pop("answers"):
        ids, text = tuple(each["case"]["ids"]), tuple(each["text"])
        case = PromptIds(each["case"]["scenario"], each["case"]["name"], ids)
        answers.append(RecordedAnswer(case, text, tuple(next(trees) for _ in range(each["trees"]))))
    costs = about.pop("costs")
    table = CostTable(**costs | {"rows": tuple(costs["rows"]), "verify": tuple(costs["verify"])})
    shape, stop_ids = TreeShape(**about.pop("shape")), frozenset(about.pop("stop_ids"))
    return Recording(**about, stop_ids=stop_ids, shape=shape, costs=table, answers=tuple(answers))


def _tree(tokens: list[int], parents: list[int], log_probs: list[float]) -> DraftTree:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(log_probs))
