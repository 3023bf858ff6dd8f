"""What the documentation says is what was measured, and what is there."""

import json
import re
from pathlib import Path

import pytest

from fairwind import algorithms
from fairwind.metrics import METRICS

ROOT = Path(__file__).parents[1]


def test_the_readmes_table_is_the_recorded_result() -> None:
    results = json.loads((ROOT / "results" / "synthetic" / "results.json").read_text())
    rows = re.findall(r"^\| (?:\*\*)?([\w-]+?)(?:\*\*)? \| (.+) \|$", (ROOT / "README.md").read_text(), re.M)
    found = {name.replace("-", "").lower(): re.findall(r"[\d.]+", cells) for name, cells in rows}
    for entry in results["summary"]:
        shown = [
            f"{entry[m][k]:.1f}" for m in ("avg", "std", "worst30", "avg_weighted") for k in ("mean", "std")
        ]
        assert found[entry["algorithm"]] == shown
    assert results["config"]["rounds"] == 1000
    assert results["config"]["seeds"] == [0, 1, 2]


@pytest.mark.parametrize("file", sorted((ROOT / "results").glob("*/*-*.json")), ids=lambda file: file.stem)
def test_the_tables_of_results_are_the_recorded_ones(file: Path) -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    assert f"../results/{file.parent.name}/{file.name}" in page
    for entry in json.loads(file.read_text())["summary"]:
        shown = " / ".join(f"{entry[m]['mean']:.1f}" for m in ("avg", "std", "worst30"))
        assert re.search(rf"^\| {entry['algorithm']} \|.*{re.escape(shown)} \|", page, re.M), entry[
            "algorithm"
        ]


def test_every_metric_and_algorithm_is_documented() -> None:
    metrics, algorithm_page = (ROOT / "docs" / f"{name}.md" for name in ("metrics", "algorithms"))
    assert all(f"| `{name}` |" in metrics.read_text() for name in METRICS)
    assert all(f"`{name}`" in algorithm_page.read_text() for name in algorithms.REGISTRY)


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
