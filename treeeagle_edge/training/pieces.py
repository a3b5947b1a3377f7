"""What a model's chat template writes around the turns of a dialogue, as ids."""

from __future__ import annotations

from dataclasses import dataclass

from treeeagle_edge.chat.prompt import TextCodec
from treeeagle_edge.errors import InputError

_USER, _ANSWER, _SECOND = "[the person's words]", "[the answer's words]", "[more of the person's words]"


@dataclass(frozen=True)
class ChatPieces:
    """The ids that the template puts around the words of person and model."""

    opening: tuple[int, ...]  # before the person's first words
    reply: tuple[int, ...]  # between the person's words and the answer
    again: tuple[int, ...]  # between an answer and the person's next words
    stop_ids: frozenset[int]  # any of them ends a turn


def chat_pieces(codec: TextCodec) -> ChatPieces:
    """Find the pieces by rendering two known dialogues with the chat template of `codec`.

    Raises InputError where the model has no template, or where the template does not repeat the words in order.
    """
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
