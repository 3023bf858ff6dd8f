"""Models of which a part stays with each client, and a loop in plain PyTorch that trains them."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from batches import client_batches
from conftest import DEVICE
from fairwind import Federation, Settings, Solver
from fairwind.engine.executor import Run
from fairwind.engine.layout import BatchNorm, Sharing
from fairwind.engine.schedule import Planner
from fairwind.engine.simulation import Simulation
from own_algorithms import built

SIDE, CLASSES = 6, 3


def pictures(sizes: list[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> Federation:
    """Clients with so many training samples and three for testing; brightness and contrast are their own."""
    g = torch.Generator().manual_seed(seed)
    clients = []
    for k, n in enumerate(sizes):
        x = (1 + k) * torch.randn(n + 3, 1, SIDE, SIDE, generator=g, dtype=dtype) + k
        clients.append((x, torch.randint(0, CLASSES, (n + 3,), generator=g)))
    made = Federation.from_clients(clients, classes=CLASSES)
    train = torch.tensor(sizes)
    object.__setattr__(made, "train", train)
    object.__setattr__(made, "test", torch.full_like(train, 3))
    return made


def small_cnn() -> nn.Sequential:
    """With batch norm of pictures and of vectors."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.BatchNorm1d(5, momentum=0.3),
        nn.ReLU(),
        nn.Linear(5, CLASSES),
    ).double()


def cumulative_cnn() -> nn.Sequential:
    """The same with statistics that are means over all batches."""
    made = small_cnn()
    for layer in made:
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.momentum = None
    return made


SOLVER = Solver(lr=0.1, batch_size=4, epochs=2)


def simulated(
    federation: Federation,
    names: list[str],
    *,
    model: Callable[[], nn.Module] | nn.Module = small_cnn,
    personal: Any = None,
    batch_norm: BatchNorm | None = None,
    seeds: tuple[int, ...] = (0,),
    **options: Any,
) -> Simulation:
    """One client after another, unless told otherwise; already at its start."""
    runs = [Run(name, built(name), seed) for name in names for seed in seeds]
    own: dict[str, Any] = {"rounds": 4, "eval_every": 1, "compile": "off", "engine": "loop", "workers": 1}
    plan = options.pop("plan", None)
    settings = Settings(**own | {"solver": SOLVER, "device": DEVICE} | options)
    sharing = Sharing(personal, batch_norm)
    made = Simulation(model, federation, runs, settings, sharing=sharing, plan=plan)
    made.start()
    return made


def norms(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def single(layer: nn.Module, samples: int) -> bool:
    """Whether a batch of so many pictures has one value per channel in a layer of `small_cnn`."""
    return samples == 1 and isinstance(layer, nn.BatchNorm1d)


def step(model: nn.Module, x: Tensor, y: Tensor, solver: Solver, names: list[str] | None = None) -> None:
    """A step of SGD on some of the parameters; a layer with one value per channel keeps its statistics."""
    model.train()
    for layer in norms(model):
        layer.train(not single(layer, len(x)))
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.grad is not None and (names is None or name in names):
                p.sub_(solver.lr * p.grad)


class ByHand(NamedTuple):
    """What a loop in plain PyTorch has trained."""

    shared: dict[str, Tensor]  # the state of all
    own: list[dict[str, Tensor]]  # each client's part
    losses: Tensor  # (rounds, K) on test samples
    probes: Tensor  # (rounds, K, 2) F_k and ‖∇F_k‖ before training


def fedavg_by_hand(
    federation: Federation,
    model: nn.Module,
    solver: Solver,
    rounds: int,
    keeps: Callable[[str], bool],
    choice: str,
    seed: int = 0,
) -> ByHand:
    """FedAvg over all clients, by their sizes, of all tensors but those that clients keep."""
    planner, state = Planner(federation, solver), copy.deepcopy(model.state_dict())
    own = [{n: v.clone() for n, v in state.items() if keeps(n)} for _ in range(len(federation))]
    sizes = federation.train.double()
    losses, probes = [], []
    for t in range(rounds):
        trained, probed = [], []
        for k in range(len(federation)):
            model.load_state_dict(state | own[k])
            probed.append(probe_by_hand(federation, model, solver, k, choice, keeps))
            model.load_state_dict(state | own[k])
            for samples in client_batches(planner, [seed], t, k):
                step(model, *federation.at(torch.tensor(samples)), solver)
            after = {n: v.clone() for n, v in model.state_dict().items()}
            own[k] = {n: v for n, v in after.items() if keeps(n)}
            trained.append(after)
        fixed = choice == "recomputed"
        for name, value in state.items():
            statistic = "running" in name or "num_batches" in name
            if not keeps(name) and not (statistic and fixed):
                mean = (
                    sum(s * each[name].double() for s, each in zip(sizes, trained, strict=True)) / sizes.sum()
                )
                state[name] = mean.round().long() if "num_batches" in name else mean.to(value.dtype)
        judged = state | (recomputed_by_hand(federation, model, solver, state) if fixed else {})
        losses.append(
            torch.stack([loss_of_test(federation, model, judged | own[k], k) for k in range(len(own))])
        )
        probes.append(torch.stack(probed))
    return ByHand(judged, own, torch.stack(losses), torch.stack(probes))


def probe_by_hand(
    federation: Federation,
    model: nn.Module,
    solver: Solver,
    k: int,
    choice: str,
    keeps: Callable[[str], bool],
) -> Tensor:
    """F_k and the norm of its gradient by shared parameters; by batches where there are no statistics yet."""
    begin, size = int(federation.start[k]), int(federation.train[k])
    before = copy.deepcopy(model.state_dict())
    model.eval()
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    parts = torch.split(
        torch.arange(begin, begin + size), solver.batch_size if choice == "recomputed" else size
    )
    for samples in parts:
        model.load_state_dict(before)
        for layer in norms(model):
            layer.train(choice == "recomputed" and not single(layer, len(samples)))
        x, y = federation.at(samples)
        loss = F.cross_entropy(model(x), y) * len(samples) / size
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    grads = [p.grad for n, p in model.named_parameters() if not keeps(n) and p.grad is not None]
    return torch.stack([total, torch.cat([g.reshape(-1) for g in grads]).norm()])


@torch.no_grad()
def recomputed_by_hand(
    federation: Federation, model: nn.Module, solver: Solver, state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The mean of the statistics of all clients' batches of several samples, by their sizes."""
    total: dict[str, Tensor] = {}
    count, model = 0, copy.deepcopy(model)
    for begin, size in zip(federation.start.tolist(), federation.train.tolist(), strict=True):
        for samples in torch.split(torch.arange(begin, begin + size), solver.batch_size):
            if len(samples) == 1:
                continue
            model.load_state_dict(state)
            model.eval()
            for layer in norms(model):
                layer.train()
                layer.reset_running_stats()
                layer.momentum = 1.0
            model(federation.at(samples)[0])
            count += len(samples)
            for name, value in model.state_dict().items():
                if "running" in name:
                    total[name] = total.get(name, 0) + len(samples) * value.clone()
    return {name: value / count for name, value in total.items()}


@torch.no_grad()
def loss_of_test(federation: Federation, model: nn.Module, state: dict[str, Tensor], k: int) -> Tensor:
    begin, size = int(federation.start[k] + federation.train[k]), int(federation.test[k])
    model.load_state_dict(state)
    model.eval()
    x, y = federation.at(slice(begin, begin + size))
    return F.cross_entropy(model(x), y)
