"""Plays recorded drafts again: an answer's rounds over two models that repeat what they said.

Everything between the models is the program's: rounds, passes, slots, walks, growth of trees, controller and lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from measuring.clock import Clock, TimedController, play
from measuring.drafts import RecordedAnswer
from measuring.timing import Decoded
from treeeagle_edge.drafting.costs import CostTable
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.model.head import HeadOutput
from treeeagle_edge.model.pass_rows import PassRows
from treeeagle_edge.model.protocols import TargetModel
from treeeagle_edge.model.target import TargetOutput
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.sampling import Peaks
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree

_CPU = torch.device("cpu")
_NOTHING = -1  # no token, and no row
_NEVER = -1e4  # log-probability of a child that is not there; finite, as a head's are


class RecordedTarget:
    """Stands for the target (`model.protocols.TargetModel`): at each place of the text, its next token is likeliest.

    A row off the path gets that token too. No walk comes to it.
    """

    config = SimpleNamespace(vocab_size=1, num_kv_heads=1, head_dim=1)
    device = _CPU
    layer_devices = (_CPU,)
    kv_dtype = torch.float32

    def __init__(self, answer: RecordedAnswer) -> None:
        self._text = (*answer.case.ids, *answer.text)

    def forward_rows(
        self, rows: PassRows, store: KVStore, taps: tuple[int, ...], scored: slice, *, peaks_only: bool
    ) -> TargetOutput:
        """See `model.pass_rows.TensorTarget.forward_rows`. Behind the text's end nothing is known, nor asked."""
        text = self._text
        found = [text[at + 1] if at + 1 < len(text) else _NOTHING for at in rows.positions[scored]]
        peaks = Peaks(np.zeros(len(found), dtype=np.float32), np.array(found, dtype=np.int64))
        return TargetOutput(torch.empty(0, 1), torch.zeros(len(rows.ids), 1), peaks)


class RecordedHead:
    """Stands for the head (`model.protocols.DraftHead`): a node's children are those that its recorded tree has.

    Its hidden states are rows of that tree.
    """

    config = SimpleNamespace(taps=())

    def __init__(self, answer: RecordedAnswer) -> None:
        self._answer = answer
        self._tree = DraftTree.root_only(_NOTHING)
        self.asked = 0  # nodes that children were wanted of
        self.unknown = 0  # those of them whose children are not in the recorded tree

    def extend_rows(self, features: Tensor, rows: PassRows, top: int) -> HeadOutput:
        """See `model.pass_rows.TensorHead.extend_rows`. The last row is the root's, one place before the token."""
        trees, place = self._answer.trees, rows.positions[-1] + 1 - len(self._answer.case.ids)
        # in the prompt, and behind the last tree, rows are only written
        known = 0 <= place < len(trees)
        self._tree = trees[place] if known else DraftTree.root_only(rows.ids[-1])
        return self._children([0], top)

    def step_rows(self, states: Tensor, chosen: Sequence[int], rows: PassRows, top: int) -> HeadOutput:
        """See `model.pass_rows.TensorHead.step_rows`."""
        below = self._tree.children
        above = states[:, 0].tolist()
        nodes = [below[above[at]].get(token, _NOTHING) for at, token in zip(chosen, rows.ids, strict=True)]
        self.asked += len(nodes)
        self.unknown += sum(node == _NOTHING or not below[node] for node in nodes)
        return self._children(nodes, top)

    def _children(self, nodes: Sequence[int], top: int) -> HeadOutput:
        """The best `top` of each node, first those that the tree has."""
        tree = self._tree
        ids, log_probs = [], []
        for node in nodes:
            found = list(tree.children[node].items())[:top] if node != _NOTHING else []
            missing = top - len(found)
            ids.append([token for token, _ in found] + [_NOTHING] * missing)
            log_probs.append(
                [tree.log_probs[row] - tree.log_probs[node] for _, row in found] + [_NEVER] * missing
            )
        # in 32 bits, differences of sums are again what the head gave
        return HeadOutput(torch.tensor(nodes)[:, None], torch.tensor(log_probs), torch.tensor(ids))


class Arm:
    """One way to size trees, with a clock of its own: no arm changes another."""

    def __init__(
        self, tree: TreeShape | None, table: CostTable, *, other: float, noise: float, seed: int
    ) -> None:
        """tree: None decodes plainly. The rest as `Clock` has it; only costs of an arm that learns are noisy."""
        self.tree = tree
        self.learns = tree is not None and tree.adaptive
        self.clock = Clock(table, other=other, noise=noise if self.learns else 0.0, seed=seed)
        self.controller = TimedController(table, self.clock) if self.learns else None
        self.answers: dict[str, list[list[Decoded]]] = {}  # by scenario, those of each repetition
        self.levels: dict[str, int] = {}  # that the head scored, by scenario
        self.asked = self.unknown = 0  # as `RecordedHead` counts them

    def answer(self, recorded: RecordedAnswer, params: SamplingParams) -> Decoded:
        """One answer, played."""
        head = RecordedHead(recorded)
        # they have what rounds on the host ask of models, and nothing else
        target: TargetModel = RecordedTarget(recorded)  # type: ignore[assignment]
        found = play(target, head, recorded.case.ids, params, self.tree, self.clock, self.controller)  # type: ignore[arg-type]
        self.asked += head.asked
        self.unknown += head.unknown
        return found

    def repeat(self, scenario: str, answers: Sequence[RecordedAnswer], params: SamplingParams) -> None:
        """One repetition of a scenario."""
        before = self.clock.levels
        self.answers.setdefault(scenario, []).append([self.answer(each, params) for each in answers])
        self.levels[scenario] = self.levels.get(scenario, 0) + self.clock.levels - before

    def means(self, scenario: str) -> dict[str, float]:
        """Tokens, nodes and levels of a round."""
        rounds = [each for turn in self.answers[scenario] for answer in turn for each in answer.rounds]
        return {
            "tokens": sum(each.accepted + 1 for each in rounds) / len(rounds),
            "nodes": sum(each.drafted for each in rounds) / len(rounds),
            "levels": self.levels[scenario] / len(rounds),
        }
