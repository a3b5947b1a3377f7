"""What a model's chat template writes around the turns of a dialogue, as ids."""

from __future__ import annotations

from dataclasses import dataclass

from treeeagle_edge.errors import InputError
from treeeagle_edge.prompt import TextCodec

_USER, _ANSWER, _SECOND = "[the person's words]", "[the answer's words]", "[more of the person's words]"


@dataclass(frozen=True)
class ChatPieces:
    """The template cut at the words of person and model. Each piece holds ids."""

    opening: tuple[int, ...]  # up to the person's first words: what a person's turn is sampled from
    reply: tuple[int, ...]  # from the person's words to the answer's
    again: tuple[int, ...]  # from an answer's words to the person's next
    stop_ids: frozenset[int]  # any of them ends a turn


def chat_pieces(codec: TextCodec) -> ChatPieces:
    """Cut the template of `codec`. Raises InputError where the model has none or it hides the words."""
    if not codec.has_chat_template:
        raise InputError(
            "this model has no chat template, so it cannot write dialogues itself",
            "use an instruct model",
        )
    one = codec.render([{"role": "user", "content": _USER}])
    two = codec.render(
        [
            {"role": "user", "content": _USER},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": _SECOND},
        ]
    )
    opening, _, reply = one.partition(_USER)
    between = two.partition(_ANSWER)[2].partition(_SECOND)[0]
    if not reply or not between or not two.startswith(opening):
        raise InputError(
            "the model's chat template does not show the turns as they are",
            "use a model whose template writes them in order",
        )
    return ChatPieces(
        tuple(codec.encode(opening)),
        tuple(codec.encode(reply)),
        tuple(codec.encode(between)),
        frozenset(codec.stop_ids),
    )
