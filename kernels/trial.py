"""A small tree on which an attention backend shows that it runs, and gives what the reference gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from treeeagle_edge.errors import CannotRunError, TreeEagleError, reason_of
from treeeagle_edge.kernels.dispatch import attention, set_backend, use_backend
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.tree import DraftTree

_PREFIX, _SLOTS = 40, 64
_TREE = DraftTree((1, 2, 3, 4, 5, 6), (-1, 0, 0, 1, 1, 3), (0, 1, 1, 2, 2, 3), (0.0,) * 6)
_ROUNDINGS = 8  # of the pool's dtype: what kernels may differ by that round weights and products there


@dataclass(frozen=True)
class HeadShape:
    """Attention heads of one model."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    dtype: torch.dtype = torch.float32  # of keys and values


@dataclass(frozen=True)
class Trial:
    """Arguments of one attention call: a tree of six rows after forty tokens, in scattered slots."""

    query: Tensor  # [6, heads, head_dim] float32
    keys: Tensor  # [slots, kv_heads, head_dim]
    values: Tensor
    view: AttentionView

    @property
    def limit(self) -> float:
        """The largest relative error that rounding explains: 1e-4 for a pool in fp32."""
        eps = torch.finfo(self.keys.dtype).eps
        return 1e-4 if self.keys.dtype == torch.float32 else _ROUNDINGS * eps


def small_tree(device: torch.device, shape: HeadShape | None = None) -> Trial:
    """The same random numbers on every device."""
    shape = shape or HeadShape()
    visible = torch.zeros(len(_TREE), len(_TREE), dtype=torch.bool)
    for row, path in enumerate(_TREE.ancestors):
        visible[row, list(path)] = True
    generator = torch.Generator().manual_seed(11)
    slots = torch.randperm(_SLOTS, generator=generator).to(device)
    view = AttentionView(slots[:_PREFIX], slots[_PREFIX : _PREFIX + len(_TREE)], visible.to(device))
    query = torch.randn(len(_TREE), shape.heads, shape.head_dim, generator=generator).to(device)
    pool = (_SLOTS, shape.kv_heads, shape.head_dim)
    keys, values = (torch.randn(pool, generator=generator).to(device, shape.dtype) for _ in range(2))
    return Trial(query, keys, values, view)


def relative_error(name: str, trial: Trial) -> float:
    """The backend's largest difference from the reference, by the reference's largest value. Waits for the device.

    Raises whatever the backend raises; afterwards the backend that was in force is in force again.
    """
    with _on(trial.query.device):
        with use_backend("reference"):
            expected = attention(trial.query, trial.keys, trial.values, trial.view)
        with use_backend(name):
            got = attention(trial.query, trial.keys, trial.values, trial.view)
        return float((got - expected).abs().max() / expected.abs().max())


def refusal(name: str, trial: Trial) -> str | None:
    """Why the backend should not serve here, as a lower-case sentence; None where it should.

    Raises CannotRunError where the attempt broke CUDA for this process, so that nothing can be done on it any more.
    """
    try:
        error = relative_error(name, trial)
    except Exception as problem:  # a compiler, a driver and a launcher each raise errors of their own
        require_device(trial.query.device, name)
        return (
            problem.message if isinstance(problem, TreeEagleError) else f"{name} fails: {reason_of(problem)}"
        )
    return None if error <= trial.limit else f"{name} is {error:.1e} from the reference"


def refusal_apart(name: str, device: torch.device, seconds: float = 180.0) -> str | None:
    """As `refusal` on `small_tree(device)`, in a process of its own: a kernel that breaks CUDA, or never ends, breaks
    nothing here. Compiling takes most of the time.
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
    """What `refusal_apart` runs: the reason on stdout, and 1 where there is one."""
    try:
        reason = refusal(name, small_tree(torch.device(device)))
    except CannotRunError as error:
        reason = error.message
    if reason is not None:
        print(reason, flush=True)
    return int(reason is not None)


def choose_attention(device: torch.device, shapes: Iterable[HeadShape], *, plain: bool) -> str | None:
    """Put the best attention for `device` in force: on CUDA Triton's, where it runs and is right for all `shapes`.

    Returns a sentence where the reference serves in its place; with `plain` it does so on purpose. Errors as `refusal`.
    """
    set_backend("reference")
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)  # Triton launches on the current card
    if plain:
        return None
    for shape in shapes:
        reason = refusal("triton", small_tree(device, shape))
        if reason is not None:
            return f"attention runs on PyTorch's operations, which are slower: {reason}"
    set_backend("triton")
    return None


def require_device(device: torch.device, what: str) -> None:
    """Raise CannotRunError where CUDA no longer answers in this process, which `what` is then to blame for."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise CannotRunError(
            f"{what} broke CUDA for this process: {reason_of(error)}", "use --kernels torch, and report it"
        ) from error


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a card the current one: Triton launches there, wherever the tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
