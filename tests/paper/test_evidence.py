"""What docs/tables.py shows of results/, counted again in another way."""

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fairwind.intervals import over_draws
from fairwind.report.paper_comparison import published
from fairwind.study import Finished, choose, read_runs
from narrowed import known

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_tables"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs() -> list[Finished]:
    return read_runs(ROOT / "results" / "runs")[0]


def row(table: str, name: str) -> list[str]:
    (found,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def of(runs: list[Finished], folder: str, algorithm: str) -> dict[int, Finished]:
    found = [run for run in runs if run.folder.name in folder.split()]
    return {run.key.seed: run for run in found if run.row["algorithm"] == algorithm}


def test_every_stored_seed_of_a_row_is_shown(tables: ModuleType, runs: list[Finished]) -> None:
    for algorithm, name in (("adafedadam:alpha=0", "(alpha=0)"), ("fedadam:lr=0.003", "(lr=0.003)")):
        stored = of(runs, "cifar10-h200-seeds-0-1", algorithm)
        assert sorted(stored) == [0, 1]
        mean = sum(known(run.row["final"]["avg"]) for run in stored.values()) / 2
        label = ("AdaFedAdam " if algorithm.startswith("ada") else "FedAdam ") + name
        _, _, end, seeds = row(tables.late("controls", "10", "11"), label)
        assert (end.split(" / ")[0], seeds) == (f"{mean:.1f}", "2")
    assert row(tables.summary("alpha", "2", "avg"), "AdaFedAdam (alpha=0)")[-1] == "2"


def test_both_end_points_are_shown(tables: ModuleType, runs: list[Finished]) -> None:
    """Of Algorithm 1 as printed the late mean is lower than the default's, the last round higher."""
    shown = tables.late("controls", "seed=0", "12")
    late, end = (
        [float(row(shown, name)[i].split(" / ")[0]) for name in ("AdaFedAdam", "AdaFedAdam (warmup=none)")]
        for i in (1, 2)
    )
    assert late[0] > late[1]
    assert end[0] < end[1]


def test_precision_has_its_control(tables: ModuleType, runs: list[Finished]) -> None:
    short = of(runs, "cifar10-9e958239c0", "adafedadam")
    long = of(runs, "cifar10-h200-seeds-0-1 cifar10-h200-seed-2", "adafedadam")
    apart = [
        abs(
            known(short[seed].row["final"]["avg"])
            - next(known(x["avg"]) for x in run.history if x["round"] == 30)
        )
        for seed, run in long.items()
    ]
    assert len(apart) == 3
    assert row(tables.moved("precision", "0", "1", "2"), "AdaFedAdam")[4] == f"{sum(apart) / 3:.1f}"


def test_fednova_is_compared_on_every_reading(tables: ModuleType) -> None:
    rows = [line.split(" | ") for line in tables.rival().splitlines()[2:]]
    assert len(rows) == 14
    assert sum(line[2].startswith("-") for line in rows) == 13  # the area under the curve is FedNova's
    assert all("[" in cell for line in rows for cell in line[3:])


def test_tuned_baselines_have_intervals(tables: ModuleType) -> None:
    page = (ROOT / "docs" / "paper" / "tuned.md").read_text()
    asked = "paired tuned 0 fedavg:lr=10 fedadam:lr=0.1 fednova:lr=2 qfedavg:lr=30"
    assert f"<!-- table: {asked} -->" in page
    best = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[3] for line in tables.tuned("0").splitlines()[2:]
    }
    for spec in asked.split()[3:]:  # these are the best rates
        name, _, rate = spec.partition(":lr=")
        assert best[tables.display_name(name)] == rate


def test_the_papers_slips_are_slips() -> None:
    """What the page says of the paper's proof and of its text, from its own numbers."""

    def excess(c: float) -> float:
        return math.sqrt(1 - 0.999**c) - (math.log(c) + 1) * math.sqrt(1 - 0.999)

    assert excess(12.4) < 0 < excess(12.6)
    assert math.log(2) ** 2 == pytest.approx(0.480, abs=5e-4)
    rows = {name: table["rows"] for name, table in published()["tables"].items()}
    for name in ("heterogeneity/0.5", "heterogeneity/1"):
        assert rows[name]["fedadam"]["std"][0] < rows[name]["adafedadam"]["std"][0]
    sent140 = {name: row["avg"][0] for name, row in rows["convergence/sent140"].items()}
    assert max(sent140, key=lambda name: sent140[name]) == "fedadam"
    assert "heterogeneity/iid" not in rows


def test_six_bounds_that_hold_fail_the_sum_that_they_follow_from() -> None:
    checks = json.loads((ROOT / "results" / "theory" / "theory.json").read_text())["checks"]
    (check,) = [check for check in checks if check["name"] == "theorem2_guarantee"]
    held = [row for row in check["rows"] if row["held"]]
    assert (len(held), sum(not row["held_telescoped"] for row in held)) == (71, 6)


def claims() -> list[list[str]]:
    page = (ROOT / "docs" / "reproduction.md").read_text()
    table = page.partition("<!-- claims -->\n")[2].partition("<!-- end claims -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_a_claim_is_told_in_fifteen_words_with_its_evidence_and_a_verdict() -> None:
    assert len(claims()) >= 7
    for said, found, evidence, verdict in claims():
        for cell in (said, found, evidence, verdict):
            words = [word for word in re.sub(r"\]\([^)]*\)", "]", cell).split() if re.search(r"\w", word)]
            assert 1 <= len(words) <= 15, cell
        assert re.search(r"\d", evidence), f"how many seeds or problems: {said}"


def test_the_first_screen_says_what_the_tables_say(tables: ModuleType) -> None:
    """The five sentences' numbers are those of the tables on the other pages."""
    first = (ROOT / "docs" / "reproduction.md").read_text().partition("![")[0].replace("−", "-")
    five, one = "0,1,2,3,4", "adafedadam:alpha=1"
    shown = tables.draws("parts", five, one, five, "adafedadam:alpha=0", "adafedadam:alpha=4")
    assert row(shown, "AdaFedAdam (alpha=0)")[3] in first
    four = float(row(shown, "AdaFedAdam (alpha=4)")[3].split()[0])
    assert f"worse by {four:.1f}" in " ".join(first.split())
    leads = {
        line.split(" | ")[0]: int(line.split(" | ")[1].replace(",", ""))
        for line in tables.rival().splitlines()[2:]
        if line.startswith("| LEAF, labels as described")
    }
    ours, *others = leads.values()
    said = f"for {ours} of 1000 rounds ({min(others)} to {max(others)} on other data like the paper's)"
    assert said in " ".join(first.split())


def test_draws_count_once_each(tables: ModuleType, runs: list[Finished]) -> None:
    """AdaFedAdam minus FedNova over five draws of Synthetic, by hand, with t of four degrees of freedom."""
    shown = tables.draws("parts", "0,1,2,3,4", "adafedadam:alpha=1", "0,1,2,3,4", "fednova")
    apart = []
    for panel in tables.STUDIES["parts"].panels[:5]:
        ends: dict[str, dict[int, float]] = {"adafedadam:alpha=1": {}, "fednova": {}}
        for spec, chosen in choose(panel, runs).items():
            if spec in ends:
                ends[spec] = {run.key.seed: known(run.row["final"]["worst30"]) for run in chosen}
        mine, theirs = ends.values()
        assert sorted(mine) == sorted(theirs) == [0, 1, 2, 3]
        apart.append(sum(mine.values()) / 4 - sum(theirs.values()) / 4)
    mean = sum(apart) / 5
    half = 2.776 * math.sqrt(sum((a - mean) ** 2 for a in apart) / 4 / 5)  # a table's t at 97.5 %
    assert row(shown, "FedNova")[3] == f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]"


def test_the_intervals_of_several_draws_hold_their_level() -> None:
    draw = np.random.default_rng(0)
    for draws, comparisons in ((3, 1), (5, 4)):
        held = 0
        for _ in range(2000):
            found = [
                over_draws(draw.normal(1.0, 2.0, draws).tolist(), comparisons) for _ in range(comparisons)
            ]
            held += all(interval.low <= 1.0 <= interval.high for interval in found)
        assert 0.94 <= held / 2000 <= 0.97


def test_unequal_data_says_how_many_draws_there_are_of_each_partition(tables: ModuleType) -> None:
    left = tables.remaining()
    for study in ("features", "pooled"):
        heads = tables.unequal_lead(study).splitlines()[0]
        for beta, name in tables.PARTITIONS:
            found = tables.by_partition(study, beta)
            assert f" {name}, {len(found)} draws |" in heads
            assert all(set(draw) == set(tables.ALGORITHMS) for draw in found)
            assert len(found) >= 2
            assert len(found) == 3 or f"beta={beta},seed=2" in left


def test_kept_momentum_is_beside_the_published_rows(tables: ModuleType) -> None:
    stored = json.loads((ROOT / "results" / "solvers" / "momentum.json").read_text())
    assert (stored["seeds"], stored["rounds"]) == ([0, 1, 2], 1000)
    shown = tables.momentum()
    for entry in stored["rows"]:
        assert f"{entry['avg_weighted']['mean']:.1f} / {entry['std_weighted']['mean']:.1f}" in shown
    paper = published()["tables"]["solvers/momentum"]["rows"]["qfedavg"]["avg"][0]
    line = next(line for line in shown.splitlines() if line.startswith("| momentum | q-FedAvg"))
    assert f"| {paper:.1f} /" in line
