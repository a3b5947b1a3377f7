"""Sizes of the GPU check: the full one for a card, and a small one with which a test runs every part on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.planning.known_models import KNOWN_MODELS, decoder, usual_head
from treeeagle_edge.rounds import TreeShape

MAIN, SECOND = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2-7B-Instruct"


@dataclass(frozen=True)
class Model:
    """A model of which only the shapes are taken; its weights are random."""

    name: str
    config: ModelConfig


@dataclass(frozen=True)
class Sizes:
    """All numbers of one size. Bytes are lower limits; samples and rounds are upper limits, for time may end first."""

    name: str
    main: Model
    head: HeadConfig  # of the main model
    second: Model
    small: Model  # runs in fp32, where tree and plain decoding may not differ
    bits: int
    tree: TreeShape
    product_rows: tuple[int, ...]
    contexts: tuple[int, ...]  # tokens, where attention is timed
    context: int  # tokens, of engines
    prompt: int  # tokens
    # tokens: one of the prefill, and a number that 2, 3 and 4 divide, so that no round of so many tokens is cut
    answer: int
    rounds: int  # over which memory must not grow
    samples: int  # how often each call is timed
    kernel_runs: int  # how often each kernel runs on the same inputs
    ring_bytes: int  # read before the same weight is used again, so that no cache still holds it
    graph_bytes: int  # read by one replay of a graph, so that the time of its launch does not matter
    copy_bytes: int  # copied to measure bandwidth

    @property
    def tree_rows(self) -> int:
        """Rows of a verify pass: the nodes and the root."""
        return self.tree.nodes + 1

    @property
    def slots(self) -> int:
        """Slots of an engine: for the context, for one tree, and one for rows whose results nobody reads."""
        return self.context + self.tree_rows + 1


def _tiny(family: str) -> ModelConfig:
    return decoder(family, 64, 128, 3, 4, 2, 320, 4096, head_dim=16)


def _full() -> Sizes:
    main = KNOWN_MODELS[MAIN]
    assert main.head is not None
    small = decoder("llama", 512, 1024, 6, 8, 2, 4096, 4096, head_dim=64)
    return Sizes(
        name="full",
        main=Model("Llama-3.1-8B", main.config),
        head=main.head,
        second=Model("Qwen2-7B", KNOWN_MODELS[SECOND].config),
        small=Model("a small model in fp32", small),
        bits=4,
        tree=TreeShape(depth=4, branching=4, nodes=15),
        product_rows=(1, 8, 16, 32, 64),
        contexts=(1024, 8192, 32_768),
        context=1024,
        prompt=256,
        answer=97,
        rounds=1000,
        samples=15,
        kernel_runs=8,
        ring_bytes=256 * 2**20,
        graph_bytes=2 * 2**30,
        copy_bytes=2**30,
    )


def _test() -> Sizes:
    tiny = _tiny("llama")
    return Sizes(
        name="test",
        main=Model("a tiny Llama", tiny),
        head=usual_head(tiny, draft_vocab=200),
        second=Model("a tiny Qwen2", _tiny("qwen2")),
        small=Model("a tiny model in fp32", tiny),
        bits=4,
        tree=TreeShape(depth=3, branching=2, nodes=4),
        product_rows=(1, 8),
        contexts=(16, 32),
        context=64,
        prompt=6,
        answer=13,
        rounds=12,
        samples=2,
        kernel_runs=2,
        ring_bytes=2**14,
        graph_bytes=2**14,
        copy_bytes=2**16,
    )


SIZES: Mapping[str, Sizes] = MappingProxyType({"full": _full(), "test": _test()})
