"""A library that is built in a moment, and a classifier's training, in forked children of their own."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fairwind
from fairwind.engine.backends.native import build, library
from forked import Ended, fork

DRAW = torch.Generator().manual_seed(0)
CLIENTS = [(torch.randn(n, 8, generator=DRAW), torch.randint(3, (n,), generator=DRAW)) for n in (5, 20, 9)]


def answering(folder: Path, answer: int = 42) -> Callable[[], object]:
    """Prints whether a library was built, and what its function returns."""
    source = folder / f"answer-{answer}.cpp"
    source.write_text(f'extern "C" int answer() {{ return {answer}; }}')

    def act() -> None:
        def make(path: Path) -> None:
            print("built")
            build(str(source), path)

        print(library(("answer", str(folder)), "answer", make).answer())

    return act


def training() -> None:
    """Prints a digest of a linear classifier, trained by compiled steps."""
    task = fairwind.Task(lambda: nn.Linear(8, 3), fairwind.Federation.from_clients(CLIENTS), rounds=2)
    options: dict[str, Any] = {"compile": "on", "engine": "stacked", "workers": 1, "progress": False}
    run = fairwind.simulate(task, "adafedadam", **options)
    print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in run.state_dict.values())).hexdigest())


def run(act: Callable[[], object], folder: Path, cache: Path, **environment: str) -> Ended:
    """Runs a function in a child with a cache folder of its own."""

    def acting() -> None:
        os.environ.update({"XDG_CACHE_HOME": str(cache), **environment})
        act()

    return fork(acting, folder)
