"""Losses and scores of the user's own, and inputs, targets and outputs of several parts."""

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from zoo.specimen import (
    CLASSES,
    FEATURES,
    Client,
    Specimen,
    classes,
    clients,
    squared_error,
)


def vector(n: int, g: Generator) -> Tensor:
    return torch.randn(n, FEATURES, generator=g)


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, outputs))


def labels(n: int, g: Generator) -> Client:
    x = vector(n, g)
    return x, (x[:, :4] > 0).float()


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)


def share_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs > 0) == (targets > 0.5)).float().mean(1)


def numbers(n: int, g: Generator) -> Client:
    x = vector(n, g)
    return x, x[:, :2].sin()


def within_tolerance(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets).abs() < 0.5).all(1).float()


def scalars(n: int, g: Generator) -> Client:
    x = vector(n, g)
    return x, x[:, 0] * 2 + 1


class Scalar(nn.Module):
    """Outputs of shape (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x).squeeze(-1)
        return out


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.smooth_l1_loss(outputs, targets, reduction="none")


def minus_distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(outputs - targets).abs()


def counts(n: int, g: Generator) -> Client:
    x = vector(n, g)
    return x, torch.poisson((0.5 * x[:, 0]).exp(), generator=g)


def poisson(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.poisson_nll_loss(outputs, targets, reduction="none")


def minus_poisson(outputs: Tensor, targets: Tensor) -> Tensor:
    return -poisson(outputs, targets)


class Ordinal(nn.Module):
    """Logits of a class above the first, above the second …, from a score and ordered thresholds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(1)
        self.first = nn.Parameter(torch.tensor([-1.0]))
        self.steps = nn.Parameter(torch.zeros(CLASSES - 2))

    def forward(self, x: Tensor) -> Tensor:
        thresholds = torch.cat([self.first, self.first + F.softplus(self.steps).cumsum(0)])
        out: Tensor = self.layers(x) - thresholds
        return out


def above(targets: Tensor) -> Tensor:
    return (targets[:, None] > torch.arange(CLASSES - 1, device=targets.device)).float()


def ordinal(outputs: Tensor, targets: Tensor) -> Tensor:
    return binary_cross_entropy(outputs, above(targets))


def ordinal_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs > 0).sum(1) == targets).float()


class VAE(nn.Module):
    """Reconstruction, mean and log-variance. It reconstructs from the mean, so that nothing is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(4)
        self.decoder = nn.Linear(2, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return self.decoder(mean), mean, log_variance


def itself(n: int, g: Generator) -> Client:
    x = vector(n, g)
    return x, x


def minus_evidence(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """Minus the evidence's lower bound, with a reconstruction of unit variance."""
    reconstruction, mean, log_variance = outputs
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
    return (reconstruction - targets).square().sum(1) / 2 + divergence


def evidence(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    return -minus_evidence(outputs, targets)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 8)
        self.kind, self.size = nn.Linear(8, CLASSES), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.stem(x).relu()
        return self.kind(h), self.size(h).squeeze(-1)


def kinds_and_sizes(n: int, g: Generator) -> Client:
    return vector(n, g), {"kind": classes(n, g), "size": torch.rand(n, generator=g)}


def two_losses(outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
    kind, size = outputs
    return F.cross_entropy(kind, targets["kind"], reduction="none") + (size - targets["size"]).square()


def kind_accuracy(outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
    return (outputs[0].argmax(1) == targets["kind"]).float()


class Recommender(nn.Module):
    """A user's rating of an item (two towers)."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(5, 4), nn.Embedding(7, 4)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        out: Tensor = (self.users(user) * self.items(item)).sum(-1) + self.bias
        return out


def ratings(n: int, g: Generator) -> Client:
    pairs = torch.randint(5, (n,), generator=g), torch.randint(7, (n,), generator=g)
    return pairs, torch.randint(1, 6, (n,), generator=g).float()


class GraphConvolution(nn.Module):
    """Classifies a graph of nodes (B, N, F) and adjacency (B, N, N) (Kipf, Welling 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        mixing = adjacency / adjacency.sum(-1, keepdim=True)
        out: Tensor = self.head((mixing @ self.first(nodes)).relu().mean(1))
        return out


def graphs(n: int, g: Generator) -> Client:
    edges = (torch.rand(n, 4, 4, generator=g) < 0.4) | torch.eye(4, dtype=torch.bool)
    nodes = torch.randn(n, 4, FEATURES, generator=g)
    return {"nodes": nodes, "adjacency": (edges | edges.mT).float()}, classes(n, g)


class Speech(nn.Module):
    """Log-probabilities (B, T, symbols) of a blank and the symbols at every time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(FEATURES, 1 + CLASSES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).mT.log_softmax(-1)
        return out


def spoken(n: int, g: Generator) -> Client:
    symbols, size = torch.randint(1, 1 + CLASSES, (n, 3), generator=g), torch.randint(1, 4, (n,), generator=g)
    return torch.randn(n, FEATURES, 8, generator=g), (symbols, size)


def ctc(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    symbols, size = targets
    times = torch.full((len(outputs),), outputs.shape[1], device=outputs.device)
    return F.ctc_loss(outputs.transpose(0, 1), symbols, times, size, reduction="none")


def minus_ctc(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    return -ctc(outputs, targets)


SPECIMENS = [
    Specimen("multi-label", lambda: mlp(4), clients(labels), binary_cross_entropy, share_right),
    Specimen("regression", lambda: mlp(2), clients(numbers), squared_error, within_tolerance),
    Specimen("regression-scalar", Scalar, clients(scalars), huber, minus_distance),
    Specimen("poisson", Scalar, clients(counts), poisson, minus_poisson),
    Specimen(
        "ordinal", Ordinal, clients(lambda n, g: (vector(n, g), classes(n, g))), ordinal, ordinal_accuracy
    ),
    Specimen("tuple-output", TwoHeads, clients(lambda n, g: (vector(n, g), classes(n, g)))),
    Specimen("vae", VAE, clients(itself), minus_evidence, evidence),
    Specimen("two-tasks", TwoHeads, clients(kinds_and_sizes), two_losses, kind_accuracy),
    Specimen("recommender", Recommender, clients(ratings), huber, minus_distance),
    Specimen("graph-convolution", GraphConvolution, clients(graphs)),
    Specimen("ctc", Speech, clients(spoken), ctc, minus_ctc),
]
