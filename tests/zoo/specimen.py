"""What an entry of the zoo is, clients with made-up samples, and losses and scores that entries share."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fairwind.engine.layout import ALL_SHARED, Sharing

Values = Tensor | tuple[Tensor, ...] | dict[str, Tensor]  # of n samples, which come first
Client = tuple[Values, Values]  # inputs and targets
PerSample = Callable[[Any, Any], Tensor]  # outputs, targets -> (B,)

SIZES = (5, 9, 3)  # samples of the clients
FEATURES, CLASSES = 6, 3
WORDS, LENGTH = 11, 7  # word 0 is padding


class Specimen(NamedTuple):
    """A module and clients to train it."""

    name: str
    model: Callable[[], nn.Module]  # a new one, with weights from torch's global generator
    clients: Callable[[], list[Client]]  # the same at every call
    loss: PerSample | None = None  # None: cross-entropy
    score: PerSample | None = None  # None: accuracy
    executor: Literal["stacked", "loop"] = "stacked"
    note: str = ""  # why it does not stack
    needs: tuple[str, ...] = ()  # packages to import
    sharing: Sharing = ALL_SHARED  # what stays with each client, and what is done with batch norm


def clients(draw: Callable[[int, Generator], Client]) -> Callable[[], list[Client]]:
    """Clients whose samples `draw(n, generator)` makes."""

    def make() -> list[Client]:
        g = Generator().manual_seed(0)
        return [draw(n, g) for n in SIZES]

    return make


def classes(n: int, g: Generator) -> Tensor:
    return torch.randint(CLASSES, (n,), generator=g)


def _vector(n: int, g: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, FEATURES, generator=g)
    return x, x[:, :CLASSES].argmax(1)


vectors = clients(_vector)
vectors64 = clients(lambda n, g: (torch.randn(n, FEATURES, generator=g).double(), classes(n, g)))


def images(*shape: int) -> Callable[[], list[Client]]:
    """Images of a shape, such as (channels, height, width), and their classes."""
    return clients(lambda n, g: (torch.randn(n, *shape, generator=g), classes(n, g)))


def words(n: int, g: Generator) -> Tensor:
    return torch.randint(1, WORDS, (n, LENGTH), generator=g)


def lengths(n: int, g: Generator) -> Tensor:
    return torch.randint(2, LENGTH + 1, (n,), generator=g)


def padded(n: int, g: Generator) -> tuple[Tensor, Tensor]:
    """Texts of unequal lengths, and a mask that is true at their words."""
    mask = torch.arange(LENGTH) < lengths(n, g)[:, None]
    return words(n, g) * mask, mask


texts = clients(lambda n, g: (words(n, g), classes(n, g)))
padded_texts = clients(lambda n, g: (padded(n, g)[0], classes(n, g)))


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).mean(1)


def minus_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return -squared_error(outputs, targets)


def token_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over a text's words, or an image's pixels, from outputs (B, ..., C) and targets (B, ...)."""
    losses = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(len(targets), -1).mean(1)


def token_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(-1) == targets).float().flatten(1).mean(1)
