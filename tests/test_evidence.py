"""What docs/tables.py shows of results/, counted again in another way."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fairwind.report.beside import published
from fairwind.study import Finished, read_runs

ROOT = Path(__file__).parents[1]


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
        mean = sum(run.row["final"]["avg"] for run in stored.values()) / 2
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
        abs(short[seed].row["final"]["avg"] - next(x["avg"] for x in run.history if x["round"] == 30))
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
    page = (ROOT / "docs" / "reproduction.md").read_text()
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
