"""Numbers that float32 would round too much, such as times in seconds, are refused at every door."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, Features, List, Value
from flwr_datasets.partitioner import IidPartitioner
from torch import nn

from fairwind import Federation, InputError, Task, evaluate, simulate
from samples import as_tensor

SECONDS = [1700000001, 1700000002, 1700000003, 1700000004]
LABELS = [0, 1, 0, 1]
WORDS = "hold whole numbers such as 1700000001, which float32 would round to 1700000000"


def table(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"who": ["ann", "bob"] * 2, "x": 0.5, "y": LABELS} | columns)


def dataset(kind: Any, values: Any) -> Dataset:
    kinds = Features({"who": Value("string"), "time": kind, "y": Value("int64")})
    return Dataset.from_dict({"who": ["ann", "bob"] * 2, "time": values, "y": LABELS}, features=kinds)


def csv(folder: Path, text: str) -> Federation:
    (folder / "ann.csv").write_text(text)
    return Federation.from_folder(folder)


def partitioned(data: Dataset) -> Federation:
    partitioner = IidPartitioner(2)
    partitioner.dataset = data
    return Federation.from_partitioner(partitioner, inputs="time", targets="y")


CLOSE = [1_700_000_000 + i for i in range(40)]
HALF: list[float] = [1_700_000_000.5, *CLOSE[1:]]  # one fraction among whole numbers
FRACTIONS = [second + 0.25 for second in CLOSE]
FRAME: dict[str, Any] = {"client": "who", "target": "y"}
SET: dict[str, Any] = {"client": "who", "inputs": "time", "targets": "y"}


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (
            lambda _: Federation.from_frame(table(time=SECONDS), **FRAME),
            "client 'ann': the numbers of column 'time'",
        ),
        (
            lambda _: Federation.from_frame(table(time=pd.array(SECONDS, dtype="Int64")), **FRAME),
            "client 'ann': the numbers of column 'time'",
        ),
        (
            lambda _: Federation.from_frame(table(y=[float(s) for s in SECONDS]), **FRAME),
            "the numbers of column 'y'",
        ),
        (
            lambda folder: csv(folder, "time,target\n" + "".join(f"{s},0\n" for s in SECONDS)),
            "ann.csv: the numbers of column 'time'",
        ),
        (
            lambda folder: csv(folder, "x,target\n" + "".join(f"0.5,{s}\n" for s in SECONDS)),
            "ann.csv: the numbers of column 'target'",
        ),
        (
            lambda _: Federation.from_dataset(dataset(Value("float64"), map(float, SECONDS)), **SET),
            "the numbers of column 'time'",
        ),
        (
            lambda _: Federation.from_dataset(
                dataset(List(Value("float64")), [[float(s)] * n for n, s in enumerate(SECONDS, 1)]),
                pad=0,
                **SET,
            ),
            "the numbers of column 'time'",
        ),
        (
            lambda _: partitioned(dataset(Value("float64"), map(float, SECONDS))),
            "the numbers of column 'time'",
        ),
    ],
)
def test_times_in_seconds_are_refused_where_data_is_read(
    make: Callable[[Path], Federation], where: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        make(tmp_path)
    assert f"{where} {WORDS}" in str(caught.value)


def task(inputs: Any, targets: Any = LABELS, **options: Any) -> Task:
    """The second of two clients has these."""
    first = np.zeros(np.shape(inputs), dtype=np.asarray(inputs).dtype), np.zeros_like(np.asarray(targets))
    federation = Federation.from_clients({"ann": first, "bob": (inputs, targets)})
    return Task(nn.Linear(np.shape(inputs)[1], 2 if "loss" not in options else 1), federation, **options)


WIDE = np.array([[s, 0.5] for s in SECONDS])


def test_float64_is_refused_where_the_model_computes_in_float32() -> None:
    with pytest.raises(InputError, match="client 'bob': inputs hold whole numbers such as 170000000"):
        simulate(task(WIDE), "fedavg", rounds=1)
    with pytest.raises(InputError, match="client 'bob': inputs hold whole numbers such as 170000000"):
        evaluate(nn.Linear(2, 2), task(WIDE).federation)
    double = Task(nn.Linear(2, 2).double(), task(WIDE).federation)
    assert simulate(double, "fedavg", rounds=1).score.isfinite().all()
    trained = simulate(task(WIDE - [SECONDS[0], 0]), "fedavg", rounds=1)
    for given in (WIDE, np.array(SECONDS * 2).reshape(4, 2)):
        with pytest.raises(InputError, match="inputs hold whole numbers such as 170000000"):
            trained.predict(given)


def test_new_clients_are_refused_before_training() -> None:
    federation = task(WIDE).federation.with_new_clients(["bob"])
    with pytest.raises(InputError, match="client 'bob': inputs hold whole numbers such as 170000000"):
        simulate(Task(nn.Linear(2, 2), federation), "fedavg", rounds=1)


def test_integers_as_targets_of_a_regression_are_refused() -> None:
    x = np.zeros((4, 2), dtype=np.float32)
    for kind in (np.int64, np.float64):
        with pytest.raises(InputError, match="client 'bob': targets hold whole numbers such as 170000000"):
            simulate(task(x, np.array(SECONDS, dtype=kind), loss=nn.MSELoss()), "fedavg", rounds=1)


@pytest.mark.parametrize(
    "values",
    [
        [2.0**24 - 1, 2.0**24, 2.0**30, 3.0 * 2**30],  # float32 holds these
        [1700000001.25, 1.0, 2.0, 3.0],  # no column of whole numbers: rounded as decimals always are
        [0.1, 0.2, 0.3, 1e9],
        [1e30, 2.0, 3.0, 4.0],  # beyond any integer
    ],
)
def test_other_numbers_are_taken(values: list[float]) -> None:
    federation = Federation.from_frame(table(time=values), **FRAME)
    assert sorted(as_tensor(federation.inputs)[:, 1].tolist()) == pytest.approx(sorted(values))
    assert torch.isfinite(simulate(task(np.array(values)[:, None]), "fedavg", rounds=1).loss[1:]).all()


@pytest.mark.parametrize("times", [HALF, FRACTIONS, [*FRACTIONS, 0.0]], ids=["one", "all", "beside a zero"])
def test_times_with_fractions_are_refused_too(times: list[float], tmp_path: Path) -> None:
    who, labels = ["ann", "bob"] * 20 + ["cy"] * 2, [0, 1] * 20 + [0, 1]
    rows = {"who": who[: len(times)], "time": times, "y": labels[: len(times)]}
    x = np.zeros((len(times), 1), dtype=np.float32)
    doors: list[Callable[[], object]] = [
        lambda: Federation.from_frame(pd.DataFrame(rows), **FRAME),
        lambda: Federation.from_dataset(Dataset.from_dict(rows), **SET),
        lambda: csv(tmp_path, "time,target\n" + "".join(f"{t},0\n" for t in times)),
        lambda: csv(tmp_path, "x,target\n" + "".join(f"1,{t}\n" for t in times)),
        lambda: simulate(task(np.array(times)[:, None], rows["y"]), "fedavg", rounds=1),
        lambda: evaluate(nn.Linear(1, 2), task(np.array(times)[:, None], rows["y"]).federation),
        lambda: simulate(task(x, np.array(times), loss=nn.MSELoss()), "fedavg", rounds=1),
    ]
    for door in doors:
        with pytest.raises(InputError, match="which float32 would round to 1700000000: subtract an offset"):
            door()


def test_large_integers_are_compared_as_integers() -> None:
    large = [2**60 + i for i in range(4)]  # float64 holds none of their differences
    with pytest.raises(InputError, match="hold whole numbers such as 115292150460684"):
        Federation.from_frame(table(time=large), **FRAME)


def test_integers_beyond_int64_are_refused_and_not_made_negative() -> None:
    x, beyond = np.zeros((4, 1), dtype=np.float32), np.array([2**63 + 5, 1, 2, 3], dtype=np.uint64)
    doors: list[Callable[[], object]] = [
        lambda: Federation.from_clients([(x, beyond)]),
        lambda: Federation.from_clients([(x, torch.from_numpy(beyond))]),
        lambda: Federation.from_clients([(x, list(beyond))]),
        lambda: Federation.from_frame(table(time=beyond), **FRAME),
        lambda: Federation.from_frame(table(y=pd.array(beyond, dtype="UInt64")), **FRAME),
        lambda: Federation.from_dataset(
            Dataset.from_pandas(table(y=beyond)), client="who", inputs="x", targets="y"
        ),
    ]
    for door in doors:
        with pytest.raises(InputError, match="9223372036854775813 is larger than any int64"):
            door()
    small = torch.from_numpy(beyond[1:])
    assert sorted(as_tensor(Federation.from_clients([(x[1:], small)]).targets).tolist()) == [1, 2, 3]


@pytest.mark.parametrize(
    "values",
    [
        [0.3, 0.1 + 0.2, 0.3, 0.2 + 0.1],  # a constant with errors of rounding
        [280.123456789 + i for i in range(4)],
        [2459000.25 + i / 4 for i in range(4)],  # exact
        [52.5001, 52.5002, 52.5101, 52.5102],
    ],
)
def test_numbers_that_remain_apart_are_taken(values: list[float]) -> None:
    assert len(Federation.from_frame(table(time=values), **FRAME)) == 2


def test_a_few_samples_may_be_alike() -> None:
    places = np.array([[-33.8, 151.2], [52.5, 13.4], [40.7, -74.0], [52.51, 13.3]])
    trained = simulate(task(places), "fedavg", rounds=1)
    near = places[:1] + np.arange(4)[:, None] * 1e-7
    assert trained.predict(near).isfinite().all()
