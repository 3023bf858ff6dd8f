"""VGG11's gradients for clients at once: as matrix products, as grouped convolutions, and in a loop.

    python benchmarks/convolution.py [--device cuda] [--rows 4]

Times of a client's step (forward and backward, batch 32), and ratios to the plain loop, taken in one process.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fairwind.engine.cohort import Cohort
from fairwind.models import vgg11


def plain_vgg11() -> nn.Module:
    """The same network with PyTorch's layers."""
    layers: list[nn.Module] = []
    inputs = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        inputs = width or inputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tf32", action="store_true", help="let matrix products use TF32")
    options = parser.parse_args()
    device, rows = torch.device(options.device), options.rows
    if options.tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    else:
        torch.backends.cudnn.allow_tf32 = False
    x = torch.rand(rows, 32, 3, 32, 32, device=device)
    y = torch.randint(0, 10, (rows, 32), device=device)
    mask = torch.ones(rows, 32, dtype=torch.bool, device=device)
    key = torch.zeros(rows, dtype=torch.int64, device=device)

    def stacked(model: nn.Module, compiled: bool) -> Callable[[], Tensor]:
        cohort = Cohort(model).to(device)
        flat = cohort.flatten(model).to(device).expand(rows, -1).clone()
        gradients = torch.compile(cohort.gradients) if compiled else cohort.gradients
        return lambda: gradients(flat, x, y, mask, key)

    single = plain_vgg11().to(device)

    def loop() -> None:
        for r in range(rows):
            single.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(single(x[r]), y[r]))

    ways: dict[str, Callable[[], object]] = {
        "plain loop": loop,
        "matrix products": stacked(vgg11(), False),
        "matrix products, compiled": stacked(vgg11(), True),
        "grouped convolution": stacked(plain_vgg11(), False),
        "grouped convolution, compiled": stacked(plain_vgg11(), True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # compile, and choose algorithms
    for _ in range(5):  # in turn: these machines are noisy
        for name, way in ways.items():
            _wait(device)
            began = time.perf_counter()
            way()
            _wait(device)
            times[name].append((time.perf_counter() - began) / rows)
    print(f"VGG11, {rows} clients, batch 32, {device}, torch {torch.__version__}, TF32 {options.tf32}")
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(times["plain loop"], taken, strict=True))
        print(f"{name:30s} {1e3 * statistics.median(taken):8.3f} ms a client-step {ratio:6.2f}×")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
