"""No shape of a tree is ignored in silence: beside a wish for plain decoding it is refused, without a head noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from treeeagle_edge.cli.app import main
from treeeagle_edge.errors import UsageError
from treeeagle_edge.runtime import load_runtime
from treeeagle_edge.settings import RunSettings

BASE = ["--kernels", "torch", "--bits", "32", "--context", "256", "--threads", "1", "--device", "cpu"]
PROFILE = """name: headless
device: cpu
memory_gb: 4
model: {model}
head: none
bits: 32
context: 256
tree: {{depth: 2, branching: 2, nodes: 4}}
reserve_gb: 1
"""


@pytest.mark.parametrize("command", [["chat", "-p", "x"], ["bench"]], ids=["chat", "bench"])
@pytest.mark.parametrize("plain", [["--no-spec"], ["--head", "none"], ["--head", " None "]], ids=str)
@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (["--nodes", "3"], "--nodes shapes"),
        (["--nodes", "0"], "--nodes shapes"),
        (["--depth", "2"], "--depth shapes"),
        (["--branching", "2", "--depth", "2"], "--depth and --branching shape"),
    ],
    ids=str,
)
def test_it_is_refused_beside_a_wish_for_plain_decoding(
    command: list[str],
    plain: list[str],
    shape: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*command, "--model", "/no/such/model", *plain, *shape]) == 2, "before a model is looked for"
    option = "--no-spec" if plain == ["--no-spec"] else "--head none"
    assert capsys.readouterr() == (
        "",
        f"error: {named} a tree, and {option} leaves none to draft\n"
        f" hint: leave {option} out to draft, or leave out the rest to decode plainly\n",
    )


@pytest.mark.parametrize("plain", [{"speculate": False}, {"head": "none"}], ids=str)
def test_settings_refuse_it_too(plain: dict[str, object]) -> None:
    """So neither `load_runtime` nor `run_bench` can be asked for it from Python."""
    for name in ("depth", "branching", "nodes"):
        with pytest.raises(UsageError, match=f"--{name} shapes a tree, and --"):
            RunSettings(**plain, **{name: 3})  # type: ignore[arg-type]
    assert RunSettings(**plain).wants_plain  # type: ignore[arg-type]


def test_it_is_noted_where_the_profile_asks_for_no_head(tiny_checkpoint: Path, tmp_path: Path) -> None:
    profile = tmp_path / "headless.yaml"
    profile.write_text(PROFILE.format(model=tiny_checkpoint))
    usual = RunSettings(profile=str(profile), device="cpu", kernels="torch", threads=1)
    said = "profile headless asks for no draft head, so it decodes plainly"
    assert not [note for note in load_runtime(usual).notes if "head" in note]
    runtime = load_runtime(RunSettings(**vars(usual) | {"nodes": 3}))
    assert runtime.tree is None
    assert [note for note in runtime.notes if "head" in note] == [f"{said}; --head names one"]
