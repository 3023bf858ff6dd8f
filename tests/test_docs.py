"""What the documentation says is what was measured, and what is there."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tables

from fairwind import algorithms
from fairwind.metrics import METRICS
from fairwind.report.table import display_name
from fairwind.study import read_study
from gpu import TIMED, failure

ROOT = Path(__file__).parents[1]


def test_the_tables_written_from_results_are_up_to_date() -> None:
    """`python docs/tables.py` would change nothing: no number in them is typed."""
    for page, least in zip(tables.PAGES, (2, 20, 1, 1, 13, 3, 1, 5, 7, 13, 5, 3, 1, 2, 2, 5, 3), strict=True):
        text = page.read_text()
        assert len(tables.MARKED.findall(text)) >= least, page.name
        assert tables.rendered(text) == text, f"run python docs/tables.py: {page.name} is stale"


def test_a_stale_table_is_found() -> None:
    text = (ROOT / "README.md").read_text()
    name, number = re.search(r"^\| FedAvg \| ([\d.]+)", text, re.M).group(0, 1)  # type: ignore[union-attr]
    assert tables.rendered(text.replace(name, name.replace(number, "99.9"))) == text


@pytest.mark.parametrize("file", sorted((ROOT / "results").glob("*/*-*.json")), ids=lambda file: file.stem)
def test_the_other_tables_of_results_are_the_recorded_ones(file: Path) -> None:
    page = "".join(page.read_text() for page in tables.PAGES)
    assert f"../results/{file.parent.name}/{file.name}" in page
    for entry in json.loads(file.read_text())["summary"]:
        shown = " / ".join(f"{entry[m]['mean']:.1f}" for m in ("avg", "std", "worst30"))
        names = f"(?:{entry['algorithm']}|{display_name(entry['algorithm'])})"
        assert re.search(rf"^\| {names} \|.*{re.escape(shown)} \|", page, re.M), entry["algorithm"]


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
NEWEST |= {
    f"{name}-cpu": RECORDED / f"{name}-cpu.json"
    for name in ("leaf", "lstm", "resnet", "sent140", "synthetic")
}


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
        if runs > 1 and not name.endswith("uncompiled"):
            assert shown(setup, ratio, readme), (setup, ratio)


def test_so_are_figures_of_earlier_measurements() -> None:
    page, readme = (ROOT / "docs" / "benchmarks.md").read_text(), (ROOT / "README.md").read_text()
    for setup, _, ratio in recorded(RECORDED / "engine-cpu.json"):
        assert setup == "Synthetic" or shown(setup, ratio, page), (setup, ratio)
    for setup, runs, ratio in recorded(RECORDED / "users-cpu.json"):
        assert runs == 1 or setup == "Synthetic" or shown(setup, ratio, readme), (setup, ratio)


def test_the_gpus_record_is_of_compiled_steps_and_recorded_rounds() -> None:
    """The tables of README and benchmarks are written from it (docs/tables.py)."""
    record = json.loads((RECORDED / "gpu.json").read_text())
    assert set(record["results"]) == set(TIMED)
    for name, result in record["results"].items():
        assert result["steps"] == "torch.compile", name
        assert result["graphs"] != "none", name
        assert not failure(result, None)
        assert failure(result | {"round_of_floor": 0.8 * result["round_of_floor"]}, result)
        assert failure(result | {"graphs": "none"}, result)
    assert re.search(r"\d+ passed", record["tests"]["result"])
    assert "failed" not in record["tests"]["result"]


def test_the_table_of_other_simulators_is_the_recorded_one() -> None:
    page, readme = (ROOT / "docs" / "benchmarks.md").read_text(), (ROOT / "README.md").read_text()
    table = page.partition("## Other simulators")[2]

    def cell(median: float, low: float, high: float) -> str:
        middle, least, most = (f"{r:.{int(r < 10)}f}" for r in (median, low, high))
        return f"{middle}× ({least}–{most})"

    found = json.loads((RECORDED / "peers-cpu.json").read_text())["results"]
    for peer in found:
        cells = " | ".join(cell(**peer["ratios"][runs]) for runs in ("1 run", "15 runs"))
        assert cells in table.replace("*", ""), peer["title"]
    for name in ("pfl", "fedjax", "flower", "drjax-bucketed"):
        (peer,) = (peer for peer in found if peer["peer"] == name)
        for runs in ("1 run", "15 runs"):
            median = peer["ratios"][runs]["median"]
            assert f"{median:.{int(median < 10)}f}×" in readme, (name, runs)


def test_the_costs_of_rounds_are_the_recorded_ones() -> None:
    rows = (ROOT / "docs" / "family.md").read_text().partition("## What a round costs")[2].splitlines()
    for column, task in enumerate(("synthetic", "femnist"), start=2):
        shown = [row.split("|")[column].strip() for row in rows if "×" in row and row.startswith("| ")]
        found = json.loads((RECORDED / f"family-cost-{task}.json").read_text())["results"]
        assert shown == [f"{r['ratio']:.2f}× ({r['low']:.2f} to {r['high']:.2f})" for r in found]


def test_the_slowdown_on_a_busy_machine_is_the_recorded_one() -> None:
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    one, fifteen = (r["ratio"] for r in json.loads((RECORDED / "busy-cpu.json").read_text())["results"])
    assert f"takes {one:.1f}× as long as on an idle machine with one run, and {fifteen:.1f}× with 15" in page


def test_the_ranges_over_the_zoo_are_the_recorded_ones() -> None:
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())

    def ratios(name: str) -> list[float]:
        return [r["ratio"] for r in json.loads((RECORDED / f"{name}.json").read_text())["results"]]

    small, larger, three = ratios("zoo-cpu"), ratios("zoo-larger-cpu"), ratios("zoo-three-clients-cpu")
    assert f"times {len(small)} modules" in page
    assert f"**{min(small):.2f}× to {max(small):.0f}×** as fast" in page
    assert f"`--clients larger`, {len(larger)} modules" in page
    assert f"**{min(larger):.2f}× to {max(larger):.1f}×**" in page
    below = [r for r in three if r < 1]
    assert f"{len(below)} of {len(three)} modules are slower" in page
    assert f"at {min(below):.2f}× to {max(below):.2f}×" in page


def test_the_table_of_scale_is_the_recorded_one() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text().partition("## Scale")[2]
    found = json.loads((RECORDED / "scale-cpu.json").read_text())["points"]
    points = [point for point in found if point["sweep"] == "clients"]
    assert "| " + " | ".join(f"{point['us']:.1f}" for point in points) + " |" in page
    for field in ("data_mib", "beyond_mib"):
        cells = [f"{point[field]:.{int(point[field] < 10)}f}" for point in points]
        assert f"| {' | '.join(cells)} |" in page, field


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


@pytest.mark.parametrize("file", ["users-uncompiled-h200", "users-cpu", *NEWEST])
def test_the_readme_shows_how_little_single_runs_gain(file: str) -> None:
    readme = (ROOT / "README.md").read_text().partition("## Speed")[2]
    path = NEWEST.get(file, RECORDED / f"{file}.json")
    latest = {setup: ratio for setup, runs, ratio in recorded(path) if runs == 1}
    again = {"LEAF's CNN", "ResNet-18", "nn.LSTM"}  # measured again, in files of their own
    for row in ("Transformer encoder", "nn.LSTM", "LEAF's CNN", "LoRA on GPT-2", "ResNet-18"):
        if row in latest and not (file.startswith("users") and row in again):
            assert shown(row, latest[row], readme), (row, latest[row])


def test_the_readme_says_what_the_picture_shows() -> None:
    readme = (ROOT / "README.md").read_text()
    record = tables.panel("convergence", "3").record
    assert record is not None
    worst = {row["algorithm"]: row["worst30"]["mean"] for row in record.results["summary"]}
    caption = f"FedAvg leaves them at {worst['fedavg']:.0f} %, AdaFedAdam brings them to"
    assert f"{caption} {worst['adafedadam']:.0f} %" in " ".join(readme.split())


def test_the_table_of_privacy_is_the_recorded_one() -> None:
    page = (ROOT / "docs" / "federation.md").read_text()
    by_noise: dict[float | None, list[str]] = {}
    for row in json.loads((RECORDED / "privacy.json").read_text())["rows"]:
        by_noise.setdefault(row["noise"], []).append(f"{row['avg']:.1f} / {row['worst30']:.1f}")
    assert len(by_noise) == 5
    for cells in by_noise.values():
        assert f"| {' | '.join(cells)} |" in page, cells


def test_every_metric_and_algorithm_is_documented() -> None:
    metrics, algorithm_page = (ROOT / "docs" / f"{name}.md" for name in ("metrics", "algorithms"))
    assert all(f"| `{name}` |" in metrics.read_text() for name in METRICS)
    assert all(f"`{name}`" in algorithm_page.read_text() for name in algorithms.REGISTRY)


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "paper").glob("*.md")]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} links to {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
                assert anchor in map(slug, headings), f"{page.name} links to {target}#{anchor}"


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


def test_the_readmes_ten_lines_print_what_it_shows(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (code, output), *others = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", readme, re.S)
    assert not others
    assert len([line for line in code.splitlines() if line.strip()]) == 10
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    words = [re.sub(r"[\d.]+", "#", text).split() for text in (done.stdout, output)]
    assert words[0] == words[1]
    found, printed = numbers(done.stdout), numbers(output)
    assert len(found) == len(printed) == 20
    # One test sample is 25 points of the smallest client's accuracy, and rounding may flip it
    assert found == pytest.approx(printed, abs=3)
    fedavg, adafedadam = found[:10], found[10:]
    assert fedavg[4] < adafedadam[4], "the worst 30 % gain"


def test_the_first_pages_python_runs(tmp_path: Path) -> None:
    page, readme = (ROOT / "docs" / "index.md").read_text(), (ROOT / "README.md").read_text()
    ((install, code),) = re.findall(r"```bash\n(.*?)```\n\n```python\n(.*?)```", page, re.S)
    assert f"`{install.partition('#')[0].strip()}`" in readme
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 13
    assert max(map(len, lines)) <= 52, "it stands beside the picture"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ *(FedAvg|AdaFedAdam) (.*)$", done.stdout, re.M)
    assert [name for name, _ in rows] == ["FedAvg", "AdaFedAdam"]
    fedavg, adafedadam = (numbers(row) for _, row in rows)
    assert len(fedavg) == len(adafedadam) == 5
    assert fedavg[2] < adafedadam[2], "the worst 30 % gain"


def test_the_readme_keeps_its_order() -> None:
    readme = (ROOT / "README.md").read_text()
    title, sentence, picture, _caption, *_ = readme.split("\n\n")
    assert title == "# Fairwind"
    assert len(re.findall(r"[.!?](?:\s|$)", sentence)) == 1
    assert picture.startswith("![")
    assert re.findall(r"^## (.*)$", readme, re.M) == [
        "Install",
        "Your model, your data",
        "Results",
        "Speed",
        "What it is not for",
        "Links",
    ]
    install = re.search(r"## Install.*?```\n(.*?)```", readme, re.S)
    assert install is not None
    assert re.findall(r"^make \w+", install[1], re.M) == ["make demo", "make test"]
    assert len(install[1].splitlines()) == 2
    assert "does *not* win" in readme.partition("## Speed")[2].partition("## ")[0]


PROSE = [ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PROSE += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "docs" / "paper").glob("*.md"))


def running_text(page: Path) -> list[str]:
    """A page's lines without code, tables, pictures and the targets of links."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.S | re.M)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "![", "<!--"))]
    return [re.sub(r"\]\([^)]*\)|^\[\w+\]: \S+$", "]()", line) for line in lines]


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.stem)
def test_prose_is_wrapped_and_names_no_commits(page: Path) -> None:
    for line in running_text(page):
        assert len(line) <= 100, line
        for word in re.findall(r"(?<![\w-])[0-9a-f]{7,40}(?![\w-])", line):
            assert not re.search(r"\d", word), f"a commit belongs into the JSON beside the result: {line}"


def test_a_commit_in_running_text_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("(AMD EPYC, commit ec6ca4d.)\n")
    with pytest.raises(AssertionError, match="belongs into the JSON"):
        test_prose_is_wrapped_and_names_no_commits(tmp_path / "page.md")


def test_the_glossary_has_every_word_that_a_page_links() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    entries = re.findall(r"^### (.*)\n\n((?:.+\n)+)", glossary, re.M)
    anchors = {slug(word) for word, _ in entries}
    assert len(entries) == len(re.findall("^### ", glossary, re.M)) == len(anchors) >= 12
    assert all("*Example:*" in " ".join(text.split()) for _, text in entries)
    linked = {page: re.findall(r"glossary\.md#([\w-]+)", page.read_text()) for page in PROSE}
    assert len(set(linked[ROOT / "README.md"])) >= 5
    for page, words in linked.items():
        assert set(words) <= anchors, page.name


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
