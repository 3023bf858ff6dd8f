import os

import pytest
import torch
from torch import Tensor, nn

from fairwind import Federation
from fairwind.engine.machine import missing_compiler

torch.set_num_threads(1)  # the tests run side by side

FEATURES, CLASSES = 5, 3
DEVICE = os.environ.get("FAIRWIND_TEST_DEVICE", "cpu")  # the engine's tests run on any


def compiler_found(device: torch.device) -> bool:
    return not missing_compiler(device)


def make_federation(sizes: list[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> Federation:
    """Clients of the given numbers of samples, each with inputs around a mean of its own."""
    g = torch.Generator().manual_seed(seed)
    clients = []
    for n in sizes:
        x = torch.randn(n, FEATURES, generator=g, dtype=dtype) + torch.randn(
            FEATURES, generator=g, dtype=dtype
        )
        y = torch.randint(0, CLASSES, (n,), generator=g)
        clients.append((x, y))
    return Federation.from_clients(clients, classes=CLASSES)


def make_model() -> nn.Sequential:
    hidden = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    return hidden.double()


class Point(nn.Module):
    """A model that is nothing but a point: F_k(w) = ½‖w − c_k‖² with the loss below."""

    def __init__(self, dims: int):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dims, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), -1)


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).sum(1) / 2


def points(centres: Tensor, sizes: list[int]) -> Federation:
    """Clients with so many training samples and one for testing, which all want the model at their centre."""
    train, each = torch.tensor(sizes), torch.tensor(sizes) + 1
    targets = centres.repeat_interleave(each, 0)
    start = each.cumsum(0) - each
    names = tuple(map(str, range(len(sizes))))
    return Federation(torch.zeros(len(targets), 1), targets, start, train, torch.ones_like(train), names)


@pytest.fixture
def ragged() -> Federation:
    """Clients with 1 to 45 samples: single samples, partial batches, full ones."""
    return make_federation([1, 2, 3, 17, 45, 8, 1, 26])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line on what was skipped for want of a program or a package, and how to get it."""
    reasons = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])]
    remedies = {
        "browser": "a browser: apt-get install chromium",
        "could not import": "packages: make test installs them",
        "FAIRWIND_DATA": "real data: make test-data DATA=FOLDER",
        "GPU": "a GPU",
    }
    missing = {
        remedy: sum(word in reason for reason in reasons)
        for word, remedy in remedies.items()
        if any(word in reason for reason in reasons)
    }
    if missing:
        shown = "; ".join(f"{count} need {remedy}" for remedy, count in missing.items())
        terminalreporter.write_line(f"skipped tests: {shown}")
