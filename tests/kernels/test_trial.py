"""A kernel serves only where it ran and was right on a small call; elsewhere a sentence says why it does not."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.kernels import dispatch, trial, trial_cases
from treeeagle_edge.kernels.trial_cases import ModelShape
from treeeagle_edge.kernels.triton import availability
from treeeagle_edge.profiling.live import check_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")
SHAPES = [
    ModelShape(packed=True, int8=True),
    ModelShape(6, 3, 16, 64, 80, dtype=torch.bfloat16, head_norm=True),
    ModelShape(dtype=torch.bfloat16, stream=torch.bfloat16),
]
KERNELS = dispatch._dispatcher.kernels


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """A card in words: inputs lie on the CPU, and Triton's kernels are the reference's. Gives the cards chosen."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(trial, "cases", lambda device, shape: trial_cases.cases(CPU, shape))
    monkeypatch.setattr(
        "treeeagle_edge.profiling.live.small_tree", lambda device: trial_cases.small_tree(CPU)
    )
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(availability, "problem", lambda: None)
    for kernels in KERNELS.values():
        monkeypatch.setitem(kernels, "triton", kernels["reference"])
    yield chosen
    dispatch.leave_out(())
    dispatch.set_backend("reference")


@pytest.mark.parametrize("plain", [True, False])
def test_products_of_fp32_are_exact_whatever_the_environment_says(
    plain: bool, card: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's images with PyTorch ask for TF32, which is a thousandth off."""
    monkeypatch.setattr(trial, "refusals", lambda name, device, shapes: {})
    torch.set_float32_matmul_precision("high")  # what that leaves
    try:
        trial.choose_kernels(CUDA, SHAPES, plain=plain)
        assert torch.get_float32_matmul_precision() == "highest" and card == [CUDA]
    finally:
        torch.set_float32_matmul_precision("highest")


def broken(error: Exception) -> Callable[..., torch.Tensor]:
    def kernel(*_: object) -> torch.Tensor:
        raise error

    return kernel


def serving() -> set[str]:
    return {operation for operation in dispatch.OPERATIONS if dispatch.serving(operation) == "triton"}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_operation_of_a_model_has_a_case_and_backends_of_the_cpu_are_right(shape: ModelShape) -> None:
    cases = list(trial_cases.cases(CPU, shape))
    tried = {case.operation for case in cases}
    assert tried == set(dispatch.OPERATIONS) - (set() if shape.packed else {"matmul_4bit", "int8_product"})
    for case in cases:
        assert trial.refusal("reference", case) is None and trial.refusal("exact", case) is None
    tree = trial_cases.small_tree(CPU, shape)
    assert tree.keys.dtype == shape.dtype and tree.query.shape == (6, shape.heads, shape.head_dim)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operation", dispatch.OPERATIONS)
def test_a_kernel_that_is_wrong_is_refused(
    operation: str, shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = KERNELS[operation]
    for case in trial_cases.cases(CPU, shape):
        if case.operation != operation:
            continue
        monkeypatch.setitem(kernels, "exact", lambda *args: kernels["reference"](*args) * 1.1)
        reason = trial.refusal("exact", case)
        assert reason is not None and reason.startswith(("exact is 1.0e-01 from", "exact is 9.9e-02 from"))
        monkeypatch.setitem(kernels, "exact", lambda *args: kernels["reference"](*args) * float("nan"))
        assert trial.refusal("exact", case) == "exact is nan from the reference"
    assert dispatch.current_backend() == "reference"


def test_what_a_kernel_writes_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual stream, keys and values: results that a call does not return."""
    kernels = KERNELS["rotate_and_write"]

    def forgets_values(qkv: torch.Tensor, *rest: object) -> torch.Tensor:
        held = qkv.clone()
        held[:, -2:] = 0
        return kernels["reference"](held, *rest)

    monkeypatch.setitem(kernels, "exact", forgets_values)
    monkeypatch.setitem(KERNELS["add_rms_norm"], "exact", lambda x, *_: torch.ones_like(x))
    refused = trial.refusals("exact", CPU, [ModelShape()])
    assert refused["rotate_and_write"] == "exact is 1.0e+00 from the reference"
    assert set(refused) == {"rotate_and_write", "add_rms_norm"}


def test_on_the_cpu_the_reference_is_chosen_and_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "refusal", broken(AssertionError("tried")))
    dispatch.set_backend("exact")
    assert trial.choose_kernels(CPU, SHAPES, plain=False) == ()
    assert dispatch.current_backend() == "reference"


def test_on_cuda_triton_is_chosen_on_the_card_of_the_run(card: list[torch.device]) -> None:
    dispatch.leave_out({"attention"})  # by an earlier start
    assert trial.choose_kernels(CUDA, SHAPES, plain=False) == ()
    assert serving() == set(dispatch.OPERATIONS) and card == [CUDA]


def test_what_fails_on_one_of_several_cards_serves_on_none(
    card: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[torch.device, list[ModelShape]]] = []

    def refusals(name: str, device: torch.device, shapes: list[ModelShape]) -> dict[str, str]:
        tried.append((device, list(shapes)))
        return {"silu_gate": "triton fails: no ptxas"} if device == other else {}

    other = torch.device("cuda:2")
    monkeypatch.setattr(trial, "refusals", refusals)
    said = trial.choose_kernels(CUDA, iter(SHAPES), plain=False, others=[other])
    assert said == ("slower without Triton's kernels: SiLU gate (triton fails: no ptxas)",)
    assert tried == [(CUDA, list(SHAPES)), (other, list(SHAPES))]
    assert serving() == set(dispatch.OPERATIONS) - {"silu_gate"} and card == [CUDA]


def test_kernels_torch_keeps_the_reference_without_a_word(card: list[torch.device]) -> None:
    assert trial.choose_kernels(CUDA, SHAPES, plain=True) == ()
    assert dispatch.current_backend() == "reference" and card == [CUDA]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("PTXAS failed\nlong log"), "triton fails: PTXAS failed"),
        (
            CannotRunError("triton attention has heads of 128 at most", "use reference"),
            "triton attention has heads of 128 at most",
        ),
        (AttributeError(), "triton fails: AttributeError"),
    ],
)
@pytest.mark.parametrize("operation", dispatch.OPERATIONS)
def test_on_cuda_a_kernel_that_fails_gives_way_to_the_reference_and_the_others_serve(
    operation: str,
    error: Exception,
    reason: str,
    card: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KERNELS[operation], "triton", broken(error))
    said = trial.choose_kernels(CUDA, SHAPES, plain=False)
    assert said == (f"slower without Triton's kernels: {trial.NAMES[operation]} ({reason})",)
    assert serving() == set(dispatch.OPERATIONS) - {operation}


def test_kernels_that_fail_alike_are_told_together_and_one_shape_is_enough(
    card: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    for operation in ("rms_norm", "silu_gate"):
        monkeypatch.setitem(KERNELS[operation], "triton", broken(RuntimeError("no ptxas")))
    reference = KERNELS["attention"]["reference"]

    def only_four_heads(query: torch.Tensor, *rest: object) -> torch.Tensor:
        return reference(query, *rest) * (1 if query.shape[1] == 4 else 2)

    monkeypatch.setitem(KERNELS["attention"], "triton", only_four_heads)
    assert trial.choose_kernels(CUDA, SHAPES, plain=False) == (
        "slower without Triton's kernels: RMSNorm, SiLU gate (triton fails: no ptxas)",
        "slower without Triton's kernels: attention (triton is 1.0e+00 from the reference)",
    )
    assert serving() == set(dispatch.OPERATIONS) - {"rms_norm", "silu_gate", "attention"}


def test_a_width_that_blocks_of_4_bits_do_not_fill_is_not_tried(card: list[torch.device]) -> None:
    """4 bits in blocks that rows would cut: nothing to try, and nothing that `linear` would call."""
    shape = replace(SHAPES[0], hidden=96)
    assert "matmul_4bit" not in {case.operation for case in trial_cases.cases(CPU, shape)}
    assert trial.choose_kernels(CUDA, [shape], plain=False) == ()


def test_on_cuda_an_unavailable_triton_is_explained(
    card: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = CannotRunError("triton needs a C compiler, and there is neither gcc nor clang", "install one")
    monkeypatch.setattr(availability, "problem", lambda: missing)
    assert trial.choose_kernels(CUDA, SHAPES, plain=False) == (
        f"slower without Triton's kernels: {missing.message}",
    )
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
        return "SiLU gate (triton fails: an illegal memory access)"

    monkeypatch.setattr(trial, "refusal_apart", apart)
    warning, last = list(check_kernels(CUDA))
    assert (
        warning.status == "warn"
        and "triton does not serve: SiLU gate (triton fails: an illegal" in warning.text
    )
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
