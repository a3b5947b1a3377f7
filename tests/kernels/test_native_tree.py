"""A draft tree from one native call is the one that `Drafter` grows level by level with the same head, bit for bit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from native_toys import needs_native
from plain_head import random_head
from tiny_models import CONFIG, RandomCheckpoint

from treeeagle_edge.checkpoint.head import HeadCheckpoint
from treeeagle_edge.drafting.acceptance import Acceptance
from treeeagle_edge.drafting.controller import Controller
from treeeagle_edge.drafting.costs import CostModel, CostTable
from treeeagle_edge.drafting.drafter import Drafter, OneCallDrafter, drafter_for
from treeeagle_edge.drafting.growth import AdaptiveGrowth, FixedGrowth, Growth
from treeeagle_edge.kernels.native.library import NativeError
from treeeagle_edge.kernels.native.team import Team
from treeeagle_edge.model.native_head import NativeHead
from treeeagle_edge.model.native_target import load_native_target
from treeeagle_edge.model.pass_rows import FeatureRows, PassRows
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.tree import DraftTree

pytestmark = needs_native

WIDE = replace(CONFIG, hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, head_dim=32)
CONTEXT, SLOTS, ROWS, EXPANDED, MOST = 96, 128, 48, 40, 10  # MOST: nodes expanded a level
VOCAB, DRAFT_VOCAB = WIDE.vocab_size, 24

Made = Callable[[], Growth]


def random_checkpoint(**fields: bool) -> HeadCheckpoint:
    return random_head(WIDE, draft_vocab=DRAFT_VOCAB, **fields)


def native_head(
    checkpoint: HeadCheckpoint | None = None, *, isa: str | None = None, threads: int = 1
) -> NativeHead:
    target = load_native_target(
        RandomCheckpoint(WIDE), Team(threads, isa), bits=8, context=CONTEXT, max_rows=ROWS
    )
    return NativeHead(
        checkpoint or random_checkpoint(), target, bits=8, slots=SLOTS + EXPANDED, context=CONTEXT, max_rows=ROWS,
        max_scored=MOST, max_expanded=EXPANDED,
    )  # fmt: skip


class Case:
    """True rows behind a prefix, both random, in scattered slots."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        self.count = rng.randint(1, 9)
        before = rng.randint(0, CONTEXT - self.count - depth)
        slots = rng.sample(range(SLOTS), before + self.count + 1)  # its first entry has no head row
        first = before + 1
        own = range(first, first + self.count)
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        table = torch.randn(2 * self.count, 3 * WIDE.hidden_size, generator=generator)
        chosen = FeatureRows(table, rng.sample(range(len(table)), self.count))
        self.features = rng.choice((chosen, FeatureRows(chosen.tensor())))
        self.rows = PassRows(
            [rng.randrange(VOCAB) for _ in own], range(first - 1, first - 1 + self.count), slots[first:],
            torch.tensor(slots), range(1, first), slots[first:], range(-1, self.count - 1),
        )  # fmt: skip


def both(head: NativeHead, case: Case, made: Made) -> tuple[DraftTree | None, Growth]:
    """The tree, after a look whether both ways give it, count the same levels and leave the same rows."""
    scratch, store = range(SLOTS, SLOTS + EXPANDED), head.store
    before = store.keys.clone(), store.values.clone()
    expected, by_levels = made(), made()
    tree = Drafter(head, scratch).draft(case.features, case.rows, expected)
    rows = store.keys.clone(), store.values.clone()
    store.keys.copy_(before[0])
    store.values.copy_(before[1])
    assert drafter_for(head, scratch).draft(case.features, case.rows, by_levels) == tree
    assert by_levels.levels == expected.levels
    assert torch.equal(store.keys.view(torch.int16), rows[0].view(torch.int16))  # NaN equals itself
    assert torch.equal(store.values.view(torch.int16), rows[1].view(torch.int16))
    return tree, expected


def random_shape(rng: random.Random) -> TreeShape:
    branching = rng.randint(1, MOST)
    return TreeShape(rng.randint(1, min(8, EXPANDED // branching + 1)), branching, rng.randint(1, 40))


def fixed(rng: random.Random, shape: TreeShape) -> Made:
    stops = tuple(rng.sample(range(VOCAB), rng.choice((0, 1, 8))))
    return lambda: FixedGrowth(shape, stops)


def experienced(rng: random.Random) -> Acceptance:
    """After random walks through random trees."""
    acceptance = Acceptance()
    for _ in range(rng.choice((0, 3, 60))):
        depth = rng.randint(1, 6)
        log_probs = [0.0]
        for _ in range(depth):
            log_probs.append(log_probs[-1] + math.log(rng.random()))
        chain = DraftTree(
            (0,) * (depth + 1), tuple(range(-1, depth)), tuple(range(depth + 1)), tuple(log_probs)
        )
        acceptance.observe(chain, tuple(range(rng.randint(1, depth + 1))))
    return acceptance


def adaptive(rng: random.Random, shape: TreeShape) -> Made:
    plain = 0.01
    verify = (plain, plain * rng.uniform(1, 1.3), plain * rng.uniform(1.3, 3))
    table = CostTable((1, 8, 32), verify, plain * rng.uniform(0.001, 0.1), plain * rng.uniform(0.001, 0.1))
    costs, acceptance, rate = CostModel(table), experienced(rng), rng.uniform(0.3, 2) / plain
    stops = tuple(rng.sample(range(VOCAB), rng.choice((0, 1, 8))))
    return lambda: AdaptiveGrowth(shape, costs, acceptance, rate, stops)


@pytest.mark.parametrize("kind", [fixed, adaptive])
@pytest.mark.parametrize(
    ("all_equal", "before_residual", "norm_output"),
    [(False, False, False), (False, True, False), (False, False, True), (True, False, False)],
    ids=["plain", "before residual", "norm output", "all equal"],
)
def test_both_grow_the_same_tree(
    kind: Callable[[random.Random, TreeShape], Made],
    all_equal: bool,
    before_residual: bool,
    norm_output: bool,
) -> None:
    checkpoint = random_checkpoint(norm_before_residual=before_residual, norm_output=norm_output)
    if all_equal:
        checkpoint.tensors["lm_head.weight"].zero_()
    head, rng = native_head(checkpoint, threads=2), random.Random(5)
    depths, sizes = set(), set()
    for _ in range(60):
        shape = random_shape(rng)
        tree, growth = both(head, Case(rng, shape.depth), kind(rng, shape))
        assert tree is not None
        assert tree.num_nodes <= shape.nodes
        depths.add(growth.levels)
        sizes.add(tree.num_nodes)
    assert len(sizes) > 8
    assert len(depths) > 2


def test_every_instruction_set_grows_it(isa: str) -> None:
    head, rng = native_head(isa=isa), random.Random(1)
    for kind in (fixed, adaptive):
        both(head, Case(rng, 5), kind(rng, TreeShape(5, 4, 12)))


@pytest.mark.parametrize(
    "shape",
    [TreeShape(1, 4, 8), TreeShape(6, 1, 9), TreeShape(4, 6, 2), TreeShape(1, 1, 1), TreeShape(2, 10, 200)],
    ids=["one level", "a chain", "fewer nodes than a level", "one node", "all that is scored"],
)
def test_the_edges_of_a_shape(shape: TreeShape) -> None:
    tree, growth = both(native_head(), Case(random.Random(2), shape.depth), lambda: FixedGrowth(shape))
    assert tree is not None
    assert growth.levels <= shape.depth
    scored = shape.branching + (shape.depth - 1) * shape.branching**2
    assert tree.num_nodes == min(shape.nodes, scored)


def test_nothing_follows_a_stop_id() -> None:
    head, case = native_head(), Case(random.Random(3), 6)
    shape = TreeShape(6, 3, 12)
    free, _ = both(head, case, lambda: FixedGrowth(shape))
    assert free is not None
    stops = (free.tokens[1], free.tokens[2])
    assert any(free.tokens[parent] in stops for parent in free.parents[1:] if parent > 0)
    tree, _ = both(head, case, lambda: FixedGrowth(shape, stops))
    assert tree is not None
    assert not any(tree.tokens[parent] in stops for parent in tree.parents[1:] if parent > 0)


@pytest.mark.parametrize("finite_levels", [0, 1, 3])
def test_scores_that_are_not_finite_end_the_draft(finite_levels: int) -> None:
    """A token whose embedding lies along the one direction that the norm blows up spoils the level behind it."""
    checkpoint = random_checkpoint(own_embedding=True)
    assert checkpoint.embedding is not None
    checkpoint.embedding[:, 0] = 0.0
    checkpoint.tensors["layers.0.input_layernorm.weight"][0] = 3e38
    head = native_head(checkpoint)
    chain = lambda: FixedGrowth(TreeShape(6, 1, 6))  # noqa: E731
    for seed in range(50):
        case = Case(random.Random(seed), 6)
        tree, _ = both(head, case, chain)
        assert tree is not None
        if tree.tokens[finite_levels] not in (*tree.tokens[:finite_levels], *case.rows.ids[:-1]):
            break
    checkpoint.embedding[tree.tokens[finite_levels]] = torch.eye(WIDE.hidden_size)[0]
    head._head.matrix("embedding", "q8", checkpoint.embedding.numpy())
    spoilt, growth = both(head, case, chain)
    assert spoilt is None
    assert growth.levels == finite_levels


def test_a_draft_that_has_no_room_is_refused() -> None:
    head, case = native_head(), Case(random.Random(6), 5)
    drafter = OneCallDrafter(head, range(SLOTS, SLOTS + 3))
    with pytest.raises(NativeError, match="scratch_count is 3, outside 8"):
        drafter.draft(case.features, case.rows, FixedGrowth(TreeShape(5, 2, 4)))
    with pytest.raises(NativeError, match=r"expected \(\d+, 192\) of contiguous float32"):
        drafter.draft(FeatureRows(case.features.tensor()[:, 1:]), case.rows, FixedGrowth(TreeShape(1, 2, 4)))
    many = PassRows([1] * 49, range(49), range(49), torch.arange(60), range(1, 1), range(49), range(-1, 48))
    with pytest.raises(NativeError, match="at most 48 rows, not 49"):
        drafter.draft(FeatureRows(torch.zeros(49, 192)), many, FixedGrowth(TreeShape(1, 2, 4)))


def test_the_controller_hears_how_many_levels_were_scored() -> None:
    head, case = native_head(), Case(random.Random(7), 5)
    controller = Controller(CostTable((1, 32), (0.010, 0.011), 0.0001, 0.0001))
    growth = controller.growth(TreeShape(5, 3, 12, adaptive=True), ())
    assert growth is not None
    drafter_for(head, range(SLOTS, SLOTS + EXPANDED)).draft(case.features, case.rows, growth)
    assert growth.levels > 0
