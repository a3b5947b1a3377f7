"""The options of how a token is chosen and when an answer ends, and what they mean as `SamplingParams`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated

import typer

from treeeagle_edge.errors import UsageError
from treeeagle_edge.sampling_params import SamplingParams

TemperatureOption = Annotated[
    float | None,
    typer.Option("--temperature", metavar="T", help="0 is greedy. [default: the model's, else 0.7]"),
]
TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Smallest set of this mass. [default: the model's, else 0.95]"),
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", metavar="K", help="Only the K likeliest. 0 is off.")
]
MinPOption = Annotated[
    float | None, typer.Option("--min-p", metavar="P", help="Drop below P times the likeliest. 0 is off.")
]
RepetitionOption = Annotated[
    float | None, typer.Option("--repetition-penalty", metavar="X", help="Over prompt and answer. 1 is off.")
]
PresenceOption = Annotated[
    float | None, typer.Option("--presence-penalty", metavar="X", help="Over the answer, -2 to 2. 0 is off.")
]
FrequencyOption = Annotated[
    float | None, typer.Option("--frequency-penalty", metavar="X", help="Over the answer, -2 to 2. 0 is off.")
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Same seed, same text. [default: drawn and reported]"),
]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", help="Longest answer. [default: up to the context]")
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End the answer before this text. May be repeated."),
]


@dataclass(frozen=True)
class SamplingChoices:
    """The sampling options as the person gave them; None means "the default of the model"."""

    temperature: TemperatureOption = None
    top_p: TopPOption = None
    top_k: TopKOption = None
    min_p: MinPOption = None
    repetition_penalty: RepetitionOption = None
    presence_penalty: PresenceOption = None
    frequency_penalty: FrequencyOption = None
    seed: SeedOption = None
    max_tokens: MaxTokensOption = None

    def __post_init__(self) -> None:
        self.resolve(SamplingParams())  # a value out of range is refused before a model is loaded

    def resolve(self, defaults: SamplingParams) -> SamplingParams:
        """The given options over `defaults`; what cannot be given here (bias, bans, stop ids) comes from `defaults`.

        Raises UsageError with the allowed range.
        """
        merged = {item.name: getattr(defaults, item.name) for item in fields(defaults)}
        merged.update(
            {item.name: getattr(self, item.name) for item in fields(self) if self._given(item.name)}
        )
        return SamplingParams(**merged)

    def _given(self, name: str) -> bool:
        return getattr(self, name) is not None


def stop_strings(given: Sequence[str] | None) -> tuple[str, ...]:
    """The stop strings in the order given. Raises UsageError for an empty one, which would end every answer."""
    stops = tuple(given or ())
    if "" in stops:
        raise UsageError("--stop is empty, which would end every answer at once", "give the text to stop at")
    return stops
