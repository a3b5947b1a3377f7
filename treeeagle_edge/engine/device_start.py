"""Gets rounds on the device ready: whether they can be led there, their buffers, and a trial of each shape."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import islice

import torch

from treeeagle_edge.device.cuda_graphs import Capture, CudaCapture, Runs
from treeeagle_edge.device.round import DeviceRound
from treeeagle_edge.device.rounds import DeviceRounds
from treeeagle_edge.drafting.round_shapes import rounds_within
from treeeagle_edge.drafting.shape_choice import Choice, OneShape
from treeeagle_edge.engine.passes import Passes
from treeeagle_edge.kernels.dispatch import TRITON, serving
from treeeagle_edge.limits import CAPTURED_KINDS, MAX_EXPANSIONS
from treeeagle_edge.model.protocols import TargetModel
from treeeagle_edge.rounds import Round, TreeShape

_TRIAL_TOKENS = 48  # of the made-up prompt on which rounds are captured and timed
_TRIAL_ROUNDS = 4  # of each shape; the first one captures, the others are timed


def can_stay_on_device(target: TargetModel) -> bool:
    """Whether the device can lead rounds: CUDA, all layers on one card, an attention that reads lengths there."""
    one_card = set(target.layer_devices) == {target.device}
    return target.device.type == "cuda" and one_card and serving("attention") == TRITON


def device_rounds(
    passes: Passes, tree: TreeShape | None, *, slots: int, context: int, graphs: bool | Capture | None
) -> DeviceRounds:
    """The buffers of rounds within `tree` over a pool of `slots` slots. graphs: see `Engine`."""
    device = passes.target.device
    if graphs is None:
        graphs = device.type == "cuda"
    capture = (CudaCapture(device) if graphs else None) if isinstance(graphs, bool) else graphs
    scratch = torch.arange(slots, slots + MAX_EXPANSIONS, device=device)
    round_ = DeviceRound(passes.target, passes.head, passes.store, scratch, context=context)
    runs = Runs(capture, device, CAPTURED_KINDS * len(rounds_within(tree)))
    return DeviceRounds(passes, round_, runs, tree)


def try_shapes(
    device: DeviceRounds,
    tree: TreeShape | None,
    answer: Callable[[Sequence[int], Choice], Generator[Round]],
    *,
    vocab: int,
    context: int,
) -> None:
    """Before the first answer: capture and time every shape that a round within `tree` may have, on a made-up prompt.

    answer: the rounds of an answer to these ids, of shapes so chosen.
    """
    if not device.runs.captures and not (tree is not None and tree.adaptive):
        return
    choice = device.choice(tree)
    prompt = [i % vocab for i in range(1, min(_TRIAL_TOKENS, context // 2) + 1)]
    for shape in rounds_within(tree):
        with closing(answer(prompt, OneShape(shape))) as rounds:
            for settled in islice(rounds, 2, 1 + _TRIAL_ROUNDS):
                choice.time(shape, settled.verify_s)
