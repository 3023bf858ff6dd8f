"""Columns with names are matched by their names, at every door where data comes in; or they are refused."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from torch import nn

from fairwind import Federation, InputError, Task, compare, evaluate, load, simulate
from fairwind.algorithms import build
from fairwind.comparison import Result
from fairwind.exchange.client import LocalClient
from fairwind.exchange.message import RefusedError
from samples import as_dict, as_tensor, as_tuple

AGES, WEIGHTS, LABELS = [30.0, 41, 52, 63], [1.0, 2, 3, 4], np.array([0, 1, 0, 1])


def frame(*names: str) -> pd.DataFrame:
    """Four samples with columns in an order."""
    return pd.DataFrame({"age": AGES, "weight": WEIGHTS, "height": [9.0, 8, 7, 6]})[list(names)]


FIRST, OTHER = frame("age", "weight"), frame("weight", "age")


def trained(federation: Federation, **options: Any) -> Result:
    torch.manual_seed(0)
    return simulate(Task(nn.Linear(2, 2), federation), "fedavg", rounds=1, **options)


def rows(federation: Federation) -> list[list[float]]:
    return sorted(as_tensor(federation.inputs).tolist())


TWICE = sorted(2 * [list(pair) for pair in zip(AGES, WEIGHTS, strict=True)])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda given: given,
        lambda given: given.astype(object),
        lambda given: [row for _, row in given.iterrows()],
        lambda given: list(given.itertuples(index=False)),
        lambda given: given.astype("Float64"),
    ],
    ids=["frame", "objects", "rows", "tuples", "nullable"],
)
def test_columns_of_clients_in_another_order_are_matched_by_name(wrap: Callable[[Any], Any]) -> None:
    federation = Federation.from_clients({"ann": (wrap(FIRST), LABELS), "bob": (wrap(OTHER), LABELS)})
    assert rows(federation) == TWICE
    assert federation.columns["inputs"] == ("age", "weight")
    parts = {"train": (wrap(OTHER), LABELS), "test": (wrap(FIRST), LABELS)}
    split = Federation.from_clients({"ann": parts})
    assert split.columns["inputs"] == ("weight", "age")
    assert rows(split) == sorted(row[::-1] for row in TWICE)


def test_columns_in_tuples_dicts_and_targets_are_matched_by_name() -> None:
    nested = Federation.from_clients(
        [({"a": FIRST, "b": X}, (LABELS, FIRST)), ({"b": X, "a": OTHER}, (LABELS, OTHER))]
    )
    assert sorted(as_dict(nested.inputs)["a"].tolist()) == TWICE
    assert list(as_dict(nested.inputs)) == ["a", "b"]
    assert sorted(as_tuple(nested.targets)[1].tolist()) == TWICE
    assert set(nested.columns) == {"inputs.a", "targets[1]"}


X = np.zeros((4, 1), dtype=np.float32)


def test_frames_that_are_sequences_are_matched_by_name() -> None:
    for pad, place in ((0, "inputs"), ("mask", "inputs[0]")):
        federation = Federation.from_clients(
            [([FIRST, FIRST[:2]], [0, 1]), ([OTHER[:3], OTHER[:1]], [0, 1])], pad=pad, train=1.0
        )
        given: Any = federation.inputs if pad == 0 else as_tuple(federation.inputs)[0]
        assert given.shape == (4, 4, 2)
        assert given[..., 0].max(1).values.sort().values.tolist() == [30, 41, 52, 63]
        assert federation.columns == {place: ("age", "weight")}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (frame("age", "height"), "missing: weight; not there: height"),
        (frame("age"), "missing: weight"),
        (frame("age", "weight", "height"), "not there: height"),
        (FIRST.set_axis(["age", "age"], axis=1), "two columns 'age'"),
        (FIRST.rename(columns=str.upper), "missing: age, weight; not there: AGE, WEIGHT"),
    ],
)
def test_other_columns_are_refused_by_client_and_name(given: pd.DataFrame, words: str) -> None:
    with pytest.raises(InputError) as caught:
        Federation.from_clients({"ann": (FIRST, LABELS), "bob": (given, LABELS)})
    assert "client 'bob': inputs" in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_targets_of_another_name_are_refused() -> None:
    one, other = (pd.Series(LABELS, name=name) for name in ("ill", "dead"))
    with pytest.raises(
        InputError, match=r"client 'bob': targets have other columns.*missing: ill; not there: dead"
    ):
        Federation.from_clients({"ann": (X, one), "bob": (X, other)})


def test_arrays_stay_by_position_unless_two_orders_are_possible() -> None:
    array = FIRST.to_numpy()
    assert rows(Federation.from_clients([(array, LABELS), (FIRST, LABELS)])) == TWICE
    plain = pd.DataFrame(array)
    assert plain.columns.tolist() == [0, 1]
    federation = Federation.from_clients([(plain, LABELS), (array, LABELS)])
    assert rows(federation) == TWICE
    assert not federation.columns
    assert rows(Federation.from_clients([(plain[[1, 0]], LABELS), (plain, LABELS)])) == TWICE
    with pytest.raises(InputError, match="client 'cy': inputs have no column names"):
        Federation.from_clients({"ann": (FIRST, LABELS), "bob": (OTHER, LABELS), "cy": (array, LABELS)})


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


def test_csv_files_are_matched_by_their_headers(tmp_path: Path) -> None:
    write(tmp_path, ann="age,weight,target\n30,1,0\n41,2,1\n", bob="target,weight,age\n0,3,52\n1,4,63\n")
    federation = Federation.from_folder(tmp_path)
    assert rows(federation) == sorted([list(pair) for pair in zip(AGES, WEIGHTS, strict=True)])
    assert federation.columns == {"inputs": ("age", "weight")}
    write(tmp_path, cy="age,size,target\n1,2,0\n")
    with pytest.raises(
        InputError, match=r"client 'cy': inputs have other columns.*missing: weight; not there: size"
    ):
        Federation.from_folder(tmp_path)


def test_a_trained_model_predicts_by_name() -> None:
    for federation in (
        Federation.from_clients([(FIRST, LABELS), (OTHER, LABELS)]),
        Federation.from_owners(FIRST, LABELS, [0, 0, 1, 1], names=["a", "b"]),
        Federation.from_owners(
            FIRST.to_numpy(), LABELS, [0, 0, 1, 1], names=["a", "b"], columns={"inputs": ["age", "weight"]}
        ),
        Federation.from_frame(FIRST.assign(who="ann", y=LABELS), client="who", target="y"),
    ):
        result = trained(federation)
        wanted = result.predict(FIRST.to_numpy())
        assert torch.equal(result.predict(FIRST), wanted)
        assert torch.equal(result.predict(OTHER), wanted)
        with pytest.raises(InputError, match="missing: weight; not there: height"):
            result.predict(frame("age", "height"))
    unnamed = trained(Federation.from_clients([(FIRST.to_numpy(), LABELS)]))
    assert torch.equal(unnamed.predict(OTHER), unnamed.predict(OTHER.to_numpy()))


@pytest.mark.parametrize("columns", [{"inputs": ["age", "size", "y"]}, {"input": ["age", "weight"]}])
def test_names_that_fit_no_columns_are_refused(columns: dict[str, list[str]]) -> None:
    with pytest.raises(InputError, match="give a name for each column"):
        Federation.from_owners(FIRST.to_numpy(), LABELS, [0] * 4, names=["a"], columns=columns)


def test_other_federations_are_evaluated_by_name() -> None:
    one, other, wrong = (
        Federation.from_clients([{"train": (given, LABELS), "test": (given, LABELS)}])
        for given in (FIRST, OTHER, frame("age", "height"))
    )
    model = trained(one).model
    assert evaluate(model, other).loss == evaluate(model, one).loss
    with pytest.raises(InputError, match="the inputs have other columns than those of training"):
        evaluate(model, wrong)


def test_a_graph_says_which_columns_it_takes(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    result = trained(Federation.from_clients([(FIRST, LABELS)]))
    graph = onnx.load(result.save(tmp_path / "model.onnx"))
    found = {each.key: each.value for each in graph.metadata_props}
    assert json.loads(found["columns"]) == {"inputs": ["age", "weight"]}


def test_the_columns_are_kept_with_the_results(tmp_path: Path) -> None:
    federation = Federation.from_clients([(FIRST, LABELS), (OTHER, LABELS)])
    torch.manual_seed(0)
    task = Task(nn.Linear(2, 2), federation)
    before = compare(task, ["fedavg"], seeds=[0], rounds=1, out=tmp_path / "run")[0]
    for given in (federation, Federation.from_clients([(FIRST.to_numpy(), LABELS)] * 2)):
        result = load(tmp_path / "run", task=Task(nn.Linear(2, 2), given))[0]
        assert torch.equal(result.predict(OTHER), before.predict(FIRST))
    swapped = Federation.from_clients([(OTHER, LABELS), (FIRST, LABELS)])
    other = load(tmp_path / "run", task=Task(nn.Linear(2, 2), swapped))[0]
    assert torch.equal(other.predict("0"), before.predict("0"))
    wrong = Federation.from_clients([(frame("age", "height"), LABELS)])
    with pytest.raises(InputError, match="inputs have other columns than those of training"):
        load(tmp_path / "run", task=Task(nn.Linear(2, 2), wrong))[0].predict("0")


def test_a_site_of_a_real_federation_takes_the_servers_order() -> None:
    algorithm, model = build("fedavg"), nn.Linear(2, 2)
    columns = Federation.from_clients([(FIRST, LABELS)]).columns
    sites = [Federation.from_clients([(given, LABELS)], train=1.0) for given in (FIRST, OTHER)]
    clients = [LocalClient(Task(model, site), algorithm, columns=columns) for site in sites]
    assert torch.equal(as_tensor(clients[0].federation.inputs), as_tensor(clients[1].federation.inputs))
    wrong = Federation.from_clients([(frame("age", "height"), LABELS)])
    with pytest.raises(RefusedError, match="missing: weight; not there: height"):  # the server is told why
        LocalClient(Task(model, wrong), algorithm, columns=columns)


def classed(names: list[str]) -> Federation:
    """Samples of "no" and "yes", the classes in an order."""
    rows = {
        "c": [0] * 4,
        "x": [[-2.0], [2.0], [-1.0], [1.0]],
        "y": [names.index(n) for n in ["no", "yes"] * 2],
    }
    kinds = Features({"c": Value("int64"), "x": List(Value("float32")), "y": ClassLabel(names=names)})
    return Federation.from_dataset(
        Dataset.from_dict(rows, kinds), client="c", inputs="x", targets="y", train=0.5
    )


def test_classes_in_another_order_are_refused() -> None:
    same, other = (classed(names) for names in (["no", "yes"], ["yes", "no"]))
    task = Task(nn.Linear(1, 2), same)
    model = simulate(task, "fedavg", rounds=1).model
    words = "class 0 is 'yes', and 'no' among"
    doors: list[Callable[[], object]] = [
        lambda: evaluate(model, other),
        lambda: evaluate(nn.Sequential(model, nn.LogSoftmax(1)), other),
        lambda: replace(same, new_clients=other),
        lambda: simulate(Task(model, other), "fedavg", rounds=1),
        lambda: simulate(Task(lambda: model, other), "fedavg", rounds=1),
        lambda: LocalClient(Task(nn.Linear(1, 2), other), build("fedavg"), columns=same.meanings),
    ]
    for door in doors:
        with pytest.raises((InputError, RefusedError), match=words):
            door()
    assert evaluate(model, classed(["no", "yes", "perhaps"])).clients == ["0"]  # 0 and 1 mean the same


def test_a_trained_module_inside_another_takes_its_columns_by_name() -> None:
    one, other = (
        Federation.from_clients([{"train": (given, LABELS), "test": (given, LABELS)}])
        for given in (FIRST, OTHER)
    )
    model = trained(one).model
    inside = nn.Sequential(model, nn.LogSoftmax(1))
    assert evaluate(inside, other).loss == evaluate(model, one).loss
    for given in (model, inside, lambda: copy.deepcopy(inside)):
        on = [simulate(Task(given, federation), "fedavg", rounds=1) for federation in (one, other)]
        assert on[0].columns == on[1].columns == {"inputs": ["age", "weight"]}
        for name, value in on[0].state_dict.items():
            assert torch.equal(on[1].state_dict[name], value)
        assert torch.equal(on[0].predict("0"), on[1].predict("0"))
        assert torch.equal(on[0].predict(FIRST), on[1].predict(FIRST))
    both = nn.Sequential(trained(one).model, trained(other).model)
    with pytest.raises(InputError, match="parts that were trained on columns in several orders"):
        evaluate(both, one)


@pytest.mark.parametrize("finished", [True, False])
def test_a_directory_of_other_names_is_refused(finished: bool, tmp_path: Path) -> None:
    def task(columns: list[str]) -> Task:
        return Task(
            lambda: nn.Linear(2, 2), Federation.from_clients([(FIRST.set_axis(columns, axis=1), LABELS)])
        )

    budget: Any = {} if finished else {"time_budget": 1e-9}
    compare(task(["age", "weight"]), ["fedavg"], seeds=[0], rounds=3, out=tmp_path / "run", **budget)
    with pytest.raises(InputError, match="names of inputs, which were age, weight and are weight, age"):
        compare(task(["weight", "age"]), ["fedavg"], seeds=[0], rounds=3, out=tmp_path / "run")
    again = compare(task(["age", "weight"]), ["fedavg"], seeds=[0], rounds=3, out=tmp_path / "run")
    assert again[0].columns["inputs"] == ["age", "weight"]


def test_a_site_refuses_a_server_that_names_no_columns() -> None:
    site = Federation.from_clients([(FIRST, LABELS)])
    with pytest.raises(RefusedError, match=r"the inputs have columns with names \(age, weight\)"):
        LocalClient(Task(nn.Linear(2, 2), site), build("fedavg"), columns={})
    arrays = Federation.from_clients([(FIRST.to_numpy(), LABELS)])
    assert LocalClient(Task(nn.Linear(2, 2), arrays), build("fedavg"), columns={}).federation.names == ("0",)
