"""The options that chat and bench share, as the person gave them: None means "let the profile decide"."""

from __future__ import annotations

from dataclasses import dataclass

from treeeagle_edge.errors import UsageError

_SHAPE = ("depth", "branching", "nodes")


@dataclass(frozen=True)
class RunSettings:
    """Which model runs where, and how it drafts. Sampling is kept apart, in `SamplingParams`.

    Raises UsageError for the shape of a tree beside the wish for none, since one of the two would be ignored.
    """

    model: str | None = None  # a name, a Hugging Face directory, a .gguf file or an org/name of the hub
    head: str | None = None  # a name, a directory or an org/name of the hub
    bits: int | None = None  # 4, 8, 16 or 32
    head_bits: int | None = None  # of the draft head: 4, 8 or 16
    lm_head_bits: int | None = None  # 8 or 16
    device: str | None = None  # "cpu", "cuda", "cuda:1", "cuda:0,cuda:1"
    profile: str | None = None  # a shipped name or a YAML file
    context: int | None = None  # tokens
    threads: int | None = None
    speculate: bool = True
    depth: int | None = None
    branching: int | None = None
    nodes: int | None = None
    exact: bool = False
    kernels: str | None = None  # "native" or "torch"; None takes native ones where they can be had

    def __post_init__(self) -> None:
        shaped = [f"--{name}" for name in _SHAPE if getattr(self, name) is not None]
        if shaped and self.wants_plain:
            plain = "--head none" if self.speculate else "--no-spec"
            verb = "shapes" if len(shaped) == 1 else "shape"
            raise UsageError(
                f"{' and '.join(shaped)} {verb} a tree, and {plain} leaves none to draft",
                f"leave {plain} out to draft, or leave out the rest to decode plainly",
            )

    @property
    def asks_for_tree(self) -> bool:
        """Whether the person named a head or the shape of a tree, rather than leaving both to the program."""
        shaped = any(getattr(self, name) is not None for name in _SHAPE)
        return self.speculate and (self.head is not None or shaped)

    @property
    def wants_plain(self) -> bool:
        """Whether the person asked for plain decoding."""
        return not self.speculate or (self.head or "").strip().lower() == "none"
