"""Our numbers beside the paper's, differences with their intervals, the front of α, LaTeX."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest

from fairwind.algorithms import PAPER
from fairwind.intervals import KEYS, jackknife, paired_differences, student
from fairwind.metrics import fairness
from fairwind.report import latex, pareto, write_theory
from fairwind.report.paired import paired
from fairwind.report.paper_comparison import (
    BESIDE,
    WEIGHTED,
    Printed,
    against_others,
    beside_paper,
    distance,
    least_std,
    published,
    published_rows,
    statistics_of,
)
from fairwind.report.record import Record
from fairwind.report.targets import Reached, rounds_to, target_tables
from fairwind.runs.schema import HistoryLine, Results, SummaryRow

TABLES = published()["tables"]
ACCURACY = [{"name": "accuracy", "kind": "accuracy"}]


def summary(rows: Mapping[str, Mapping[Printed, Sequence[float]]]) -> list[SummaryRow]:
    """A summary that says what a table of the paper does."""
    made: list[dict[str, object]] = [
        {"algorithm": name, **{key: {"mean": mean, "std": std} for key, (mean, std) in row.items()}}
        for name, row in rows.items()
    ]
    return cast(list[SummaryRow], made)


def curve(label: str, seed: int, averages: Sequence[float | None]) -> list[HistoryLine]:
    """A line of the history for every tenth round, with the average alone."""
    made: list[dict[str, object]] = [
        {"algorithm": label, "seed": seed, "round": 10 * t, "avg": value} for t, value in enumerate(averages)
    ]
    return cast(list[HistoryLine], made)


@pytest.mark.parametrize("name", TABLES)
def test_every_published_table_is_whole(name: str) -> None:
    rows = TABLES[name]["rows"]
    assert sorted(rows) == sorted(PAPER)
    for row in rows.values():
        assert list(row) == list(BESIDE)
        assert all(0 <= mean <= 100 and 0 <= std < 11 for mean, std in row.values())
        assert row["worst30"][0] < row["avg"][0]


def test_published_numbers_are_the_papers() -> None:
    """Four of them, read from the paper's own tables by eye."""
    assert [*TABLES["convergence/femnist"]["rows"]["adafedadam"]["worst30"]] == [74.16, 0.3]
    assert [*TABLES["convergence/synthetic"]["rows"]["fedadam"]["worst30"]] == [57.15, 10.56]
    assert [*TABLES["resources"]["rows"]["fednova"]["std"]] == [24.99, 2.15]
    assert [*TABLES["heterogeneity/1"]["rows"]["fedadam"]["avg"]] == [71.22, 0.17]


def test_the_paper_beside_itself_does_not_differ() -> None:
    for name, table in TABLES.items():
        cells = beside_paper(summary(table["rows"]), name, "plain")
        assert distance(cells) == 0
        assert all(cell.in_order and cell.difference == 0 for row in cells.values() for cell in row.values())


def test_equal_values_share_their_places() -> None:
    """Whichever comes first in the list."""
    rows = json.loads(json.dumps(TABLES["convergence/femnist"]["rows"]))
    rows["fedavg"]["avg"] = rows["fednova"]["avg"] = [78.0, 0.1]  # fourth and third in the paper
    for order in (list(rows), list(reversed(rows))):
        cells = beside_paper(summary({name: rows[name] for name in order}), "convergence/femnist")
        assert all(row["avg"].in_order for row in cells.values())


def test_no_clients_have_a_smaller_std_than_the_bound() -> None:
    draw = np.random.default_rng(0)
    for clients in (5, 16, 100):
        tail = math.ceil(0.3 * clients - 1e-9)
        for _ in range(50):
            found = fairness(
                draw.uniform(0, 100, clients) ** draw.uniform(0.2, 1), np.ones(clients), np.ones(clients)
            )
            assert found["std"] >= least_std(found["avg"], found["worst30"], tail / clients) - 1e-9
        two = np.array([20.0] * tail + [90.0] * (clients - tail))  # the clients that reach it
        found = fairness(two, two, np.ones(clients))
        assert found["std"] == pytest.approx(least_std(found["avg"], found["worst30"], tail / clients))


def test_published_rows_that_cannot_count_each_client_once() -> None:
    """Eight however 30 % of 16 clients are rounded, and one more if 4.8 is 5."""
    failing = [row for row in published_rows() if not row.possible()]
    assert [(row.tables[0], row.algorithm) for row in failing] == [
        ("convergence/cifar10", "adafedadam"),
        ("convergence/synthetic", "fedavg"),
        ("convergence/synthetic", "fedadam"),
        ("solvers/momentum", "fedavg"),
        ("solvers/momentum", "fedadam"),
        ("solvers/nesterov", "fedavg"),
        ("solvers/nesterov", "fedadam"),
        ("resources", "adafedadam"),
    ]
    (more,) = [row for row in published_rows() if row.possible() and not row.possible("up")]
    assert more.tables == ("heterogeneity/0.1, main text",)
    assert failing[0].least_down == pytest.approx((62.81 - 46.01) * math.sqrt(4 / 12))  # by hand: 9.70 > 8.18


def test_tables_with_such_a_row_are_compared_weighted_by_size() -> None:
    weighted = {name for name in TABLES if statistics_of(name) == WEIGHTED}
    assert weighted == {
        *("convergence/cifar10", "convergence/synthetic", "heterogeneity/0.05", "resources"),
        *("solvers/sgd", "solvers/momentum", "solvers/nesterov"),
    }
    rows = json.loads(json.dumps(TABLES["convergence/synthetic"]["rows"]))
    by_size = [row | {f"{key}_weighted": row[key] for key in BESIDE} for row in rows.values()]
    for row in by_size:
        row |= {key: [0.0, 0.0] for key in BESIDE}  # not what is compared
    assert (
        distance(beside_paper(summary(dict(zip(rows, by_size, strict=True))), "convergence/synthetic")) == 0
    )


def test_differences_are_in_pooled_standard_deviations_and_places_are_marked() -> None:
    rows = json.loads(json.dumps(TABLES["convergence/cifar10"]["rows"]))
    rows["fedavg"]["avg"] = [66.47, 1.0]  # the highest, where the paper has it third; and 30 more than there
    cells = beside_paper(summary(rows), "convergence/cifar10", "plain")
    cell = cells["fedavg"]["avg"]
    assert cell.difference == pytest.approx(30)
    assert cell.pooled == pytest.approx(30 / math.sqrt((1.0**2 + 0.75**2) / 2))
    moved = {label for label, row in cells.items() if not row["avg"].in_order}
    assert moved == {"fedavg", "adafedadam", "fedadam"}
    assert all(row["std"].in_order for row in cells.values())
    assert distance(cells) == pytest.approx(30 / math.sqrt(15))


def test_a_constant_lead_over_every_client_has_no_uncertainty() -> None:
    b = np.random.default_rng(0).uniform(20, 80, (3, 50))
    found = paired_differences(b + 5, b)
    for name in ("avg", "worst30"):
        assert found[name] == pytest.approx((5, 5, 5))
    assert found["std"] == pytest.approx((0, 0, 0), abs=1e-9)


def test_the_difference_is_that_of_the_metrics_and_lies_in_its_interval() -> None:
    draw = np.random.default_rng(1)
    a, b = draw.uniform(40, 100, (2, 3, 37))
    a[:, 4] = b[:, 9] = np.nan  # clients without test samples
    found = paired_differences(a, b)
    kept = [k for k in range(37) if k not in (4, 9)]
    ones = np.ones(len(kept))
    for name, interval in found.items():
        means = [np.mean([fairness(row[kept], ones, ones)[name] for row in x]) for x in (a, b)]
        assert interval.difference == pytest.approx(means[0] - means[1])
        assert interval.low < interval.difference < interval.high


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("apart", [0.0, 3.0])
def test_intervals_hold_the_truth_as_often_as_they_say(seeds: int, apart: float) -> None:
    """Also where an algorithm has better and worse seeds; a percentile bootstrap then held it in 80 %."""
    draw = np.random.default_rng(2)
    times, held = 200, 0
    for _ in range(times):
        level, noise = draw.normal(60, 15, (1, 30)), draw.normal(0, 4, (2, seeds, 30))
        a, b = level + noise + draw.normal(0, apart, (2, seeds, 1)) + np.array([2, 0])[:, None, None]
        interval = paired_differences(a, b)["avg"]
        held += interval.low <= 2 <= interval.high
    assert held >= 0.92 * times  # two standard deviations below 95 %


def test_no_algorithm_is_called_best_too_often(tmp_path: Path) -> None:
    """Five equal algorithms, three seeds: in at most 5 % of comparisons one is ahead of all others."""
    draw = np.random.default_rng(3)
    labels = ["fedavg", "fedadam", "fednova", "qfedavg", "adafedadam"]
    called, times = 0, 200
    for _ in range(times):
        score = 70 + draw.normal(0, 10, (1, 30)) + draw.normal(0, 2, (15, 1)) + draw.normal(0, 3, (15, 30))
        runs = [{"algorithm": label, "seed": seed} for label in labels for seed in range(3)]
        means = score.reshape(5, 3, 30).mean(axis=(1, 2))
        rows = [{"algorithm": n, "avg": {"mean": float(m)}} for n, m in zip(labels, means, strict=True)]
        sizes, names = np.ones(30, np.int64), [str(k) for k in range(30)]
        results = cast(Results, {"scores": ACCURACY, "runs": runs, "summary": rows})
        given = Record(results, [], score.astype(np.float32), sizes, sizes, names)
        called += "avg" in paired(given).ahead
    assert called <= 0.05 * times


def test_quantiles_are_students() -> None:
    """From a table; the last is nearly the normal distribution's."""
    for freedom, t in ((1, 12.706), (2, 4.303), (3, 3.182), (10, 2.228), (29, 2.045), (499, 1.965)):
        assert student(0.05, freedom) == pytest.approx(t, abs=5e-4)
    assert student(0.01, 2) == pytest.approx(9.925, abs=5e-4)


def test_of_an_average_the_intervals_are_the_t_test() -> None:
    """With one seed, paired over clients; with equal clients, paired over seeds: by hand."""
    draw = np.random.default_rng(4)
    a, b = draw.normal(60, 10, (2, 1, 12))
    apart = (a - b)[0]
    half = 2.201 * apart.std(ddof=1) / math.sqrt(12)
    assert paired_differences(a, b)["avg"] == pytest.approx(
        (apart.mean(), apart.mean() - half, apart.mean() + half), abs=1e-3
    )
    a, b = (np.repeat(draw.normal(60, 3, (4, 1)), 12, axis=1) for _ in range(2))
    apart = (a - b)[:, 0]
    half = 3.182 * apart.std(ddof=1) / 2
    assert paired_differences(a, b)["avg"][1:] == pytest.approx(
        (apart.mean() - half, apart.mean() + half), abs=2e-3
    )


def test_many_clients_are_left_out_in_groups_with_the_same_result() -> None:
    draw = np.random.default_rng(5)
    score, ones = draw.beta(5, 2, (2, 1300)) * 100, np.ones(1300)
    found = jackknife(score, score, ones, 1)
    assert len(found.shares) == 500  # of two and of three clients each
    assert found.shares.sum() == pytest.approx(1)
    interval = found.interval("avg", [0], [1])
    assert interval is not None
    half = 1.965 * (score[0] - score[1]).std(ddof=1) / math.sqrt(1300)
    assert interval.high - interval.difference == pytest.approx(half, rel=0.1)


def test_measures_under_weights_are_the_metrics() -> None:
    """Ties and sizes included."""
    draw = np.random.default_rng(6)
    score = np.round(draw.uniform(0, 100, (1, 11)), -1)  # with ties
    size = draw.integers(2, 9, 11).astype(float)
    kinds: tuple[tuple[int, Any], ...] = ((1, "accuracy"), (-1, "lower"))
    for sign, kind in kinds:
        found = jackknife(score, score, size, sign)
        expected = fairness(score[0], score[0], size, kind)
        for key in KEYS:
            if key in expected:
                assert found.values[key][0, 0] == pytest.approx(expected[key]), key


def record(labels: list[str], averages: dict[str, list[float]]) -> Record:
    """A record with a curve of averages for each label, and one client."""
    runs = [{"algorithm": label, "seed": 0} for label in labels]
    history = [line for label in labels for line in curve(label, 0, averages[label])]
    rows = [{"algorithm": label} for label in labels]
    results = cast(Results, {"scores": ACCURACY, "runs": runs, "summary": rows})
    accuracy = np.array([[averages[label][-1]] * 2 for label in labels], np.float32)
    sizes = np.ones(2, np.int64)
    return Record(results, history, accuracy, sizes, sizes, ["0", "1"])


def test_rounds_to_a_target_have_a_spread_over_seeds() -> None:
    given = record(["fedavg", "adafedadam"], {"fedavg": [10, 35, 45], "adafedadam": [10, 62, 61]})
    assert {k: {x: r.rounds for x, r in row.items()} for k, row in rounds_to(given).items()} == {
        "fedavg": {30: (10,), 40: (20,), 50: (None,), 60: (None,)},
        "adafedadam": {30: (10,), 40: (10,), 50: (10,), 60: (10,)},
    }
    more = curve("fedavg", 1, [10, 20, 41]) + curve("fedavg", 2, [10, 20, 25])
    found = rounds_to(given._replace(history=given.history + more))["fedavg"]
    assert found[30].rounds == (10, 20, None)
    assert found[30].text() == "20 (10 to –)"  # one seed never
    assert found[40].text() == "20 (20 to –)"
    assert found[50].text() == "–"
    assert Reached((None, 30, None)).text() == "– (30 to –)"
    assert Reached((30, 30)).text() == "30"
    assert Reached((30, 50)).median == 50  # by which half of two are there
    lost = curve("fedavg", 1, [None, None, None])
    assert rounds_to(given._replace(history=given.history + lost))["fedavg"][30].rounds == (10, None)


def test_what_a_target_costs_stands_beside_its_rounds() -> None:
    given = record(["fedavg", "adafedadam"], {"fedavg": [10, 35, 45], "adafedadam": [10, 62, 61]})
    for run, count in zip(given.results["runs"], (100.0, 200.0), strict=True):
        run |= {
            "rounds": 20,
            "cost": {"sample_gradients": 20 * count, "bytes_up": 4e6, "bytes_down": 6e6},
        }
    rounds, gradients, sent = target_tables(given)
    assert rounds[1] == [["FedAvg", "10", "20", "–", "–"], ["AdaFedAdam", "10", "10", "10", "10"]]
    assert gradients[0][0] == "thousand sample gradients to an average of"
    assert gradients[1] == [["FedAvg", "1", "2", "–", "–"], ["AdaFedAdam", "2", "2", "2", "2"]]
    assert sent[1][0] == ["FedAvg", "5", "10", "–", "–"]
    assert sent[0][0] == "million bytes to an average of"


def test_adafedadams_default_is_what_others_are_compared_with() -> None:
    labels = ["fedavg", "adafedadam:alpha=0", "adafedadam:alpha=1"]
    given = record(labels, {label: [10.0 * i] for i, label in enumerate(labels, 1)})
    one, found = against_others(paired(given))
    assert one == "adafedadam:alpha=1"
    assert {other: i["avg"].difference for other, i in found.items()} == {
        "fedavg": 20,
        "adafedadam:alpha=0": 10,
    }


def point(
    name: str, error: float, rsd: float, kind: Literal["AdaFedAdam", "baseline"] = "AdaFedAdam"
) -> pareto.Point:
    return {"label": name, "name": name, "kind": kind, "alpha": None, "error": error, "rsd": rsd}


def test_the_front_its_knee_and_what_it_dominates() -> None:
    ours = [
        point("a", 10, 5),
        point("b", 11, 2),
        point("c", 20, 1),
        point("beaten", 12, 3),
        point("twin", 11, 2),
    ]
    others = [point(n, *xy, "baseline") for n, xy in {"in": (12, 4), "out": (9, 9), "low": (30, 0.5)}.items()]
    found = [*others, *ours]
    assert [p["error"] for p in pareto.front(found)] == [10, 11, 20]
    assert [p["name"] for p in pareto.dominated(found)] == ["in"]
    knee = pareto.knee(found)
    assert knee is not None
    assert knee["error"] == 11
    assert pareto.knee(ours[:2]) is None  # two points have no knee
    line = [point("a", 1, 3), point("b", 2, 2), point("c", 3, 1)]
    assert pareto.knee(line) is None  # nor has a straight line


def test_latex_escapes_and_marks_the_best() -> None:
    row = latex.Row(
        "FedAdam (lr_x=2)",
        [(64.25, 1.0), (None, None)],
        [(62.81, 1.02), (8.18, 1.33)],
        [True, False],
    )
    text = latex.tables("A & B", [latex.Table("50 % of α", ["average", "worst 30 %"], [row])])
    assert (
        r"FedAdam (lr\_x=2) & \textbf{64.25 $\pm$ 1.00} & 62.81 $\pm$ 1.02 & -- & 8.18 $\pm$ 1.33 \\" in text
    )
    assert r"\caption{50 \% of $\alpha$}" in text
    assert r"worst 30 \% (ours) & worst 30 \% (paper)" in text
    alone = latex.Row("One seed", [(1.0, None)], [], [False])
    assert r"One seed & 1.00 \\" in latex.tables("", [latex.Table(r"a\b", ["average"], [alone])])
    assert latex.escape(r"{a}\b^$") == r"\{a\}\textbackslash{}b\^{}\$"
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 1


def test_the_recorded_theory_becomes_a_page(tmp_path: Path) -> None:
    recorded = Path(__file__).parents[2] / "results" / "theory" / "theory.json"
    content = json.loads(recorded.read_text())
    write_theory(tmp_path, content)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert len(content["checks"]) == 10
    for check in content["checks"]:
        assert f'id="{check["name"]}"' in page
        assert (tmp_path / "figures" / f"{check['name']}.png").stat().st_size > 5000
