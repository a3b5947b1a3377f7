"""Tries kernels on small calls before they serve: each has to run, and to give what the reference gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping

import torch

from treeeagle_edge.errors import CannotRunError, TreeEagleError, reason_of
from treeeagle_edge.kernels.current_card import on_card, use_card
from treeeagle_edge.kernels.dispatch import TRITON, leave_out, set_backend, use_backend
from treeeagle_edge.kernels.trial_cases import Case, ModelShape, cases
from treeeagle_edge.kernels.triton import availability

NAMES = {  # of operations, for a person
    "attention": "attention",
    "rms_norm": "RMSNorm",
    "add_rms_norm": "RMSNorm after a residual sum",
    "rotate_and_write": "RoPE with the KV write",
    "silu_gate": "SiLU gate",
    "random_words": "random words",
    "matmul_4bit": "4-bit product",
    "int8_product": "int8 product",
}


def relative_error(name: str, case: Case) -> float:
    """The backend's largest difference from the reference, by the reference's largest value. Waits for the device.

    Raises whatever the backend raises; afterwards the backend that was in force is in force again.
    """
    with on_card(case.device):
        with use_backend("reference"):
            expected = case.call()
        with use_backend(name):
            got = case.call()
        errors = [
            float((a.float() - b.float()).abs().max() / b.float().abs().max())
            for a, b in zip(got, expected, strict=True)
        ]
    return max(errors, key=lambda error: float("inf") if error != error else error)  # NaN is the worst


def refusal(name: str, case: Case) -> str | None:
    """Why the backend should not compute this operation here, as a lower-case sentence; None where it should.

    Raises CannotRunError where the attempt broke CUDA for this process, so that nothing can be done on it any more.
    """
    try:
        error = relative_error(name, case)
    except Exception as problem:  # a compiler, a driver and a launcher each raise errors of their own
        require_device(case.device, name)
        return (
            problem.message if isinstance(problem, TreeEagleError) else f"{name} fails: {reason_of(problem)}"
        )
    return None if error <= case.limit else f"{name} is {error:.1e} from the reference"


def refusals(name: str, device: torch.device, shapes: Iterable[ModelShape]) -> dict[str, str]:
    """Operation -> why the backend should not compute it, for operations that failed or were wrong in some shape.

    Errors as `refusal`.
    """
    found: dict[str, str] = {}
    for shape in dict.fromkeys(shapes):
        for case in cases(device, shape):
            if case.operation not in found and (reason := refusal(name, case)) is not None:
                found[case.operation] = reason
    return found


def choose_kernels(
    device: torch.device,
    shapes: Iterable[ModelShape],
    *,
    plain: bool,
    others: Iterable[torch.device] = (),
) -> tuple[str, ...]:
    """Put the best kernels for `device` in force: on CUDA, each of Triton's that runs and is right for all `shapes`.

    plain: use the reference for everything, on purpose. others: further cards that hold layers; a kernel has to run and
    be right on each of them. Returns sentences that name the operations left to the reference, and why.

    Raises the CannotRunError of `refusal` alone: where CUDA is broken in this process, the reference cannot serve
    either.
    """
    leave_out(())
    set_backend("reference")
    if device.type != "cuda":
        return ()
    use_card(device)
    if plain:
        return ()
    missing = availability.problem()
    if missing is not None:
        return (f"slower without Triton's kernels: {missing.message}",)
    shapes = list(shapes)
    found: dict[str, str] = {}
    for card in (device, *others):
        found = refusals(TRITON, card, shapes) | found
    leave_out(found)
    set_backend(TRITON)
    return tuple(f"slower without Triton's kernels: {each}" for each in told(found))


def told(refused: Mapping[str, str]) -> list[str]:
    """What `refusals` found, for a person: one item for each reason."""
    return [
        f"{', '.join(NAMES[operation] for operation in refused if refused[operation] == reason)} ({reason})"
        for reason in dict.fromkeys(refused.values())
    ]


def refusal_apart(name: str, device: torch.device, seconds: float = 180.0) -> str | None:
    """Why the backend should not serve a small model of bf16 and 4 bits; None where it should.

    It is tried in a process of its own, where a kernel that breaks CUDA or never ends does no harm. Most of the time
    goes to compiling.
    """
    command = [sys.executable, "-P", "-m", "treeeagle_edge.kernels.trial", name, str(device)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"{name} gave nothing within {seconds:.0f} seconds"
    if done.returncode == 0:
        return None
    said = done.stdout.strip() or done.stderr.strip()
    return said.splitlines()[-1] if said else f"{name} ended its process with {done.returncode}"


def main(name: str, device: str) -> int:
    """What `refusal_apart` runs: the reasons on one line of stdout, and 1 where there is one."""
    shape = ModelShape(dtype=torch.bfloat16, packed=True)
    try:
        reasons = told(refusals(name, torch.device(device), [shape]))
    except CannotRunError as error:
        reasons = [error.message]
    if reasons:
        print("; ".join(reasons), flush=True)
    return int(bool(reasons))


def require_device(device: torch.device, what: str) -> None:
    """Raise CannotRunError where CUDA no longer answers in this process; `what` is named as the cause."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise CannotRunError(
            f"{what} broke CUDA for this process: {reason_of(error)}", "use --kernels torch, and report it"
        ) from error


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
