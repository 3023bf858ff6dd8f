"""Mistakes that no other test makes: each is told in one line, with the remedy."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import fairwind as fw
from command import called
from conftest import make_federation, make_model
from fairwind import scores
from fairwind.exchange.client import LocalClient

X, Y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])


class Partitioner:
    """As flwr-datasets' are."""

    def load_partition(self, number: int) -> None: ...


class Uneven(Dataset[Any]):
    """Samples whose inputs are one tensor, then two."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Any:
        return (X[0],) * (number + 1), number


def task() -> fw.Task:
    return fw.Task(make_model, make_federation([12, 30]), rounds=2)


def trained(**options: Any) -> fw.Comparison:
    return fw.compare(task(), ["fedavg", "fedadam"], compile="off", progress=False, **options)


def from_clients(*clients: Any, **options: Any) -> fw.Federation:
    return fw.Federation.from_clients(*clients, **options)


CASES: list[tuple[Callable[[], object], str]] = [
    (lambda: fw.compare(task(), {"mine": "fedavg"}), "'fedavg' is a spec, and keeps its name"),
    (lambda: fw.compare(task(), {"mine": 3}), "3 is not an algorithm"),  # type: ignore[dict-item]
    (lambda: trained(after_evaluation=5), "after_evaluation=5 is not a function"),
    (lambda: trained(seeds=None), "seeds=None is no list of numbers: give seeds="),
    (lambda: trained(out=5), "out=5 is no path: give the name of a folder"),
    (lambda: trained(codec=5), "codec=5 is not a name: give one of"),
    (lambda: trained(attack=5), "attack=5 is not a name: give one of"),
    (
        lambda: fw.compare(replace(task(), score=lambda outputs, targets: 1.0), "fedavg"),
        "does not fit: it returns 1.0, and not a tensor",
    ),
    (lambda: fw.compare(task(), ["fedavg", "fedavg"]), "algorithm 'fedavg' is given twice"),
    (lambda: fw.compare(task(), ["fedadam:lr"]), "parameter 'lr' of fedadam has no value: write lr=…"),
    (lambda: from_clients([(X, Y)], names=["a", "b"]), "2 names for 1 clients"),
    (lambda: from_clients(Partitioner()), r"use Federation.from_partitioner\(partitioner\)"),
    (lambda: from_clients([Uneven()]), "tuples of other lengths"),
    (
        lambda: LocalClient(task(), fw.algorithms.fedavg()),
        "the task has 2 clients: say which of them this is",
    ),
    (lambda: LocalClient(task(), fw.algorithms.fedavg(), 2), "client 2 is not one of the task's 2"),
    (lambda: replace(task(), score=[]), "give at least one score"),
    (lambda: replace(task(), score="f2"), "unknown score 'f2': known: accuracy"),
    (lambda: replace(task(), score=[scores.f1, scores.f1]), "two scores are called 'f1'"),
    (lambda: fw.load("nowhere"), "nowhere holds no finished comparison"),
    (lambda: trained().report(), r"this comparison was not kept: give compare\(…, out='runs/NAME'\)"),
    (lambda: trained()["fedavgg"], "unknown run 'fedavgg'"),
    (
        lambda: trained().difference("fedavg", "fedprox"),
        "unknown algorithm 'fedprox': known: fedavg, fedadam",
    ),
]


@pytest.mark.parametrize(("mistake", "words"), CASES, ids=[words[:40] for _, words in CASES])
def test_a_mistake_in_python_is_one_line(mistake: Callable[[], object], words: str) -> None:
    with pytest.raises(fw.InputError, match=words) as caught:
        mistake()
    assert "\n" not in str(caught.value)


def test_a_place_for_runs_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    done = called("compare", "synthetic:clients=3", "--rounds", 1, cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot write to runs: " in done.stderr
    assert "give --out" in done.stderr


def test_a_number_of_clients_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    done = called("compare", "synthetic:clients=3", "--clients", 4, cwd=tmp_path)
    assert "the number of clients is given twice: in synthetic:clients=3 and by --clients" in done.stderr


LARGE = """
import fairwind as fw

def model():
    raise MemoryError("for 9 TiB")

task = fw.Task(model, fw.setup("synthetic:clients=3").federation)
"""


def test_too_little_memory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LARGE)
    done = called("compare", "mine.py:task", cwd=tmp_path)
    assert done.returncode == 2
    assert "not enough memory: for 9 TiB; take fewer clients" in done.stderr


def test_a_run_that_diverges_is_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    clients = [(torch.randn(20, 2), torch.randn(20, 1)) for _ in range(3)]
    wild = fw.Task(
        torch.nn.Linear(2, 1),
        from_clients(clients),
        loss=torch.nn.functional.mse_loss,
        score=scores.mse,
        solver=fw.Solver(lr=1e30),
        rounds=2,
    )
    fw.simulate(wild, "fedavg", compile="off", eval_every=1)
    said = capfd.readouterr().err
    assert "left out, being not finite" in said
