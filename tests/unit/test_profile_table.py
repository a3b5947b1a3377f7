"""The page of plans: what the command prints, what it promises, and that nothing is loaded for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from treeeagle_edge.cli.app import main
from treeeagle_edge.planning.known_models import KNOWN_MODELS
from treeeagle_edge.planning.memory_profile import load_profile
from treeeagle_edge.profiling import table as profile_table
from treeeagle_edge.profiling.table import CARDS, CONTEXTS, MODELS, NONE, WIDTHS, plan_page, planned
from treeeagle_edge.units import GB

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture(scope="module")
def page() -> str:
    return plan_page()


@pytest.fixture(scope="module")
def rows(page: str) -> dict[tuple[str, str], list[str]]:
    """(model, weights) -> the other cells."""
    return {(name, width): rest for name, width, *rest in cells_of(page.partition("## Narrower heads")[0])}


def cells_of(text: str) -> list[list[str]]:
    """The cells of the one table in `text`, without its head."""
    lines = [line for line in text.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_in_docs_is_what_the_command_prints(repository: Path, capsys) -> None:
    assert main(["profile", "--table"]) == 0
    printed = capsys.readouterr().out
    kept = (repository / "docs" / "plans.md").read_text(encoding="utf-8")
    assert kept == printed, "write it again: treeeagle profile --table > docs/plans.md"


def test_every_model_width_and_context_is_there(rows) -> None:
    assert list(rows) == [(name, width) for name in MODELS for width in WIDTHS.values()]
    for (name, _), cells in rows.items():
        assert len(cells) == len(CONTEXTS) + len(CARDS)
        for context, cell in zip(CONTEXTS, cells, strict=False):
            assert (cell == NONE) == (context > KNOWN_MODELS[name].config.max_position)


def test_an_8b_with_its_head_and_8k_is_within_10_and_a_half_gb(rows) -> None:
    """Expectations row 27: out of memory on 12 GB. Llama-3.1-8B NF4 + head + 8k + reserve plans at most 10.5 GB."""
    need, _, cards = rows[LLAMA, "NF4"][1].partition(" · ")
    assert cards.split() == ["12", "16", "24"]
    reserve = load_profile("gpu-12gb").reserve / GB
    assert float(need) + reserve <= 10.5
    plan = planned(LLAMA, 4, 8192, profile_table._computer_with(12)).memory
    assert plan.total <= 10.5 * GB and plan.line("head").nbytes > 0
    assert f"{(plan.total - plan.line('reserve').nbytes) / GB:.1f}" == need


def test_8_bits_on_12_gb_are_refused_with_what_fits(page: str, rows) -> None:
    """What the page says fits does, and the command refuses the same plan with the same words."""
    assert rows[LLAMA, "int8"][1].partition(" · ")[2] == "16 24"
    line = next(line for line in page.splitlines() if line.startswith(f"- {LLAMA} needs"))
    options = re.findall(r"`([^`]+)`", line)
    assert "--bits 4" in options and any(option.startswith("--context ") for option in options)
    for option in options:
        given = {"--model": LLAMA, "--bits": "8", "--context": "8192"}
        words = option.split()
        given |= dict(zip(words[::2], words[1::2], strict=True))
        if "--device" not in given:
            card = profile_table._computer_with(12)
            head_bits = int(given["--head-bits"]) if "--head-bits" in given else None
            model, bits, context = given["--model"], int(given["--bits"]), int(given["--context"])
            assert planned(model, bits, context, card, head_bits=head_bits).memory.fits, option


def test_narrower_heads_are_counted(page: str) -> None:
    """Less to read for every model; less memory but where lm_head is a copy of a tied embedding."""
    cells = cells_of(page.partition("## Narrower heads")[2])
    assert [name.removesuffix(" *") for name, *_ in cells] == list(MODELS)
    for name, *figures in cells:
        known = KNOWN_MODELS[name.removesuffix(" *")]
        tied = known.config.tie_word_embeddings
        assert name.endswith(" *") == tied
        *head, wide, narrow, need, both = figures
        saved = known.config.vocab_size * known.config.hidden_size / GB
        assert float(wide) - float(narrow) == pytest.approx(saved, abs=0.011)
        assert (float(both) > float(need)) == tied
        if known.head is None:
            assert head == [NONE] * 3
            continue
        sixteen, eight, four = map(float, head)
        assert eight == pytest.approx(sixteen / 2, abs=0.011) and four < 0.6 * eight


def test_the_refusal_is_the_one_of_the_command(capsys) -> None:
    arguments = ["--fast", "--gpu-memory", "12", "--model", LLAMA, "--bits", "8", "--context", "7168"]
    code = main(["profile", *arguments])
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert code == 3 and verdict.startswith(
        "verdict  does not fit, 0.33 GB too much; what fits: --head-bits 8; --context 5032; "
    )
    assert "; --bits 4; " in verdict


def test_longest_contexts_are_those_that_fit(rows) -> None:
    for (name, width), cells in rows.items():
        bits = next(bits for bits, word in WIDTHS.items() if word == width)
        for size, cell in zip(CARDS, cells[len(CONTEXTS) :], strict=True):
            card = profile_table._computer_with(size)
            if cell == "none":
                assert not planned(name, bits, 64, card).memory.fits
                continue
            longest = int(cell.strip("*").replace(",", ""))
            assert planned(name, bits, longest, card).memory.fits
            assert cell.startswith("**") == (longest == KNOWN_MODELS[name].config.max_position)


def test_it_takes_no_other_option(capsys) -> None:
    for extra in (["--bits", "4"], ["--fast"], ["--gpu-memory", "0"], ["--json"]):
        assert main(["profile", "--table", *extra]) == 2
        assert "leave the other options out" in capsys.readouterr().err


def test_nothing_is_imported_or_compiled_for_it() -> None:
    code = (
        "import sys; from treeeagle_edge.cli.app import main; code = main(['profile', '--table']);"
        "names = ('torch', 'transformers', 'huggingface_hub', 'treeeagle_edge.kernels.native.loader');"
        "sys.exit(code or any(name in sys.modules for name in names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("# What fits which card")
