"""The memory plan: arithmetic from shapes, checked against known sizes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import LLAMA, usual

from treeeagle_edge.errors import UsageError
from treeeagle_edge.limits import MAX_EXPANSIONS
from treeeagle_edge.planning.known_models import KNOWN_MODELS, find_known
from treeeagle_edge.planning.memory_plan import plan_memory, plan_slots
from treeeagle_edge.planning.torch_bytes import (
    block_bytes,
    embedding_bytes,
    linear_bytes,
    rotary_bytes,
    step_bytes,
)
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.units import GB, format_gb

pytestmark = pytest.mark.usefixtures("native_kernels")

DEMO = KNOWN_MODELS["smollm2-135m"]
TREE = TreeShape(4, 4, 24)


def plan(
    known=LLAMA,
    *,
    bits=4,
    context=8192,
    tree=TREE,
    budget=12 * GB,
    device="cuda:0",
    head=True,
    native=False,
    **widths,
):
    return plan_memory(
        known.config,
        known.head if head else None,
        bits=bits,
        context=context,
        tree=tree,
        reserve=800 * 10**6,
        budget=budget,
        device=device,
        native=native,
        **widths,
    )


def test_an_8b_with_its_head_fits_a_12_gb_card():
    """Expectations row 27: out of memory on 12 GB. Llama-3.1-8B NF4 + head + 8k context plans at most 10.5 GB."""
    made = plan()
    assert made.total <= 10.5 * GB and made.fits
    assert made.line("head").nbytes == pytest.approx(0.85 * GB, rel=0.01)
    assert made.line("weights (NF4)").nbytes == pytest.approx(3.93 * GB, rel=0.01)
    assert made.line("embedding").nbytes == pytest.approx(2.10 * GB, rel=0.01)
    assert made.line("KV").nbytes == pytest.approx(plan_slots(8192, TREE) * 0.135e6, rel=0.02)
    assert not plan(budget=8 * GB).fits


def test_bytes_a_step_are_those_that_were_published():
    """Weights one step reads: Llama-3.1-8B int8 8.0 and 16-bit 15.0 GB, Qwen2-7B 16-bit 14.1 GB (lm_head included)."""
    assert step_bytes(LLAMA.config, usual(16, "cuda")) == pytest.approx(15.0 * GB, rel=0.01)
    assert step_bytes(LLAMA.config, usual(8, "cuda")) == pytest.approx(8.03 * GB, rel=0.01)
    assert step_bytes(KNOWN_MODELS["Qwen/Qwen2-7B-Instruct"].config, usual(16, "cuda")) == pytest.approx(
        14.1 * GB, rel=0.01
    )


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("smollm2-135m", 134.5),
        ("meta-llama/Llama-3.1-8B-Instruct", 8030),
        ("meta-llama/Llama-3.2-1B-Instruct", 1236),
        ("meta-llama/Llama-3.2-3B-Instruct", 3213),
        ("meta-llama/Llama-2-7b-chat-hf", 6738),
        ("lmsys/vicuna-13b-v1.3", 13016),
        ("mistralai/Mistral-7B-Instruct-v0.3", 7248),
        ("Qwen/Qwen2-7B-Instruct", 7616),
        ("Qwen/Qwen3-1.7B", 1721),
        ("Qwen/Qwen3-4B", 4022),
        ("Qwen/Qwen3-8B", 8191),
        ("Qwen/Qwen3-14B", 14768),
    ],
)
def test_known_shapes_add_up_to_the_published_number_of_parameters(name, millions):
    config = KNOWN_MODELS[name].config
    held = block_bytes(config, 32) + embedding_bytes(config, usual(32, "cpu"))
    assert held / 4e6 == pytest.approx(millions, rel=0.001)


def test_a_known_head_adds_up_to_the_published_number_of_parameters():
    """The file of AngelSlim's head for Qwen3-4B holds 218,429,056 numbers, d2t and t2d among them."""
    head = KNOWN_MODELS["Qwen/Qwen3-4B"].head
    norms = 4 * head.hidden_size
    numbers = sum(rows * columns for rows, columns in head.matrices.values()) + norms
    assert numbers == 218_429_056 - head.draft_vocab_size - head.vocab_size


def test_known_names_are_found_in_any_case():
    assert find_known("qwen/qwen3-8b/") is KNOWN_MODELS["Qwen/Qwen3-8B"]
    assert find_known("nobody/nothing") is None


@pytest.mark.parametrize(("bits", "expected"), [(4, 512 + 64), (8, 1024 + 4 * 8), (16, 2048), (32, 4096)])
def test_linear_bytes(bits, expected):
    """1,024 weights in 8 rows: NF4 has an fp32 scale for 64 weights, int8 one a row."""
    assert linear_bytes(8, 128, bits) == expected


def test_a_tied_model_on_the_cpu_holds_an_int8_lm_head_beside_its_embedding():
    table = 49_152 * 576
    assert embedding_bytes(DEMO.config, usual(32, "cpu")) == table * 4
    assert embedding_bytes(DEMO.config, usual(16, "cpu")) == table * 2
    assert embedding_bytes(DEMO.config, usual(8, "cpu")) == table * 2 + table + 49_152 * 4
    assert embedding_bytes(DEMO.config, usual(8, "cuda")) == table * 2


def test_the_head_is_fp32_beside_fp32_weights_and_16_bit_otherwise():
    """Expectations row 29's arithmetic: the head's dtype does not follow the target's quantisation."""
    assert [line.name for line in plan(DEMO, bits=32, device="cpu").lines][2] == "head (fp32)"
    assert [line.name for line in plan(DEMO, bits=8, device="cpu").lines][2] == "head (16-bit)"
    assert (
        plan(DEMO, bits=4, device="cpu").line("head").nbytes
        == plan(DEMO, bits=16, device="cpu").line("head").nbytes
    )


def test_room_for_the_tree_is_part_of_the_slots():
    assert plan_slots(8192, None) == 8192 + 1 + 256
    assert plan_slots(8192, TREE) == plan_slots(8192, None) + 24
    assert plan().slots == plan_slots(8192, TREE)


def test_plain_decoding_plans_no_head():
    names = [line.name for line in plan(tree=None, head=False).lines]
    assert not any(name.startswith("head") for name in names)
    assert plan(tree=None, head=False).total < plan().total


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(KNOWN_MODELS)),
    bits=st.sampled_from((4, 8, 16, 32)),
    budget=st.integers(1, 48),
    device=st.sampled_from(("cpu", "cuda:0", "native")),
)
def test_the_longest_context_is_exact(name, bits, budget, device):
    """It fits, and one token more does not, unless the model's own limit came first."""
    known = KNOWN_MODELS[name]
    native = device == "native"
    if native:
        bits, device = min(bits, 8), "cpu"
    sized = partial(plan, known, bits=bits, budget=budget * GB, device=device, native=native)
    made = sized(context=64)
    longest = made.longest_context
    if longest == 0:
        assert not sized(context=2).fits
        return
    assert sized(context=longest).fits
    if longest < known.config.max_position:
        assert not sized(context=longest + 1).fits


@pytest.mark.parametrize(("bits", "context"), [(3, 100), (8, 1), (8, 8193)])
def test_out_of_range_is_refused_with_the_range(bits, context):
    with pytest.raises(UsageError) as error:
        plan(DEMO, bits=bits, context=context, device="cpu")
    assert error.value.hint in ("use 4, 8, 16 or 32", "use 2 to 8,192")


def test_sizes_are_printed_for_people():
    shown = [format_gb(size) for size in (0, 310e6, 994e6, 999e6, 8.34e9)]
    assert shown == ["0.00 GB", "0.31 GB", "0.99 GB", "1.0 GB", "8.3 GB"]


def test_planning_imports_no_torch():
    code = (
        "import sys; from treeeagle_edge.planning.run_plan import pick_profile, plan_run, RunSettings;"
        "from treeeagle_edge.planning.model_shapes import planned_model; "
        "from treeeagle_edge.hardware.detection import detect, imagine_gpu;"
        "h = imagine_gpu(detect('cpu'), 12); s = RunSettings(); p = pick_profile(s, h);"
        "plan_run(s, p, h, planned_model(s, p)); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("bits", "lm_head"), [(4, None), (8, None), (16, None), (32, None), (4, 16), (8, 16), (16, 8), (4, 8)]
)
@pytest.mark.parametrize("tied", [False, True])
def test_planned_weights_are_those_that_are_held(bits, lm_head, tied):
    """The promise is kept closely: never less than what a loaded target holds, and at most 3 % more."""
    import torch
    from tiny_models import CONFIG, RandomCheckpoint

    from treeeagle_edge.model.target import load_target

    checkpoint = RandomCheckpoint(replace(CONFIG, vocab_size=4096, tie_word_embeddings=tied))
    target = load_target(checkpoint, bits=bits, context=256, device=torch.device("cpu"), lm_head_bits=lm_head)
    made = plan_memory(
        checkpoint.config, None, bits=bits, context=256, tree=None, reserve=0, budget=GB, device="cpu",
        lm_head_bits=lm_head,
    )  # fmt: skip
    planned = made.lines[0].nbytes + made.lines[1].nbytes
    assert target.nbytes <= planned <= 1.03 * target.nbytes


@pytest.mark.parametrize(("bits", "head_bits"), [(16, None), (32, None), (16, 8), (4, 8), (32, 8), (8, 4)])
def test_planned_head_is_the_one_that_is_held(bits, head_bits):
    """The bundled head's weights, and its KV rows for every slot and every scratch row."""
    import torch

    from treeeagle_edge.checkpoint.head import open_head
    from treeeagle_edge.model.head import Head
    from treeeagle_edge.sources.model_names import BUNDLED_HEADS

    made = plan(DEMO, bits=bits, context=512, device="cpu", head_bits=head_bits)
    checkpoint = open_head(BUNDLED_HEADS / DEMO.head_name, DEMO.config)
    assert checkpoint.config.matrices == DEMO.head.matrices
    head = Head(
        checkpoint,
        lambda ids: ids,
        slots=made.slots + MAX_EXPANSIONS,
        context=512,
        dtype=torch.float32 if bits == 32 and head_bits is None else torch.bfloat16,
        device=torch.device("cpu"),
        bits=made.widths.head,
    )
    planned = made.line("head").nbytes - rotary_bytes(checkpoint.config, 512)
    # a 4-bit matrix repacked for the CPU has its scales in bf16
    held = head.nbytes + 8 * checkpoint.config.draft_vocab_size
    assert held <= planned <= (1.06 if head_bits == 4 else 1.01) * held
    alone = plan(DEMO, bits=bits, context=512, device="cpu", head=False).line("KV").nbytes
    assert made.line("KV").nbytes == alone + head.store.nbytes
