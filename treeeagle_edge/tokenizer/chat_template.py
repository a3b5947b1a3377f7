"""A model's own chat template, rendered as `transformers` renders it: same environment, same variables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treeeagle_edge.errors import InputError, reason_of
from treeeagle_edge.text_file import read_text

_RAW_HINT = "use --raw to send the text without a template"


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks answers for training; its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it as an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """Compiled once; a template comes with the model, so it runs in Jinja's sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` maps bos_token, eos_token, ... to text. Raises InputError for a broken one."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InputError(
                f"the model's chat template has an error in line {error.lineno}", _RAW_HINT
            ) from error

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The prompt for `messages` (role, content). Raises InputError where the template refuses them."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            said = str(error.message or error).strip().rstrip(".")
            raise InputError(
                f"the model's chat template refuses this conversation: {said}",
                "leave out the system prompt if the model takes none, or " + _RAW_HINT,
            ) from error
        except Exception as error:  # the template is a program of the model's: it may fail with anything
            raise InputError(
                f"the model's chat template fails on this conversation: {reason_of(error)}", _RAW_HINT
            ) from error


def find_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The template of a Hugging Face directory: chat_template.jinja, else a key of tokenizer_config.json.

    The latter is a string, or a list of named templates of which "default" counts. None where there is none.
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return read_text(file)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{file} cannot be read: {reason_of(error)}", "download the file again"
            ) from error
    declared = tokenizer_config.get("chat_template")
    if isinstance(declared, str):
        return declared
    if isinstance(declared, list):
        named = {entry.get("name"): entry.get("template") for entry in declared if isinstance(entry, Mapping)}
        return named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
    return None
