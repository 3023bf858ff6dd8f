"""Groups of clients: given with a federation, measured, kept and shown; and nothing of it without groups."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict
from flwr_datasets.partitioner import NaturalIdPartitioner
from hypothesis import given as drawn
from hypothesis import strategies as st
from rich.console import Console
from safetensors import safe_open
from torch import nn

import fairwind as fw
from fairwind import Federation, InputError
from fairwind.data import store
from fairwind.data.groups import group_sizes
from fairwind.metrics import METRICS, OF_GROUPS, by_group, fairness
from fairwind.report import summary_table
from fairwind.report.groups import MAX_COLUMNS
from fairwind.report.labels import data_table
from fairwind.report.page import figures, page
from fairwind.report.record import read_record
from fairwind.runs.results import summary_of
from fairwind.runs.schema import HistoryLine, RunRow
from narrowed import known
from reader import Reader

X, Y = torch.arange(60, dtype=torch.float32).view(20, 3), torch.arange(20) % 2
CLIENTS = {"ann": (X[:8], Y[:8]), "bob": (X[8:14], Y[8:14]), "eve": (X[14:], Y[14:])}
GROUPS = {"ann": "rural", "bob": "urban", "eve": "rural"}
LABELS = ("rural", "urban", "rural")


def table() -> dict[str, list[Any]]:
    owners = ["ann"] * 8 + ["bob"] * 6 + ["eve"] * 6
    numbers = {f"x{i}": X[:, i].tolist() for i in range(3)}
    return {
        "client": owners, **numbers, "label": Y.tolist(), "kind": [GROUPS[owner] for owner in owners]
    }  # fmt: skip


def partitioned() -> Any:
    partitioner = NaturalIdPartitioner("client")
    partitioner.dataset = Dataset.from_dict(table())
    return partitioner


def folder(path: Path) -> Path:
    for name, (x, y) in CLIENTS.items():
        np.savez(path / f"{name}.npz", inputs=x.numpy(), targets=y.numpy())
    return path


def owners() -> torch.Tensor:
    return torch.tensor([0] * 8 + [1] * 6 + [2] * 6)


def two_splits() -> DatasetDict:
    whole = Dataset.from_dict(table())
    even = [i for i in range(20) if i % 2 == 0]
    return DatasetDict(train=whole.select(even), test=whole.select(i for i in range(20) if i % 2))


def in_parts() -> dict[str, Any]:
    return {name: {"train": (x[2:], y[2:]), "test": (x[:2], y[:2])} for name, (x, y) in CLIENTS.items()}


DOORS: dict[str, Callable[[Path], Federation]] = {
    "mapping": lambda _: Federation.from_clients(CLIENTS, groups=GROUPS),
    "sequence": lambda _: Federation.from_clients(CLIENTS, groups=list(LABELS)),
    "array": lambda _: Federation.from_clients(CLIENTS, groups=np.array(LABELS)),  # type: ignore[arg-type]
    "list of clients": lambda _: Federation.from_clients(
        list(CLIENTS.values()), names=list(CLIENTS), groups=GROUPS
    ),
    "own splits": lambda _: Federation.from_clients(in_parts(), groups=GROUPS),
    "owners": lambda _: Federation.from_owners(X, Y, owners(), names=list(CLIENTS), groups=GROUPS),
    "frame": lambda _: Federation.from_frame(
        pd.DataFrame(table()), client="client", target="label", group="kind"
    ),
    "categories": lambda _: Federation.from_frame(
        pd.DataFrame(table()).astype({"kind": "category"}), client="client", target="label", group="kind"
    ),
    "dataset": lambda _: Federation.from_dataset(
        Dataset.from_dict(table()), client="client", inputs="x0", group="kind"
    ),
    "two splits": lambda _: Federation.from_dataset(two_splits(), client="client", inputs="x0", group="kind"),
    "partitioner": lambda _: Federation.from_partitioner(partitioned(), inputs="x0", groups=GROUPS),
    "folder": lambda path: Federation.from_folder(folder(path), groups=GROUPS),
    "constructor": lambda _: Federation(**{**vars(Federation.from_clients(CLIENTS)), "groups": GROUPS}),
    "replace": lambda _: replace(Federation.from_clients(CLIENTS), groups=GROUPS),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_takes_groups(door: str, tmp_path: Path) -> None:
    federation = DOORS[door](tmp_path)
    assert federation.names == ("ann", "bob", "eve")
    assert federation.groups == LABELS
    assert all(type(label) is str for label in federation.groups)


def test_a_groups_column_is_no_input() -> None:
    frame = pd.DataFrame(table())
    with_groups = Federation.from_frame(frame, client="client", target="label", group="kind")
    without = Federation.from_frame(frame.drop(columns="kind"), client="client", target="label")
    assert torch.equal(with_groups.inputs, without.inputs)  # type: ignore[arg-type]


def test_names_that_are_numbers_are_found_by_their_numbers() -> None:
    clients = {7: (X[:8], Y[:8]), 8: (X[8:], Y[8:])}
    federation = Federation.from_clients(clients, groups={8: "b", 7: "a"})  # type: ignore[dict-item]
    assert federation.groups == ("a", "b")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"ann": "a", "bob": "b"}, "client 'eve' has no group: add it to groups="),
        ({**GROUPS, "evf": "a"}, "a client 'evf', which the federation does not have; did you mean 'eve'?"),
        ({**GROUPS, "zzzz": "a"}, "a client 'zzzz', which the federation does not have; leave it out"),
        ({}, "client 'ann' has no group"),
        (["a", "b"], "2 groups for 3 clients (client 'eve' has none): give each client one"),
        (["a", "b", "c", "d"], "4 groups for 3 clients (too many)"),
        ([], "0 groups for 3 clients (client 'ann' has none)"),
        (["a", 3, "c"], "client 'bob': its group is 3, not a string; write it as one, such as '3'"),
        (["a", None, "c"], "client 'bob': its group is None, not a string; write it as one, such as 'other'"),
        ({**GROUPS, "bob": math.nan}, "client 'bob': its group is nan, not a string"),
        (["a", "b", " "], "client 'eve': its group is an empty string; write a label"),
        ("abc", "groups are a str: give a dict by the clients' names"),
        ({"a", "b", "c"}, "groups are a set: give a dict by the clients' names"),
        (7, "groups are a int: give a dict by the clients' names"),
        (pd.Series(GROUPS), "groups are a Series: give a dict by the clients' names, as series.to_dict()"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups: Any, message: str) -> None:
    for door in (
        lambda: Federation.from_clients(CLIENTS, groups=groups),
        lambda: replace(Federation.from_clients(CLIENTS), groups=groups),
    ):
        with pytest.raises(InputError) as caught:
            door()  # type: ignore[no-untyped-call]
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["frame", "dataset"])
@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        (
            {"kind": ["rural"] * 9 + ["urban"] * 11},
            {},
            "client 'bob' is of two groups in column 'kind', 'rural' and 'urban': give all its rows one",
        ),
        ({"kind": [1] * 20}, {}, "client 'ann': its group is 1, not a string; write it as one, such as '1'"),
        ({}, {"group": "sort"}, "has no column 'sort'; it has client"),
        ({}, {"group": "client"}, "column 'client' is named twice"),
    ],
)
def test_a_groups_column_that_does_not_fit_is_refused(
    kind: str, changed: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    columns = table() | changed
    given: dict[str, Any] = {"client": "client", "group": "kind", "inputs": "x0"} | options
    makers = {
        "frame": lambda: Federation.from_frame(pd.DataFrame(columns), target="label", **given),
        "dataset": lambda: Federation.from_dataset(Dataset.from_dict(columns), **given),
    }
    with pytest.raises(InputError) as caught:
        makers[kind]()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda c: Federation.from_frame(pd.DataFrame(c), client="client", target="label", group="kind"),
            "column 'kind' has no value in row 3; fill it or drop the row",
        ),
        (
            lambda c: Federation.from_dataset(
                Dataset.from_dict(c), client="client", inputs="x0", group="kind"
            ),
            "client 'ann' is of two groups in column 'kind', 'rural' and None",
        ),
    ],
)
def test_a_missing_group_in_a_column_is_refused(make: Callable[..., Federation], message: str) -> None:
    columns = table()
    columns["kind"][3] = None
    with pytest.raises(InputError, match=re.escape(message)):
        make(columns)


def test_groups_stay_with_a_federation(tmp_path: Path) -> None:
    federation = Federation.from_clients(CLIENTS, groups=GROUPS)
    assert federation.to("cpu").groups == federation.to("cpu", keep_on_host=True).groups == LABELS
    assert replace(federation, name="other").groups == LABELS
    kept = store.save(tmp_path / "x", federation, {"source": []}).load()
    assert (kept.groups, kept.digest()) == (LABELS, federation.digest())


def test_groups_are_described_and_change_the_digest() -> None:
    plain, federation = Federation.from_clients(CLIENTS), Federation.from_clients(CLIENTS, groups=GROUPS)
    assert federation.describe() == plain.describe() | {"groups": {"rural": 2, "urban": 1}}
    swapped = Federation.from_clients(CLIENTS, groups=["urban", "rural", "urban"])
    assert len({plain.digest(), federation.digest(), swapped.digest()}) == 3
    out = StringIO()
    Console(file=out, width=100).print(data_table("mine", federation))
    assert re.search(r"groups +rural \(2\), urban \(1\)", out.getvalue())


def test_the_digest_without_groups_is_what_it_was() -> None:
    federation = Federation.from_clients({"ann": (X[:8], Y[:8]), "bob": (X[8:], Y[8:])})
    assert federation.digest()[:16] == "ed21a4fd8808de97"
    assert federation.groups == ()
    assert "groups" not in federation.describe()


def test_by_hand_accuracy() -> None:
    score, size = [80, 60, 90, 100, math.nan], [5, 50, 10, 1, 0]
    found = by_group(score, size, ["a", "a", "b", "b", "c"], "accuracy")
    assert found == {
        "groups": {
            "a": {"clients": 2, "avg": 70.0},  # (80 + 60) / 2, whatever their sizes
            "b": {"clients": 2, "avg": 95.0},
            "c": {"clients": 0, "avg": None},  # no test samples
        },
        "worst_group": "a",
        "worst_group_avg": 70.0,
        "group_gap": 25.0,
    }


def test_by_hand_mae() -> None:
    score, size = [1.0, 2.0, 0.5, math.nan, 9.0], [5, 5, 5, 5, 0]
    found = by_group(score, size, ["a", "a", "b", "b", "b"], "lower")
    assert found["groups"] == {"a": {"clients": 2, "avg": 1.5}, "b": {"clients": 1, "avg": 0.5}}
    assert (found["worst_group"], found["worst_group_avg"], found["group_gap"]) == ("a", 1.5, 1.0)


@pytest.mark.parametrize(
    ("score", "kind"),
    [([math.inf, 1.0], "lower"), ([math.nan, math.nan], "lower"), ([-math.inf, math.inf], "higher")],
)
def test_what_is_not_finite_is_null(score: list[float], kind: Any) -> None:
    found = by_group(score, [3, 3], ["a", "b"], kind)
    assert [found.get(key, "") for key in ("worst_group", *OF_GROUPS)] == [None, None, None]
    json.dumps(found, allow_nan=False)


def test_a_tie_goes_to_the_first_label_and_one_group_has_no_gap() -> None:
    assert by_group([50, 50], [1, 1], ["b", "a"], "accuracy")["worst_group"] == "a"
    assert by_group([50, 70], [1, 1], ["a", "a"], "accuracy")["group_gap"] == 0.0


@drawn(
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9), st.sampled_from("abc")), min_size=1),
    st.sampled_from(["accuracy", "higher", "lower"]),
)
def test_groups_of_one_client_are_the_clients_and_one_group_is_the_average(clients: Any, kind: Any) -> None:
    score, size, _ = zip(*clients, strict=True)
    whole = fairness(score, score, size, kind)
    one = by_group(score, size, ["all"] * len(score), kind)
    assert one["worst_group_avg"] == pytest.approx(whole["avg"])
    each = by_group(score, size, [str(k) for k in range(len(score))], kind)
    assert each["worst_group_avg"] == pytest.approx(whole["worst"])
    assert each["group_gap"] == pytest.approx(max(score) - min(score))


def task(groups: Any = None, *, mae: bool = False, clients: int = 6) -> fw.Task:
    draw = torch.Generator().manual_seed(0)
    given = []
    for k in range(clients):
        x = torch.randn(10 + 5 * k, 4, generator=draw) + 0.2 * k
        given.append((x, x.sum(1, keepdim=True) if mae else (x[:, 0] > k % 2).long()))
    federation = Federation.from_clients(given, groups=groups)
    if mae:
        scores = [fw.scores.mae, fw.scores.r2]
        return fw.Task(lambda: nn.Linear(4, 1), federation, loss=nn.functional.mse_loss, score=scores)
    return fw.Task(lambda: nn.Linear(4, 2), federation, score=[fw.scores.accuracy, fw.scores.f1])


OPTIONS: dict[str, Any] = {
    "seeds": [0, 1], "rounds": 4, "eval_every": 2, "compile": "off", "progress": False, "workers": 1,
}  # fmt: skip
ALGORITHMS = ["fedavg", "adafedadam"]
SIX = ["rural", "urban", "rural", "urban", "rural", "<b>port</b>"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> fw.Comparison:
    return fw.compare(task(SIX), ALGORITHMS, out=tmp_path_factory.mktemp("groups") / "run", **OPTIONS)


def test_results_and_history_have_groups(compared: fw.Comparison) -> None:
    assert compared.results["federation"]["groups"] == {"<b>port</b>": 1, "rural": 3, "urban": 2}
    for run, row in zip(compared, compared.results["runs"], strict=True):
        wanted = by_group(run.score, [2] * 6, SIX, "accuracy")
        last = run.history[-1]
        assert wanted.items() <= last.items()
        assert (row["groups"], row["worst_group"]) == (wanted["groups"], wanted["worst_group"])
        assert {key: row["final"][key] for key in OF_GROUPS} == {
            key: wanted.get(key, "") for key in OF_GROUPS
        }
        assert (run.groups, run.worst_group) == (wanted["groups"], wanted["worst_group"])
        assert run.metrics["group_gap"] == wanted["group_gap"]
        f1 = by_group(run.scores["f1"], [2] * 6, SIX, "higher")
        assert row["scores"]["f1"] == last["scores"]["f1"]
        assert f1.items() <= row["scores"]["f1"].items()
        assert all("groups" in line for line in run.history)


def test_the_summary_is_over_seeds(compared: fw.Comparison) -> None:
    for line in compared.results["summary"]:
        runs = [run for run in compared if run.algorithm == line["algorithm"]]
        for key in OF_GROUPS:
            assert line[key]["mean"] == pytest.approx(np.mean([known(run.metrics[key]) for run in runs]))
        rural = [known(run.groups["rural"]["avg"]) for run in runs]
        assert line["groups"]["rural"] == {
            "clients": 3,
            "avg": {"mean": pytest.approx(np.mean(rural)), "std": pytest.approx(np.std(rural))},
        }
        assert set(line["scores"]["f1"]["groups"]) == set(SIX)


def test_pandas(compared: fw.Comparison) -> None:
    groups = compared.groups_to_pandas()
    assert list(groups) == ["algorithm", "seed", "group", "clients", "avg"]
    assert len(groups) == 4 * 3
    clients = compared.clients_to_pandas()
    assert clients.group.tolist() == SIX * 4
    means = clients.groupby(["algorithm", "seed", "group"]).accuracy.mean()
    for row in groups.itertuples():
        assert row.avg == pytest.approx(means[row.algorithm, row.seed, row.group], rel=1e-5)
    runs = compared.to_pandas()
    assert runs.worst_group.tolist() == [run.worst_group for run in compared]
    assert runs.group_gap.tolist() == [run.metrics["group_gap"] for run in compared]


def test_loading_keeps_groups(compared: fw.Comparison) -> None:
    assert compared.path is not None
    loaded = fw.load(compared.path)
    assert loaded.groups == compared.groups == SIX
    for mine, theirs in zip(loaded, compared, strict=True):
        assert (mine.groups, mine.worst_group) == (theirs.groups, theirs.worst_group)
        assert (mine.metrics, mine.history) == (theirs.metrics, theirs.history)
    assert loaded.groups_to_pandas().equals(compared.groups_to_pandas())


def test_a_comparison_goes_on_with_its_groups_and_with_no_others(
    compared: fw.Comparison, tmp_path: Path
) -> None:
    def stop(lines: list[HistoryLine]) -> None:
        assert all(set(line["groups"]) == set(SIX) for line in lines)
        if lines[0]["round"] == 4:
            raise RuntimeError("stop")

    out = tmp_path / "run"
    with pytest.raises(RuntimeError, match="stop"):
        fw.compare(
            task(SIX), ALGORITHMS, out=out, checkpoint_every=0, after_evaluation=stop, **OPTIONS
        )  # fmt: skip
    for groups in (None, [*SIX[:5], "urban"]):
        with pytest.raises(InputError, match="differs in its data"):
            fw.compare(task(groups), ALGORITHMS, out=out, **OPTIONS)
    again = fw.compare(task(SIX), ALGORITHMS, out=out, **OPTIONS)
    for key in ("runs", "summary", "federation"):
        assert again.results[key] == compared.results[key]
    assert compared.path is not None
    assert (out / "history.jsonl").read_bytes() == (compared.path / "history.jsonl").read_bytes()


def test_groups_given_to_prepared_data_are_part_of_what_a_run_is_known_by(tmp_path: Path) -> None:
    kept = store.save(tmp_path / "x", task().federation, {"source": []}).load()
    assert "digest" in kept.origin
    first = fw.Task(lambda: nn.Linear(4, 2), replace(kept, groups=tuple(SIX)))
    fw.compare(first, "fedavg", out=tmp_path / "run", **OPTIONS)
    other = replace(first, federation=replace(kept, groups=("a",) * 6))
    with pytest.raises(InputError, match="differs in its data"):
        fw.compare(other, "fedavg", out=tmp_path / "run", **OPTIONS)


def test_where_lower_is_better_the_worst_group_has_the_largest_error() -> None:
    run = fw.compare(task(SIX, mae=True), "fedavg", **OPTIONS)[0]
    averages = {label: known(group["avg"]) for label, group in run.groups.items()}
    assert run.worst_group == max(averages, key=lambda label: averages[label])
    assert run.metrics["worst_group_avg"] == max(averages.values())
    assert run.metrics["group_gap"] == pytest.approx(max(averages.values()) - min(averages.values()))


def test_without_groups_nothing_is_new(tmp_path: Path) -> None:
    compared = fw.compare(task(), ALGORITHMS, out=tmp_path / "run", **OPTIONS)
    for row in compared.results["runs"]:
        assert list(row) == [
            "algorithm", "seed", "rounds", "final", "cost", "scores", "left_out", "stalled_rounds",
        ]  # fmt: skip
        assert tuple(row["final"]) == METRICS
        assert set(row["scores"]["f1"]) <= set(METRICS)
    for mean in compared.results["summary"]:
        assert list(mean) == ["algorithm", *METRICS, "scores"]
        assert set(mean["scores"]["f1"]) <= set(METRICS)
    with_groups = fw.compare(task(SIX), ALGORITHMS, **OPTIONS)
    for mine, theirs in zip(compared, with_groups, strict=True):
        assert mine.metrics == {key: theirs.metrics[key] for key in METRICS}
        for line, other in zip(mine.history, theirs.history, strict=True):
            new = {"groups", "worst_group", *OF_GROUPS}
            assert set(other) - set(line) == new
            assert all(other.get(key, "") == value for key, value in line.items() if key != "scores")
            assert set(other["scores"]["f1"]) - set(line["scores"]["f1"]) == new
    with safe_open(tmp_path / "run" / "clients.safetensors", framework="pt") as file:
        assert set(file.metadata()) == {"names", "rounds"}
    assert (compared.groups, compared[0].groups, compared[0].worst_group) == ([], {}, None)
    assert "group" not in compared.clients_to_pandas()
    assert "worst_group" not in compared.to_pandas()
    with pytest.raises(InputError, match="the clients are in no groups: give"):
        compared.groups_to_pandas()
    record = read_record(tmp_path / "run")
    assert "groups" not in figures(record)
    assert "Groups" not in Reader(page(record, figures(record))).headings
    assert "worst group" not in repr(compared)
    assert "weighted" in repr(compared)


def test_the_terminal_shows_worst_group_and_gap_in_80_columns(compared: fw.Comparison) -> None:
    out = StringIO()
    Console(file=out, width=80).print(summary_table(compared.results))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert re.search(r"average +STD +worst 30 % +worst group +gap", out.getvalue())
    for row in compared.results["summary"]:
        shown = f"{row['worst_group_avg']['mean']:.2f}"
        assert sum(shown in line for line in lines) >= 1
    assert "Worst group: " in out.getvalue()


def test_the_page_has_a_table_and_a_chart_of_groups(compared: fw.Comparison) -> None:
    assert compared.path is not None
    record = read_record(compared.path)
    specs = figures(record)
    assert specs["groups"]["description"] == "Average accuracy of each group of clients, by algorithm"
    html = page(record, specs)
    seen = Reader(html)
    assert "Groups" in seen.headings
    assert "<b>port</b>" not in html.replace("\\u003c", "")  # a label is text, not markup
    (head,) = [row for row in seen.rows if any("rural, 3 clients" in cell for cell, _ in row)][:1]
    assert [cell for cell, _ in head[1:]] == [
        "<b>port</b>, 1 client", "rural, 3 clients", "urban, 2 clients", "worst group", "gap",
    ]  # fmt: skip
    start = seen.rows.index(head) + 1
    for row, line in zip(seen.rows[start : start + 2], compared.results["summary"], strict=True):
        means = [known(group["avg"]["mean"]) for group in line["groups"].values()]
        cells = [cell for cell, _ in row[1:4]]
        assert [f"{mean:.2f}" for mean in means] == [cell.lstrip("▾").split()[0] for cell in cells]
        (marked,) = [mean for mean, cell in zip(means, cells, strict=True) if cell.startswith("▾")]
        assert marked == min(means)
    assert html.count('role="img" aria-label="worst group"') == 2 * 2  # of each algorithm by each score


def test_the_page_of_many_groups_has_the_worst(tmp_path: Path) -> None:
    many = [f"g{k:02d}" for k in range(30)]
    compared = fw.compare(task(many, clients=30), "fedavg", out=tmp_path / "run", **OPTIONS)
    html = compared.report().read_text()
    shown = next(row for row in Reader(html).rows if sum("client" in cell for cell, _ in row) > 2)
    assert len(shown) == 1 + MAX_COLUMNS + 2
    groups = compared.results["summary"][0]["groups"]
    worst = min(groups, key=lambda label: known(groups[label]["avg"]["mean"]))
    assert shown[1][0] == f"{worst}, 1 client"
    assert (tmp_path / "run" / "figures" / "groups.pdf").exists()


def test_a_group_without_test_samples_is_shown_without_a_number(tmp_path: Path) -> None:
    clients = {f"c{k}": (X, Y) for k in range(3)} | {"small": (X[:1], Y[:1])}
    federation = Federation.from_clients(clients, groups=["a", "b", "b", "empty"])
    run = fw.Task(lambda: nn.Linear(3, 2), federation)
    compared = fw.compare(run, ALGORITHMS, out=tmp_path / "run", **OPTIONS)
    assert compared[0].groups["empty"] == {"clients": 0, "avg": None}
    assert compared[0].worst_group in ("a", "b")
    rows = Reader(compared.report().read_text()).rows
    assert any("empty, 0 clients" in [cell for cell, _ in row] for row in rows)
    assert [row for row in rows if row[0][0] == "FedAvg"][3][3][0] == "–"


def test_group_sizes_and_summaries_of_older_results() -> None:
    assert group_sizes(["b", "a", "b"]) == {"a": 1, "b": 2}
    rows = [{"algorithm": "fedavg", "final": {"avg": 1.0}}]
    assert summary_of(cast(list[RunRow], rows)) == [{"algorithm": "fedavg", "avg": {"mean": 1.0, "std": 0.0}}]


@pytest.mark.slow
def test_the_documented_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", text.partition("## Groups")[2], re.S)[:2]
    exec(compile(code, "tasks.md", "exec"), {})
    said, shape = capsys.readouterr().out, lambda out: re.sub(r"[\d.±\s─]+", " ", out)
    assert shape(said).split() == shape(shown).split()  # type: ignore[no-untyped-call]


def test_personal_models_are_measured_by_group_too() -> None:
    compared = fw.compare(task(SIX), "ditto", **OPTIONS)
    assert len(compared) > 2  # the shared model and the clients' own, under each of two seeds
    for run in compared:
        assert run.groups == by_group(run.score, [2] * 6, SIX, "accuracy")["groups"]
