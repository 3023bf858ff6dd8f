"""A federation without a network: clients and a server that hand each other plain arrays."""

from collections.abc import Sequence
from typing import Any

import torch

from conftest import make_model
from fairwind import Federation, Settings, Solver, Task, algorithms
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.exchange import UNBOUNDED, Aggregator, LocalClient, Reply, Round

SOLVER = Solver(lr=0.1, batch_size=10)


def clients_of(task: Task, spec: str, seed: int = 0, **options: Any) -> list[LocalClient]:
    algorithm = algorithms.build(spec)
    return [LocalClient(task, algorithm, k, seed=seed, **options) for k in range(len(task.federation))]


class Exchange:
    """Clients, what they remember, and their server."""

    def __init__(
        self,
        task: Task,
        spec: str,
        *,
        seed: int = 0,
        bounds: Any = UNBOUNDED,
        privacy: Any = None,
        **options: Any,
    ):
        self.clients = clients_of(task, spec, seed, **options)
        self.memory: dict[int, float | None] = {}
        one = self.clients[0]
        sends = options.get("sends", "report")
        own: dict[str, Any] = {"bounds": bounds, "sends": sends, "privacy": privacy}
        self.server = Aggregator(algorithms.build(spec), one.layout, one.start(), **own)

    def reply(self, k: int) -> Reply:
        server = self.server
        first = self.memory.get(k, server.first_loss(str(k)) if server.round else None)
        trained = self.clients[k].train(
            server.weights(), server.round, first_loss=first, shared=server.shared()
        )
        self.memory[k] = trained.first_loss
        return trained.reply

    def round(self, order: Sequence[int] | None = None) -> Round:
        for k in range(len(self.clients)) if order is None else order:
            assert not self.server.accept(str(k), self.reply(k))
        return self.server.finish()


def simulated(task: Task, spec: str, *, seed: int = 0, **options: Any) -> Simulation:
    own: dict[str, Any] = {"rounds": 50, "compile": "off", "device": "cpu", "workers": 1, "eval_every": 50}
    settings = Settings(solver=task.solver, **own | options)
    made = Simulation(task.model, task.federation, [Run(spec, algorithms.build(spec), seed)], settings)
    made.start()
    return made


def task_of(federation: Federation, dtype: torch.dtype = torch.float64, **options: Any) -> Task:
    return Task(lambda: make_model().to(dtype), federation, **{"solver": SOLVER} | options)
