"""A client's local training with ordinary autograd, and sums of updates."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairwind.contract import Local
from fairwind.engine.plain import PlainModel
from fairwind.layers.factored import add_gradients, factored, squared_norm, take_factors

BLOCK = 1 << 18  # numbers that are added up at once
FEW = 8  # clients


class Modification(NamedTuple):
    """What turns a client's gradient g into s(ℓ)·g + μ·y + w."""

    local: Local[Any] = Local()
    weights: Sequence[nn.Parameter] = ()
    parts: Sequence[Tensor] = ()  # w of each weight; empty if steps are not modified
    received: Sequence[Tensor] | None = None  # x, where g is g(y) − g(x)

    def scale(self, loss: Tensor) -> float:
        s = self.local.scale
        return float(s(loss)) if callable(s) else s


class Learner:
    """A copy of the model, with which clients train one after another."""

    def __init__(self, model: PlainModel, *, factors: bool):
        """With `factors`, gradients of large dense layers are added to the weights without being stored."""
        self.model = model
        self.layers = factored(model.module) if factors else []

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        losses: Callable[[], Tensor],
        clip: float | None,
        modification: Modification,
    ) -> None:
        """One optimizer step on the mean loss, modified if the algorithm says so."""
        before = self._gradients_at(modification, losses) if modification.received is not None else None
        loss = losses().mean()
        torch.autograd.backward(loss)
        scale = modification.scale(loss.detach())
        for i, (parameter, w) in enumerate(zip(modification.weights, modification.parts, strict=True)):
            gradient: Any = 0 if parameter.grad is None else parameter.grad
            if before is not None:
                gradient = gradient - before[i]
            parameter.grad = scale * gradient + modification.local.pull * parameter.detach() + w
        if clip is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        add_gradients(self.layers, -optimizer.param_groups[0]["lr"] * scale)
        optimizer.step()
        optimizer.zero_grad()

    @staticmethod
    def _gradients_at(modification: Modification, losses: Callable[[], Tensor]) -> Sequence[Tensor]:
        """The gradients at the received model; the weights are restored afterwards."""
        assert modification.received is not None
        trained = [weight.detach().clone() for weight in modification.weights]
        _set(modification.weights, modification.received)
        found = torch.autograd.grad(losses().mean(), modification.weights, materialize_grads=True)
        _set(modification.weights, trained)
        return found

    @torch.no_grad()
    def gradient_norm(self, weights: list[nn.Parameter], found: dict[int, Tensor]) -> Tensor:
        """The norm of all gradients, dense (by index) and factored."""
        factors, squares = take_factors(self.layers), []
        for i, weight in enumerate(weights):
            product = factors.get(id(weight))
            if product is not None and i in found:  # the weight is shared with another layer
                found[i] = found[i] + (product[0].mT @ product[1])
            elif product is not None:
                squares.append(squared_norm(*product))
        return torch.stack([norm(list(found.values())).square(), *squares]).sum().sqrt()


@torch.no_grad()
def _set(weights: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


class Sum:
    """Σ coef·δ in float64, with a few terms at a time added up in the updates' own type."""

    def __init__(self, like: Tensor):
        self.total = torch.zeros_like(like, dtype=torch.float64)
        self.few: Tensor | None = None
        self.terms, self.scale = 0, 1.0

    def add(self, coef: float, update: Tensor) -> None:
        """Adds an update, which must not be used afterwards."""
        if self.few is None or self.terms == FEW or not 1e-6 < abs(coef / self.scale) < 1e6:
            self.flush()
            if coef:
                self.few, self.terms, self.scale = update, 1, coef
            return
        self.few.add_(update, alpha=coef / self.scale)
        self.terms += 1

    def flush(self) -> Tensor:
        """The sum of all terms so far."""
        if self.few is not None:
            # In blocks whose copies in float64 stay in the cache
            for total, few in zip(*(torch.split(t, BLOCK) for t in (self.total, self.few)), strict=True):
                total.add_(few, alpha=self.scale)
        self.few = None
        return self.total


def norm(parts: Sequence[Tensor]) -> Tensor:
    """The norm of all parts together."""
    blocks = [block for part in parts for block in torch.split(part.detach().reshape(-1), BLOCK)]
    return _joined(torch._foreach_norm(blocks)) if blocks else torch.zeros((), dtype=torch.float64)


def _joined(norms: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(norms)).double().square().sum().sqrt()


@torch.no_grad()
def difference(before: Sequence[Tensor], after: Sequence[Tensor], out: Sequence[Tensor]) -> Tensor:
    """Writes before − after to `out`, part by part, and returns its norm, computed in the same pass."""
    norms = []
    for parts in zip(before, after, out, strict=True):
        simple = all(part.is_contiguous() for part in parts)
        flat = [part.view(-1) for part in parts] if simple else parts
        for a, b, c in zip(*(torch.split(each, BLOCK) for each in flat), strict=True):
            norms.append(torch.linalg.vector_norm(torch.sub(a, b, out=c)))
    return _joined(norms)
