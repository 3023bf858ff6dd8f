"""The Adult census data as two clients, people with a doctorate and all others: is one model fair to both?

The two domains of Mohri, Sivek and Suresh, "Agnostic Federated Learning" (ICML 2019). They train on the
categorical columns; here the numbers are inputs, too, standardised, but for the census's weights (fnlwgt).

    python examples/adult.py FOLDER                      # that holds adult.data and adult.test
    ADULT=FOLDER fairwind compare examples/adult.py:task

Files as the UCI repository has them: https://archive.ics.uci.edu/dataset/2/adult
"""

import os
import sys
from pathlib import Path

import torch
from torch import Tensor

import fairwind as fw

COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country"),
    "income",
)
NUMBERS = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
CATEGORIES = tuple(c for c in COLUMNS if c not in (*NUMBERS, "fnlwgt", "income"))
INCOMES = ("<=50K", ">50K")

Person = dict[str, str]


def read(file: Path) -> list[Person]:
    """The people of a file, by column; what is not known is the category '?'."""
    if not file.is_file():
        raise fw.InputError(
            f"there is no {file}: download adult.data and adult.test from "
            f"https://archive.ics.uci.edu/dataset/2/adult into {file.parent}"
        )
    people = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("|"):  # adult.test begins with a remark
            continue
        values = [value.strip() for value in line.split(",")]
        person = dict(zip(COLUMNS, values, strict=False))
        person["income"] = person.get("income", "").removesuffix(".")  # with which adult.test ends its lines
        if len(values) != len(COLUMNS) or person["income"] not in INCOMES:
            raise fw.InputError(
                f"{file}, line {number}: not {len(COLUMNS)} values of which the last is <=50K or >50K; "
                "download it again"
            )
        try:
            [float(person[column]) for column in NUMBERS]
        except ValueError as error:
            raise fw.InputError(f"{file}, line {number}: {error}; download it again") from None
        people.append(person)
    return people


def federation(folder: str | Path) -> fw.Federation:
    """Two clients, trained on adult.data and tested on adult.test; each is a group of its own."""
    train, test = (read(Path(folder) / name) for name in ("adult.data", "adult.test"))
    known = sorted({(column, person[column]) for person in train for column in CATEGORIES})
    place = {each: i for i, each in enumerate(known)}
    raw = _numbers(train)
    mean, std = raw.mean(0), raw.std(0).clamp(min=1e-9)  # of constant columns, too

    def samples(people: list[Person]) -> tuple[Tensor, Tensor]:
        hot = torch.zeros(len(people), len(known))
        for row, person in enumerate(people):
            for column in CATEGORIES:
                if (at := place.get((column, person[column]))) is not None:  # else not among those trained on
                    hot[row, at] = 1
        labels = torch.tensor([INCOMES.index(person["income"]) for person in people])
        return torch.cat([(_numbers(people) - mean) / std, hot], 1), labels

    def part(doctorate: bool) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            of: samples([person for person in people if (person["education"] == "Doctorate") == doctorate])
            for of, people in (("train", train), ("test", test))
        }

    clients = {"doctorate": part(True), "no doctorate": part(False)}
    return fw.Federation.from_clients(clients, groups={name: name for name in clients}, name="Adult")


def _numbers(people: list[Person]) -> Tensor:
    return torch.tensor([[float(person[column]) for column in NUMBERS] for person in people])


def task(folder: str | Path | None = None) -> fw.Task:
    """Logistic regression of the income; without a folder on the files of $ADULT, or data/adult."""
    data = federation(folder or os.environ.get("ADULT", "data/adult"))
    assert isinstance(data.inputs, Tensor)
    features = data.inputs.shape[1]
    solver = fw.Solver(lr=0.05, batch_size=64)
    return fw.Task(lambda: fw.models.linear(features, 2), data, solver=solver, rounds=100)


if __name__ == "__main__":
    compared = fw.compare(task(*sys.argv[1:2]), ["fedavg", "qfedavg", "adafedadam"], seeds=[0, 1, 2])
    print(compared)
