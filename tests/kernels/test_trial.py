"""A backend serves only where it ran and was right on a small tree; elsewhere a sentence says why it does not."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest
import torch

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.kernels import dispatch, reference, trial
from treeeagle_edge.kernels.triton import availability
from treeeagle_edge.profile_live import check_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")
SHAPES = [trial.HeadShape(), trial.HeadShape(6, 3, 16, torch.bfloat16)]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """A card in words: the small tree lies on the CPU, and Triton's attention is the reference. Gives cards chosen."""
    chosen: list[torch.device] = []
    on_cpu = trial.small_tree
    monkeypatch.setattr(trial, "small_tree", lambda device, shape=None: on_cpu(CPU, shape))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(availability, "problem", lambda: None)
    monkeypatch.setitem(dispatch._dispatcher.kernels["attention"], "triton", reference.attention)
    yield chosen
    dispatch.set_backend("reference")


def broken(error: Exception) -> Callable[..., torch.Tensor]:
    def attention(*_: object) -> torch.Tensor:
        raise error

    return attention


def test_backends_of_the_cpu_are_right() -> None:
    for shape in SHAPES:
        case = trial.small_tree(CPU, shape)
        assert case.keys.dtype == shape.dtype and case.query.shape == (6, shape.heads, shape.head_dim)
        assert trial.refusal("reference", case) is None and trial.refusal("exact", case) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_a_backend_that_is_wrong_is_refused(shape: trial.HeadShape, monkeypatch: pytest.MonkeyPatch) -> None:
    def nearly(*arguments: object) -> torch.Tensor:
        return reference.attention(*arguments) * 1.1  # type: ignore[arg-type]

    monkeypatch.setitem(dispatch._dispatcher.kernels["attention"], "nearly", nearly)
    reason = trial.refusal("nearly", trial.small_tree(CPU, shape))
    assert reason is not None and reason.startswith("nearly is 1.0e-01 from")
    monkeypatch.setitem(
        dispatch._dispatcher.kernels["attention"], "nearly", lambda query, *_: query * float("nan")
    )
    assert "nan from the reference" in str(trial.refusal("nearly", trial.small_tree(CPU, shape)))
    assert dispatch.current_backend() == "reference"


def test_on_the_cpu_the_reference_is_chosen_and_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "refusal", broken(AssertionError("tried")))
    dispatch.set_backend("exact")
    assert trial.choose_attention(CPU, SHAPES, plain=False) is None
    assert dispatch.current_backend() == "reference"


def test_on_cuda_triton_is_chosen_on_the_card_of_the_run(card: list[torch.device]) -> None:
    assert trial.choose_attention(CUDA, SHAPES, plain=False) is None
    assert dispatch.current_backend() == "triton" and card == [CUDA]


def test_kernels_torch_keeps_the_reference_without_a_word(card: list[torch.device]) -> None:
    assert trial.choose_attention(CUDA, SHAPES, plain=True) is None
    assert dispatch.current_backend() == "reference" and card == [CUDA]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("PTXAS failed\nlong log"), "triton fails: PTXAS failed"),
        (
            CannotRunError("triton attention has heads of 128 at most", "use reference"),
            "heads of 128 at most",
        ),
        (AttributeError(), "triton fails: AttributeError"),
    ],
)
def test_on_cuda_a_kernel_that_fails_gives_way_to_the_reference(
    error: Exception, reason: str, card: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dispatch._dispatcher.kernels["attention"], "triton", broken(error))
    said = trial.choose_attention(CUDA, SHAPES, plain=False)
    assert said is not None and said.endswith(reason)
    assert str(said).startswith("attention runs on PyTorch's operations, which are slower: ")
    assert dispatch.current_backend() == "reference"


def test_on_cuda_an_unavailable_triton_is_explained(
    card: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = CannotRunError("triton needs a C compiler, and there is neither gcc nor clang", "install one")
    monkeypatch.setattr(availability, "problem", lambda: missing)
    said = trial.choose_attention(CUDA, SHAPES, plain=False)
    assert said is not None and missing.message in said
    assert dispatch.current_backend() == "reference"


def test_a_kernel_that_broke_cuda_ends_the_start_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(
        CannotRunError, match=r"triton broke CUDA .*: CUDA error: an illegal memory"
    ) as caught:
        trial.require_device(CUDA, "triton")
    assert "--kernels torch" in str(caught.value.hint)
    trial.require_device(CPU, "triton")


def test_apart_a_backend_is_tried_in_a_process_of_its_own() -> None:
    assert trial.refusal_apart("exact", CPU) is None
    said = trial.refusal_apart("triton", CPU)
    assert said is not None and "need a CUDA device" in said


@pytest.mark.parametrize(
    ("done", "reason"),
    [
        ((-11, "", ""), "triton ended its process with -11"),
        ((1, "", "Traceback\nRuntimeError: no ptxas"), "RuntimeError: no ptxas"),
    ],
)
def test_apart_a_process_that_dies_is_a_reason(
    done: tuple[int, str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = done
    ended = subprocess.CompletedProcess([], code, out, err)
    monkeypatch.setattr(trial.subprocess, "run", lambda *_, **__: ended)
    assert trial.refusal_apart("triton", CUDA) == reason

    def hangs(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 3.0)

    monkeypatch.setattr(trial.subprocess, "run", hangs)
    assert trial.refusal_apart("triton", CUDA, 3.0) == "triton gave nothing within 3 seconds"


def test_profile_survives_a_triton_kernel_that_fails_on_a_card(
    card: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried apart, the line says so, and the plan is not blocked: the reference takes its place."""
    asked: list[tuple[str, torch.device]] = []

    def apart(name: str, device: torch.device) -> str:
        asked.append((name, device))
        return "triton fails: an illegal memory access"

    monkeypatch.setattr(trial, "refusal_apart", apart)
    warning, last = list(check_kernels(CUDA))
    assert warning.status == "warn" and "triton does not serve: triton fails: an illegal" in warning.text
    assert "reference serves in its place" in str(warning.hint)
    assert last.status == "ok" and last.text.endswith("reference, exact agree")
    assert asked == [("triton", CUDA)]


def test_profile_says_why_triton_is_not_there_on_a_card(
    card: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = CannotRunError("triton is not installed", "pip install triton")
    monkeypatch.setattr(availability, "problem", lambda: missing)
    warning, last = list(check_kernels(CUDA))
    assert (warning.status, warning.hint) == ("warn", missing.hint) and missing.message in warning.text
    assert last.status == "ok"
    assert [check.status for check in check_kernels(CPU)] == ["ok"]
