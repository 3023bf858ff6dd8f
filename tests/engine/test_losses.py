"""Losses against PyTorch: training, probes and test losses are those of a hand-written loop."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import DEVICE
from fairwind import Federation, Settings, Solver, algorithms
from fairwind.aggregation import contribute
from fairwind.contract import Algorithm, Report
from fairwind.data.samples import take
from fairwind.engine.executor import Run
from fairwind.engine.modules import call
from fairwind.engine.simulation import Simulation
from loss_cases import CASES, Case

SIZES = [13, 6, 9, 1, 22]
LR = 0.05


def federation_of(case: Case) -> Federation:
    torch.manual_seed(0)
    clients = []
    for size in SIZES:
        inputs, targets = case.data(size)
        clients.append((inputs, targets))
    return Federation.from_clients(clients, train=0.7)


def simulation_of(
    case: Case, engine: str, batch_size: int, names: Sequence[str] = ("adafedadam:lr=0.02",), **more: Any
) -> Simulation:
    torch.manual_seed(1)
    model, solver = case.model(), Solver(lr=LR, batch_size=batch_size, epochs=2)
    own: dict[str, Any] = {"engine": engine, "compile": "off", "device": DEVICE, "workers": 1} | more
    settings = Settings(rounds=2, eval_every=2, solver=solver, **own)
    runs = [Run(name, algorithms.build(name), 0) for name in names]
    return Simulation(model, federation_of(case), runs, settings, loss=case.loss)


class ByHand:
    """AdaFedAdam on a module, in plain PyTorch; only the order of samples is the simulation's."""

    def __init__(self, case: Case, simulation: Simulation):
        torch.manual_seed(1)
        self.case, self.model = case, case.model()
        self.federation = simulation.federation.to("cpu")
        self.planner = replace(simulation.planner, federation=self.federation)
        self.size = simulation.settings.solver.batch_size
        algorithm = simulation.runs[0].algorithm
        assert isinstance(algorithm, Algorithm)
        self.algorithm = algorithm
        self.x = self.flat()
        self.state = self.algorithm.init(self.x)
        self.loss0 = [self.loss(self.training(k)).item() for k in range(len(SIZES))]

    def flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def load(self, x: Tensor) -> None:
        nn.utils.vector_to_parameters(x.clone(), self.model.parameters())

    def training(self, k: int) -> Tensor:
        return self.federation.start[k] + torch.arange(int(self.federation.train[k]))

    def testing(self, k: int) -> Tensor:
        begin = self.federation.start[k] + self.federation.train[k]
        return begin + torch.arange(int(self.federation.test[k]))

    def of_batch(self, samples: Tensor) -> Tensor:
        targets = take(self.federation.targets, samples)
        outputs = call(self.model, take(self.federation.inputs, samples))
        found = self.case.by_hand(outputs, targets)
        if found.isnan():  # no label counts, and PyTorch divides 0 by 0
            return 0 * torch.cat([p.flatten() for p in self.model.parameters()]).sum()
        return found

    def loss(self, samples: Tensor) -> Tensor:
        """Of all samples together, or the mean over batches if the loss is one of whole batches."""
        parts = samples.split(self.size) if self.case.whole_batches else [samples]  # type: ignore[no-untyped-call]
        return sum((len(part) / len(samples) * self.of_batch(part) for part in parts), torch.zeros(()))

    def round(self, round: int) -> None:
        plan = self.planner.plan([0], round)
        entries = torch.arange(len(SIZES))
        order = self.planner.training(plan, entries).order(plan.order_key, plan.dropout_key)
        reports, updates = [], []
        for k, samples in enumerate(order.samples.split((plan.size * plan.epochs).tolist())):  # type: ignore[no-untyped-call]
            self.load(self.x)
            loss = self.loss(self.training(k))
            gradient = torch.autograd.grad(loss, list(self.model.parameters()), allow_unused=True)
            norm = torch.cat([g.reshape(-1) for g in gradient if g is not None]).norm()
            steps = 0
            for epoch in samples.split(int(plan.size[k])):
                for batch in epoch.split(self.size):
                    optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
                    optimizer.zero_grad()
                    torch.autograd.backward(self.of_batch(batch))
                    optimizer.step()
                    steps += 1
            updates.append(self.x - self.flat())
            numbers = plan.size[k], steps, LR, updates[-1].norm(), loss, self.loss0[k], norm
            reports.append(
                torch.tensor([n.item() if isinstance(n, Tensor) else n for n in numbers], dtype=torch.float64)
            )
        report = Report(*torch.stack(reports).T)
        part, _ = contribute(self.algorithm, report)
        total = part.coef @ torch.stack(updates)
        sums = type(part.sums)(*(each.sum() for each in part.sums))
        self.x, self.state = self.algorithm.server(self.x, self.state, total, sums)


@pytest.mark.filterwarnings("ignore:reduction")  # PyTorch's advice on KLDivLoss
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # rows one after another in that operation
@pytest.mark.parametrize("batch_size", [64, 4], ids=["full", "padded"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_training_is_that_of_a_hand_written_loop(case: Case, batch_size: int) -> None:
    engines = ["stacked" if case.stacks else "auto", "loop"]
    found = {engine: simulation_of(case, engine, batch_size) for engine in engines}
    hand = ByHand(case, found["loop"])
    started = hand.x
    for simulation in found.values():
        simulation.start()
        torch.testing.assert_close(
            simulation.loss0[0].cpu(), torch.tensor(hand.loss0, dtype=torch.float64), rtol=1e-9, atol=1e-12
        )
    for round in range(2):
        hand.round(round)
        for engine, simulation in found.items():
            simulation.step()
            moved = (hand.x - started).norm()
            assert moved > 1e-4
            assert (simulation.x[0].cpu() - hand.x).norm() < 1e-8 * moved, f"{engine}, round {round}"
    hand.load(hand.x)
    tested = [k for k in range(len(SIZES)) if hand.federation.test[k]]
    with torch.no_grad():
        losses = torch.tensor([float(hand.loss(hand.testing(k))) for k in tested], dtype=torch.float64)
    for simulation in found.values():
        judged = simulation.loss[0, tested].cpu()
        counted = ~judged.isnan()
        torch.testing.assert_close(judged[counted], losses[counted], rtol=1e-8, atol=1e-10)
        assert counted.sum() >= 3
    assert not found["loop"].stacked


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("case", [case for case in CASES if not case.stacks], ids=lambda case: case.name)
def test_what_cannot_be_padded_trains_one_client_after_another(case: Case) -> None:
    if case.name == "ctc" and DEVICE != "cpu":
        pytest.skip("a GPU's kernel for it is vectorised")
    chosen = simulation_of(case, "auto", 4).plan.executor
    assert chosen.value == "loop"
    assert "cannot be stacked" in chosen.why


UNEQUAL = [
    case for case in CASES if case.name in ("tags, weights", "logits, summed", "own: tokens", "own: hazards")
]


@pytest.mark.parametrize(
    "options", [{}, {"probe_samples": 5}, {"probe_samples": 5, "data_on": "host"}], ids=str
)
@pytest.mark.parametrize("case", UNEQUAL, ids=lambda case: case.name)
def test_executors_agree_on_unequal_samples(case: Case, options: dict[str, Any]) -> None:
    names = "adafedadam", "qfedavg", "mime", "ditto", "propfair"
    stacked, loop = (simulation_of(case, engine, 4, names, **options) for engine in ("stacked", "loop"))
    for simulation in (stacked, loop):
        simulation.run()
    torch.testing.assert_close(stacked.x, loop.x, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(stacked.loss, loop.loss, rtol=1e-9, atol=1e-11, equal_nan=True)
    torch.testing.assert_close(stacked.score, loop.score, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert len(stacked.views) == len(names) + 1  # Ditto's personal models


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("case", [case for case in CASES if case.stacks], ids=lambda case: case.name)
def test_compiled_steps_have_the_same_losses(case: Case) -> None:
    compiled, plain = (simulation_of(case, "stacked", 4, compile=switch) for switch in ("on", "off"))
    for simulation in (compiled, plain):
        simulation.run()
    torch.testing.assert_close(compiled.x, plain.x, rtol=1e-8, atol=1e-10)


def test_every_loss_of_pytorch_is_in_the_battery() -> None:
    every = {getattr(nn, name) for name in dir(nn) if name.endswith("Loss")}
    with_parameters = {each for each in every if "in_features" in inspect.signature(each).parameters}
    assert len(with_parameters) in (1, 2)  # these are layers, and refused as losses
    assert every - with_parameters <= {type(case.loss) for case in CASES}
