"""The pages a newcomer reads: links lead somewhere, and commands that are promised exist."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

PAGES = (
    "README.md",
    "CHANGELOG.md",
    *(f"docs/{page.name}" for page in Path(__file__).parents[2].glob("docs/*.md")),
)
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)")


def test_the_promised_pages_are_there() -> None:
    assert {"docs/architecture.md", "README.md", "CHANGELOG.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str, repository: Path) -> None:
    path = repository / page
    links = LINK.findall(path.read_text(encoding="utf-8"))
    targets = [(path.parent / file if file else path, anchor) for file, anchor in links]
    assert [file for file, _ in targets if not file.exists()] == []
    assert [anchor for file, anchor in targets if anchor and anchor not in _anchors(file)] == []


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_expectation_is_shown_by_the_tests_that_the_page_names(repository: Path) -> None:
    page = (repository / "docs" / "expectations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|.*\| (.+) \|$", page, re.MULTILINE)
    named = {(int(row), path) for row, cell in rows for path in re.findall(r"`([\w/]+\.py)`", cell)}
    assert len({row for row, _ in named}) == len(rows)
    tests = repository / "tests"
    cited = {
        (int(row), path.relative_to(tests).as_posix())
        for path in tests.rglob("test_*.py")
        for listed in re.findall(
            r"[Ee]xpectations rows? (\d+(?:(?:, | and )\d+)*)", path.read_text(encoding="utf-8")
        )
        for row in re.findall(r"\d+", listed)
    }
    assert named - cited == set()
    assert {row for row, _ in cited} == {row for row, _ in named}


def test_the_modules_that_the_architecture_names_exist(repository: Path) -> None:
    text = (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert "kv/pool.py" in named
    missing = [
        name
        for name in named
        if not any((repository / base / name).exists() for base in ("", "treeeagle_edge"))
    ]
    assert missing == []


def test_the_architecture_names_every_module_at_the_top_of_the_package(repository: Path) -> None:
    text = (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w*]+)(?:\.py|/)?`", text)
    package = repository / "treeeagle_edge"
    modules = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    missing = {name for name in modules - {"__init__"} if not any(fnmatchcase(name, one) for one in named)}
    assert missing == set()
