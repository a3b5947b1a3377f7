"""The speed estimate: bandwidth over bytes, and what a verify pass costs."""

from __future__ import annotations

import pytest
from plan_cases import LLAMA, machine, made_run, usual

from treeeagle_edge.planning.speed_estimate import estimate_speed, table_verify_cost
from treeeagle_edge.planning.torch_bytes import (
    step_bytes,
)
from treeeagle_edge.settings import RunSettings

pytestmark = pytest.mark.usefixtures("native_kernels")


def test_the_ceiling_is_bandwidth_over_bytes():
    made = made_run(RunSettings(model="meta-llama/Llama-3.1-8B-Instruct"), machine(card=12))
    speed = estimate_speed(made, 912)
    assert speed.ceiling == pytest.approx(912e9 / step_bytes(LLAMA.config, usual(4, "cuda")))
    assert speed.ceiling == pytest.approx(183, rel=0.02)
    assert 0.4 * speed.ceiling < speed.plain[0] < speed.plain[1] < 0.8 * speed.ceiling
    assert speed.tree[0] < speed.tree[1] and speed.tree[1] > speed.plain[1]


@pytest.mark.parametrize(("bits", "plain", "tree"), [(4, 281, 357), (8, 187, 248)])
def test_what_was_measured_on_native_kernels_lies_in_the_expected_range(bits, plain, tree):
    """The demo model's figures in the README, and the 37 to 40 GB/s that were measured on the same two cores."""
    made = made_run(RunSettings(bits=bits), machine())
    for bandwidth in (37, 40):
        speed = estimate_speed(made, bandwidth)
        assert speed.plain[0] < plain < speed.plain[1] < speed.ceiling
        assert speed.tree[0] < tree < speed.tree[1]


def test_a_costly_verify_pass_makes_the_tree_a_loss():
    made = made_run(RunSettings(), machine())
    assert estimate_speed(made, 40, verify_cost=1.1).tree[1] > estimate_speed(made, 40).plain[1]
    assert estimate_speed(made, 40, verify_cost=6.0).tree[1] < estimate_speed(made, 40).plain[1]
    assert estimate_speed(made_run(RunSettings(head="none"), machine()), 40).tree is None


def test_verify_cost_is_interpolated_and_extrapolated():
    assert table_verify_cost("cuda", 4, 1) == 1.0
    assert table_verify_cost("cuda", 4, 24) == pytest.approx(1.175)
    assert table_verify_cost("cuda", 4, 512) == pytest.approx(16.0)
    assert table_verify_cost("cpu", 16, 8) == pytest.approx(1.2)
    assert table_verify_cost("native", 8, 16) == pytest.approx(1.8)
    made = made_run(RunSettings(nodes=15), machine())
    assert estimate_speed(made, 40).verify_cost == pytest.approx(2.4), "native kernels have their own row"


def test_an_adaptive_tree_is_priced_at_its_usual_size():
    """Its bounds reserve slots; what a round drafts as a rule is what time is estimated from."""
    adaptive = made_run(RunSettings(nodes=0), machine())
    fixed = made_run(RunSettings(nodes=6, depth=3), machine())
    assert adaptive.tree.adaptive
    assert estimate_speed(adaptive, 40).tree == estimate_speed(fixed, 40).tree
    assert "a tree of at most 32 nodes" in adaptive.memory.line("KV").note
