"""Drafted trees and walked paths equal those the reference implementation drew with the same head and prompts.

So do those of the same head written by `write_head` in either layout and read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from treeeagle_edge.checkpoint.head import open_head
from treeeagle_edge.checkpoint.opening import open_checkpoint
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.limits import MAX_EXPANSIONS
from treeeagle_edge.model.head import Head
from treeeagle_edge.model.target import Target, load_target
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.training.export import LAYOUTS, write_head
from treeeagle_edge.tree import DraftTree

BRINGUP = "smollm2-eagle3-bringup"
CONTEXT, SLOTS = 512, 544
SCORE_TOLERANCE = 1e-4  # two nodes whose scores differ by less may change places at the cut


@pytest.fixture(scope="module")
def reference(shared_data: Path) -> dict:
    return json.loads((shared_data / "reference-trees.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def target(demo_gguf: Path) -> Target:
    return load_target(open_checkpoint(demo_gguf), bits=32, context=CONTEXT, device=torch.device("cpu"))


def engine_with(folder: Path, target: Target, reference: dict) -> Engine:
    head = Head(
        open_head(folder, target.config, target.embed),
        target.embed,
        slots=SLOTS + MAX_EXPANSIONS,
        context=CONTEXT,
        dtype=torch.float32,
        device=torch.device("cpu"),
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


def compare(engine: Engine, prompts: list[dict]) -> int:
    """Answer each prompt, hold every round to the recorded one; how many there were."""
    compared = 0
    for prompt in prompts:
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
    return compared


def test_trees_and_walks_equal_the_reference(target: Target, shared_data: Path, reference: dict) -> None:
    engine = engine_with(shared_data / BRINGUP, target, reference)
    assert compare(engine, reference["prompts"]) >= 20


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_written_and_read_again_draws_them_too(
    layout: str, target: Target, shared_data: Path, reference: dict, tmp_path: Path
) -> None:
    opened = open_head(shared_data / BRINGUP, target.config, target.embed)
    write_head(
        tmp_path, opened.config, opened.tensors, opened.target_ids, layout=layout, target_name="target",
        default_taps=target.config.default_taps,
    )  # fmt: skip
    assert compare(engine_with(tmp_path, target, reference), reference["prompts"][:2]) == 20
