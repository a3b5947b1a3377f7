"""The plan of a run on native kernels: sizes as they are held, and what gives way where there are none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_models import CONFIG, RandomCheckpoint

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.hardware.cpu import Cpu, Ram
from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.hardware.nvidia import Gpu
from treeeagle_edge.kernels.native import loader
from treeeagle_edge.limits import MAX_EXPANSIONS, PREFILL_CHUNK
from treeeagle_edge.planning import native_bytes
from treeeagle_edge.planning.known_models import KNOWN_MODELS
from treeeagle_edge.planning.memory_plan import MemoryPlan, plan_memory
from treeeagle_edge.planning.memory_profile import load_profile
from treeeagle_edge.planning.model_shapes import planned_model
from treeeagle_edge.planning.run_plan import RunPlan, pick_profile, plan_run
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.units import GB

pytestmark = pytest.mark.usefixtures("native_kernels")

DEMO = KNOWN_MODELS["smollm2-135m"]
TREE = TreeShape(4, 4, 24)
needs_native = pytest.mark.skipif(loader.problem() is not None, reason="native kernels need a C++ compiler")


def machine(*, card: bool = False) -> Hardware:
    gpus = (Gpu(0, "a card", 12 * GB, 12 * GB, usable=True),) if card else ()
    cpu, ram = Cpu("a processor", 2, 2, ("avx2",)), Ram(24 * GB, 24 * GB, False)
    return Hardware("cuda:0" if card else "cpu", "for a test", cpu, ram, gpus)


def made_run(run: RunSettings, here: Hardware) -> RunPlan:
    profile = pick_profile(run, here)
    return plan_run(run, profile, here, planned_model(run, profile))


def plan(*, bits: int, context: int = 2048, head: bool = True, native: bool = True) -> MemoryPlan:
    return plan_memory(
        DEMO.config,
        DEMO.head if head else None,
        bits=bits,
        context=context,
        tree=TREE,
        reserve=0,
        budget=GB,
        device="cpu",
        native=native,
    )


def test_names_and_sizes_on_native_kernels():
    """Blocks of 32: 34 bytes at 8 bits, 20 at 4; the tied table is held once, at 8 bits in both, with bounds."""
    made = {bits: plan(bits=bits) for bits in (4, 8)}
    for bits, held in made.items():
        names = [line.name for line in held.lines]
        assert names[:3] == [f"weights ({bits}-bit blocks)", "embedding, lm_head", "head (4-bit blocks)"]
        assert held.line("embedding").nbytes == 49_152 * 576 * 34 // 32 + 49_152 // 16 * 64
    linears = 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
    fewer = made[8].line("weights").nbytes - made[4].line("weights").nbytes
    assert fewer == linears * (34 - 20) // 32
    assert made[8].line("KV") == plan(bits=8, native=False).line("KV")
    assert made[8].total < plan(bits=8, native=False).total


def test_more_threads_need_more_scratch():
    few, many = (
        plan_memory(
            DEMO.config, DEMO.head, bits=8, context=512, tree=TREE, reserve=0, budget=GB, device="cpu", native=True,
            threads=threads,
        ).line("workspace").nbytes
        for threads in (2, 64)
    )  # fmt: skip
    assert 62 * 100_000 < many - few < 62 * 1_000_000


def test_more_slots_need_room_for_what_their_chunks_leave():
    """Each of 16 rows and of all heads leaves 80 floats for every 128 slots, in the target's pass and in the head's."""
    few, many = (
        native_bytes.workspace_bytes(DEMO.config, DEMO.head, rows=64, slots=slots, expanded=24, threads=2)
        for slots in (1024, 8192)
    )
    heads, lists = DEMO.config.num_heads + DEMO.head.num_heads, 2 * 7168 * 8
    assert many - few == 56 * 16 * heads * 80 * 4 + lists


def test_a_cpu_run_has_native_kernels_and_four_bits():
    made = made_run(RunSettings(), machine())
    assert made.backend.native and made.note is None
    assert (made.bits, made.tree) == (4, load_profile("cpu").tree)


def test_without_native_kernels_a_profiles_four_bits_give_way(monkeypatch):
    """The person's own bits and tree do not."""
    found = loader.Problem("no C++ compiler is installed", "install g++")
    monkeypatch.setattr(loader, "problem", lambda: found)
    made = made_run(RunSettings(), machine())
    assert (made.bits, made.tree, made.backend.native) == (8, TreeShape(3, 2, 3), False)
    assert made.memory.line("weights").name == "weights (int8)"
    assert "8 bits and a small tree" in made.note.text and "no C++ compiler" in made.note.text
    assert made.note.hint == "install g++"
    assert made_run(RunSettings(nodes=6, depth=4), machine()).tree == TreeShape(4, 2, 6)
    given = made_run(RunSettings(bits=4), machine())
    assert (given.bits, given.tree) == (4, load_profile("cpu").tree) and "small tree" not in given.note.text
    assert made_run(RunSettings(bits=16), machine()).note is None
    assert made_run(RunSettings(profile="gpu-12gb"), machine(card=True)).bits == 4


def test_kernels_that_were_chosen_are_used_or_refused(monkeypatch):
    torch_run = made_run(RunSettings(kernels="torch"), machine())
    assert not torch_run.backend.native and torch_run.bits == 8 and "asked for" in torch_run.note.text
    assert made_run(RunSettings(kernels="torch", bits=8), machine()).note is None
    assert made_run(RunSettings(kernels="native"), machine()).backend.native
    with pytest.raises(CannotRunError, match="they hold 4 or 8 bits, not 16"):
        made_run(RunSettings(kernels="native", bits=16), machine())


@needs_native
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("variant", ["untied", "tied", "biases", "norms"])
def test_planned_native_weights_are_those_that_are_held(bits, variant):
    """Never less than what a loaded target holds; here, all of it. 1,000 tokens and 96 channels fill no whole tiles."""
    from treeeagle_edge.kernels.native.team import Team
    from treeeagle_edge.model.native_target import load_native_target

    shapes = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 3, "num_kv_heads": 1, "head_dim": 32}
    changes = {
        "untied": {},
        "tied": {"tie_word_embeddings": True},
        "biases": {"attention_bias": True, "output_bias": True},
        "norms": {"qk_norm": True},
    }
    config = replace(CONFIG, **shapes, vocab_size=1000, **changes[variant])
    target = load_native_target(RandomCheckpoint(config), Team(1), bits=bits, context=256, max_rows=257)
    made = plan_memory(
        config, None, bits=bits, context=256, tree=None, reserve=0, budget=GB, device="cpu", native=True
    )
    assert made.lines[0].nbytes + made.lines[1].nbytes == target.nbytes


@needs_native
@pytest.mark.parametrize(("bits", "held"), [(8, 143_222_016), (4, 96_773_376)])
def test_planned_native_demo_model_and_head_are_those_that_are_held(demo_gguf, bits, held):
    """The Q4_1 file and the bundled head, weights, rotary tables and KV rows."""
    from treeeagle_edge.checkpoint.head import open_head
    from treeeagle_edge.checkpoint.opening import open_checkpoint
    from treeeagle_edge.kernels.native.team import Team
    from treeeagle_edge.model.native_head import NativeHead
    from treeeagle_edge.model.native_target import load_native_target
    from treeeagle_edge.sources.model_names import BUNDLED_HEADS

    made = plan(bits=bits)
    target = load_native_target(
        open_checkpoint(demo_gguf), Team(1), bits=bits, context=2048, max_rows=PREFILL_CHUNK + 1
    )
    rotary = (2048 + 64) * 64 * 4
    assert target.nbytes == held + rotary
    assert target.nbytes <= made.lines[0].nbytes + made.lines[1].nbytes <= 1.03 * target.nbytes
    opened = open_head(BUNDLED_HEADS / DEMO.head_name, DEMO.config, target.embed)
    head = NativeHead(
        opened,
        target,
        bits=4,
        slots=made.slots + MAX_EXPANSIONS,
        context=2048,
        max_rows=PREFILL_CHUNK + 1,
        max_scored=64,
        max_expanded=MAX_EXPANSIONS,
    )
    assert head.nbytes + rotary <= made.line("head").nbytes <= 1.02 * (head.nbytes + rotary)
    alone = plan(bits=bits, head=False).line("KV").nbytes
    assert made.line("KV").nbytes == alone + head.store.nbytes
