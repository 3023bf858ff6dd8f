"""Takes two steps of SGD with every module of the zoo; exits with 1 if a loss or gradient is not finite."""

import sys
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from zoo import ZOO, Specimen


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def logits(outputs: Any) -> Tensor:
    outputs = getattr(outputs, "logits", outputs)
    out: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return out


def cross_entropy(outputs: Any, targets: Any) -> Tensor:
    return F.cross_entropy(logits(outputs), targets, reduction="none")


def accuracy(outputs: Any, targets: Any) -> Tensor:
    right: Tensor = logits(outputs).argmax(1) == targets
    return right.float()


def check(specimen: Specimen) -> tuple[int, float, bool]:
    """How many parameters train, milliseconds of the second step, and whether all numbers are finite."""
    torch.manual_seed(0)
    model = specimen.model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    numbers = []
    for inputs, targets in specimen.clients()[:2]:
        model.train()
        start = perf_counter()
        optimizer.zero_grad()
        losses = (specimen.loss or cross_entropy)(call(model, inputs), targets)
        torch.autograd.backward(losses.mean())
        optimizer.step()
        milliseconds = 1000 * (perf_counter() - start)
        model.eval()
        with torch.no_grad():
            scores = (specimen.score or accuracy)(call(model, inputs), targets)
        assert losses.dim() == 1, f"losses have the shape {tuple(losses.shape)}, not (B,)"
        assert scores.shape == losses.shape, f"scores have the shape {tuple(scores.shape)}"
        gradients = [p.grad for p in trained if p.grad is not None]
        assert gradients, "no parameter has a gradient"
        numbers += [losses, scores, *gradients]
    finite = all(bool(number.isfinite().all()) for number in numbers)
    return sum(p.numel() for p in trained), milliseconds, finite


def main() -> int:
    failed = 0
    for name, specimen in ZOO.items():
        absent = [package for package in specimen.needs if find_spec(package) is None]
        if absent:
            print(f"{name:32}needs {', '.join(absent)}")
            continue
        try:
            parameters, milliseconds, finite = check(specimen)
        except Exception as error:
            print(f"{name:32}{type(error).__name__}: {error}")
            failed += 1
        else:
            print(f"{name:32}{parameters:7} {milliseconds:8.2f} ms  {'finite' if finite else 'NOT FINITE'}")
            failed += not finite
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
