"""Block-scaled products: close to numpy, and the same bits for any batch, order and number of threads."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from native_toys import needs_native
from numpy_reference import project

from treeeagle_edge.kernels.native.library import check, library
from treeeagle_edge.kernels.native.structs import FORMATS
from treeeagle_edge.kernels.native.team import Team

pytestmark = needs_native

TYPES = {
    "q8": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
}
SHAPES = [(16, 32), (40, 96), (100, 576), (5, 1536)]


def weight(fmt: str, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """GGUF blocks of a random matrix, and their exact values."""
    rng = np.random.default_rng(seed)
    blocks = gguf.quantize((rng.standard_normal((n, k)) * 0.05).astype(np.float32), TYPES[fmt])
    return blocks, gguf.dequantize(blocks, TYPES[fmt])


def rows(m: int, k: int, seed: int = 1) -> np.ndarray:
    """Random activations; one block of zeros and one large value among them."""
    x = np.random.default_rng(seed).standard_normal((m, k)).astype(np.float32)
    x[0, :32] = 0
    x[-1, -1] = 300
    return x


@pytest.mark.parametrize("fmt", TYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_values_equal_the_files_bit_for_bit(fmt: str, n: int, k: int) -> None:
    blocks, exact = weight(fmt, n, k)
    out = np.empty((n, k), np.float32)
    data = np.ascontiguousarray(blocks)
    check(library().te_unpack(FORMATS[fmt], 1, data.ctypes.data, data.nbytes, n, k, out.ctypes.data))
    np.testing.assert_array_equal(out, exact)


def quantised(fmt: str, x: np.ndarray) -> np.ndarray:
    """The values that `x` [n, k] has after quantising."""
    out = np.empty_like(x)
    check(library().te_unpack(FORMATS[fmt], 0, x.ctypes.data, x.nbytes, *x.shape, out.ctypes.data))
    return out


@pytest.mark.parametrize("fmt", TYPES)
def test_quantising_stays_within_a_step(fmt: str) -> None:
    x = np.random.default_rng(3).standard_normal((32, 128)).astype(np.float32)
    out = quantised(fmt, x)
    blocks = x.reshape(-1, 32)
    spread = {
        "q8": np.abs(blocks).max(1) / 127,
        "q4_0": np.abs(blocks).max(1) / 8,
        "q4_1": np.ptp(blocks, 1) / 15,
    }[fmt]
    # scales are fp16; Q4_0 has no +8, its far end may be a step away; Q4_1 cuts the ends where that serves the others
    most = {"q8": 0.57, "q4_0": 1.01, "q4_1": 1.5}[fmt]
    assert (np.abs(out.reshape(-1, 32) - blocks).max(1) <= most * spread + 1e-6).all()


@pytest.mark.parametrize("tail", [0.0, 6.0])
def test_four_bits_are_fitted(tail: float) -> None:
    """By a sixth less squared error than steps from the least to the greatest value, with and without far values."""
    generator = np.random.default_rng(5)
    x = generator.standard_normal((256, 256)).astype(np.float32)
    x[generator.random(x.shape) < 0.01] *= 1 + tail
    blocks = x.reshape(-1, 32)
    low, step = blocks.min(1, keepdims=True), np.ptp(blocks, axis=1, keepdims=True) / 15
    plain = np.square(np.rint((blocks - low) / step) * step + low - blocks).sum()
    assert np.square(quantised("q4_1", x) - x).sum() < 0.84 * plain


def test_what_needs_no_fit_is_exact() -> None:
    """Blocks of zeros, of one value, and of sixteen steps."""
    x = np.zeros((3, 32), np.float32)
    x[1], x[2] = 1.5, np.arange(32) % 16 * 0.25 - 1
    np.testing.assert_array_equal(quantised("q4_1", x), x)


@pytest.mark.parametrize("fmt", TYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_close_to_numpy(isa: str, fmt: str, n: int, k: int) -> None:
    blocks, exact = weight(fmt, n, k)
    x = rows(7, k)
    expected = project(x, exact)
    got = Team(1, isa).matmul(fmt, blocks, n, x)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("fmt", TYPES)
def test_extreme_weights_do_not_saturate(isa: str, fmt: str) -> None:
    n, k = 16, 64
    blocks = np.full(
        (n, k // 32 * {"q8": 34, "q4_0": 18, "q4_1": 20}[fmt]), 0x81 if fmt == "q8" else 0xFF, np.uint8
    )
    head = blocks.reshape(n, k // 32, -1)[:, :, : 4 if fmt == "q4_1" else 2].view(np.float16)
    head[...] = np.float16(0.5)
    exact = gguf.dequantize(blocks, TYPES[fmt])
    for sign in (1, -1):
        x = np.full((1, k), sign * 127, np.float32)
        np.testing.assert_array_equal(Team(1, isa).matmul(fmt, blocks, n, x), project(x, exact))


@pytest.mark.parametrize("fmt", TYPES)
def test_a_rows_bits_do_not_depend_on_its_batch(isa: str, fmt: str) -> None:
    n, k = 72, 160
    blocks, _ = weight(fmt, n, k)
    x = rows(64, k)
    one, two, three = (Team(t, isa) for t in (1, 2, 3))
    alone = np.concatenate([one.matmul(fmt, blocks, n, x[i : i + 1]) for i in range(64)])
    for m in range(1, 65):
        np.testing.assert_array_equal(two.matmul(fmt, blocks, n, x[:m]), alone[:m])
    order = np.random.default_rng(2).permutation(64)
    np.testing.assert_array_equal(three.matmul(fmt, blocks, n, np.ascontiguousarray(x[order])), alone[order])


@pytest.mark.parametrize("fmt", TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e-38, -1e-38])
@pytest.mark.parametrize("count", [1, 64])
def test_a_row_beyond_what_int8_can_say_spoils_no_other(isa: str, fmt: str, value: float, count: int) -> None:
    blocks, _ = weight(fmt, 16, 64)
    x = rows(5, 64)
    team = Team(1, isa)
    expected = team.matmul(fmt, blocks, 16, x)
    x[2, :count] = value
    np.testing.assert_array_equal(team.matmul(fmt, blocks, 16, x)[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_sleeping_workers_wake_for_every_call(isa: str) -> None:
    blocks, _ = weight("q8", 64, 64)
    x = rows(2, 64)
    sleepy = Team(4, isa, spin_us=0)
    expected = Team(1, isa).matmul("q8", blocks, 64, x)
    for _ in range(300):
        np.testing.assert_array_equal(sleepy.matmul("q8", blocks, 64, x), expected)
