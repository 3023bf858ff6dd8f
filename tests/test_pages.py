"""Pages are followed as a reader would follow them: all code runs, and prints what the page shows."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pages import compare, follow, same_line

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    DOCS / "start.md",
    DOCS / "personal.md",
    *sorted((DOCS / "tutorials").glob("*.md")),
    *sorted((DOCS / "howto").glob("*.md")),
]
LONG = ("algorithm", "resume")
NEEDS = {"hugging-face": "peft", "your-data": "pandas", "export": "pandas", "onnx": "onnxruntime"}


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in LONG else []) for p in PAGES],
)
def test_a_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    assert follow(page, tmp_path) > 0


def test_a_page_that_shows_something_else_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "```python\nprint(2.0)\nprint('more')\n```\n\n```output\nSHOWN\n```\n"
    for shown in ("2.00\nmore", "2.01\n…", "…\nmore", "2.0\n…ore", "…"):
        page.write_text(text.replace("SHOWN", shown))
        assert follow(page, tmp_path) == 2
    for shown in ("2.2\nmore", "2.0", "2.0\nless", "more\n2.0"):
        page.write_text(text.replace("SHOWN", shown))
        with pytest.raises(AssertionError, match="the page shows"):
            follow(page, tmp_path)
    page.write_text("```console\n$ echo 3.10 s \\\n  more\n3.11 s more\n$ false\n```\n")
    with pytest.raises(AssertionError, match="false"):
        follow(page, tmp_path)


def test_lines_agree_up_to_rounding() -> None:
    assert same_line("FedAvg 89.63 ±3.72 (… s)", "FedAvg 89.61 ±3.71 (12 s)")
    assert not same_line("FedAvg 89.63", "FedAvg 80.63")
    assert not same_line("3 clients", "4 clients")
    assert not same_line("loss 0.1", "loss 0.1 and more")


def test_the_flower_app_of_the_tutorial_is_one(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    for code in re.findall(
        r"```python\n(# (\w+\.py)\n.*?)```", (DOCS / "tutorials" / "federation.md").read_text(), re.S
    ):
        (tmp_path / code[1]).write_text(code[0])
    apps = "import client, server; print(type(client.app).__name__, type(server.app).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", apps], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["ClientApp", "ServerApp"], done.stderr


def test_the_notebook_prints_what_it_was_saved_with(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(DOCS / "tutorials" / "alpha.ipynb", as_version=4)
    saved = [printed(cell) for cell in notebook.cells]
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert sum(map(bool, saved)) >= 4
    for shown, cell in zip(saved, notebook.cells, strict=True):
        compare(shown, printed(cell), cell.source)


def printed(cell: Any) -> str:
    outputs = cell.get("outputs", [])
    return "".join(each.get("text") or each["data"].get("text/plain", "") for each in outputs)


def test_every_page_is_followed_by_a_test() -> None:
    """A page with code in it that no test runs is a page that may be wrong."""
    run_elsewhere = {
        "tasks",
        "data",
        "models",
        "studies",
        "federation",
        "ranks",
        "tracking",
        "index",
    }  # test_given, test_groups, …
    for page in DOCS.rglob("*.md"):
        if re.search(r"^```(python|console)", page.read_text(), re.M):
            assert page in PAGES or page.stem in run_elsewhere, page.name
