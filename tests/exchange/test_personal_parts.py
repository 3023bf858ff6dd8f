"""A real federation whose clients keep a part of the model, or average statistics of batch norm."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import CLASSES, FEATURES, make_federation
from exchanged import SOLVER, Exchange, simulated
from fairwind import InputError, Task
from fairwind.engine.checkpoint import load_checkpoint, save_checkpoint
from fairwind.exchange import UNBOUNDED, Bounds, Reply, Round
from fairwind.exchange.kept import kept_file, load_kept, save_kept
from fairwind.robust.defence import DEFENCES

FEDERATION = make_federation([12, 21, 45])  # batches of one, too
OWN: dict[str, dict[str, Any]] = {
    "local": {"batch_norm": "local"},
    "shared": {"batch_norm": "shared"},
    "head": {"personal": "3.*", "batch_norm": "shared"},
    "head, local": {"personal": "3.*", "batch_norm": "local"},
}
BATCHES = "1.num_batches_tracked"


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, CLASSES)).double()


def task_of(case: str) -> Task:
    return Task(model, FEDERATION, solver=SOLVER, **OWN[case])


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("case", OWN)
@pytest.mark.parametrize("spec", ["fedavg", "adafedadam", "scaffold", "mime", "ditto", "local", "afl"])
def test_three_nodes_train_the_simulators_model(spec: str, case: str, tmp_path: Path) -> None:
    """What nodes keep is what the simulator holds; a server and nodes that start anew go on with it."""
    task = task_of(case)
    exchange, simulation = Exchange(task, spec, seed=3), simulated(task, spec, seed=3)
    for t in range(3):
        if t == 2:  # all are killed, and begin again from their files
            save_checkpoint(tmp_path, exchange.server.checkpoint(), "me")
            again = Exchange(task, spec, seed=3, clients=exchange.clients)
            found, _ = load_checkpoint(tmp_path, "me")
            assert found is not None
            again.server.restore(found)
            for k, kept in enumerate(exchange.kept):
                save_kept(kept_file(tmp_path, k), kept)
                again.kept[k] = load_kept(kept_file(tmp_path, k))
            exchange = again
        assert exchange.round().moved
        simulation.step()
        close(exchange.server.x, simulation.x[0])
        close(exchange.server.statistics, simulation.own.averages[0])
    simulation.evaluate()
    for k in range(len(FEDERATION)):
        judged = exchange.judge(k)
        both = [judged] if judged.further is None else [judged, judged.further]
        assert [each.loss for each in both] == pytest.approx(simulation.loss[:, k].tolist())
    trained = model()
    exchange.server.load(trained)
    whole = simulation.plain.state_dict(
        torch.cat([simulation.x[0], simulation.own.take(0, torch.tensor([0]))[0]])
    )
    for name in simulation.layout.names + simulation.plain.division.averaged_part.names:
        close(trained.state_dict()[name].double(), whole[name].double())


def test_a_node_that_lost_its_part_begins_again_and_says_so() -> None:
    exchange = Exchange(task_of("local"), "fedavg", seed=3)
    exchange.round()
    exchange.kept[1] = exchange.kept[1]._replace(vectors={})
    done = exchange.round()
    assert done.lost == {"1": 0}


def test_a_reply_with_statistics_that_cannot_be_is_refused() -> None:
    exchange = Exchange(task_of("shared"), "fedavg", seed=3)
    cases: tuple[tuple[Any, str], ...] = (
        (lambda a: {n: v for n, v in a.items() if n != "1.running_var"}, "1.running_var' missing"),
        (lambda a: a | {"1.running_var": -np.abs(a["1.running_var"])}, "'1.running_var' is negative"),
        (lambda a: a | {"1.running_mean": a["1.running_mean"] * np.nan}, "not finite"),
        *((partial(with_batches, number=n), "numbers of batches") for n in (-1e30, -1, 0.5, 2.0**60)),
    )
    for spoil, why in cases:
        reply = exchange.reply(0)
        assert why in exchange.server.accept("0", reply._replace(arrays=spoil(reply.arrays)))
        exchange.server.begin()


def with_batches(arrays: Any, number: float) -> Any:
    """Arrays with another number of batches."""
    return arrays | {BATCHES: np.full_like(arrays[BATCHES], number)}


def test_a_number_of_batches_below_the_servers_is_refused() -> None:
    exchange = Exchange(task_of("shared"), "fedavg", seed=3)
    exchange.round()
    reply = exchange.reply(0)
    less = reply._replace(arrays=with_batches(reply.arrays, 1))
    assert "smaller than those that it was sent" in exchange.server.accept("0", less)


def cumulative() -> nn.Module:
    made = model()
    norm: Any = made[1]
    norm.momentum = None  # PyTorch divides by the number of batches
    return made


@pytest.mark.parametrize("defence", [None, "geometric"])
def test_a_client_that_claims_many_batches_does_not_freeze_the_statistics(defence: str | None) -> None:
    """In the first round already, when there are no earlier reports."""
    honest, exchange = (of_many(cumulative, bounds=Bounds(), defence=defence) for _ in range(2))
    honest.round()
    for k in range(6):
        reply = exchange.reply(k)
        liar = reply._replace(arrays=with_batches(reply.arrays, 2.0**50))
        assert not exchange.server.accept(str(k), liar if k == 5 else reply)
    done = exchange.server.finish()
    assert set(done.capped[BATCHES]) == {"5"}
    counted, usual = (float(each.server.statistics[each.server.counters]) for each in (exchange, honest))
    assert usual <= counted <= 5 * usual
    assert exchange.round().moved


def lying(reply: Reply, *, size: float, mean: float) -> Reply:
    """A reply that claims so many samples, and so large a mean of the activations."""
    far = np.full_like(reply.arrays["1.running_mean"], mean)
    return reply._replace(
        arrays=reply.arrays | {"1.running_mean": far}, numbers={**reply.numbers, "size": size}
    )


def with_liar(exchange: Exchange, *, size: float, mean: float) -> Round:
    """A round in which the last client lies."""
    for k in range(len(exchange.clients)):
        reply = exchange.reply(k)
        last = k == len(exchange.clients) - 1
        assert not exchange.server.accept(str(k), lying(reply, size=size, mean=mean) if last else reply)
    return exchange.server.finish()


def of_many(build: Any = model, **options: Any) -> Exchange:
    task = Task(build, make_federation([20, 24, 28, 32, 36, 40]), solver=SOLVER, batch_norm="shared")
    return Exchange(task, "fedavg", seed=3, **options)


@pytest.mark.parametrize("defence", [None, *DEFENCES])
def test_a_client_that_claims_all_samples_does_not_set_the_statistics(defence: str | None) -> None:
    """However many batches were counted before."""
    honest, exchange = (of_many(bounds=Bounds(), defence=defence) for _ in range(2))
    for _ in range(4):
        honest.round()
        exchange.round()
    before = honest.server.statistics.clone()
    honest.round()
    done = with_liar(exchange, size=1e12, mean=1e9)
    assert set(done.capped["statistics' weight"]) == {"5"}
    if defence is None:
        assert set(done.capped["statistics"]) == {"5"}
    small = ~honest.server.counters
    usual = (honest.server.statistics - before)[small].norm()
    assert (exchange.server.statistics - honest.server.statistics)[small].norm() < 6 * usual


def test_under_a_defence_statistics_do_not_notice_by_how_much_a_client_lies() -> None:
    near, far = (of_many(bounds=Bounds(), defence="median") for _ in range(2))
    for exchange, mean in ((near, 1e3), (far, 1e9)):
        exchange.round()
        with_liar(exchange, size=1e12, mean=mean)
    assert torch.equal(near.server.statistics, far.server.statistics)
    assert float(far.server.statistics[~far.server.counters].abs().max()) < 10


def test_a_reply_whose_statistics_are_refused_counts_nowhere() -> None:
    found, without = of_many(), of_many()
    for k in range(5):
        for each in (found, without):
            assert not each.server.accept(str(k), each.reply(k))
    said = found.server.accept("5", lying(found.reply(5), size=1e305, mean=1e9))
    assert "too large to be weighed" in said
    assert found.server.finish().used == without.server.finish().used == 5
    close(found.server.x, without.server.x)
    close(found.server.statistics, without.server.statistics)


def test_what_cannot_be_averaged_is_refused() -> None:
    recomputed = Task(model, FEDERATION, solver=SOLVER, batch_norm="recomputed")
    with pytest.raises(InputError, match="needs the samples of all clients"):
        Exchange(recomputed, "fedavg")
    with pytest.raises(InputError, match="beside the one sum"):
        Exchange(task_of("shared"), "fedavg", sends="sums")
    assert Exchange(task_of("local"), "fedavg", sends="sums").round().moved


@pytest.mark.parametrize("case", OWN)
def test_flowers_server_and_nodes_train_and_evaluate_the_simulators_models(case: str) -> None:
    pytest.importorskip("flwr")
    from fairwind.flower import AlgorithmStrategy, client_app
    from flower_grid import InProcessGrid

    task = task_of(case)
    strategy = AlgorithmStrategy("fedavg", task, seed=3, bounds=UNBOUNDED)
    strategy.start(InProcessGrid(client_app(task), len(FEDERATION)), num_rounds=3, timeout=30)
    simulation = simulated(task, "fedavg", seed=3, eval_every=1)
    for _ in range(3):
        simulation.step()
    close(strategy.aggregator.x, simulation.x[0])
    for found, expected in zip(strategy.evaluations.history, simulation.history, strict=True):
        for name in ("avg", "worst30", "loss_avg"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6), name  # type: ignore[literal-required]
