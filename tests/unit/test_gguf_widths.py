"""A GGUF file on native kernels: unless a width is asked for, its blocks keep their values to the last bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Quant
from native_toys import needs_native
from target_passes import in_pieces

from treeeagle_edge.checkpoint.opening import open_checkpoint
from treeeagle_edge.drafting.costs import CostTable
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.gguf_file import open_gguf
from treeeagle_edge.hardware.cpu import Cpu, Ram
from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.kernels.native import loader
from treeeagle_edge.kernels.native.library import check, library
from treeeagle_edge.kernels.native.model import Model
from treeeagle_edge.kernels.native.structs import FORMATS
from treeeagle_edge.model.native_target import NativeTarget
from treeeagle_edge.model.target import load_target
from treeeagle_edge.model_loading import load_planned_target
from treeeagle_edge.planning import native_bytes
from treeeagle_edge.planning.model_shapes import planned_model
from treeeagle_edge.planning.run_plan import RunPlan, pick_profile, plan_run
from treeeagle_edge.rounds import tree_shape
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.units import GB

HEADS, HIDDEN, VOCAB = 3, 96, 40  # an odd number of blocks a row, so that tiles are padded
FORMATS_OF_FILES = {"Q8_0": "q8", "Q4_0": "q4_0", "Q4_1": "q4_1"}
BLOCK_BYTES = {"q8": 34, "q4_0": 18, "q4_1": 20}
MATRICES = {
    "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o",
    "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down",
}  # fmt: skip
FILES = {  # width of the plan; types of embedding, layers, the layers' last matrix, and lm_head (None: tied)
    "as the demo": (4, "Q8_0", "Q4_1", "Q4_1", None),
    "all of 4 bits": (4, "Q4_0", "Q4_0", "Q4_1", None),
    "embedding with minimum": (4, "Q4_1", "Q4_0", "Q4_0", None),
    "all of 8 bits": (8, "Q8_0", "Q8_0", "Q8_0", None),
    "an 8-bit matrix among 4": (4, "Q8_0", "Q4_1", "Q8_0", None),
    "a 4-bit matrix among 8": (8, "Q8_0", "Q8_0", "Q4_0", "Q8_0"),
    "4-bit tables beside 8": (8, "Q4_0", "Q8_0", "Q8_0", "Q4_1"),
    "a tied 4-bit table beside 8": (8, "Q4_1", "Q8_0", "Q8_0", None),
    "an 8-bit matrix among others": (4, "Q8_0", "Q5_0", "Q8_0", None),
    "floats for lm_head": (4, "Q8_0", "Q4_1", "Q4_1", "F16"),
}  # fmt: skip


def write(
    path: Path, table: str, layers: str, last: str, lm_head: str | None = None, odd: str = "ffn_down"
) -> Path:
    """A model of one layer. `last`: type of its `odd` matrix."""
    writer = gguf.GGUFWriter(path, "qwen3")  # whose Q and K are in the order of ours
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(1e-6)
    draw = np.random.default_rng(3)
    kinds = {"token_embd": table, **{f"blk.0.{name}": layers for name in MATRICES}, f"blk.0.{odd}": last}
    if lm_head is not None:
        kinds["output"] = lm_head
    for name, kind in kinds.items():
        rows = VOCAB if name in ("token_embd", "output") else HIDDEN
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
    target = load_planned_target(plan, open_checkpoint(path), 1, context=256, max_rows=64)
    assert isinstance(target, NativeTarget)
    return target


@dataclass(frozen=True)
class Given:
    """What native code was given for a matrix."""

    fmt: str
    data: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """What native code makes of it, float32 [rows, columns]."""
        rows, columns = self.data.shape
        blocks = self.data.dtype == np.uint8
        out = np.empty((rows, columns * 32 // BLOCK_BYTES[self.fmt] if blocks else columns), np.float32)
        check(
            library().te_unpack(
                FORMATS[self.fmt],
                blocks,
                self.data.ctypes.data,
                self.data.nbytes,
                *out.shape,
                out.ctypes.data,
            )
        )
        return out


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Given]:
    found: dict[str, Given] = {}
    own = Model.matrix

    def watched(model: Model, tensor: str, fmt: str, data: np.ndarray, layer: int = 0) -> None:
        found[tensor] = Given(fmt, data)
        own(model, tensor, fmt, data, layer)

    monkeypatch.setattr(Model, "matrix", watched)
    return found


@needs_native
@pytest.mark.parametrize("name", FILES)
def test_blocks_keep_their_values_tensor_by_tensor_and_the_plan_counts_them(
    name: str, tmp_path: Path, given: dict[str, Given]
) -> None:
    bits, *kinds = FILES[name]
    path = write(tmp_path / "m.gguf", *kinds)
    plan, file = planned(path), open_gguf(path)
    assert plan.bits == bits
    target, config = loaded(path, plan), plan.model.config
    planned_bytes = native_bytes.layers_bytes(config, plan.bits) + native_bytes.embedding_bytes(config)
    assert target.model.nbytes == planned_bytes
    names = {"token_embd": "embedding", "output": "lm_head"} | {f"blk.0.{k}": v for k, v in MATRICES.items()}
    for tensor in file.tensors.values():
        native = names.get(tensor.name.removesuffix(".weight"))
        if native is not None and tensor.quant.name in FORMATS_OF_FILES:
            stored = gguf.dequantize(np.array(file.blocks(tensor.name)), tensor.quant).reshape(tensor.shape)
            assert given[native].fmt == FORMATS_OF_FILES[tensor.quant.name]
            assert np.array_equal(given[native].values, stored), native


@needs_native
@pytest.mark.parametrize("name", FILES)
def test_a_tree_says_what_plain_decoding_says(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", *FILES[name][1:])
    target = loaded(path, planned(path))
    ids = torch.arange(12) % VOCAB
    assert torch.equal(in_pieces(target, ids, 12)[0], in_pieces(target, ids, 1)[0])
    flat = CostTable(rows=(1, 33), verify=(0.01, 0.011), extend=0.0, step=0.0)
    engine = Engine(target, None, context=256, slots=320, tree=tree_shape(5, 3, 0), costs=flat)
    params = SamplingParams(
        max_tokens=100, banned_ids=frozenset(range(4, VOCAB))
    )  # so that the text repeats itself
    plain = [i for item in engine.generate([1, 2, 3] * 5, params, speculate=False) for i in item.ids]
    rounds = list(engine.generate([1, 2, 3] * 5, params))
    assert [i for item in rounds for i in item.ids] == plain
    assert sum(item.accepted for item in rounds) > 0


@needs_native
@pytest.mark.parametrize("odd", ["attn_q", "attn_v", "ffn_gate", "ffn_up"])
def test_matrices_that_are_used_together_may_differ_in_width(odd: str, tmp_path: Path) -> None:
    """Logits are near those of the file's values, and a row has the same bits alone and among others."""
    path = write(tmp_path / "m.gguf", "Q8_0", "Q4_1", "Q8_0", odd=odd)
    mixed, ids = loaded(path, planned(path)), torch.arange(12) % VOCAB
    logits = in_pieces(mixed, ids, 12)[0]
    assert torch.equal(logits, in_pieces(mixed, ids, 1)[0])
    exact = load_target(open_checkpoint(path), bits=32, context=64, device=torch.device("cpu"))
    true = in_pieces(exact, ids, 12)[0]
    assert torch.norm(logits - true) < 0.05 * torch.norm(true)


@needs_native
@pytest.mark.parametrize("bits", [4, 8])
def test_a_width_that_was_asked_for_is_that_of_all_layers(
    bits: int, tmp_path: Path, given: dict[str, Given]
) -> None:
    path = write(tmp_path / "m.gguf", "Q8_0", "Q4_1", "Q8_0")
    plan = planned(path, bits)
    assert plan.bits == bits
    target, config = loaded(path, plan), plan.model.config
    assert {given[name].fmt for name in MATRICES.values()} == {"q4_1" if bits == 4 else "q8"}
    planned_bytes = native_bytes.layers_bytes(config, bits) + native_bytes.embedding_bytes(config)
    assert target.model.nbytes == planned_bytes


def test_without_native_kernels_a_small_tree_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        loader, "problem", lambda: loader.Problem("no C++ compiler is installed", "install g++")
    )
    for name in ("as the demo", "all of 8 bits"):
        plan = planned(write(tmp_path / "m.gguf", *FILES[name][1:]))
        assert plan.bits == 8 and plan.note is not None and not plan.backend.native
