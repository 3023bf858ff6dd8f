"""Norms of gradients that the loop never forms."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairwind import Federation
from fairwind.engine import tuning
from fairwind.engine.loop import learner
from fairwind.engine.plain import PlainModel


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
    monkeypatch.setattr(tuning, "MIN_FACTORED_NUMBERS_LOOP", 1)
    torch.manual_seed(0)
    model, ids, targets = Tied(), torch.randint(30, (samples, 5)), torch.randint(30, (samples,))
    weights = list(model.parameters())
    exact = torch.autograd.grad(F.cross_entropy(model(ids), targets), weights)

    data = Federation.from_clients([(ids, targets)], train=0.99)
    plain = PlainModel.fitted(model, data)
    ours = learner.Learner(plain, factors=True)
    assert len(ours.layers) == 3
    monkeypatch.setattr(tuning, "MAX_LOOP_PROBED_SAMPLES", samples // 2)  # in several parts
    _, norm = ours.probe(lambda at: plain.evaluation_loss(ids[at], targets[at]), torch.arange(samples), None)
    assert not norm.requires_grad
    torch.testing.assert_close(norm.float(), torch.cat([g.view(-1) for g in exact]).norm(), rtol=1e-5, atol=0)
    assert not any(layer.factors for layer in ours.layers)
