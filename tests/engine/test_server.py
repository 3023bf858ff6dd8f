"""The server's step in blocks, and norms of gradients that are never formed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairwind import Federation, algorithms
from fairwind.aggregation import advance
from fairwind.contract import Algorithm, Contribution, Report, Stateless
from fairwind.engine import server
from fairwind.engine.executor import RoundSums, Run
from fairwind.engine.loop import learner
from fairwind.engine.plain import PlainModel
from fairwind.engine.server import Server, is_elementwise
from fairwind.layers import factored
from fairwind.testing import reports, total


def outcome(total: Tensor, sums: object, clients: Tensor) -> RoundSums:
    return RoundSums(total[None], [sums], clients[None], clients[None] * 0, clients[None] * 0, {}, {})


@pytest.mark.parametrize("name", algorithms.PAPER)
def test_a_step_in_blocks_is_the_same_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = algorithms.build(name)
    assert isinstance(algorithm, Algorithm)
    report, delta = reports(5, seed=3)
    summed, sums, clients = total(algorithm, report, delta.repeat(1, 9))
    x = torch.randn(len(summed), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(server, "BLOCK", 7)
    monkeypatch.setattr(server, "LARGE", 1)
    blocks = Server([Run(name, algorithm, 0)], x[None], workers=2)
    assert blocks.in_blocks == [True]
    state = algorithm.init(x)
    for _ in range(3):
        whole = advance(algorithm, x, state, summed, sums, clients)
        found = blocks.advance(0, x, state, outcome(summed, sums, clients))
        assert torch.equal(whole[0], found[0])
        assert all(torch.equal(a, b) for a, b in zip(whole[1], found[1], strict=True))
        assert whole[2] & found[2]
        x, state, _ = whole
    spoilt = summed.clone()
    spoilt[-1] = torch.nan
    stayed, _, moved = blocks.advance(0, x, state, outcome(spoilt, sums, clients))
    assert not moved
    assert torch.equal(stayed, x)


def _with(step: Callable[[Tensor], Tensor]) -> Algorithm[Stateless, Stateless]:
    def client(r: Report) -> Contribution[Stateless]:
        return Contribution(r.size, Stateless())

    def apply(x: Tensor, s: Stateless, total: Tensor, sums: Stateless) -> tuple[Tensor, Stateless]:
        return x - step(total), s

    return Algorithm(lambda x: Stateless(), client, apply, probe="none")


@pytest.mark.parametrize(
    ("step", "elementwise"),
    [
        (lambda g: g, True),
        (lambda g: 0.1 * g.sign() * g.abs().sqrt(), True),
        (lambda g: g / g.norm(), False),
        (lambda g: g / len(g), False),
        (lambda g: g - g.mean(), False),
        (lambda g: g if g[0] > 1e9 else 2 * g, False),
        (lambda g: g * torch.arange(len(g)), False),
        (lambda g: g.cumsum(0), False),
        (lambda g: g.flip(0), False),
    ],
)
def test_only_servers_that_handle_parameters_by_themselves_go_in_blocks(step: Any, elementwise: bool) -> None:
    assert is_elementwise(_with(step), torch.float32) == elementwise


class Tied(nn.Module):
    """A weight used by two dense layers, and one that an embedding uses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 40)
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40, bias=False)
        self.second.weight = self.first.weight
        self.out = nn.Linear(40, 30, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.second(F.relu(self.first(self.embedding(ids))))
        out: Tensor = self.out(x.mean(1))
        return out


@pytest.mark.parametrize("samples", [3, 200])
def test_the_norm_of_a_gradient_left_as_factors(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factored, "LARGE", 1)
    torch.manual_seed(0)
    model, ids, targets = Tied(), torch.randint(30, (samples, 5)), torch.randint(30, (samples,))
    weights = list(model.parameters())
    exact = torch.autograd.grad(F.cross_entropy(model(ids), targets), weights)

    data = Federation.from_clients([(ids, targets)], train=0.99)
    plain = PlainModel(model, data)
    ours = learner.Learner(plain, factors=True)
    assert len(ours.layers) == 3
    monkeypatch.setattr(learner, "PROBED", samples // 2)  # in several parts
    _, norm = ours.probe(lambda at: plain.evaluation_loss(ids[at], targets[at]), torch.arange(samples), None)
    assert not norm.requires_grad
    torch.testing.assert_close(norm.float(), torch.cat([g.view(-1) for g in exact]).norm(), rtol=1e-5, atol=0)
    assert not any(layer.factors for layer in ours.layers)
