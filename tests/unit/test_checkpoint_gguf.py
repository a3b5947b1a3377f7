"""GGUF files: every quantisation, the order of Q and K rows, and files that are damaged."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Quant

from treeeagle_edge.checkpoint.gguf import GGUFCheckpoint, canonical_name
from treeeagle_edge.checkpoint.opening import open_checkpoint
from treeeagle_edge.errors import InputError

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 256, 4, 2, 64, 40
SHAPES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate.weight": (WIDE, HIDDEN),
    "blk.0.ffn_up.weight": (WIDE, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, WIDE),
}
QUANTISED = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def blocks_of(shape: tuple[int, ...], quant: Quant, seed: int) -> np.ndarray:
    """Random bytes of `quant`, as [rows, bytes per row]; every 16-bit float in them is finite and small."""
    block, size = GGML_QUANT_SIZES[quant]
    data = np.random.default_rng(seed).integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    # the sign stays, the exponent cannot reach infinity: scales lie at a block's beginning ...
    data[..., :4] &= 0x3B
    data[..., -2:] &= 0x3B  # ... or, in the K types, at its end
    if quant is Quant.Q2_K:
        data[..., -4:] &= 0x3B
    return data.reshape(shape[0], -1)


def write_model(
    path: Path,
    arch: str = "llama",
    quant: Quant = Quant.F32,
    extra: dict[str, np.ndarray] | None = None,
    without: str = "",
) -> dict[str, np.ndarray]:
    """A one-layer model whose matrices are stored as `quant`; gives what was stored, by GGUF name."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_eos_token_id(3)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 5)
    stored = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        if name == without:
            continue
        if len(shape) == 1 or quant is Quant.F32:
            stored[name] = values
            writer.add_tensor(name, values)
        elif quant is Quant.F16:
            stored[name] = values.astype(np.float16)
            writer.add_tensor(name, stored[name])
        else:
            stored[name] = (
                gguf.quantize(values, quant) if quant is Quant.BF16 else blocks_of(shape, quant, seed)
            )
            writer.add_tensor(name, stored[name], raw_dtype=quant)
    for name, value in (extra or {}).items():
        stored[name] = value
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def to_ggml_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """What GGUF's Llama converter does to Q and K: rows i and i + head_dim / 2 become neighbours."""
    order = [
        head * HEAD_DIM + half * HEAD_DIM // 2 + i
        for head in range(heads)
        for i in range(HEAD_DIM // 2)
        for half in (0, 1)
    ]
    return rows[order]


def test_canonical_names() -> None:
    assert canonical_name("blk.12.attn_k_norm.weight") == "model.layers.12.self_attn.k_norm.weight"
    assert canonical_name("output.weight") == "lm_head.weight"
    assert canonical_name("blk.0.mystery.weight") == "blk.0.mystery.weight"


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_types_equal_the_reference_dequantisation(tmp_path: Path, name: str) -> None:
    stored = write_model(tmp_path / "m.gguf", "qwen3", Quant[name])
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.names() == {canonical_name(each) for each in SHAPES}
    for each, shape in SHAPES.items():
        tensor, raw = checkpoint.tensor(canonical_name(each)), checkpoint.raw(canonical_name(each))
        assert tensor.dtype == torch.float32 and tensor.shape == shape
        if len(shape) == 1:
            assert raw is None and np.array_equal(tensor, stored[each])
            continue
        expected = gguf.dequantize(stored[each], Quant[name])
        assert np.isfinite(expected).all() and np.abs(expected).max() > 0
        assert np.array_equal(tensor, expected)
        assert raw is not None and raw[0] == name and np.array_equal(raw[1], stored[each])


@pytest.mark.parametrize(
    ("quant", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_float_types_keep_their_dtype(tmp_path: Path, quant: str, dtype: torch.dtype) -> None:
    stored = write_model(tmp_path / "m.gguf", "qwen2", Quant[quant])
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    tensor = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    expected = gguf.dequantize(stored["blk.0.ffn_up.weight"], Quant[quant])
    assert tensor.dtype == dtype and np.array_equal(tensor.float(), expected)
    assert checkpoint.raw("model.layers.0.mlp.up_proj.weight") is None


@pytest.mark.parametrize("arch", ["llama", "minicpm"])
@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_K"])
def test_rows_of_q_and_k_come_back_in_hugging_face_order(tmp_path: Path, arch: str, quant: str) -> None:
    stored = write_model(tmp_path / "m.gguf", arch, Quant[quant])
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    for which, heads in (("q", HEADS), ("k", KV_HEADS)):
        name = f"model.layers.0.self_attn.{which}_proj.weight"
        there = gguf.dequantize(stored[f"blk.0.attn_{which}.weight"], Quant[quant])
        assert not np.array_equal(checkpoint.tensor(name), there)
        assert np.array_equal(to_ggml_order(checkpoint.tensor(name).numpy(), heads), there)
        raw = checkpoint.raw(name)
        if raw is not None:
            assert np.array_equal(to_ggml_order(raw[1], heads), stored[f"blk.0.attn_{which}.weight"])
    value = gguf.dequantize(stored["blk.0.attn_v.weight"], Quant[quant])
    assert np.array_equal(checkpoint.tensor("model.layers.0.self_attn.v_proj.weight"), value)


def test_biases_of_llama_files_are_reordered_and_those_of_qwen_are_not(tmp_path: Path) -> None:
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    biases = {f"blk.0.attn_{which}.bias": np.arange(size, dtype=np.float32) for which, size in sizes.items()}
    for arch in ("llama", "qwen2"):
        write_model(tmp_path / f"{arch}.gguf", arch, extra=biases)
        checkpoint = GGUFCheckpoint(tmp_path / f"{arch}.gguf")
        bias = checkpoint.tensor("model.layers.0.self_attn.q_proj.bias").numpy()
        assert checkpoint.config.attention_bias
        assert np.array_equal(
            to_ggml_order(bias, HEADS) if arch == "llama" else bias, biases["blk.0.attn_q.bias"]
        )


def test_rope_tensors_are_config_and_not_weights(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.full(HEAD_DIM // 2, 8, np.float32)})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config.rope.freq_divisors == (8.0,) * (HEAD_DIM // 2)
    assert not any("rope" in name for name in checkpoint.names())


def test_generation_defaults_are_the_end_ids(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    found = open_checkpoint(tmp_path / "m.gguf").generation
    assert found.stop_ids == {3, 5} and found.temperature is None


def complaint(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_checkpoint(path)
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize("kept", [0, 10, 40, 300, -1])
def test_truncated_files(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)
    path.write_bytes(path.read_bytes()[:kept])
    said = complaint(path)
    assert "truncated" in said or "too short" in said


@pytest.mark.parametrize("at", range(8, 400, 7))
def test_a_damaged_header_is_an_error_a_person_can_read(tmp_path: Path, at: int) -> None:
    """Bytes overwritten anywhere in the header: refused with a sentence, or (some numbers) still a model."""
    path = tmp_path / "m.gguf"
    write_model(path)
    data = bytearray(path.read_bytes())
    data[at : at + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    with suppress(InputError):  # anything else is a traceback, and fails here
        open_checkpoint(path)


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "zip archive" in complaint(path)
    path.write_bytes(bytes(100))
    assert "no GGUF file" in complaint(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(100))
    assert "big-endian" in complaint(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(100))
    assert "version 1" in complaint(path)
    assert "does not exist" in complaint(tmp_path / "nowhere.gguf")


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", quant=Quant.IQ2_XS)
    assert "IQ2_XS" in complaint(tmp_path / "m.gguf")


def test_tensors_that_are_missing_or_unknown_are_named(tmp_path: Path) -> None:
    write_model(tmp_path / "a.gguf", without="blk.0.attn_v.weight")
    assert "v_proj" in complaint(tmp_path / "a.gguf")
    write_model(tmp_path / "b.gguf", extra={"blk.0.ffn_gate.bias": np.zeros(WIDE, np.float32)})
    assert "mlp.gate_proj.bias" in complaint(tmp_path / "b.gguf")


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(InputError, match="truncated"):
        checkpoint.tensor("model.layers.0.mlp.down_proj.weight")
