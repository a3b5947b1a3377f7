"""A group of options is one parameter of a command, and on the command line the options that are its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from treeeagle_edge.cli.option_groups import with_groups
from treeeagle_edge.cli.options import MachineOptions, TreeOptions, run_settings
from treeeagle_edge.cli.sampling_options import SamplingChoices
from treeeagle_edge.errors import UsageError
from treeeagle_edge.settings import RunSettings

First = Annotated[str, typer.Option("--first", help="Comes before the group.")]
Last = Annotated[int, typer.Option("--last", help="Comes behind the group.")]


@dataclass(frozen=True)
class Pair:
    """A group of two, one of which has no default."""

    left: Annotated[int, typer.Option("--left", help="To the left.")]
    right: Annotated[float | None, typer.Option("--right", help="To the right.")] = None

    def __post_init__(self) -> None:
        if self.left < 0:
            raise UsageError("--left is below 0", "use 0 or more")


seen: list[tuple[str, Pair, int]] = []


@with_groups
def command(*, first: First = "a", pair: Pair, last: Last = 3) -> None:
    """Keep what was given."""
    seen.append((first, pair, last))


@pytest.fixture
def program() -> typer.Typer:
    seen.clear()
    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    return app


def test_the_fields_are_options_in_the_place_of_the_group(program: typer.Typer) -> None:
    shown = CliRunner().invoke(program, ["--help"]).output
    places = [shown.index(name) for name in ("Keep what", "--first", "--left", "--right", "--last")]
    assert places == sorted(places)
    assert "--pair" not in shown


def test_the_group_is_made_from_what_was_given(program: typer.Typer) -> None:
    assert CliRunner().invoke(program, ["--left", "2", "--right", "0.5", "--first", "b"]).exit_code == 0
    assert CliRunner().invoke(program, ["--left", "7"]).exit_code == 0
    assert seen == [("b", Pair(2, 0.5), 3), ("a", Pair(7, None), 3)]


def test_a_field_without_a_default_is_required(program: typer.Typer) -> None:
    assert CliRunner().invoke(program, []).exit_code == 2
    assert seen == []


def test_what_a_group_refuses_is_refused_before_the_command_runs(program: typer.Typer) -> None:
    refused = CliRunner().invoke(program, ["--left", "-1"]).exception
    assert isinstance(refused, UsageError)
    assert seen == []


def test_no_option_given_is_the_settings_that_nobody_asked_for() -> None:
    assert run_settings(MachineOptions(), TreeOptions()) == RunSettings()
    assert set(vars(SamplingChoices()).values()) == {None}
