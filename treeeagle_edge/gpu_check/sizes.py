"""How large the GPU check is: in full on a card, and so small that every part of it runs on a CPU in a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.known_models import KNOWN_MODELS, decoder, usual_head
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.rounds import TreeShape

MAIN, SECOND = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2-7B-Instruct"


@dataclass(frozen=True)
class Model:
    """Shapes that get random weights."""

    name: str
    config: ModelConfig


@dataclass(frozen=True)
class Sizes:
    """One size of the check. Bytes are least ones; samples, rounds and answers end early where time does."""

    name: str
    main: Model
    head: HeadConfig  # of the main model
    second: Model
    small: Model  # runs in fp32, where a tree and plain decoding may not differ
    bits: int
    tree: TreeShape
    product_rows: tuple[int, ...]
    contexts: tuple[int, ...]  # tokens, of attention
    context: int  # tokens, of engines
    prompt: int  # tokens
    answer: int  # tokens: one, and whole rounds of 2, 3 and 4
    rounds: int  # watched for growth
    samples: int  # of every timed call
    kernel_runs: int  # of every kernel on the same inputs
    ring_bytes: int  # read before a weight comes up again, so that no cache still holds it
    graph_bytes: int  # read by one replay of a graph, so that its launch does not count
    copy_bytes: int  # copied to measure bandwidth

    @property
    def tree_rows(self) -> int:
        """Rows of a verify pass: the nodes and the root."""
        return self.tree.nodes + 1

    @property
    def slots(self) -> int:
        """Slots of an engine: the context, one tree, a throwaway row."""
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
        tree=TreeShape(depth=4, branching=2, nodes=5),
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
