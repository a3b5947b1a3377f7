"""Repositories that bitsandbytes quantised load as they are: the same codes and scales as `transformers` loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from target_passes import in_pieces
from torch import Tensor

from treeeagle_edge.checkpoint.bnb import Stored4bit, StoredInt8
from treeeagle_edge.checkpoint.hf import HFCheckpoint
from treeeagle_edge.checkpoint.opening import open_checkpoint
from treeeagle_edge.errors import InputError, UsageError
from treeeagle_edge.kernels.native import loader
from treeeagle_edge.model.linear import DenseLinear
from treeeagle_edge.model.target import Target, load_target
from treeeagle_edge.model.target_stored import (
    JoinedLinear,
    Stored4bitLinear,
    StoredInt8CudaLinear,
    StoredInt8Linear,
    stored_linear,
)
from treeeagle_edge.planning.torch_bytes import block_bytes

CPU = torch.device("cpu")
IDS = torch.arange(24) * 7 % 320
Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
KINDS: dict[str, dict[str, object]] = {
    "nf4": NF4,
    "nested": {**NF4, "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "as-bf16": {**NF4, "bnb_4bit_quant_storage": "bfloat16"},  # the same bytes under another dtype
    "int8": {"load_in_8bit": True},
    "some-nf4": {**NF4, "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp", "model.layers.0.self_attn.k_proj"]},
}  # fmt: skip


def bits_of(kind: str) -> int:
    return 8 if kind == "int8" else 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kind -> a folder that `transformers` and bitsandbytes wrote: a random Llama of three layers, with biases."""
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("stored")
    config = LlamaConfig(
        hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=320, max_position_embeddings=256, tie_word_embeddings=False, attention_bias=True,
    )  # fmt: skip
    state = torch.get_rng_state()
    torch.manual_seed(11)
    plain = LlamaForCausalLM(config).to(torch.bfloat16)
    for name, parameter in plain.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    plain.save_pretrained(root / "plain")
    torch.set_rng_state(state)

    def make(kind: str) -> Path:
        if not (root / kind).is_dir():
            how = BitsAndBytesConfig(**KINDS[kind])
            LlamaForCausalLM.from_pretrained(
                root / "plain", quantization_config=how, device_map="cpu", dtype=torch.bfloat16
            ).save_pretrained(root / kind)
        return root / kind

    return make


def loaded(folder: Path, bits: int) -> Target:
    return load_target(open_checkpoint(folder), bits=bits, context=64, device=CPU)


def float_logits(folder: Path) -> Tensor:
    """[N, V]: `transformers` in fp32 with the dequantised weights."""
    from transformers import LlamaForCausalLM

    checkpoint = open_checkpoint(folder)
    model = LlamaForCausalLM.from_pretrained(folder.parent / "plain", dtype=torch.float32).eval()
    model.load_state_dict({name: checkpoint.tensor(name).float() for name in checkpoint.names()})
    with torch.no_grad():
        return model(IDS[None]).logits[0]


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference, in shares of the largest logit."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_logits_are_those_of_transformers(saved: Callable[[str], Path], kind: str) -> None:
    """Expectations row 1: every weight equals what bitsandbytes dequantises, and logits differ by bf16's rounding."""
    import bitsandbytes as bnb
    from transformers import LlamaForCausalLM

    folder = saved(kind)
    checkpoint = open_checkpoint(folder)
    oracle = LlamaForCausalLM.from_pretrained(folder, device_map="cpu").eval()
    compared = 0
    for name, module in oracle.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            state = module.weight.quant_state
            state.dtype = torch.float32
            weight = bnb.functional.dequantize_4bit(module.weight.data, state)
            state.dtype = torch.bfloat16
            assert torch.equal(checkpoint.tensor(f"{name}.weight"), weight), name
        elif isinstance(module, bnb.nn.Linear8bitLt):
            weight = bnb.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
            torch.testing.assert_close(checkpoint.tensor(f"{name}.weight"), weight, rtol=3e-7, atol=0)
        else:
            continue
        compared += 1
    assert compared == (17 if kind == "some-nf4" else 21)
    with torch.no_grad():
        theirs = oracle(IDS[None]).logits[0]
    ours, _ = in_pieces(loaded(folder, bits_of(kind)), IDS, 24)
    exact = float_logits(folder)
    assert distance(ours, exact) < 0.02
    # theirs quantises activations beside int8 weights, and rounds NF4's scales on some CPUs
    assert distance(ours, theirs) < 0.03
    if kind != "int8":  # which is nearer to the original than bf16 can tell
        assert distance(float_logits(folder.parent / "plain"), exact) > 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_layers_hold_the_stored_codes_and_the_planned_bytes(saved: Callable[[str], Path], kind: str) -> None:
    target = loaded(saved(kind), bits_of(kind))
    checkpoint = open_checkpoint(saved(kind))
    assert isinstance(checkpoint, HFCheckpoint)
    layers = target._weights.layers
    down, stored = layers[1].down, checkpoint.stored(DOWN)
    if kind == "some-nf4":
        assert stored is None and isinstance(down, DenseLinear)
        assert torch.equal(down.weight, checkpoint.tensor(DOWN))
        assert isinstance(layers[0].qkv, JoinedLinear) and isinstance(layers[1].qkv, Stored4bitLinear)
    else:
        assert isinstance(down, StoredInt8Linear if kind == "int8" else Stored4bitLinear)
        assert stored is not None and torch.equal(down.weight.view(stored.codes.shape), stored.codes)
        assert torch.equal(
            down.absmax if isinstance(down, StoredInt8Linear) else down.state.absmax, stored.absmax
        )
        assert not isinstance(layers[0].qkv, JoinedLinear)
    held = sum(layer.nbytes for layer in layers) + target._weights.final_norm.nbytes
    assert held == block_bytes(target.config, bits_of(kind))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["nested", "int8"])
def test_native_kernels_convert_stored_weights(saved: Callable[[str], Path], kind: str, bits: int) -> None:
    """8-bit blocks lose next to nothing of stored weights; 4-bit ones lose more, and a note of the plan says so."""
    if loader.problem() is not None:
        pytest.skip("native kernels need a C++ compiler")
    from treeeagle_edge.kernels.native.team import Team
    from treeeagle_edge.model.native_target import load_native_target

    target = load_native_target(open_checkpoint(saved(kind)), Team(1), bits=bits, context=64, max_rows=24)
    ours, _ = in_pieces(target, IDS, 24)
    assert distance(ours, float_logits(saved(kind))) < (0.02 if bits == 8 else 0.25)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_another_width_is_refused(saved: Callable[[str], Path], kind: str) -> None:
    for bits in {4, 8, 16, 32} - {bits_of(kind)}:
        with pytest.raises(UsageError, match=f"stored at {bits_of(kind)} bits"):
            loaded(saved(kind), bits)


def four_bit(rows: int, columns: int, seed: int, kind: str = "nf4") -> tuple[Stored4bit, Tensor]:
    """A matrix as bitsandbytes quantises it in blocks of 64, and what it dequantises to."""
    import bitsandbytes.functional as bnb

    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type=kind)
    stored = Stored4bit(codes.flatten(), state.absmax, state.code, 64, kind, (rows, columns))
    return stored, bnb.dequantize_4bit(codes, state)


@pytest.mark.parametrize(
    ("rows", "kinds", "joined"),
    [((8, 16), ("nf4", "nf4"), True), ((6, 16), ("nf4", "nf4"), False), ((8, 6), ("nf4", "nf4"), True),
     ((8, 16), ("nf4", "fp4"), False)],
)  # fmt: skip
def test_matrices_are_joined_only_where_their_blocks_end(
    rows: tuple[int, int], kinds: tuple[str, str], joined: bool
) -> None:
    """40 columns: 8 rows fill 5 blocks of 64, 6 rows end within one, as the last matrix may. Products stay exact."""
    made = [four_bit(size, 40, seed, kind) for seed, (size, kind) in enumerate(zip(rows, kinds, strict=True))]
    biases = [torch.full((size,), float(size)) for size in rows]
    linear = stored_linear([stored for stored, _ in made], biases, device=CPU, dtype=torch.float32)
    assert isinstance(linear, Stored4bitLinear if joined else JoinedLinear)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(9))
    expected = x @ torch.cat([weight for _, weight in made]).T + torch.cat(biases)
    torch.testing.assert_close(linear(x), expected)
    assert linear.nbytes == sum(size * 20 + 4 * -(-size * 40 // 64) + 4 * size for size in rows)
    for stored, weight in made:
        assert torch.equal(stored.dequantised(), weight)


@pytest.mark.parametrize("kind", [StoredInt8Linear, StoredInt8CudaLinear])
def test_a_row_of_int8_is_the_same_among_others(kind: type[StoredInt8Linear]) -> None:
    """bitsandbytes has the operations of the CUDA product for CPUs too."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-127, 128, (48, 64), generator=generator, dtype=torch.int8)
    matrix, bias = StoredInt8(codes, torch.rand(48, generator=generator)), torch.arange(48.0)
    linear = kind(matrix, bias, CPU, torch.bfloat16)
    x = torch.randn(17, 64, generator=generator).to(torch.bfloat16)
    together = linear(x)
    expected = x.float() @ matrix.dequantised().T + bias
    assert distance(together, expected) < 0.01
    assert all(torch.equal(linear(x[row : row + 1])[0], together[row]) for row in range(17))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 96])
def test_products_on_cuda_use_the_stored_weights(rows: int) -> None:
    device, generator = torch.device("cuda"), torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (128, 256), generator=generator, dtype=torch.int8)
    eight = StoredInt8(codes, torch.rand(128, generator=generator))
    x = torch.randn(rows, 256, generator=generator).to(torch.bfloat16)
    for matrix in (eight, four_bit(128, 256, 5)[0], four_bit(128, 256, 6, "fp4")[0]):
        linear = stored_linear([matrix, matrix], [None, None], device=device, dtype=torch.bfloat16)
        expected = x.float() @ torch.cat((matrix.dequantised(), matrix.dequantised())).T
        assert distance(linear(x.to(device)).cpu(), expected) < 0.02


def test_a_map_of_codes_of_another_kind_is_refused() -> None:
    stored, _ = four_bit(8, 64, 0)
    other = Stored4bit(stored.codes, stored.absmax, stored.quant_map * 0.9, 64, "nf4", stored.shape)
    with pytest.raises(InputError, match="other values than nf4"):
        stored_linear([other], [None], device=CPU, dtype=torch.float32)


def edited(source: Path, folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of `source` whose tensors went through `edit`."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


STATE = f"{Q}.quant_state.bitsandbytes__nf4"
INT8 = Q.removesuffix(".weight")


@pytest.mark.parametrize(
    ("kind", "edit", "said"),
    [
        ("nf4", lambda t: t.pop(f"{Q}.absmax"), "lacks its absmax"),
        ("nf4", lambda t: t.update({f"{Q}.absmax": t[f"{Q}.absmax"][:-1]}), "255 scales"),
        ("nf4", lambda t: t.update({Q: t[Q][:-1]}), "8191 bytes"),
        ("nf4", lambda t: t.update({STATE: t[STATE][:-1]}), "cannot be read"),
        ("nf4", lambda t: t.pop(STATE), "q_proj"),
        ("nested", lambda t: t.pop(f"{Q}.nested_absmax"), "lacks its nested_absmax"),
        ("nested", lambda t: t.update({f"{Q}.absmax": t[f"{Q}.absmax"].float()}), "nested scales of the wrong kind"),
        ("int8", lambda t: t.update({f"{INT8}.SCB": t[f"{INT8}.SCB"][:-1]}), "127 scales"),
        ("int8", lambda t: t.update({f"{INT8}.weight_format": torch.tensor(2, dtype=torch.uint8)}), "one card's"),
        ("int8", lambda t: t.pop(f"{INT8}.SCB"), "q_proj"),
    ],
)  # fmt: skip
def test_damage_is_named(
    saved: Callable[[str], Path],
    tmp_path: Path,
    kind: str,
    edit: Callable[[dict[str, Tensor]], object],
    said: str,
) -> None:
    folder = edited(saved(kind), tmp_path, edit)
    with pytest.raises(InputError, match=said) as caught:
        loaded(folder, bits_of(kind))
    assert caught.value.hint


def test_floats_under_a_config_that_says_quantised(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """They would take more memory than was planned, and nobody asked for quantising them here."""
    folder = shutil.copytree(saved("nf4").parent / "plain", tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": NF4}))
    with pytest.raises(InputError, match="is not quantised, and config") as caught:
        open_checkpoint(folder)
    assert "remove quantization_config" in str(caught.value.hint)


def test_an_old_layout_without_weight_format_and_a_quantised_lm_head(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    head = four_bit(320, 128, 4)[0]

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_format")]:
            del tensors[name]
        about = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [320, 128]}
        tensors["lm_head.weight"] = head.codes[:, None].contiguous()
        tensors["lm_head.weight.absmax"], tensors["lm_head.weight.quant_map"] = head.absmax, head.quant_map
        tensors["lm_head.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(about).encode()), dtype=torch.uint8
        )

    folder = edited(saved("int8"), tmp_path, edit)
    target = loaded(folder, 8)
    assert isinstance(target._weights.lm_head, Stored4bitLinear)
    assert torch.equal(target._weights.lm_head.weight.flatten(), head.codes)
    with pytest.raises(UsageError, match=r"--lm-head-bits is 8, and the model's lm_head is stored at 4 bits"):
        load_target(open_checkpoint(folder), bits=8, context=64, device=CPU, lm_head_bits=8)
    plain = load_target(open_checkpoint(saved("int8")), bits=8, context=64, device=CPU, lm_head_bits=16)
    assert isinstance(plain._weights.lm_head, DenseLinear)
