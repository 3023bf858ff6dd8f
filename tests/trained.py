"""Prints a digest of a model trained by steps of PyTorch's compiler, and the warnings."""

import hashlib
import warnings

import torch
from torch import nn

import fairwind

torch.manual_seed(0)
clients = [(torch.randn(n, 8), torch.randint(3, (n,))) for n in (5, 20, 9)]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))


task = fairwind.Task(model, fairwind.Federation.from_clients(clients), rounds=2)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    run = fairwind.simulate(
        task, "adafedadam", compile="on", engine="stacked", workers=1, device="cpu", progress=False
    )
digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in run.state_dict.values()))
print(digest.hexdigest(), [str(warning.message) for warning in said])
