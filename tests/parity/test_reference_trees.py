"""Drafted trees and walked paths equal those the reference implementation drew with the same head and prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from treeeagle_edge.checkpoint import open_checkpoint
from treeeagle_edge.engine import Engine
from treeeagle_edge.head import Head
from treeeagle_edge.head_checkpoint import open_head
from treeeagle_edge.passes import MAX_EXPANSIONS
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.target import load_target
from treeeagle_edge.tree import DraftTree

CONTEXT, SLOTS = 512, 544
SCORE_TOLERANCE = 1e-4  # two nodes whose scores differ by less may change places at the cut


@pytest.fixture(scope="module")
def reference(shared_data: Path) -> dict:
    return json.loads((shared_data / "reference-trees.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def engine(demo_gguf: Path, shared_data: Path, reference: dict) -> Engine:
    cpu = torch.device("cpu")
    checkpoint = open_checkpoint(demo_gguf)
    target = load_target(checkpoint, bits=32, context=CONTEXT, device=cpu)
    folder = shared_data / "smollm2-eagle3-bringup"
    head = Head(
        open_head(folder, checkpoint.config, target.embed),
        target.embed,
        slots=SLOTS + MAX_EXPANSIONS,
        context=CONTEXT,
        dtype=torch.float32,
        device=cpu,
    )
    settings = reference["settings"]
    shape = TreeShape(depth=settings["depth"], branching=settings["branching"], nodes=settings["nodes"])
    return Engine(target, head, context=CONTEXT, slots=SLOTS, tree=shape)


def root_paths(tokens: Iterable[int], parents: Iterable[int]) -> dict[tuple[int, ...], int]:
    """Token path from the root -> row."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((token,) if parent < 0 else (*paths[parent], token))
    return {path: row for row, path in enumerate(paths)}


def assert_same_tree(ours: DraftTree, theirs: dict) -> None:
    mine = root_paths(ours.tokens, ours.parents)
    other = root_paths(theirs["tokens"], theirs["parents"])
    assert len(mine) == len(other)
    cut = min(ours.log_probs)
    for path in mine.keys() - other.keys():
        assert ours.log_probs[mine[path]] - cut < SCORE_TOLERANCE, f"{path} is no tie at the cut"


def test_trees_and_walks_equal_the_reference(engine: Engine, reference: dict) -> None:
    compared = 0
    for prompt in reference["prompts"]:
        ids, expected = prompt["prompt_ids"], prompt["rounds"]
        tokens_needed = expected[-1]["context_length"] + 8 - len(ids)
        # the reference stops by rounds, not by tokens: no limit may shorten our last trees
        params = SamplingParams(max_tokens=tokens_needed + 32)
        rounds: list[Round] = []
        for item in engine.generate(ids, params, reuse_prefix=False):
            rounds.append(item)
            if len(rounds) > len(expected):
                break
        assert rounds[0].next_token == expected[0]["tokens"][0]
        length = len(ids)
        for ours, theirs in zip(rounds[1:], expected, strict=True):
            assert ours.tree is not None
            assert length == theirs["context_length"]
            assert_same_tree(ours.tree, theirs)
            walked = [theirs["tokens"][row] for row in theirs["accepted"]]
            assert [ours.tree.tokens[row] for row in ours.walked] == walked
            assert ours.next_token == theirs["next_token"]
            length += len(walked)
            compared += 1
    assert compared >= 20
