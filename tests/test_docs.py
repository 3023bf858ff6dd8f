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


@pytest.mark.parametrize("machine", ["h200", "cpu"])
def test_the_benchmarks_tables_are_the_recorded_ones(machine: str) -> None:
    page, readme = (ROOT / "docs" / "benchmarks.md").read_text(), (ROOT / "README.md").read_text()
    recorded = json.loads((ROOT / "benchmarks" / "results" / f"engine-{machine}.json").read_text())["results"]
    for one, fifteen in zip(recorded[::2], recorded[1::2], strict=True):
        setup = one["task"].partition(",")[0]
        shown = [f"{r['ratio']:.{0 if r['ratio'] >= 10 else 1}f}×" for r in (one, fifteen)]
        cells = rf"\*\*{shown[0]}\*\* \| [\d.]+ µs, \*\*{shown[1]}\*\* \| "
        assert re.search(rf"^\| {setup}.*{cells}", page, re.M), (setup, shown)
        assert re.search(rf"^\| {setup}.*\| {shown[1]} \|", readme, re.M), (setup, shown)


@pytest.mark.parametrize("setup", ["femnist", "sent140"])
def test_the_tables_of_precision_are_the_recorded_ones(setup: str) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    file = ROOT / "benchmarks" / "results" / f"precision-{setup}-h200.json"
    lines = {(e["algorithm"], e["metric"]): e for e in json.loads(file.read_text())["results"]}
    rows = [re.sub(r"[\W_]", "", row).lower() for row in page.splitlines()]
    for algorithm in {name for name, _ in lines}:
        cells = []
        for metric in ("avg", "worst30"):
            e = lines[algorithm, metric]
            cells += [e["mean"]["float32"], e["moved"]["tf32"], e["moved"]["bf16"], e["over_seeds"]]
        shown = re.sub(r"\W", "", algorithm + "".join(f"{value:.2f}" for value in cells))
        assert shown in rows, (algorithm, cells)


def test_every_metric_and_algorithm_is_documented() -> None:
    metrics, algorithm_page = (ROOT / "docs" / f"{name}.md" for name in ("metrics", "algorithms"))
    assert all(f"| `{name}` |" in metrics.read_text() for name in METRICS)
    assert all(f"`{name}`" in algorithm_page.read_text() for name in algorithms.REGISTRY)


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
