"""Clients as users have them: dicts, own splits, datasets, sequences, tables; and what newcomers give."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value
from flwr_datasets.partitioner import IidPartitioner
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from fairwind import Federation, InputError, Task, simulate
from samples import as_dict, as_tensor, as_tuple

X, Y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 0, 1])


def of(federation: Federation, name: str) -> tuple[slice, slice]:
    """Where the training and test samples of a client are."""
    k = federation.names.index(name)
    start, train, test = (int(field[k]) for field in (federation.start, federation.train, federation.test))
    return slice(start, start + train), slice(start + train, start + train + test)


def held(federation: Federation, name: str) -> list[Any]:
    """The targets of a client, in ascending order."""
    train, test = of(federation, name)
    return sorted(as_tensor(federation.targets)[train.start : test.stop].tolist())


class Squares(torch.utils.data.Dataset[Any]):
    """Counts how often each sample is read."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.read = start, [0] * size

    def __len__(self) -> int:
        return len(self.read)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.read[i] += 1
        return torch.tensor([self.start + i, (self.start + i) ** 2.0]), self.start + i


def test_a_dict_names_its_clients() -> None:
    listed = Federation.from_clients([(X, Y), (X[:2], Y[:2])], names=["ann", "bob"])
    for clients in ({"ann": (X, Y), "bob": (X[:2], Y[:2])}, {"ann": [X, Y], "bob": (X[:2].tolist(), Y[:2])}):
        federation = Federation.from_clients(clients)
        assert federation.names == ("ann", "bob")
        assert federation.digest() == listed.digest()


def test_clients_may_come_from_a_generator() -> None:
    federation = Federation.from_clients((X[:n], Y[:n]) for n in (3, 4))
    assert (federation.train + federation.test).tolist() == [3, 4]


@pytest.mark.parametrize("train", [0.8, 0.1])
def test_own_splits_are_kept_to_the_sample_and_in_their_order(train: float) -> None:
    x = torch.arange(20)[:, None].float()
    rows = {"ann": ([3, 1, 2], [9, 0]), "bob": ([19, 4], [5, 18, 6, 7]), "cy": ([8], [])}
    clients = {
        name: {"train": (x[a], x[a, 0].long()), "test": (x[b], x[b, 0].long())}
        for name, (a, b) in rows.items()
    }
    clients["cy"].pop("test")
    federation = Federation.from_clients(clients, train=train, seed=3)
    for name, (a, b) in rows.items():
        for part, wanted in zip(of(federation, name), (a, b), strict=True):
            assert as_tensor(federation.targets)[part].tolist() == wanted
            assert as_tensor(federation.inputs)[part, 0].tolist() == wanted


def test_an_empty_test_part_is_none() -> None:
    federation = Federation.from_clients([{"train": (X, Y), "test": ([], [])}])
    assert (federation.train.tolist(), federation.test.tolist()) == ([4], [0])


def test_a_dataset_is_read_once_and_its_samples_stay_together() -> None:
    clients = {"ann": Squares(0, 10), "bob": Squares(10, 5)}
    federation = Federation.from_clients({**clients, "cy": Subset(Squares(20, 9), [8, 1])})
    assert held(federation, "ann") == list(range(10))
    assert held(federation, "bob") == list(range(10, 15))
    assert held(federation, "cy") == [21, 28]
    assert torch.equal(as_tensor(federation.inputs)[:, 0].square(), as_tensor(federation.inputs)[:, 1])
    assert torch.equal(as_tensor(federation.inputs)[:, 0].long(), as_tensor(federation.targets))
    assert [client.read for client in clients.values()] == [[1] * 10, [1] * 5]
    assert federation.classes == 29


def test_datasets_may_be_split_already() -> None:
    whole = Squares(0, 10)
    parts = {"train": Subset(whole, [5, 2, 7]), "test": Subset(whole, [1, 0])}
    federation = Federation.from_clients({"ann": parts})
    assert as_tensor(federation.targets).tolist() == [5, 2, 7, 1, 0]
    assert federation.train.tolist() == [3]


def test_datasets_may_give_dicts_tuples_and_pictures() -> None:
    from PIL.Image import fromarray

    pictures = np.random.RandomState(0).randint(0, 256, (6, 4, 5, 3)).astype(np.uint8)
    samples = [({"image": fromarray(pictures[i]), "age": (i, float(i))}, np.float32(i)) for i in range(6)]
    federation = Federation.from_clients({"ann": Listed(samples)}, train=1.0)
    order = as_tensor(federation.targets).long()
    assert as_tensor(federation.targets).dtype == torch.float32
    assert torch.equal(as_dict(federation.inputs)["image"], torch.from_numpy(pictures)[order])
    assert torch.equal(as_dict(federation.inputs)["age"][0], order)
    assert torch.equal(as_dict(federation.inputs)["age"][1], order.float())


class Listed(torch.utils.data.Dataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        return self.samples[i]


def test_lists_of_arrays_object_arrays_and_frames_are_numbers() -> None:
    wanted = Federation.from_clients([(X, Y)]).digest()
    objects = np.empty(4, dtype=object)
    objects[:] = list(X)
    frozen = X.copy()
    frozen.flags.writeable = False
    columns = pd.DataFrame(X, columns=["a", "b", "c"])
    for inputs in (list(X), list(torch.tensor(X)), objects, frozen, columns, X[::-1].copy()[::-1]):
        for targets in (Y, list(Y), Y.astype(object), pd.Series(Y), Y.astype(np.uint16), Y.astype(">i8")):
            assert Federation.from_clients([(inputs, targets)]).digest() == wanted


SEQUENCES = {"ann": [[1, 2, 3], [4]], "bob": [[5, 6], [7, 8]], "cy": [[9, 10, 11, 12]]}


def sequences(wrap: Callable[[list[Any]], Any] = list) -> dict[str, Any]:
    return {name: (wrap(rows), [row[0] for row in rows]) for name, rows in SEQUENCES.items()}


def whole(federation: Federation) -> dict[int, list[int]]:
    """The padded sequences by their first number."""
    ids: Any = federation.inputs
    ids = ids if isinstance(ids, Tensor) else ids[0] if isinstance(ids, tuple) else ids["input_ids"]
    return dict(zip(as_tensor(federation.targets).tolist(), ids.tolist(), strict=True))


def filled(value: int) -> dict[int, list[int]]:
    return {row[0]: row + [value] * (4 - len(row)) for rows in SEQUENCES.values() for row in rows}


@pytest.mark.parametrize("pad", [0, -1])
def test_sequences_are_padded_to_the_longest_of_all_clients(pad: int) -> None:
    federation = Federation.from_clients(sequences(), pad=pad)
    assert as_tensor(federation.inputs).dtype == torch.int64
    assert whole(federation) == filled(pad)
    assert held(federation, "bob") == [5, 7]


@pytest.mark.parametrize("pad", ["mask", "lengths"])
def test_the_model_gets_a_mask_or_lengths_beside_a_tensor(pad: str) -> None:
    ids, beside = as_tuple(Federation.from_clients(sequences(), pad=pad).inputs)
    lengths = (ids != 0).sum(1)
    assert torch.equal(beside, lengths if pad == "lengths" else ids != 0)
    x, extra = as_tuple(Federation.from_clients([(X, Y)], pad=pad).inputs)  # also where all are of one length
    assert x.shape == (4, 3)
    assert extra.tolist() == ([3] * 4 if pad == "lengths" else [[True] * 3] * 4)


def test_a_dict_gets_an_attention_mask_as_tokenizers_give_it() -> None:
    federation = Federation.from_clients(sequences(lambda rows: {"input_ids": rows}), pad="mask")
    assert whole(federation) == filled(0)
    mask = as_dict(federation.inputs)["attention_mask"]
    assert mask.dtype == torch.int64
    assert torch.equal(mask, (as_dict(federation.inputs)["input_ids"] != 0).long())

    def tokenized(rows: list[Any]) -> dict[str, Any]:
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}

    for pad in ("mask", {"input_ids": 0}):
        assert Federation.from_clients(sequences(tokenized), pad=pad).digest() == federation.digest()
    other = Federation.from_clients(sequences(tokenized), pad={"input_ids": 50})
    assert whole(other) == filled(50)
    assert torch.equal(as_dict(other.inputs)["attention_mask"], mask)


def test_sequences_of_vectors_are_padded_and_other_inputs_left() -> None:
    steps = [torch.full((n, 2), float(n)) for n in (1, 4, 2)]
    ages = torch.tensor([[1.0, 1], [4, 4], [2, 2]])
    federation = Federation.from_clients([((steps, ages), [1, 4, 2])], pad="lengths")
    inputs, age, lengths = as_tuple(federation.inputs)
    assert inputs.shape == (3, 4, 2)
    assert torch.equal(inputs[:, :, 0].sum(1), lengths.float() ** 2)
    assert torch.equal(age[:, 0], lengths.float())


def test_own_splits_are_padded_together() -> None:
    parts = {"train": ([[1, 2]], [0]), "test": ([[3], [4, 5, 6]], [1, 1])}
    federation = Federation.from_clients([parts], pad=0)
    assert as_tensor(federation.inputs).tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]


class Masked(nn.Module):
    """Classifies the mean state of an LSTM over what is not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 4)
        self.layers = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 13)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.layers(self.embedding(input_ids))[0] * attention_mask[..., None]
        out: Tensor = self.head(states.sum(1) / attention_mask.sum(1, keepdim=True))
        return out


def test_a_model_trains_on_masked_sequences() -> None:
    torch.manual_seed(0)
    model = Masked()
    trained = []
    for longer in ([], [0, 0, 0]):  # padding that is masked changes nothing
        given = sequences(lambda rows: {"input_ids": rows})
        federation = Federation.from_clients(given, pad="mask")
        fill = torch.tensor(longer, dtype=torch.int64).expand(federation.samples, len(longer))
        inputs = {name: torch.cat([value, fill], 1) for name, value in as_dict(federation.inputs).items()}
        task = Task(model, Federation(**{**vars(federation), "inputs": inputs}))
        trained.append(simulate(task, "fedavg", rounds=2).state_dict)
    torch.testing.assert_close(trained[0], trained[1])
    assert any(not torch.equal(value, trained[0][name]) for name, value in model.state_dict().items())


def table(n: int = 12) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "hospital": [["Turku", "Oslo", "Aarhus"][i % 3] for i in range(n)],
            "age": range(n),
            "weight": [i / 2 for i in range(n)],
            "label": [i % 2 for i in range(n)],
            "part": ["test" if i // 3 % 2 else "train" for i in range(n)],
        }
    )


def test_a_frame_names_the_client_of_each_row() -> None:
    frame = table().drop(columns="part").sample(frac=1, random_state=0)
    federation = Federation.from_frame(frame, client="hospital", target="label")
    assert federation.names == ("Aarhus", "Oslo", "Turku")
    assert as_tensor(federation.inputs).dtype == torch.float32
    for name in federation.names:
        train, test = of(federation, name)
        mine = frame[frame["hospital"] == name]
        both = as_tensor(federation.inputs)[train.start : test.stop]
        assert sorted(both.tolist()) == sorted(mine[["age", "weight"]].values.tolist())
    assert torch.equal(as_tensor(federation.inputs)[:, 0].long() % 2, as_tensor(federation.targets))
    assert federation.classes == 2


def test_a_frame_may_hold_its_split_and_other_columns() -> None:
    frame = table()
    frame["label"] = frame["label"].astype("Int64")
    federation = Federation.from_frame(frame, client="hospital", target="label", inputs=["age"], split="part")
    for name in federation.names:
        for part, what in zip(of(federation, name), ("train", "test"), strict=True):
            mine = frame[(frame["hospital"] == name) & (frame["part"] == what)]
            assert as_tensor(federation.inputs)[part, 0].tolist() == mine["age"].tolist()
    assert as_tensor(federation.targets).dtype == torch.int64
    real = Federation.from_frame(frame, client="label", target="weight", inputs="age")
    assert real.names == ("0", "1")
    assert as_tensor(real.targets).dtype == torch.float32
    assert torch.equal(as_tensor(real.inputs)[:, 0], 2 * as_tensor(real.targets))


def changed(column: str, row: int, value: Any) -> pd.DataFrame:
    frame = table().astype({column: object})
    frame.loc[row, column] = value
    return frame.astype({"age": float}) if column == "age" else frame


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (table(), {"client": "city"}, "the frame has no column 'city'; it has hospital, age"),
        (table(), {"inputs": ["size"]}, "the frame has no column 'size'"),
        (
            table(),
            {"split": None},
            "column 'part' does not hold numbers, but 'train' for client 'Turku': leave",
        ),
        (
            table().replace({"label": {0: "no", 1: "yes"}}),
            {},
            "column 'label' does not hold numbers, but 'no'",
        ),
        (
            changed("age", 4, None),
            {},
            "column 'age' has no value in row 4, of client 'Oslo'; fill it or drop",
        ),
        (changed("age", 5, np.inf), {}, "column 'age' has no finite number in row 5, of client 'Aarhus'"),
        (changed("hospital", 2, None), {}, "column 'hospital' has no value in row 2"),
        (
            changed("part", 1, "val"),
            {},
            "column 'part' holds 'val' for client 'Oslo'; write train, validation or test",
        ),
        (table()[4:5], {}, "client 'Oslo' has no training samples, only test samples"),
        (table()[:0], {}, "there are no rows"),
        (table(), {"inputs": ["age", "label"]}, "column 'label' is named twice"),
        (table().to_dict(), {}, "dict is not a data frame: give a pandas DataFrame"),
    ],
)
def test_a_frame_that_cannot_be_used_is_refused_by_column_and_client(
    frame: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        Federation.from_frame(frame, **{"client": "hospital", "target": "label", "split": "part", **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def written(n: int = 12) -> Dataset:
    draw = np.random.RandomState(0)
    columns = {
        "image": [draw.randint(0, 256, (4, 5, 3)).astype(np.uint8) for _ in range(n)],
        "ids": [[i] * (1 + i % 4) for i in range(n)],
        "number": [float(i) for i in range(n)],
        "text": [f"text {i}" for i in range(n)],
        "label": [i % 2 for i in range(n)],
        "writer": [[30, 4, 100][i % 3] for i in range(n)],
        "part": ["test" if i // 3 % 2 else "train" for i in range(n)],
    }
    kinds = {
        "image": Image(),
        "ids": List(Value("int32")),
        "number": Value("float32"),
        "text": Value("string"),
        "label": ClassLabel(names=["no", "yes", "perhaps"]),
        "writer": Value("int64"),
        "part": Value("string"),
    }
    return Dataset.from_dict(columns, features=Features(kinds))


def test_a_dataset_names_the_client_of_each_row() -> None:
    federation = Federation.from_dataset(written(), client="writer", inputs=["image", "number"])
    assert federation.names == ("4", "30", "100")  # as numbers, not as words
    assert (federation.classes, federation.class_names) == (3, ("no", "yes", "perhaps"))
    number = as_dict(federation.inputs)["number"].long()
    pictures = np.stack(written().with_format("numpy")[:]["image"])
    assert torch.equal(as_dict(federation.inputs)["image"], torch.from_numpy(pictures)[number])
    assert torch.equal(as_tensor(federation.targets), number % 2)
    for name, first in (("4", 1), ("30", 0), ("100", 2)):
        train, test = of(federation, name)
        assert sorted(number[train.start : test.stop].tolist()) == list(range(first, 12, 3))


def test_a_dataset_may_hold_its_split_or_come_in_two() -> None:
    dataset = written()
    column = Federation.from_dataset(dataset, client="writer", inputs="number", split="part")
    parts = {p: dataset.filter(lambda row, p=p: row["part"] == p) for p in ("train", "test")}
    two = Federation.from_dataset(DatasetDict(parts), client="writer", inputs="number")
    assert column.digest() == two.digest()
    assert as_tensor(column.inputs)[of(column, "4")[0]].tolist() == [1, 7]
    assert as_tensor(column.inputs)[of(column, "4")[1]].tolist() == [4, 10]


@pytest.mark.parametrize("split", [None, "part"])
def test_sequences_of_a_dataset_are_padded(split: str | None) -> None:
    options: dict[str, Any] = {"client": "writer", "targets": "number", "split": split}
    federation = Federation.from_dataset(written(), inputs=["ids"], pad="mask", **options)
    for i, ids, mask in zip(
        as_tensor(federation.targets).tolist(),
        *(v.tolist() for v in as_dict(federation.inputs).values()),
        strict=True,
    ):
        length = 1 + int(i) % 4
        assert ids == [int(i)] * length + [0] * (4 - length)
        assert mask == [1] * length + [0] * (4 - length)


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (written(), {"client": "author"}, "the dataset has no column 'author'; it has image, ids"),
        (
            written(),
            {"inputs": "text"},
            "client '30': column 'text' holds 'text 0', not numbers: map labels by",
        ),
        (
            written(),
            {"inputs": "ids"},
            "client '4': inputs are sequences of unequal length, 1 to 4: give pad=0",
        ),
        (DatasetDict(train=written()), {}, "the dataset has the splits train: give one of them"),
        (written().to_iterable_dataset(), {}, "load it without streaming"),
        (written().to_pandas(), {}, "DataFrame cannot be dealt to clients: give a datasets.Dataset"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused(
    dataset: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        Federation.from_dataset(dataset, **{"client": "writer", "inputs": "number", **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def partitions(dataset: Dataset) -> Federation:
    partitioner = IidPartitioner(2)
    partitioner.dataset = dataset
    return Federation.from_partitioner(partitioner, inputs="number")


def doors(dataset: Dataset) -> list[Callable[[], Federation]]:
    options: dict[str, Any] = {"client": "writer", "inputs": "number"}
    return [
        lambda: Federation.from_dataset(dataset, **options),
        lambda: Federation.from_dataset({"train": written(), "test": dataset}, **options),
        lambda: partitions(dataset),
    ]


def test_a_transform_of_a_dataset_is_refused_and_not_dropped() -> None:
    def doubled(rows: dict[str, Any]) -> dict[str, Any]:
        return {**rows, "number": [2 * number for number in rows["number"]]}

    options = written()
    options.set_format("numpy", dtype=np.float16)
    for dataset, words in ((written().with_transform(doubled), "a transform"), (options, "a format with")):
        for door in doors(dataset):
            with pytest.raises(InputError, match=f"the dataset has {words}.*dataset.map"):
                door()


def test_a_format_without_options_changes_nothing() -> None:
    for plain, formatted in zip(doors(written()), doors(written().with_format("torch")), strict=True):
        assert plain().digest() == formatted().digest()


@pytest.mark.parametrize("column", ["label", "writer", "labels"])
def test_classes_in_another_order_are_refused(column: str) -> None:
    def named(*names: str) -> Dataset:
        kind: Any = ClassLabel(names=list(names))
        values = [[0], [1]] if column == "labels" else [0, 1]
        kinds = {"writer": Value("int64"), "label": Value("int64"), "x": Value("float32")}
        kinds[column] = List(kind) if column == "labels" else kind
        columns = {"writer": [5, 5], "label": [0, 1], "x": [0.0, 1.0], column: values}
        return Dataset.from_dict(columns, features=Features(kinds))

    def read(test: Dataset) -> Federation:
        target = "label" if column == "writer" else column
        parts = {"train": named("cat", "dog"), "test": test}
        return Federation.from_dataset(parts, client="writer", inputs="x", targets=target)

    assert read(named("cat", "dog")).samples == 4
    with pytest.raises(
        InputError, match=f"classes of column '{column}' are dog, cat in 'test', and cat, dog in"
    ):
        read(named("dog", "cat"))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while True:
            yield torch.zeros(3), 0


FORMS = 'give (inputs, targets), a Dataset, or {"train": …, "test": …} of these'
DATASET = TensorDataset(torch.tensor(X), torch.tensor(Y))


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (
            [(X, ["cat", "dog", "cat", "dog"])],
            "client '0': targets hold strings, such as 'cat': map labels to 0, 1",
        ),
        ([(X, np.array(["cat", "dog"] * 2))], "client '0': targets hold strings, such as 'cat'"),
        ([(["good", "bad"], [1, 0])], "client '0': inputs hold strings, such as 'good': map labels"),
        ([(np.array([[1, "a"]], object), [0])], "client '0': inputs hold strings, such as 'a'"),
        ([(X, [0, 1, None, 1])], "client '0': targets do not make a tensor"),
        ([X, X], f"client '0' is one ndarray of shape (4, 3): {FORMS}"),
        ((X, Y), f"client '0' is one ndarray of shape (4, 3): {FORMS}"),
        ([(X, Y, Y)], "client '0' is a tuple of 3, not of inputs and targets"),
        ([(X, Y), None], "client '1' is one NoneType"),
        ([{"x": X, "y": Y}], "client '0' is a dict of x, y: give (inputs, targets)"),
        (
            [list(zip(X, Y, strict=True))],
            "client '0' is a list of (input, target) samples: give the inputs and",
        ),
        ([list(zip(X[:2], Y[:2], strict=True))], "client '0' is a list of (input, target) samples"),
        (
            [([[1, 2], [1, 2, 3]], [0, 1])],
            "client '0': inputs are sequences of unequal length, 2 to 3: give pad=0",
        ),
        (
            [(X, [[0], [0, 1], [0], [1]])],
            "client '0': targets are sequences of unequal length, 1 to 2: pad them",
        ),
        (
            [([X[:1], X[:, :2]], [0, 1])],
            "client '0': inputs are of shapes (1, 3) and (4, 2): bring all samples",
        ),
        ([(X, Y), ([], [])], "client '1' has no training samples; leave it out"),
        ({"ann": {"test": (X, Y)}}, "client 'ann' has no training samples, only test samples; leave it out"),
        ({"ann": {"train": (X, Y), "val": (X, Y)}}, "client 'ann' has a part 'val'"),
        ({"train": (X, Y), "test": (X, Y)}, "train and test are parts of a client, not clients"),
        (
            {"ann": {"train": (X, Y)}, "bob": (X, Y)},
            "client 'ann' has its own train and test parts, but client 'bob'",
        ),
        (
            [((X, Y), (X[:2], Y[:2]))],
            'differ in length: for own parts give {"train": (x, y), "test": (x, y)}',
        ),
        ([((n for n in range(4)), Y)], "client '0': inputs are a generator: give a tensor"),
        (table(), "clients are given as DataFrame: use Federation.from_frame"),
        ([table()], "client '0' is one DataFrame: use Federation.from_frame"),
        (written(), "clients are given as Dataset: use Federation.from_dataset"),
        ([written()], "sample 0 of its dataset is a dict, not (input, target); use Federation.from_dataset"),
        (DataLoader(DATASET), "clients are given as DataLoader: give a list with the dataset of each client"),
        ([DataLoader(DATASET)], "client '0' is a DataLoader: give its dataset, loader.dataset"),
        (DATASET, "clients are given as TensorDataset: give a list with a Dataset of each client"),
        ([(DATASET, DATASET)], 'client \'0\' is a pair of datasets: give {"train": …, "test": …}'),
        ([TensorDataset(*[torch.zeros(2)] * 3)], "is a tuple of 3, not (input, target); several inputs are"),
        ([Endless()], "client '0' is an IterableDataset"),
        ([Listed([({"a": 1}, 0), ({"b": 1}, 0)])], "client '0': inputs are dicts with other keys"),
        (torch.zeros(2, 3), "clients are given as Tensor: give a list with (inputs, targets)"),
        ("clients/", "clients are given as str: use Federation.from_folder"),
        (None, "clients are given as NoneType: give a list or a dict"),
        ({}, "a federation needs at least one client"),
    ],
)
def test_what_newcomers_give_is_refused_in_a_line(clients: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Federation.from_clients(clients)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "pad", "message"),
    [
        ([[[1], [1, 2]]], True, "pad=True is unknown"),
        ([[[1], [1, 2]]], "longest", "pad='longest' is unknown"),
        ([[[1], []]], "mask", "client '0': sample 1 is an empty sequence; drop it"),
        ([[1, 2]], "mask", "there are no sequences among the inputs; leave pad out"),
        ([([[1], [1, 2]], [[1, 2], [1]])], "mask", "client '0': inputs [0] and [1] differ in length"),
        ([{"a": [[1], [1, 2]]}], {"b": 0}, "names what is not among the inputs a"),
        ([{"a": [[1], [1, 2]]}, {"b": [[1], [2]]}], 0, "client '1' has inputs b, but client '0' has a"),
        (
            [[[1], [1, 2]], [1, 2]],
            0,
            "client '1': inputs are sequences and those of client '0' single numbers",
        ),
        (
            [[[1], [1, 2]], [[0.5], [1]]],
            0,
            "client '1': inputs are float32 of shape (2,) per sample, but those",
        ),
    ],
)
def test_what_cannot_be_padded_is_refused(inputs: list[Any], pad: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Federation.from_clients([(x, [0, 1]) for x in inputs], pad=pad)
    assert message in str(caught.value)


def test_names_are_said_once() -> None:
    with pytest.raises(InputError, match="leave names= out"):
        Federation.from_clients({"ann": (X, Y)}, names=["bob"])
    with pytest.raises(InputError, match="'a' is named twice"):
        Federation.from_clients([(X, Y), (X, Y)], names=["a", "a"])


def test_owners_may_come_with_a_split() -> None:
    federation = Federation.from_owners(X, Y, [1, 0, 1, 1], names=["a", "b"], test=[True, False, False, True])
    assert as_tensor(federation.inputs).tolist() == X[[1, 2, 0, 3]].tolist()
    assert (federation.train.tolist(), federation.test.tolist()) == ([1, 1], [0, 2])
    with pytest.raises(InputError, match="targets hold strings"):
        Federation.from_owners(X, ["a"] * 4, [0] * 4, names=["a"])


def test_the_page_on_ones_own_data_shows_code_that_works() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page.partition("## Your own data")[2], re.S)
    assert len(blocks) == 7
    names: dict[str, Any] = {}
    sizes = []
    for block in blocks:
        exec(block, names)
        made = names["federation"]
        sizes.append((made.train.tolist(), made.test.tolist()))
    assert sizes[1] == ([50, 30], [10, 10])
    assert sizes[0] == sizes[2] == sizes[3] == ([48, 32], [12, 8])
    assert sizes[5] == ([3, 3], [1, 1])
    assert set(names["federation"].inputs) == {"input_ids", "attention_mask"}


NUMBERS = torch.arange(50.0).reshape(10, 5)
LABELS = torch.arange(10) % 2


def masked(at: int | None) -> Any:
    return np.ma.array(NUMBERS.numpy(), mask=np.arange(50).reshape(10, 5) == at)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (np.ma.masked_all((10, 5)), LABELS, r"client 'ann': inputs are masked, first at \[0, 0\]: fill"),  # type: ignore[no-untyped-call]
        (masked(37), LABELS, r"client 'ann': inputs are masked, first at \[7, 2\]"),
        (list(masked(37)), LABELS, r"client 'ann': inputs of sample 7 are masked, first at \[2\]"),
        ({"a": masked(0), "b": NUMBERS}, LABELS, "client 'ann': inputs a are masked"),
        (NUMBERS, np.ma.array(LABELS.numpy(), mask=LABELS == 1), r"client 'ann': targets are masked"),
        (NUMBERS.to_sparse(), LABELS, r"inputs are a tensor of layout sparse_coo: give x.to_dense\(\)"),
        (
            [row.to_sparse() for row in NUMBERS],
            LABELS,
            "inputs of sample 0 are a tensor of layout sparse_coo",
        ),
        (NUMBERS.to("meta"), LABELS, "inputs are a meta tensor, which holds no numbers"),
        (NUMBERS, LABELS.to("meta"), "targets are a meta tensor"),
        (
            torch.nested.nested_tensor(list(NUMBERS), layout=torch.jagged),
            LABELS,
            "a nested tensor: give a list",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_do_not_simply_hold_their_numbers_are_refused(
    inputs: Any, targets: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Federation.from_clients({"bob": (NUMBERS, LABELS), "ann": (inputs, targets)})
    assert "\n" not in str(caught.value)


def test_a_mask_that_hides_nothing_is_no_mask() -> None:
    federation = Federation.from_clients([(masked(None), LABELS)])
    assert federation.digest() == Federation.from_clients([(NUMBERS.numpy(), LABELS)]).digest()


@pytest.mark.parametrize(
    "inputs",
    [
        NUMBERS.clone().requires_grad_(),
        NUMBERS.clone().requires_grad_() * 1,
        torch.nn.Parameter(NUMBERS.clone()),
        [row.clone().requires_grad_() for row in NUMBERS],
    ],
    ids=["a leaf", "of others", "a parameter", "rows"],
)
def test_inputs_that_require_gradients_train_as_numbers(inputs: Any) -> None:
    plain, given = (Federation.from_clients([(x, LABELS)]) for x in (NUMBERS, inputs))
    assert given.digest() == plain.digest()
    assert isinstance(given.inputs, torch.Tensor)
    assert not given.inputs.requires_grad
