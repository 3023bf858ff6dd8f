"""Validation samples: taken from those for training, or given; the test samples stay what they were."""

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset

import fairwind as fw
from fairwind import Federation, InputError
from fairwind.runs.schema import Part

SIZES = (1, 2, 5, 10, 23, 100)
CLIENTS = [
    (torch.arange(n, dtype=torch.float32)[:, None] + 1000 * k, torch.arange(n) % 3)
    for k, n in enumerate(SIZES)
]


def rows(federation: Federation, part: Part) -> list[list[float]]:
    """The first inputs of each client's part."""
    start, size = federation.part(part)
    assert isinstance(federation.inputs, torch.Tensor)
    return [
        federation.inputs[at : at + n, 0].tolist()
        for at, n in zip(start.tolist(), size.tolist(), strict=True)
    ]


def test_a_share_is_taken_from_training_and_the_test_samples_stay() -> None:
    without = Federation.from_clients(CLIENTS)
    federation = Federation.from_clients(CLIENTS, validation=0.1)
    assert rows(federation, "test") == rows(without, "test")
    assert federation.validation.tolist() == [0, 0, 0, 1, 2, 10]
    for trained, chosen, before in zip(
        rows(federation, "train"), rows(federation, "validation"), rows(without, "train"), strict=True
    ):
        assert sorted(trained + chosen) == sorted(before)
        assert [row for row in before if row in trained] == trained  # in their order
    labels = dict(zip(without.inputs[:, 0].tolist(), without.targets.tolist(), strict=True))  # type: ignore[union-attr,call-overload,index]
    assert all(
        labels[x] == y
        for x, y in zip(federation.inputs[:, 0].tolist(), federation.targets.tolist(), strict=True)  # type: ignore[union-attr,call-overload,index]
    )


def test_which_samples_is_drawn_by_the_seed_and_not_by_place() -> None:
    drawn = [
        rows(Federation.from_clients(CLIENTS).with_validation(0.2, seed), "validation") for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    many = Federation.from_clients([(torch.arange(1000.0)[:, None], torch.zeros(1000).long())], train=1.0)
    chosen = rows(many.with_validation(0.5), "validation")[0]
    assert 400 < np.mean(chosen) < 600  # all over the client's samples


def test_a_client_keeps_a_training_sample() -> None:
    federation = Federation.from_clients(CLIENTS, train=1.0, validation=0.99)
    assert federation.train.min() == 1
    assert int(federation.sizes.sum()) == sum(SIZES)


def test_own_parts_are_kept() -> None:
    x, y = CLIENTS[3]
    client = {"train": (x[:5], y[:5]), "validation": (x[5:7], y[5:7]), "test": (x[7:], y[7:])}
    federation = Federation.from_clients({"a": client, "b": {**client, "validation": ([], [])}})
    assert rows(federation, "validation") == [x[5:7, 0].tolist(), []]
    assert rows(federation, "test")[0] == x[7:, 0].tolist()
    frame = pd.DataFrame({"who": "a", "x": x[:, 0].numpy(), "y": y.numpy()})
    frame["part"] = ["validation"] * 2 + ["test"] * 3 + ["train"] * 5
    framed = Federation.from_frame(frame, client="who", target="y", split="part")
    assert [rows(framed, part)[0] for part in ("validation", "test", "train")] == [
        x[:2, 0].tolist(),
        x[2:5, 0].tolist(),
        x[5:, 0].tolist(),
    ]
    table = Dataset.from_pandas(frame.drop(columns="part"))
    parts = {
        "train": table.select(range(5)),
        "validation": table.select([5, 6]),
        "test": table.select([7, 8, 9]),
    }
    given = Federation.from_dataset(parts, client="who", inputs=["x"], targets="y")
    assert given.validation.tolist() == [2]


def test_it_is_part_of_the_digest_and_of_the_counts() -> None:
    without, federation = (Federation.from_clients(CLIENTS, validation=share) for share in (0.0, 0.1))
    assert without.digest() != federation.digest()
    assert federation.describe()["validation_samples"] == 13
    assert "validation_samples" not in without.describe()
    assert repr(federation).count("+") == 2
    assert federation.label_counts().tolist() == without.label_counts().tolist()


@pytest.mark.parametrize("spec", ["synthetic", "synthetic-li"])
def test_every_setup_takes_it(spec: str) -> None:
    task = fw.setup(f"{spec}:clients=5,validation=0.1")
    assert task.federation.validation.any()
    assert task.federation.test.tolist() == fw.setup(f"{spec}:clients=5").federation.test.tolist()


@pytest.mark.parametrize(
    ("share", "words"),
    [(1.0, "out of range"), (-0.1, "out of range"), (0.001, "leaves no validation samples")],
)
def test_shares_that_cannot_be(share: float, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Federation.from_clients(CLIENTS, validation=share)


def test_parts_of_ones_own_and_a_share_are_refused() -> None:
    x, y = CLIENTS[3]
    client = {"train": (x[:5], y[:5]), "validation": (x[5:7], y[5:7]), "test": (x[7:], y[7:])}
    with pytest.raises(InputError, match="has validation samples already"):
        Federation.from_clients([client], validation=0.1)
    with pytest.raises(InputError, match="only validation and test samples"):
        Federation.from_clients([{"validation": (x, y), "test": (x, y)}])


@pytest.mark.parametrize(("train", "validation"), [(0.5, 0.6), (0.5, 0.5), (0.8, 0.9)])
def test_shares_that_leave_nothing_to_train_on_are_refused(train: float, validation: float) -> None:
    with pytest.raises(InputError, match="leave nothing to train on"):
        Federation.from_clients(CLIENTS, train=train, validation=validation)
    with pytest.raises(InputError, match=r"of client '.' leaves none of the \d+ for training"):
        Federation.from_clients(CLIENTS, train=train).with_validation(validation)
    x, y = CLIENTS[3]
    parts = {"train": (x[:5], y[:5]), "test": (x[5:], y[5:])}
    with pytest.raises(InputError, match="client 'ann' leaves none of the 5 for training"):
        Federation.from_clients({"ann": parts}, validation=0.6)
