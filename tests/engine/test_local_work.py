"""How much a client trains in a round: steps, epochs and parts of epochs, as in a loop written by hand."""

from dataclasses import asdict, replace
from math import ceil
from typing import Any

import pytest
import torch
import tyro
from torch import nn
from torch.nn import functional as F

from batches import FEDERATION, batches_by_hand, client_batches, put
from conftest import CLASSES, DEVICE, FEATURES, compiler_found, make_federation, make_model
from exchanged import Exchange, simulated, task_of
from fairwind import Federation, InputError, Settings, Solver, algorithms
from fairwind.cli.compare import Compare
from fairwind.data.counter import EPOCHS, fold, mix
from fairwind.engine.schedule import Planner
from fairwind.engine.simulation import Simulation
from fairwind.runs.recipe import Recipe, changed_settings, settings_of
from fairwind.study.runs import RunKey
from samples import as_tensor
from simulations import assert_together, dropout_model, simulation

WORK: dict[str, dict[str, Any]] = {
    "steps": {"steps": 7},
    "drawn steps": {"steps": (2, 15)},
    "half an epoch": {"epochs": 0.5},
    "epochs and a half": {"epochs": 2.5},
    "drawn parts": {"epochs": (0.5, 2)},
}


def steps_by_hand(work: dict[str, Any], batches: int, drawn: int) -> int:
    """What a 32-bit hash lets a client do that has so many batches in an epoch."""
    ((kind, asked),) = work.items()
    low, high = asked if isinstance(asked, tuple) else (asked, asked)
    if isinstance(low, int) and isinstance(high, int):
        amount = low + drawn % (high - low + 1)
    else:
        amount = low + (high - low) * drawn / 2**32
    return amount if kind == "steps" else max(1, ceil(amount * batches))


def round_by_hand(
    model: nn.Module, data: Federation, work: dict[str, Any], round: int, *, nova: bool
) -> None:
    """A round of FedAvg or FedNova under seed 0, in place."""
    x = [p.detach().clone() for p in model.parameters()]
    sizes, updates, taken = data.train.tolist(), [], []
    for k, size in enumerate(sizes):
        steps = steps_by_hand(work, ceil(size / 4), mix(fold(EPOCHS, 0, round), k))
        put(model, x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches_by_hand(size, steps, 0, round, k):
            at = int(data.start[k]) + torch.tensor(batch)
            optimizer.zero_grad()
            torch.autograd.backward(
                F.cross_entropy(model(as_tensor(data.inputs)[at]), as_tensor(data.targets)[at])
            )
            optimizer.step()
        updates.append([a - p.detach() for a, p in zip(x, model.parameters(), strict=True)])
        taken.append(steps)
    share = [size / sum(sizes) for size in sizes]
    if nova:
        effective = sum(p * t for p, t in zip(share, taken, strict=True))
        share = [effective * p / t for p, t in zip(share, taken, strict=True)]
    changes = [sum(p * d for p, d in zip(share, each, strict=True)) for each in zip(*updates, strict=True)]
    put(model, [a - change for a, change in zip(x, changes, strict=True)])


@pytest.mark.parametrize("engine", ["stacked", "loop"])
@pytest.mark.parametrize("work", WORK)
def test_it_is_a_loop_written_by_hand(work: str, engine: str) -> None:
    data = make_federation([1, 2, 3, 17, 45, 8, 1, 26])
    solver = Solver(lr=0.1, batch_size=4, **WORK[work])
    made = simulation(data, ["fedavg", "fednova"], [0], solver=solver, engine=engine)
    models = [make_model(), make_model()]
    for model in models:
        model.load_state_dict(made.state_dict(0))
    for round in range(3):
        made.step()
        for r, model in enumerate(models):
            round_by_hand(model, data, WORK[work], round, nova=r == 1)
            found = made.state_dict(r)
            for name, p in model.state_dict().items():
                torch.testing.assert_close(found[name].cpu(), p, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("steps", [1, 5, 30])
def test_steps_go_through_epoch_after_epoch_each_shuffled_anew(steps: int) -> None:
    planner = Planner(FEDERATION, Solver(batch_size=4, steps=steps))
    for k, size in enumerate(FEDERATION.train.tolist()):
        found, per_epoch = client_batches(planner, [0], 3, k), ceil(size / 4)
        assert len(found) == steps
        starts = range(0, steps, per_epoch)
        epochs = [[s for batch in found[at : at + per_epoch] for s in batch] for at in starts]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
        assert all(len(epoch) == size for epoch in epochs[: steps // per_epoch])
        whole = [tuple(epoch) for epoch in epochs if len(epoch) == size]
        assert size < 8 or len(set(whole)) == len(whole)


@pytest.mark.parametrize(
    ("epochs", "batches", "steps"),
    [(0.5, 7, 4), (0.5, 8, 4), (0.01, 5, 1), (1.5, 3, 5), (0.07, 100, 7), (0.29, 100, 29), (2.0, 3, 6)],
)
def test_a_part_of_an_epoch_is_that_part_of_its_batches_rounded_up(
    epochs: float, batches: int, steps: int
) -> None:
    """Also where 0.07 · 100 is a little more than 7 in floating point."""
    data = make_federation([2 * batches + 2])
    data = replace(data, train=torch.tensor([2 * batches]), test=torch.tensor([2]))
    assert Planner(data, Solver(batch_size=2, epochs=epochs)).plan([0], 0).steps.tolist() == [steps]


@pytest.mark.parametrize(("work", "low", "high"), [({"steps": (3, 6)}, 3, 6), ({"epochs": (0.5, 2)}, 5, 20)])
def test_what_is_drawn_is_uniform_over_clients_and_rounds(work: dict[str, Any], low: int, high: int) -> None:
    data = make_federation([12, 12, 12, 12])
    data = replace(data, train=torch.full((4,), 10))
    drawn = torch.cat([Planner(data, Solver(batch_size=1, **work)).plan([0], t).steps for t in range(1500)])
    counts = torch.bincount(drawn)[low:]
    assert len(counts) == high - low + 1
    if "epochs" in work:  # 5 is only for 0.5 itself, which is hardly ever drawn
        assert counts[0] <= 2
        counts = counts[1:]
    expected = counts.sum() / len(counts)
    assert ((counts - expected).abs() < 5 * expected**0.5).all()


@pytest.mark.parametrize("work", WORK)
def test_either_executor_does_the_same_with_probes_dropout_and_momentum(
    ragged: Federation, work: str
) -> None:
    options = {"solver": Solver(lr=0.1, momentum=0.5, batch_size=4, **WORK[work]), "model": dropout_model}
    names = [*algorithms.PAPER, "scaffold", "ditto", "mime"]
    stacked = simulation(ragged, names, [0, 1], probe_samples=6, **options)
    loop = simulation(ragged, names, [0, 1], probe_samples=6, engine="loop", **options)
    assert_together(stacked, loop, rounds=2, tolerance=1e-9)
    assert stacked.client_steps == loop.client_steps


@pytest.mark.parametrize("work", ["steps", "drawn parts"])
@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_chunks_hosts_and_resuming_change_nothing(ragged: Federation, work: str, engine: str) -> None:
    options = {"solver": Solver(lr=0.1, batch_size=4, **WORK[work]), "engine": engine}
    names = ["adafedadam", "fednova"]
    whole = simulation(ragged, names, [0, 1], **options)
    small = simulation(ragged, names, [0, 1], memory=2e-5, data_on="host", **options)
    for _ in range(2):
        whole.step()
    kept = whole.checkpoint()
    whole.step()
    resumed = simulation(ragged, names, [0, 1], **options)
    resumed.restore(kept)
    resumed.step()
    assert torch.equal(resumed.x, whole.x)
    for _ in range(3):
        small.step()
    torch.testing.assert_close(small.x, whole.x, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not compiler_found(torch.device(DEVICE)), reason="needs a compiler")
@pytest.mark.parametrize("hidden", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_steps_do_the_same(ragged: Federation, hidden: bool) -> None:
    """Those of linear classifiers in C++, and generated ones."""

    def model() -> nn.Module:
        return make_model() if hidden else nn.Linear(FEATURES, CLASSES).double()

    solver = Solver(lr=0.1, batch_size=4, epochs=(0.5, 2))
    eager = simulation(ragged, ["fedavg", "fednova"], [0, 1], model=model, solver=solver)
    compiled = Simulation(model, ragged, eager.runs, replace(eager.settings, compile="on"))
    assert_together(eager, compiled, rounds=3)


@pytest.mark.parametrize("work", WORK)
def test_a_client_of_a_real_federation_does_the_same(ragged: Federation, work: str) -> None:
    task = task_of(ragged, solver=Solver(lr=0.1, batch_size=4, **WORK[work]))
    exchange, made = Exchange(task, "fednova"), simulated(task, "fednova")
    for _ in range(3):
        exchange.round()
        made.step()
        torch.testing.assert_close(exchange.server.x, made.x[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 3, "epochs": 1}, "epochs=1 and steps=3 are both given: give one of them"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 1.5}, r"steps=1.5 is not a whole number"),
        ({"steps": (5, 2)}, r"steps=\(5, 2\): the larger number comes second"),
        ({"steps": (1, 2, 3)}, "neither a number nor a pair"),
        ({"epochs": 0.0}, "epochs=0.0"),
        ({"epochs": (2, 0.5)}, r"epochs=\(2, 0.5\): the larger number comes second"),
        ({"epochs": True}, "epochs=True is not a number"),
        ({"epochs": "many"}, "epochs='many' is not a number"),
        ({"epochs": float("inf")}, "epochs=inf"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Solver(**given)


def test_the_same_number_of_epochs_is_the_same_solver() -> None:
    assert Solver() == Solver(epochs=1) == Solver(epochs=1.0)
    assert Solver(epochs=(1.0, 3)) == Solver(epochs=[1, 3])  # type: ignore[arg-type]
    assert str(Solver(epochs=2.0).epochs) == "2"


def test_steps_take_the_place_of_a_tasks_own_epochs_and_epochs_of_its_steps() -> None:
    assert settings_of("cifar10", steps=20).solver == Solver(lr=0.01, batch_size=32, steps=20)
    own = Solver(lr=0.5, steps=20)
    assert changed_settings(own, 10, epochs=[0.5, 2]).solver == Solver(lr=0.5, epochs=(0.5, 2))
    assert changed_settings(own, 10, lr=1).solver == Solver(lr=1.0, steps=20)
    with pytest.raises(InputError, match="both given"):
        changed_settings(own, 10, epochs=1, steps=2)


@pytest.mark.parametrize("changes", [*WORK.values(), {"epochs": 1}, {"epochs": (1, 3)}])
def test_recipes_and_commands_keep_it(changes: dict[str, Any]) -> None:
    recipe = Recipe("cifar10", ("fedavg",), (0,), settings_of("cifar10", **changes))
    assert Recipe.from_json(recipe.to_json()) == recipe
    words = recipe.command().split()
    assert "None" not in words
    assert tyro.cli(Compare, args=words[2:]).recipe() == recipe


def test_runs_of_steps_are_others_than_those_of_epochs() -> None:
    of_now = RunKey.of("synthetic", "fedavg", 0, asdict(Settings()))
    assert RunKey.of("synthetic", "fedavg", 0, asdict(Settings(solver=Solver(steps=20)))) != of_now
