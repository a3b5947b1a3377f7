"""Engines over random models, and their answers: what several sections of the GPU check share."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from treeeagle_edge.drafting.shape_choice import OneShape
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.gpu_check.models import ScriptedHead
from treeeagle_edge.gpu_check.probe import Probe
from treeeagle_edge.gpu_check.sizes import Sizes
from treeeagle_edge.gpu_check.timing import GRAPH, wait
from treeeagle_edge.model.protocols import DraftHead
from treeeagle_edge.model.target import Target
from treeeagle_edge.rounds import Round
from treeeagle_edge.sampling_params import SamplingParams

HOST = "led by the host"
RIGHT = 2  # levels that the scripted head of `engine_led` drafts right


def prompt_of(target: Target, tokens: int) -> list[int]:
    """A prompt that counts upwards: a led target (see `models`) goes on counting."""
    return [token % target.config.vocab_size for token in range(5, 5 + tokens)]


def script_of(known: Sequence[int], target: Target, places: int) -> Tensor:
    """[places] int64, the text for a `ScriptedHead`: the known tokens, then counting upwards from the last of them."""
    vocab = target.config.vocab_size
    more = [(known[-1] + step) % vocab for step in range(1, places - len(known) + 1)]
    return torch.tensor([*known, *more], dtype=torch.int64, device=target.device)


def engine_of(
    target: Target,
    head: DraftHead,
    sizes: Sizes,
    *,
    exact: bool = False,
    on_device: bool | None = None,
    graphs: bool | None = None,
) -> Engine:
    """An engine with the check's context and tree. on_device, graphs: None leaves the choice to the engine."""
    return Engine(
        target,
        head,
        context=sizes.context,
        slots=sizes.slots,
        tree=sizes.tree,
        exact=exact,
        costs=None,
        on_device=on_device,
        graphs=graphs,
    )


def engine_led(probe: Probe, target: Target, how: str, text: Sequence[int]) -> Engine:
    """An engine that runs rounds in the way `how`, with a head that drafts `text`.

    Raises CannotRunError for graphs without CUDA, RuntimeError where capturing a graph failed.
    """
    if how == GRAPH and probe.device.type != "cuda":
        raise CannotRunError("CUDA graphs need a CUDA device", "run this on the machine with the card")
    places = probe.sizes.context + probe.sizes.tree_rows
    head = ScriptedHead(probe.head(), script_of(text, target, places), RIGHT)
    engine = engine_of(target, head, probe.sizes, on_device=how != HOST, graphs=how == GRAPH)
    if how == GRAPH and engine.notes:
        raise RuntimeError(engine.notes[0])
    return engine


def answer(
    engine: Engine, prompt: Sequence[int], tokens: int, *, speculate: bool
) -> tuple[list[int], list[Round]]:
    """Ids and rounds of one greedy answer from an empty cache."""
    engine.reset()
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    rounds = list(engine.generate(prompt, params, speculate=speculate, reuse_prefix=False))
    return [token for one in rounds for token in one.ids], rounds


def timed(
    probe: Probe, engine: Engine, prompt: Sequence[int], choice: OneShape | None = None
) -> tuple[float, list[Round]]:
    """Seconds of one greedy answer after its first token, and its rounds."""
    engine.reset()
    params = SamplingParams(max_tokens=probe.sizes.answer)
    rounds = engine.generate(prompt, params, reuse_prefix=False, choice=choice)
    settled = [next(rounds)]
    wait(probe.device)
    started = time.perf_counter()
    settled += rounds
    wait(probe.device)
    return time.perf_counter() - started, settled


def tokens_per_round(rounds: Sequence[Round]) -> float:
    """Accepted tokens and one, averaged over verify passes."""
    verified = [one.accepted + 1 for one in rounds if one.kind != "prefill"]
    return sum(verified) / len(verified)
