"""A GGUF file on native kernels: its own width is the default, and its blocks keep their values to the last bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Quant
from native_toys import needs_native
from target_passes import in_pieces

from treeeagle_edge.checkpoint.opening import open_checkpoint
from treeeagle_edge.hardware.cpu import Cpu, Ram
from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.kernels.native import loader
from treeeagle_edge.kernels.native.model import Model
from treeeagle_edge.model.native_target import NativeTarget
from treeeagle_edge.model.target import load_target
from treeeagle_edge.model_loading import load_planned_target
from treeeagle_edge.planning import native_bytes
from treeeagle_edge.planning.model_shapes import planned_model
from treeeagle_edge.planning.run_plan import RunPlan, pick_profile, plan_run
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.units import GB

HIDDEN, VOCAB = 64, 40
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
FILES = {  # types of embedding, layers, and of the layers' last matrix
    "as the demo": ("Q8_0", "Q4_1", "Q4_1"), "all of 4 bits": ("Q4_0", "Q4_0", "Q4_1"),
    "embedding with minimum": ("Q4_1", "Q4_0", "Q4_0"), "all of 8 bits": ("Q8_0", "Q8_0", "Q8_0"),
    "an 8-bit matrix among 4": ("Q8_0", "Q4_1", "Q8_0"), "a 4-bit matrix among 8": ("Q8_0", "Q8_0", "Q4_1"),
}  # fmt: skip


def write(path: Path, table: str, layers: str, last: str, odd: str = "ffn_down") -> Path:
    """A model of one layer, with tied embeddings. `last`: type of its `odd` matrix."""
    writer = gguf.GGUFWriter(path, "qwen3")  # whose Q and K are in the order of ours
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(1e-6)
    draw = np.random.default_rng(3)
    kinds = {"token_embd": table, **{f"blk.0.{name}": layers for name in MATRICES}, f"blk.0.{odd}": last}
    for name, kind in kinds.items():
        rows = VOCAB if name == "token_embd" else HIDDEN
        values = draw.standard_normal((rows, HIDDEN)).astype(np.float32)
        blocks = gguf.quantize(values, Quant[kind])
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=Quant[kind])
    for name, size in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn_q_norm", 32), ("attn_k_norm", 32)):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(size, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def planned(path: Path, bits: int | None = None) -> RunPlan:
    here = Hardware("cpu", "for a test", Cpu("a processor", 2, 2, ()), Ram(24 * GB, 24 * GB, False), ())
    run = RunSettings(model=str(path), head="none", bits=bits)
    profile = pick_profile(run, here)
    return plan_run(run, profile, here, planned_model(run, profile))


def loaded(path: Path, plan: RunPlan) -> NativeTarget:
    target = load_planned_target(plan, open_checkpoint(path), 1, context=64, max_rows=16)
    assert isinstance(target, NativeTarget)
    return target


@needs_native
@pytest.mark.parametrize("name", FILES)
def test_the_default_width_is_the_stored_one_and_the_blocks_load_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.gguf", *FILES[name])
    plan = planned(path)
    assert plan.bits == (8 if FILES[name][1] == "Q8_0" else 4)
    given: dict[str, str] = {}
    own = Model.matrix

    def watched(model: Model, tensor: str, fmt: str, data: np.ndarray, layer: int = 0) -> None:
        given[tensor] = fmt if data.dtype == np.uint8 else "floats"
        own(model, tensor, fmt, data, layer)

    monkeypatch.setattr(Model, "matrix", watched)
    target = loaded(path, plan)
    table, layers, last = (kind.lower().replace("q8_0", "q8") for kind in FILES[name])
    assert (given["embedding"], given["q"], given["down"]) == (table, layers, last)
    config = plan.model.config
    planned_bytes = native_bytes.layers_bytes(config, plan.bits) + native_bytes.embedding_bytes(config)
    if table == "q8":
        assert target.model.nbytes == planned_bytes
    exact = open_checkpoint(path).tensor("model.embed_tokens.weight")
    assert torch.equal(target.embed(torch.arange(VOCAB)), exact)
    ids = torch.arange(12) % VOCAB
    assert torch.equal(in_pieces(target, ids, 12)[0], in_pieces(target, ids, 1)[0])


@needs_native
@pytest.mark.parametrize("odd", ["attn_q", "attn_v", "ffn_gate", "ffn_up"])
def test_matrices_that_are_used_together_may_differ_in_width(odd: str, tmp_path: Path) -> None:
    """Logits are near those of the file's values, and a row has the same bits alone and among others."""
    path = write(tmp_path / "m.gguf", "Q8_0", "Q4_1", "Q8_0", odd)
    mixed, ids = loaded(path, planned(path)), torch.arange(12) % VOCAB
    logits = in_pieces(mixed, ids, 12)[0]
    assert torch.equal(logits, in_pieces(mixed, ids, 1)[0])
    exact = load_target(open_checkpoint(path), bits=32, context=64, device=torch.device("cpu"))
    true = in_pieces(exact, ids, 12)[0]
    assert torch.norm(logits - true) < 0.05 * torch.norm(true)


def test_a_width_that_was_asked_for_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", *FILES["all of 8 bits"])
    assert planned(path, 4).bits == 4
    mixed = write(tmp_path / "mixed.gguf", *FILES["an 8-bit matrix among 4"])
    assert planned(mixed).model.config.other_blocks == HIDDEN * HIDDEN
    assert planned(mixed, 4).model.config.other_blocks == 0


def test_other_types_take_the_profiles_width(tmp_path: Path) -> None:
    assert planned(write(tmp_path / "m.gguf", "Q8_0", "Q5_0", "Q8_0")).bits == 4


def test_without_native_kernels_a_small_tree_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        loader, "problem", lambda: loader.Problem("no C++ compiler is installed", "install g++")
    )
    for name in ("as the demo", "all of 8 bits"):
        plan = planned(write(tmp_path / "m.gguf", *FILES[name]))
        assert plan.bits == 8 and plan.note is not None and not plan.backend.native
