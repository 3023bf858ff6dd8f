"""The documentation is followed as a reader would follow it: all code runs, and prints what the page shows."""

import re
from pathlib import Path

import pytest

from pages import follow, same_line

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [DOCS / "start.md", *sorted((DOCS / "tutorials").glob("*.md")), *sorted((DOCS / "howto").glob("*.md"))]
NEEDS = {"federation": "flwr", "hugging-face": "peft", "export": "pandas"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    assert follow(page, tmp_path) > 0


def test_the_readmes_python_runs(tmp_path: Path) -> None:
    assert follow(ROOT / "README.md", tmp_path) > 0


def test_a_page_that_shows_something_else_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "```python\n# made.py\nx = 2.0\n```\n\n```python\nimport made\nprint(made.x)\nprint('more')\n```\n\n```output\nSHOWN\n```\n"
    for shown in ("2.00\nmore", "2.01\n…", "…\nmore", "2.0\n…ore", "…"):
        page.write_text(text.replace("SHOWN", shown))
        (tmp_path / "made.py").unlink(missing_ok=True)
    for shown in ("2.1\nmore", "2.0", "2.0\nless", "more\n2.0"):
        page.write_text(text.replace("SHOWN", shown))
        with pytest.raises(AssertionError, match="the page shows"):
            follow(page, tmp_path)
    page.write_text("```console\n$ echo 3.10 s\n3.11 s\n$ false\n```\n")
    with pytest.raises(AssertionError, match="false"):
        follow(page, tmp_path)


def test_lines_agree_up_to_rounding() -> None:
    assert same_line("FedAvg 89.63 ±3.72 (… s)", "FedAvg 89.61 ±3.71 (12 s)")
    assert not same_line("FedAvg 89.63", "FedAvg 80.63")
    assert not same_line("3 clients", "4 clients")
    assert not same_line("loss 0.1", "loss 0.1 and more")


def test_every_page_is_followed_by_a_test() -> None:
    """A page with Python in it that no test runs is a page that may be wrong."""
    run_elsewhere = {"tasks", "data", "models", "studies", "federation", "ranks"}  # in test_given, test_groups, …
    for page in DOCS.rglob("*.md"):
        if re.search(r"^```(python|console)", page.read_text(), re.M):
            assert page in PAGES or page.stem in run_elsewhere, page.name
