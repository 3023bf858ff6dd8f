"""A federation without a network: clients and a server that hand each other plain arrays."""

from collections.abc import Sequence
from typing import Any

import torch

from conftest import make_model
from fairwind import Federation, Settings, Solver, Task, algorithms
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.exchange import UNBOUNDED, Aggregator, Judged, Kept, LocalClient, Reply, Round

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
        defence: str | None = None,
        clients: list[LocalClient] | None = None,
        **options: Any,
    ):
        """`clients` are those of another exchange of the same, which take long to build."""
        self.clients = clients or clients_of(task, spec, seed, **options)
        self.kept = [Kept() for _ in self.clients]
        one = self.clients[0]
        sends = options.get("sends", "report")
        own: dict[str, Any] = {"bounds": bounds, "sends": sends, "privacy": privacy, "defence": defence}
        own |= {"clients": len(self.clients), "codec": options.get("codec")}
        own |= {"division": one.division, "statistics": one.own.averages[0]}
        self.server = Aggregator(algorithms.build(spec), one.layout, one.start(), **own)

    @property
    def memory(self) -> dict[int, float | None]:
        """Clients' first losses."""
        return {k: kept.first_loss for k, kept in enumerate(self.kept)}

    def reply(self, k: int) -> Reply:
        request = self.server.requests([str(k)])[str(k)]
        reply, self.kept[k] = self.clients[k].reply(request, self.kept[k])
        return reply

    def round(self, order: Sequence[int] | None = None) -> Round:
        asked = list(range(len(self.clients)) if order is None else order)
        if self.server.phase == "gradient":
            for k in asked:
                assert not self.server.accept(str(k), self.reply(k))
            assert self.server.turn() == {str(k) for k in asked}
        for k in asked:
            assert not self.server.accept(str(k), self.reply(k))
        return self.server.finish()

    def judge(self, k: int) -> Judged:
        request = self.server.requests([str(k)], "evaluate")[str(k)]
        return self.clients[k].judge(request, self.kept[k])


def simulated(task: Task, spec: str, *, seed: int = 0, **options: Any) -> Simulation:
    own: dict[str, Any] = {"rounds": 50, "compile": "off", "device": "cpu", "workers": 1, "eval_every": 50}
    settings = Settings(solver=task.solver, **own | options)
    runs = [Run(spec, algorithms.build(spec), seed)]
    made = Simulation(task.model, task.federation, runs, settings, sharing=task.sharing)
    made.start()
    return made


def task_of(federation: Federation, dtype: torch.dtype = torch.float64, **options: Any) -> Task:
    return Task(lambda: make_model().to(dtype), federation, **{"solver": SOLVER} | options)
