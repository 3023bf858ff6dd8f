"""Types of algorithm beyond the plain sum, in both executors."""

import pytest
import torch
from torch import nn

from conftest import DEVICE, make_model
from fairwind import Federation, Settings, algorithms
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.errors import InputError
from own_algorithms import OWN
from samples import as_tensor
from simulations import SOLVERS, simulation

NAMES = ["fedprox", "scaffold", "mimelite", "mime", "ditto", *OWN]


def test_alone_is_as_beside_others(ragged: Federation) -> None:
    together = simulation(ragged, ["fedavg", *NAMES], [0, 1], solver=SOLVERS["sgd"])
    for _ in range(4):
        together.step()
    for name in ["fedavg", *NAMES]:
        alone = simulation(ragged, [name], [0, 1], solver=SOLVERS["sgd"])
        for _ in range(4):
            alone.step()
        r = [run.label for run in together.runs].index(name)
        torch.testing.assert_close(alone.x[0], together.x[r], rtol=1e-9, atol=1e-10)


def test_resumed_is_as_uninterrupted(ragged: Federation) -> None:
    one = simulation(ragged, NAMES, [0, 1], solver=SOLVERS["sgd"])
    for _ in range(2):
        one.step()
    kept = one.checkpoint()
    other = simulation(ragged, NAMES, [0, 1], solver=SOLVERS["sgd"])
    other.restore(kept)
    for _ in range(3):
        one.step()
        other.step()
    assert torch.equal(one.x, other.x)
    for r, memory in one.memories.values.items():
        assert torch.equal(memory, other.memories.values[r])


def test_personal_models_are_evaluated_beside_the_global_one(ragged: Federation) -> None:
    both = [
        simulation(ragged, ["fedavg", "ditto:lam=0.5"], [0, 1], solver=SOLVERS["sgd"], engine=e)
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
        loss = nn.functional.cross_entropy(
            module(as_tensor(ragged.inputs)[samples]), as_tensor(ragged.targets)[samples]
        )
        torch.testing.assert_close(one.loss[3, k].cpu(), loss.detach().double())
    kept = one.state_dict(3)
    assert {name: tuple(value.shape[1:]) for name, value in kept.items()} == {
        name: tuple(value.shape) for name, value in make_model().state_dict().items()
    }


def test_updates_that_do_not_fit_are_refused(ragged: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairwind.engine.machine.device_memory", lambda device: 1000)
    with pytest.raises(InputError, match="by_angle sees all updates of a round at once"):
        simulation(ragged, ["fedavg", "by_angle"], [0, 1], device="cpu")
    simulation(ragged, ["fedavg", "scaffold"], [0, 1], device="cpu")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (("ditto", "ditto (personal)"), "'ditto .personal.' is what another model of 'ditto' is called"),
        (("mine", "mine (fine-tuned)"), "give this algorithm another name"),
        (("mine", "mine/0"), "files cannot tell 'mine' from 'mine/0'"),
    ],
)
def test_names_that_another_model_may_have_are_refused(
    ragged: Federation, labels: tuple[str, ...], said: str
) -> None:
    built = {label: algorithms.ditto() if label == "ditto" else algorithms.fedavg() for label in labels}
    runs = [Run(label, algorithm, seed) for label, algorithm in built.items() for seed in (0, 1)]
    for order in (runs, runs[::-1]):
        with pytest.raises(InputError, match=said):
            Simulation(make_model, ragged, order, Settings(rounds=1, device=DEVICE))
