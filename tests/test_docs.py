"""What the documentation says is what was measured, and what is there."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fairwind import algorithms
from fairwind.metrics import METRICS
from fairwind.study import read_study

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import tables  # noqa: E402


def test_the_tables_written_from_results_are_up_to_date() -> None:
    """`python docs/tables.py` would change nothing: no number in them is typed."""
    for page in tables.PAGES:
        text = page.read_text()
        assert len(tables.MARKED.findall(text)) >= 3
        assert tables.rendered(text) == text, f"run python docs/tables.py: {page.name} is stale"


def test_a_stale_table_is_found() -> None:
    text = (ROOT / "README.md").read_text()
    name, number = re.search(r"^\| FedAvg \| ([\d.]+)", text, re.M).group(0, 1)  # type: ignore[union-attr]
    assert tables.rendered(text.replace(name, name.replace(number, "99.9"))) == text


@pytest.mark.parametrize("file", sorted((ROOT / "results").glob("*/*-*.json")), ids=lambda file: file.stem)
def test_the_other_tables_of_results_are_the_recorded_ones(file: Path) -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text()
    assert f"../results/{file.parent.name}/{file.name}" in page
    for entry in json.loads(file.read_text())["summary"]:
        shown = " / ".join(f"{entry[m]['mean']:.1f}" for m in ("avg", "std", "worst30"))
        assert re.search(rf"^\| {entry['algorithm']} \|.*{re.escape(shown)} \|", page, re.M), entry[
            "algorithm"
        ]


def test_recorded_runs_say_how_they_were_made_and_name_no_machine_path() -> None:
    files = sorted((ROOT / "results").glob("runs/*/results.json"))
    assert len(files) >= 20
    for file in files:
        results = json.loads(file.read_text())
        assert results["command"].startswith(f"fairwind compare {results['setup']} --algorithms ")
        assert results["environment"]["commit"]
        assert results["timing"]["seconds"] > 0
        assert not re.search(r'"/\w+/', file.read_text()), file
        assert (file.parent / "history.jsonl.gz").exists()


def test_the_studies_page_shows_studies_that_work(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "studies.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", page, re.S)
    assert len(blocks) == 2
    for i, block in enumerate(blocks):
        (tmp_path / f"{i}.toml").write_text(block)
    assert [len(read_study(tmp_path / f"{i}.toml").panels) for i in (0, 1)] == [1, 6]
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    shutil.copytree(ROOT / "results" / "runs" / "readings-synthetic", tmp_path / "runs" / "some")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "FedNova" in (tmp_path / "runs" / "mine" / "index.html").read_text()


RECORDED = ROOT / "benchmarks" / "results"
NEWEST = {file.stem: file for file in (RECORDED / "engine-h200").glob("*.json")}
NEWEST |= {f"{name}-cpu": RECORDED / f"{name}-cpu.json" for name in ("leaf", "resnet")}


def shown(setup: str, ratio: float, page: str) -> bool:
    """Whether a row for the setup shows the ratio."""
    return bool(re.search(rf"^\| {setup}.*\b{ratio:.{int(ratio < 10)}f}×", page, re.M))


def recorded(file: Path) -> list[tuple[str, int, float]]:
    """Setup, runs and ratio of each result, of one call or several."""
    found = json.loads(file.read_text())
    results = [r for call in found.get("runs", [found]) for r in call["results"]]
    return [(r["task"].partition(",")[0], r["runs"], r["ratio"]) for r in results]


@pytest.mark.parametrize("name", sorted(NEWEST))
def test_the_benchmarks_tables_are_the_recorded_ones(name: str) -> None:
    page, readme = (ROOT / "docs" / "benchmarks.md").read_text(), (ROOT / "README.md").read_text()
    for setup, runs, ratio in recorded(NEWEST[name]):
        assert shown(setup, ratio, page), (setup, ratio)
        assert runs == 1 or shown(setup, ratio, readme), (setup, ratio)


def test_so_are_figures_of_earlier_measurements() -> None:
    page, readme = (ROOT / "docs" / "benchmarks.md").read_text(), (ROOT / "README.md").read_text()
    for setup, runs, ratio in recorded(RECORDED / "engine-h200.json"):
        if runs == 1 and setup in ("Synthetic", "FEMNIST"):  # the others were measured again
            assert shown(setup, ratio, page), (setup, ratio)
    for setup, _, ratio in recorded(RECORDED / "engine-cpu.json"):
        assert shown(setup, ratio, page), (setup, ratio)
    for setup, runs, ratio in recorded(RECORDED / "users-cpu.json"):
        assert runs == 1 or shown(setup, ratio, readme), (setup, ratio)


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


def test_the_trackers_page_shows_code_that_works(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tracking.md").read_text()
    first, own = re.findall(r"```python\n(.*?)```", page, re.S)
    for code in (first, own):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "shown" / "mine" / "report.html").exists()
    assert done.stdout.splitlines()[-1] == "finished"
