"""Types of algorithm beyond the plain sum, in both executors."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from conftest import DEVICE, make_model
from fairwind import Federation, algorithms
from fairwind.contract import AnyAlgorithm, Cohort, CohortAlgorithm, GramAlgorithm, Local, LocalAlgorithm
from fairwind.engine.executor import Run
from fairwind.engine.settings import Settings
from fairwind.engine.simulation import Simulation
from fairwind.errors import InputError
from simulations import SOLVERS, assert_together


class Seen(NamedTuple):
    loss: Tensor  # (K,) of each client, when it was last seen


def worst_first() -> AnyAlgorithm:
    """Clients weigh by how much larger their loss is than the least, and the server keeps all losses."""

    def init(x: Tensor, clients: int) -> Seen:
        return Seen(torch.zeros(clients, dtype=torch.float64, device=x.device))

    def weigh(s: Seen, cohort: Cohort) -> tuple[Tensor, Seen]:
        loss = cohort.report.loss
        weight = loss - loss.min() + 0.1
        return weight / weight.sum(), Seen(s.loss.index_copy(0, cohort.client, loss))

    def server(x: Tensor, s: Seen, total: Tensor) -> tuple[Tensor, Seen]:
        return x - total, s

    return CohortAlgorithm(init, weigh, server, "loss")


def by_angle() -> AnyAlgorithm:
    """Clients weigh by the inner product of their update with the mean update."""

    def init(x: Tensor, clients: int) -> Seen:
        return Seen(torch.zeros(clients, dtype=torch.float64, device=x.device))

    def weigh(s: Seen, cohort: Cohort, gram: Tensor) -> tuple[Tensor, Seen]:
        weight = gram.mean(1).abs() / gram.diagonal().sqrt().clamp(min=1e-9)
        return weight / weight.sum(), s

    def server(x: Tensor, s: Seen, total: Tensor) -> tuple[Tensor, Seen]:
        return x - total, s

    return GramAlgorithm(init, weigh, server, "none")


def scaled() -> AnyAlgorithm:
    """Steps that shrink with the batch's loss, are pulled back, and follow the server's last move."""
    mean = algorithms.fedavg()
    local: Local[Seen] = Local(lambda loss: 1 / (1 + loss), 0.3, lambda s: s.loss)

    def server(x: Tensor, s: Seen, total: Tensor, sums: object) -> tuple[Tensor, Seen]:
        new, _ = mean.server(x, None, total, sums)
        return new, Seen(0.1 * (x - new))

    return LocalAlgorithm(lambda x: Seen(torch.zeros_like(x)), mean.client, server, "none", local)


OWN = {"worst_first": worst_first, "by_angle": by_angle, "scaled": scaled}
NAMES = ["fedprox", "scaffold", "mimelite", "mime", "ditto", *OWN]


def built(name: str) -> AnyAlgorithm:
    return OWN[name]() if name in OWN else algorithms.build(name)


def simulated(federation: Federation, names: list[str], **options: object) -> Simulation:
    runs = [Run(name, built(name), seed) for name in names for seed in (0, 1)]
    own: dict[str, object] = {"rounds": 6, "eval_every": 2, "compile": "off", "engine": "stacked"}
    model = options.pop("model", make_model)
    made = Simulation(model, federation, runs, Settings(**own | {"workers": 1} | options))
    made.start()
    return made


SLOW = ("nesterov", "decay")


@pytest.mark.parametrize(
    "solver", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SOLVERS]
)
def test_both_executors_agree(ragged: Federation, solver: str) -> None:
    both = (simulated(ragged, NAMES, solver=SOLVERS[solver], engine=e) for e in ("stacked", "loop"))
    one, other = both
    assert_together(one, other)
    for r, kept in one.memories.values.items():
        torch.testing.assert_close(kept, other.memories.values[r], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("options", [{"participation": 0.5}, {"memory": 1e-5}, {"probe_samples": 5}])
def test_they_agree_in_chunks_and_on_samples(ragged: Federation, options: dict[str, object]) -> None:
    solver = SOLVERS["sgd"]
    one = simulated(ragged, NAMES, solver=solver, **options)
    other = simulated(ragged, NAMES, solver=solver, engine="loop", **options | {"memory": 1.0})
    assert_together(one, other)


def test_alone_is_as_beside_others(ragged: Federation) -> None:
    together = simulated(ragged, ["fedavg", *NAMES], solver=SOLVERS["sgd"])
    for _ in range(4):
        together.step()
    for name in ["fedavg", *NAMES]:
        alone = simulated(ragged, [name], solver=SOLVERS["sgd"])
        for _ in range(4):
            alone.step()
        r = [run.label for run in together.runs].index(name)
        torch.testing.assert_close(alone.x[0], together.x[r], rtol=1e-9, atol=1e-10)


def test_resumed_is_as_uninterrupted(ragged: Federation) -> None:
    one = simulated(ragged, NAMES, solver=SOLVERS["sgd"])
    for _ in range(2):
        one.step()
    kept = one.checkpoint()
    other = simulated(ragged, NAMES, solver=SOLVERS["sgd"])
    other.restore(kept)
    for _ in range(3):
        one.step()
        other.step()
    assert torch.equal(one.x, other.x)
    for r, memory in one.memories.values.items():
        assert torch.equal(memory, other.memories.values[r])


@pytest.mark.parametrize(
    ("names", "compile"),
    [(NAMES, "off"), (["fedavg", "fedprox:mu=0.5", "scaffold"], "on"), (["fedcm"], "on")],
)
def test_a_model_with_large_layers(ragged: Federation, names: list[str], compile: str) -> None:
    """Gradients of large dense layers stay in factors, and are modified as they are added."""

    def model() -> nn.Module:
        features = ragged.inputs.shape[1]
        layers = nn.Linear(features, 401), nn.Tanh(), nn.Linear(401, 303), nn.Tanh(), nn.Linear(303, 5)
        return nn.Sequential(*layers).double()

    options = {"solver": SOLVERS["sgd"], "model": model}
    one = simulated(ragged, names, engine="stacked", compile=compile, **options)
    other = simulated(ragged, names, engine="loop", **options)
    assert one.stacked is not None
    assert one.stacked.factored or DEVICE != "cpu"
    assert_together(one, other, rounds=2)


@pytest.mark.parametrize(
    ("names", "solver"),
    [
        (["fedavg", "fedprox", "scaffold", "scaled"], "sgd"),  # one way of training: to compile takes long
        pytest.param(["fedavg", *NAMES], "sgd", marks=pytest.mark.slow),
        pytest.param(["fedavg", *NAMES], "momentum", marks=pytest.mark.slow),
    ],
)
def test_compiled_is_as_eager(ragged: Federation, names: list[str], solver: str) -> None:
    one = simulated(ragged, names, solver=SOLVERS[solver], compile="on")
    other = simulated(ragged, names, solver=SOLVERS[solver])
    assert_together(one, other, rounds=3)


def test_personal_models_are_evaluated_beside_the_global_one(ragged: Federation) -> None:
    both = [
        simulated(ragged, ["fedavg", "ditto:lam=0.5"], solver=SOLVERS["sgd"], engine=e)
        for e in ("stacked", "loop")
    ]
    for made in both:
        for _ in range(3):
            made.step()
        made.evaluate()
    one, other = both
    labels = [view.label for view in one.views]
    assert labels == ["fedavg", "fedavg", *["ditto:lam=0.5", "ditto:lam=0.5 (personal)"] * 2]
    torch.testing.assert_close(one.score, other.score, equal_nan=True)
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-9, atol=1e-9, equal_nan=True)
    # Ditto's global model is FedAvg's, on a CPU to the bit
    torch.testing.assert_close(one.x[0], one.x[2], rtol=0 if DEVICE == "cpu" else 1e-12, atol=0)
    # By hand: each client's loss under its own model
    values, sizes = one.memories.values[2], ragged.test
    for k in range(len(ragged)):
        if not sizes[k]:
            assert one.loss[3, k].isnan()
            continue
        begin = int(ragged.start[k] + ragged.train[k])
        module = make_model()
        torch.nn.utils.vector_to_parameters(values[k].cpu(), module.parameters())
        samples = slice(begin, begin + int(sizes[k]))
        loss = nn.functional.cross_entropy(module(ragged.inputs[samples]), ragged.targets[samples])
        torch.testing.assert_close(one.loss[3, k].cpu(), loss.detach().double())
    kept = one.state_dict(3)
    assert {name: tuple(value.shape[1:]) for name, value in kept.items()} == {
        name: tuple(value.shape) for name, value in make_model().state_dict().items()
    }


def test_updates_that_do_not_fit_are_refused(ragged: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairwind.engine.machine.device_memory", lambda device: 1000)
    with pytest.raises(InputError, match="by_angle sees all updates of a round at once"):
        simulated(ragged, ["fedavg", "by_angle"])
    simulated(ragged, ["fedavg", "scaffold"])
