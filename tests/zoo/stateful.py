"""Models of vectors that do more than compute: with buffers, randomness, or control flow of their own."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from zoo.dense import HIDDEN, Hidden, mlp
from zoo.specimen import CLASSES, FEATURES, Specimen, vectors


class Standardised(Hidden):
    """Has constant buffers."""

    mean: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(-0.1, 0.1, FEATURES))
        self.register_buffer("scale", torch.full((FEATURES,), 1.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - self.mean) / self.scale)


class Counting(Hidden):
    """Counts its forward passes in a buffer that it replaces; outputs do not depend on it."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return super().forward(x)


class RunningMean(Hidden):
    """Subtracts a mean of the inputs that training updates in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return super().forward(x - self.mean)


class BatchCentred(Hidden):
    """Subtracts the batch's mean, so that a sample's output depends on the others."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Branching(nn.Module):
    """One layer for a batch with a positive sum, another for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.positive = nn.Linear(FEATURES, CLASSES)
        self.negative = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.positive(x) if x.sum() > 0 else self.negative(x)
        return out


class Routed(nn.Module):
    """Each sample goes to one of two experts, chosen by a Boolean index."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        out = x.new_zeros(len(x), CLASSES)
        for i, expert in enumerate(self.experts):
            out[chosen == i] = expert(x[chosen == i])
        return out


class Filled(Hidden):
    """Writes its outputs into a tensor of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), CLASSES, device=x.device)
        out[:] = super().forward(x)
        return out


class Noisy(Hidden):
    """Adds noise in training."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if self.training:
            h = h + 0.1 * torch.empty_like(h).normal_()
        out: Tensor = self.head(h.relu())
        return out


class AlwaysNoisy(Hidden):
    """Adds noise, in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


class AlwaysDropping(Hidden):
    """Drops inputs, in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.3, training=True))


class Remembering(Hidden):
    """Keeps the activations of its last forward pass, as some keep their attention."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.hidden(x)
        out: Tensor = self.head(self.last.relu())
        return out


class Sign(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class Binarised(Hidden):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(Sign.apply(self.hidden(x)))  # type: ignore[no-untyped-call]
        return out


class Checkpointed(Hidden):
    """Computes its hidden layer again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.hidden, x, use_reentrant=False).relu())
        return out


class ReentrantlyCheckpointed(Hidden):
    """The same with PyTorch's older way, whose backward pass needs `backward`, not `grad`."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.head, self.hidden(x).relu(), use_reentrant=True)
        return out


class ItemScaled(Hidden):
    """Reads a parameter as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x / max(self.scale.item(), 1.0))


def spectral_norm() -> nn.Module:
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(FEATURES, HIDDEN)), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def batch_norm(**options: bool) -> nn.Module:
    return mlp(nn.BatchNorm1d(HIDDEN, **options), nn.ReLU())


def loop(name: str, model: Callable[[], nn.Module], note: str) -> Specimen:
    return Specimen(name, model, vectors, executor="loop", note=note)


SPECIMENS = [
    Specimen("constant-buffers", Standardised, vectors),
    loop("counting-buffer", Counting, "assigns a buffer"),
    loop("running-mean", RunningMean, "updates a buffer in place"),
    loop("spectral-norm", spectral_norm, "updates buffers in place"),
    loop("batch-norm", batch_norm, "updates buffers in place"),
    loop("batch-norm-without-statistics", lambda: batch_norm(track_running_stats=False), "mixes samples"),
    loop("batch-centred", BatchCentred, "mixes samples"),
    loop("branching", Branching, "control flow on values"),
    loop("item", ItemScaled, "reads a value"),
    loop("routed", Routed, "shapes depend on values"),
    loop("filled-in-place", Filled, "writes rows into a tensor without rows"),
    loop("noise", Noisy, "randomness that is drawn in place"),
    Specimen("noise-always", AlwaysNoisy, vectors),
    Specimen("dropout-always", AlwaysDropping, vectors),
    Specimen("remembering", Remembering, vectors),
    loop("autograd-function", Binarised, "autograd.Function without a vmap rule"),
    loop("checkpointed", Checkpointed, "saved-tensor hooks"),
    loop("checkpointed-reentrant", ReentrantlyCheckpointed, "a backward pass within the backward pass"),
]
