"""Your own module and data: five hospitals with different patients, one fair model.

In Python as below, or `fairwind compare examples/own_model.py:task`, which leaves a page.
"""

import torch
from torch import nn

import fairwind as fw


def task() -> fw.Task:
    draw = torch.Generator().manual_seed(0)
    rule = torch.randn(8, 3, generator=draw)
    hospitals = {}
    for k, city in enumerate(["Oslo", "Turku", "Uppsala", "Aarhus", "Reykjavík"]):
        x = torch.randn(40 * (k + 1), 8, generator=draw) + torch.randn(8, generator=draw)  # its own patients
        hospitals[city] = (x, (x @ rule).argmax(1))
    federation = fw.Federation.from_clients(hospitals, name="hospitals")

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    return fw.Task(model, federation, score=[fw.scores.accuracy, fw.scores.f1], rounds=100)


if __name__ == "__main__":
    hospitals = task()
    result = fw.simulate(hospitals, "adafedadam:alpha=1")
    print({name: f"{result.metrics[name]:.1f}" for name in ("avg", "std", "worst30")})
    print(dict(zip(hospitals.federation.names, result.score.round().int().tolist(), strict=True)))
