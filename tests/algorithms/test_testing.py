"""The contract as one call, for authors of algorithms."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fairwind import Contribution, Report, Stateless
from fairwind.algorithms import REGISTRY, fedavg
from fairwind.testing import check_algorithm

GOOD = fedavg()


class Sums(NamedTuple):
    size: Tensor


class Memory(NamedTuple):
    steps: Tensor


@pytest.mark.parametrize("name", REGISTRY)
def test_the_algorithms_here_keep_the_contract(name: str) -> None:
    check_algorithm(REGISTRY[name]())


def normalised(r: Report) -> Contribution[Sums]:
    return Contribution(r.size / r.size.sum(), Sums(r.size))


def summed(r: Report) -> Contribution[Sums]:
    return Contribution(r.size, Sums(r.size.sum()))


def upwards(x: Tensor, state: Stateless, total: Tensor, sums: Sums) -> tuple[Tensor, Stateless]:
    return x + total / sums.size, state


def in_place(x: Tensor, state: Stateless, total: Tensor, sums: Sums) -> tuple[Tensor, Stateless]:
    return x.sub_(total / sums.size), state


def growing(x: Tensor, state: Memory, total: Tensor, sums: Sums) -> tuple[Tensor, Memory]:
    return x - total / sums.size, Memory(torch.cat([state.steps, state.steps]))


class Counting:
    """Keeps what changes in Python, where a recorded round does not see it."""

    calls = 0

    def __call__(self, x: Tensor, state: Stateless, total: Tensor, sums: Sums) -> tuple[Tensor, Stateless]:
        self.calls += 1
        return x - total / sums.size / self.calls, state


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (GOOD._replace(client=normalised), "depends on the other clients"),  # type: ignore[arg-type]
        (GOOD._replace(client=summed), "not \\(5,\\)"),  # type: ignore[arg-type]
        (GOOD._replace(server=upwards), "move against it"),  # type: ignore[arg-type]
        (GOOD._replace(server=in_place), "changes what it is given"),  # type: ignore[arg-type]
        (GOOD._replace(server=Counting()), "something else the second time"),  # type: ignore[arg-type]
        (GOOD._replace(init=lambda x: Memory(x.new_zeros(1)), server=growing), "'steps' changes its shape"),  # type: ignore[arg-type, return-value]
        (GOOD._replace(init=lambda x: x), "not a NamedTuple"),  # type: ignore[arg-type, return-value]
        (GOOD._replace(probe="losses"), "probe='losses'"),  # type: ignore[arg-type]
        ("fedavg", "is not a fairwind.Algorithm"),
    ],
)
def test_what_breaks_it_is_named(broken: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_algorithm(broken)
