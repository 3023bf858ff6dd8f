"""The Adult example reads the census's files as they are published, and says what is wrong with others."""

from pathlib import Path

import pytest
import torch
from examples.adult import federation, task

import fairwind as fw
from samples import as_tensor

ROW = "39, {work}, 77516, {degree}, 13, Never-married, Sales, Wife, White, Male, {gain}, 0, 40, Cuba, {pay}"


def row(degree: str, pay: str, *, work: str = "Private", gain: object = 0) -> str:
    return ROW.format(degree=degree, pay=pay, work=work, gain=gain)


TRAIN = [row("Doctorate", ">50K", gain=100), row("HS-grad", "<=50K", work="?"), row("10th", ">50K")]
TEST = [row("Doctorate", "<=50K.", work="Without-pay"), row("HS-grad", ">50K.", gain=50)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adult.data").write_text("\n".join(TRAIN) + "\n\n")
    (tmp_path / "adult.test").write_text("\n".join(["|1x3 Cross validator", *TEST]) + "\n\n")
    return tmp_path


def test_two_clients_trained_on_one_file_and_tested_on_the_other(folder: Path) -> None:
    adult = federation(folder)
    assert adult.names == adult.groups == ("doctorate", "no doctorate")
    assert (adult.train.tolist(), adult.test.tolist()) == ([1, 2], [1, 1])
    assert adult.targets.tolist() == [1, 0, 0, 1, 1]  # type: ignore[union-attr]


def test_numbers_are_standardised_by_the_training_file_and_categories_are_one_hot(folder: Path) -> None:
    inputs = as_tensor(federation(folder).inputs)
    gain = torch.tensor([100.0, 0, 0])
    wanted = (torch.tensor([100.0, 0, 0, 0, 50]) - gain.mean()) / gain.std()
    assert torch.allclose(inputs[:, 2], wanted)
    assert (inputs[:, [0, 1, 3, 4]] == 0).all()
    # Of eight categories each person has one value; a work class that nobody trained has is none.
    assert inputs[:, 5:].sum(1).tolist() == [8, 7, 8, 8, 8]


def test_the_task_trains(folder: Path) -> None:
    result = fw.simulate(task(folder), "fedavg", rounds=2, compile="off", progress=False)
    assert set(result.groups) == {"doctorate", "no doctorate"}
    assert result.worst_group in result.groups


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.unlink(), "there is no .*adult.test: download adult.data and adult.test from https://"),
        (lambda f: f.write_text("1, 2, 3\n"), "adult.test, line 1: not 15 values of which the last"),
        (lambda f: f.write_text(row("10th", "lots")), "adult.test, line 1: not 15 values of which the last"),
        (lambda f: f.write_text(row("10th", ">50K", gain="x")), "adult.test, line 1: could not convert"),
    ],
)
def test_files_that_are_missing_or_others_are_refused(folder: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    change(folder / "adult.test")
    with pytest.raises(fw.InputError, match=message):
        federation(folder)
