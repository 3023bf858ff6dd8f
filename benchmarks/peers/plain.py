"""A client's local epoch in PyTorch and in NumPy, and FedAvg as a plain loop over clients."""

import time

import numpy as np
import task
import torch
from torch import nn

torch.set_num_threads(1)  # faster than two on matrices this small


def pytorch(weight: task.Array, bias: task.Array, client: task.Client) -> list[task.Array]:
    model = nn.Linear(task.FEATURES, task.CLASSES)
    model.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
    optimizer = torch.optim.SGD(model.parameters(), lr=task.RATE)
    x, y = map(torch.from_numpy, client)
    for samples in torch.randperm(len(y)).split(task.BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[samples]), y[samples]).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def numpy(weight: task.Array, bias: task.Array, client: task.Client) -> list[task.Array]:
    """The same with the gradient written out, which only so small a model allows."""
    weight, bias = weight.copy(), bias.copy()
    x, y = client
    for samples in np.split(np.random.permutation(len(y)), range(task.BATCH, len(y), task.BATCH)):
        z = x[samples] @ weight.T + bias
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(samples)), y[samples]] -= 1
        p *= np.float32(task.RATE / len(samples))
        weight -= p.T @ x[samples]
        bias -= p.sum(0)
    return [weight, bias]


EPOCHS = {"pytorch": pytorch, "numpy": numpy}


def main() -> None:
    path, rounds, variant = task.arguments()
    clients = task.clients(path)
    sizes = np.array([len(y) for _, y in clients])
    share = (sizes / sizes.sum()).astype(np.float32)
    x, marks = task.zeros(), []
    for _ in range(rounds):
        trained = [EPOCHS[variant](*x, client) for client in clients]
        x = [np.tensordot(share, np.stack(parts), 1) for parts in zip(*trained, strict=True)]
        marks.append(time.perf_counter())
    task.report(path, {"pytorch": torch, "numpy": np}[variant].__version__, marks, *x)


if __name__ == "__main__":
    main()
