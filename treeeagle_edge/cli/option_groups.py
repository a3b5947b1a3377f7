"""Options in groups: a command takes a group as one parameter, and its command line has the group's fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer reads it: a parameter whose type is a dataclass becomes one option for each of its fields.

    The fields are declared as parameters are, `Annotated[type, typer.Option(...)]`, and stand where the group stood.
    The dataclasses are made in the order of the parameters; what a `__post_init__` raises is raised before the command
    runs.
    """
    given = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: item.annotation for name, item in given.parameters.items() if is_dataclass(item.annotation)
    }
    options: list[inspect.Parameter] = []
    for name, parameter in given.parameters.items():
        if name in groups:
            options += _options_of(groups[name])
        else:
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def flat(**values: Any) -> None:
        made = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**made, **values)

    flat.__signature__ = given.replace(parameters=options)  # type: ignore[attr-defined]
    flat.__annotations__ = {option.name: option.annotation for option in options}
    return flat


def _options_of(group: Any) -> list[inspect.Parameter]:
    declared = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=declared[field.name],
        )
        for field in fields(group)
    ]
