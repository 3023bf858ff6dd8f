"""Clients and a server that exchange messages train as the simulator does."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from caps import CappedServer
from conftest import make_federation, make_model
from exchanged import Exchange, simulated, task_of
from fairwind import Algorithm, Federation, Settings, Solver, Task, algorithms
from fairwind.engine.checkpoint import load_checkpoint, save_checkpoint
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.exchange import UNBOUNDED, Aggregator, Bounds, LocalClient, report_update

SUMMED = ["fedavg", "adafedadam:alpha=2,warmup=0", "qfedavg", "fednova", "fedadam", "fedprox:mu=0.1"]


@pytest.mark.parametrize("sends", ["report", "sums"])
@pytest.mark.parametrize("spec", SUMMED)
def test_an_exchange_trains_the_simulators_model(ragged: Federation, spec: str, sends: str) -> None:
    task = task_of(ragged)
    exchange, simulation = Exchange(task, spec, seed=3, sends=sends), simulated(task, spec, seed=3)
    for _ in range(4):
        exchange.round()
        simulation.step()
        torch.testing.assert_close(exchange.server.x, simulation.x[0], rtol=1e-9, atol=1e-10)
    for one, other in zip(exchange.server.state, simulation.states[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_so_it_does_in_float32_with_either_engine_and_drawn_epochs_and_probes(
    ragged: Federation, engine: str
) -> None:
    task = task_of(ragged, torch.float32, solver=Solver(lr=0.1, batch_size=4, epochs=(1, 3)))
    settings = Settings(solver=task.solver, engine=engine, probe_samples=9, workers=1)  # type: ignore[arg-type]
    exchange = Exchange(task, "adafedadam", settings=settings)
    simulation = simulated(task, "adafedadam", engine=engine, probe_samples=9)
    for _ in range(5):
        exchange.round()
        simulation.step()
    assert exchange.server.weights()["0.weight"].dtype == "float32"
    torch.testing.assert_close(exchange.server.x, simulation.x[0], rtol=1e-4, atol=1e-5)


def test_a_client_may_hold_its_own_data_and_nobody_elses(ragged: Federation) -> None:
    task, spec = task_of(ragged), algorithms.adafedadam()
    inputs, targets = ragged.at(slice(int(ragged.start[4]), int(ragged.start[5])))
    size = int(ragged.train[4])
    own = {"train": (inputs[:size], targets[:size]), "test": (inputs[size:], targets[size:])}
    alone = Task(make_model, Federation.from_clients([own], classes=ragged.classes), solver=task.solver)
    theirs, mine = LocalClient(task, spec, 4), LocalClient(alone, spec, number=4)
    weights = Exchange(task, "fedavg").server.weights()
    one, other = theirs.train(weights, 7), mine.train(weights, 7)
    assert one.first_loss == other.first_loss
    assert one.reply.numbers == other.reply.numbers
    assert all((one.reply.arrays[name] == other.reply.arrays[name]).all() for name in weights)
    assert mine.evaluate(weights) == theirs.evaluate(weights)


def test_the_order_of_replies_does_not_matter_with_bounds_either(ragged: Federation) -> None:
    one, other = (Exchange(task_of(ragged), "adafedadam", bounds=Bounds()) for _ in range(2))
    for _ in range(4):
        done = one.round(range(8)), other.round([5, 2, 7, 0, 1, 6, 4, 3])
        assert sorted(done[0].lines()) == sorted(done[1].lines())
    torch.testing.assert_close(one.server.x, other.server.x, rtol=1e-12, atol=1e-12)


def test_a_reply_of_sums_tells_nothing_but_sums(ragged: Federation) -> None:
    exchange = Exchange(task_of(ragged), "adafedadam", sends="sums")
    reply = exchange.reply(4)
    assert set(reply.numbers) == {"weight", "certainty", "first_loss", "first_losses"}
    assert set(reply.arrays) == set(exchange.server.weights())


@pytest.mark.parametrize("sends", ["report", "sums"])
def test_who_joins_late_is_given_the_mean_first_loss(ragged: Federation, sends: str) -> None:
    exchange = Exchange(task_of(ragged), "adafedadam", sends=sends)
    assert exchange.server.first_loss("7") is None
    exchange.round(range(7))
    known = [first for k in range(7) if (first := exchange.memory[k]) is not None]
    assert exchange.server.first_loss("7") == pytest.approx(sum(known) / 7)
    exchange.round(range(8))
    assert exchange.memory[7] == pytest.approx(sum(known) / 7)


def test_who_lost_its_memory_is_told_its_own_first_loss(ragged: Federation) -> None:
    exchange = Exchange(task_of(ragged), "adafedadam")
    exchange.round()
    assert exchange.server.first_loss("2") == exchange.memory[2]


def test_a_server_killed_after_any_round_goes_on_as_if_it_had_not_been(
    ragged: Federation, tmp_path: Path
) -> None:
    task, spec = task_of(ragged), "adafedadam:warmup=2"
    straight = Exchange(task, spec, bounds=Bounds())
    broken = Exchange(task, spec, bounds=Bounds())
    for round in range(5):
        straight.round()
        for k in range(3):  # replies of the round in flight when it is killed
            broken.server.accept(str(k), broken.reply(k))
        fresh = Aggregator(algorithms.build(spec), straight.server.layout, broken.clients[0].start())
        found, refused = load_checkpoint(tmp_path, "me")
        assert refused == []
        if found is not None:
            fresh.restore(found)
        assert fresh.round == round
        broken.server = fresh
        broken.round()
        save_checkpoint(tmp_path, broken.server.checkpoint(), "me")
    assert torch.equal(straight.server.x, broken.server.x)
    assert all(map(torch.equal, straight.server.state, broken.server.state))
    assert straight.server.first_losses == broken.server.first_losses


def test_a_loop_of_ones_own_reports_what_the_engine_would(ragged: Federation) -> None:
    task = task_of(ragged, solver=Solver(lr=0.1, batch_size=100))
    client = LocalClient(task, algorithms.adafedadam(), 4)
    torch.manual_seed(0)
    before, after = make_model(), make_model()
    after.load_state_dict(before.state_dict())
    weights = {name: p.detach().numpy() for name, p in before.named_parameters()}
    inputs, targets = client.federation.at(slice(0, int(client.federation.train[0])))
    optimizer = torch.optim.SGD(after.parameters(), lr=0.1)
    loss = torch.nn.functional.cross_entropy(after(inputs), targets)
    torch.autograd.backward(loss)
    norm = torch.cat([p.grad.reshape(-1) for p in after.parameters() if p.grad is not None]).norm()
    optimizer.step()
    mine = report_update(
        before, after, size=len(inputs), lr=0.1, steps=1, loss=loss.item(), grad_norm=norm.item()
    )
    theirs = client.train(weights, 0).reply
    assert mine.numbers == pytest.approx(theirs.numbers)
    for name in weights:
        torch.testing.assert_close(*(torch.tensor(each.arrays[name]) for each in (mine, theirs)))


def test_a_round_without_replies_leaves_the_model_as_it_is() -> None:
    exchange = Exchange(task_of(make_federation([20, 30])), "adafedadam", bounds=UNBOUNDED)
    before = exchange.server.x.clone()
    done = exchange.round([])
    assert not done.moved
    assert done.stalled
    assert done.lines("node") == ["the model stays as it was: usable replies: 0, and at least 1 must be"]
    assert torch.equal(exchange.server.x, before)
    assert exchange.server.round == 0  # it does not use up a round


def test_the_documented_server_functions_for_fedn_do_the_aggregators_arithmetic(ragged: Federation) -> None:
    page = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
    (code,) = re.findall(r"```python\n(class ServerFunctions.*?)```", page, re.S)
    scope: dict[str, Any] = {"np": np, "ServerFunctionsBase": object}
    exec(code, scope)
    functions, exchange = scope["ServerFunctions"](), Exchange(task_of(ragged), "adafedadam", sends="sums")
    model = list(exchange.server.weights().values())
    for round in range(8):  # the rate changes after six
        assert functions.client_settings(model)["round"] == round
        for k in range(8):
            reply = exchange.reply(k)
            assert not exchange.server.accept(str(k), reply)
            functions.incremental_aggregate(str(k), list(reply.arrays.values()), reply.numbers, model)
        broken = {"weight": 1.0, "certainty": float("nan")}
        functions.incremental_aggregate("broken", model, broken, model)
        exchange.server.finish()
        model = functions.get_incremental_aggregate_model()
        for found, expected in zip(model, exchange.server.weights().values(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("spec", ["fedavg", "adafedadam:warmup=0"])
def test_the_benchmark_of_caps_trains_what_an_exchange_trains(ragged: Federation, spec: str) -> None:
    """`benchmarks/caps.py` lets the simulator train and asks a server by how much clients are cut."""
    task, bounds = task_of(ragged), Bounds(share=0.25)
    exchange = Exchange(task, spec, bounds=bounds)
    built = algorithms.build(spec)
    assert isinstance(built, Algorithm)
    capped = CappedServer(built, bounds)
    settings = Settings(solver=task.solver, rounds=4, compile="off", device="cpu", workers=1)
    simulation = Simulation(task.model, task.federation, [Run(spec, capped.as_algorithm(), 0)], settings)
    simulation.start()
    rounds = []
    for _ in range(4):
        rounds.append(exchange.round())
        simulation.step()
        torch.testing.assert_close(simulation.x[0], exchange.server.x, rtol=1e-9, atol=1e-10)
    cut = [{client for each in done.capped.values() for client in each} for done in rounds]
    assert sum(map(len, cut)) == sum(capped.capped.values()) > 0
