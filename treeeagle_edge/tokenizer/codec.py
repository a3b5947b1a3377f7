"""Text to ids and back, and the chat template: what a checkpoint says about strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from treeeagle_edge.errors import InputError
from treeeagle_edge.tokenizer.chat_template import ChatTemplate
from treeeagle_edge.tokenizer.quoting import Quoting

if TYPE_CHECKING:
    import tokenizers

# Tokens that end a turn in the templates of the families that run here. One counts as a stop where it is a
# single special token of the vocabulary and the template writes it.
TURN_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "</s>",
)


class Tokenizer:
    """One model's tokenizer. Encoding never adds special tokens; the chat template writes those it wants."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        template: str | None,
        special_tokens: Mapping[str, str],
        stop_ids: frozenset[int],
    ) -> None:
        """`special_tokens` maps bos_token, eos_token, ... to text; `stop_ids` are those that files declare.

        The eos token and the template's turn token are added to the stop ids here.
        """
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._template = ChatTemplate(template, special_tokens) if template else None
        self.has_chat_template: bool = self._template is not None  # whether `render` can be used
        self._special_tokens = dict(special_tokens)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.stop_ids = stop_ids | self._turn_ids(template or "")

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """bos_token, eos_token, unk_token, pad_token, ... as the model names them, to their text."""
        return self._special_tokens

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added. Special tokens written out in the text become the special tokens.

        For raw prompts, and for what a template writes. A message is quoted first: see `quote`.
        """
        return self._backend.encode(text, add_special_tokens=False).ids

    def quote(self, text: str, *, answer: bool = False) -> str:
        """`text`, a message or an `answer` to one, made so that nothing in it is taken for a control token: give the
        result to `render`, and what that makes of it to `encode_quoted`. Most texts come back as they are.
        """
        return self._quoting.quote(text, answer=answer)

    def encode_quoted(self, text: str) -> list[int]:
        """Ids of `text`, nothing added: quoted places become ordinary tokens, the rest has those of `encode`."""
        return self._quoting.encode(text)

    def holds_control(self, ids: Sequence[int]) -> bool:
        """Whether a control token is among the `ids` of an answer, other than those that belong to answers."""
        return self._quoting.holds_control(ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`, special tokens left out unless asked for. Bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt for `messages` (role, content) by the model's own template.

        Raises InputError where the model has no template, or where the template refuses the conversation.
        """
        if self._template is None:
            raise InputError(
                "this model has no chat template", "use --raw to send the text as it is, or an instruct model"
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    @cached_property
    def _quoting(self) -> Quoting:
        around, begun = (self._own_text(generate) for generate in (False, True))
        named = self._special_tokens.values()
        return Quoting(self._backend, named=named, stop_ids=self.stop_ids, around=around, begun=begun)

    def _own_text(self, generate: bool) -> str:
        """What the template writes around short messages; empty where it is missing or fails."""
        talk = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
        for messages in (talk, talk[1:]):  # some templates refuse a system prompt
            with suppress(InputError):
                return self.render(messages, add_generation_prompt=generate)
        return ""

    def _turn_ids(self, template: str) -> frozenset[int]:
        """The eos token's id, and that of every turn token that the template writes."""
        special = {
            token.content: index
            for index, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }
        eos = self._special_tokens.get("eos_token")
        ids = {self._backend.token_to_id(eos)} if eos else set()
        ids |= {special.get(token) for token in TURN_TOKENS if token in template}
        return frozenset(index for index in ids if index is not None)


def load_tokenizer(checkpoint_path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or a .gguf file; neither needs torch.

    Raises InputError where there is none, or where it is damaged or of a kind that is not read.
    """
    if checkpoint_path.is_dir():
        from treeeagle_edge.tokenizer.hf import load_hf_tokenizer

        return load_hf_tokenizer(checkpoint_path)
    from treeeagle_edge.tokenizer.gguf import load_gguf_tokenizer

    return load_gguf_tokenizer(checkpoint_path)
