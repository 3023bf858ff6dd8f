"""Every algorithm in a federation of messages: the simulator's model, and what nodes keep for it."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import make_federation
from exchanged import Exchange, clients_of, simulated, task_of
from fairwind import InputError, algorithms
from fairwind.contract import MemoryAlgorithm
from fairwind.engine.checkpoint import load_checkpoint, save_checkpoint
from fairwind.engine.simulation import Simulation
from fairwind.exchange import Aggregator, Bounds, Kept, LocalClient, Privacy, Reply
from fairwind.exchange.kept import kept_file, load_kept, save_kept
from fairwind.exchange.message import Arrays

SEED, ROUNDS = 3, 3
FEDERATION = make_federation([12, 1, 45, 8, 26, 20])
TASK, CLIENTS = task_of(FEDERATION), len(FEDERATION)
ONE_OF_EACH = ("fedavg", "adafedadam", "fedcm", "scaffold", "mimelite", "mime", "ditto", "afl", "fedfv")
NEW = ("scaffold", "feddyn", "mimelite", "mime", "ditto", "afl", "fedmgda", "fedfv")


@cache
def clients(spec: str) -> list[LocalClient]:
    return clients_of(TASK, spec, SEED)


def exchange_of(spec: str, **options: Any) -> Exchange:
    return Exchange(TASK, spec, seed=SEED, clients=clients(spec), **options)


def assert_same(exchange: Exchange, simulation: Simulation) -> None:
    """The model, the server's state, and what clients keep."""
    torch.testing.assert_close(exchange.server.x, simulation.x[0], rtol=1e-9, atol=1e-10)
    ours = list(exchange.server.numbers.values())  # of the clients that have come, in the server's order
    theirs = [int(client) for client in exchange.server.numbers]
    for one, other in zip(exchange.server.state, simulation.states[0], strict=True):
        if one.shape[:1] == (CLIENTS,):
            one, other = one[ours], other[theirs]
        if one.shape[1:] == (CLIENTS,):
            one, other = one[:, ours], other[:, theirs]
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
    for vectors in simulation.memories.values.values():
        for client, number in exchange.server.kept.items():
            own = vector_of(exchange, int(client), number)
            torch.testing.assert_close(own, vectors[int(client)], rtol=1e-9, atol=1e-10)


def vector_of(exchange: Exchange, client: int, number: int) -> Tensor:
    return exchange.clients[client].form.vector(exchange.kept[client].vectors[number])[0]


@pytest.mark.parametrize("spec", [name for name in algorithms.REGISTRY if name != "pooled"])
def test_every_algorithm_trains_the_simulators_model(spec: str) -> None:
    exchange, simulation = exchange_of(spec), simulated(TASK, spec, seed=SEED)
    for _ in range(ROUNDS):
        assert exchange.round().moved
        simulation.step()
        assert_same(exchange, simulation)
    simulation.evaluate()
    for k in range(CLIENTS):  # every model that the simulator evaluates
        judged = exchange.judge(k)
        both = [judged] if judged.further is None else [judged, judged.further]
        expected = simulation.loss[:, k].tolist()
        assert [each.loss for each in both] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("spec", ONE_OF_EACH)
def test_so_it_does_where_nodes_miss_rounds(spec: str) -> None:
    exchange = exchange_of(spec)
    simulation = simulated(TASK, spec, seed=SEED, clients_per_round=4)
    for k, client in enumerate(exchange.clients):  # all know their first losses, as in a simulation
        first = client.loss(exchange.server.weights())
        exchange.kept[k] = Kept(exchange.server.training, first)
    absent: set[int] = set()
    for round in range(ROUNDS):
        there = simulation.planner.plan([SEED], round).client.tolist()
        absent |= set(range(CLIENTS)) - set(there)
        exchange.round(there)
        simulation.step()
        assert_same(exchange, simulation)
    assert absent


# ---- what clients keep ----


@pytest.mark.parametrize("spec", ["scaffold", "feddyn", "ditto"])
def test_what_a_node_has_lost_is_logged_and_counts_as_nothing(spec: str) -> None:
    exchange, simulation = exchange_of(spec), simulated(TASK, spec, seed=SEED)
    for _ in range(2):
        exchange.round()
        simulation.step()
    exchange.kept[4] = Kept()
    forgotten = simulation.memories.values[0]
    memory = isinstance(exchange.server.algorithm, MemoryAlgorithm)
    forgotten[4] = torch.zeros_like(forgotten[4]) if memory else simulation.x[0]
    lines = exchange.round().lines()
    simulation.step()
    assert lines == ["4 has lost what it kept of round 2, and begins again without"]
    assert_same(exchange, simulation)
    assert exchange.round().lines() == []


@pytest.mark.parametrize("spec", ["scaffold", "feddyn", "ditto"])
def test_a_round_that_did_not_count_is_undone_at_the_node(spec: str) -> None:
    late, absent = (exchange_of(spec) for _ in range(2))
    for exchange in (late, absent):
        exchange.round()
    late.reply(2)  # it trains, and its reply is late
    for exchange in (late, absent):
        exchange.round([k for k in range(CLIENTS) if k != 2])
        assert exchange.round().lines() == []
    assert torch.equal(late.server.x, absent.server.x)
    assert torch.equal(vector_of(late, 2, 2), vector_of(absent, 2, 2))


def test_what_is_kept_of_another_training_does_not_count() -> None:
    first, second = (exchange_of("scaffold") for _ in range(2))
    first.round()
    second.round()
    second.kept[0] = first.kept[0]
    assert second.round().lost == {"0": 0}


@pytest.mark.parametrize("spec", NEW)
def test_a_server_killed_in_any_round_goes_on_as_if_it_had_not_been(spec: str, tmp_path: Path) -> None:
    straight, broken = (exchange_of(spec, bounds=Bounds()) for _ in range(2))
    for _ in range(ROUNDS):
        straight.round()
        for k in range(3):  # replies of the phase in flight when it is killed
            broken.server.accept(str(k), broken.reply(k))
        one = broken.clients[0]
        fresh = Aggregator(algorithms.build(spec), one.layout, one.start(), clients=CLIENTS)
        checkpoint, _ = load_checkpoint(tmp_path, "me")
        if checkpoint is not None:
            fresh.restore(checkpoint)
        broken.server = fresh
        assert broken.round().lost == {}
        save_checkpoint(tmp_path, broken.server.checkpoint(), "me")
    assert torch.equal(straight.server.x, broken.server.x)
    assert all(map(torch.equal, straight.server.state, broken.server.state))


def test_a_file_keeps_what_a_client_keeps_or_counts_as_lost(tmp_path: Path) -> None:
    vectors: dict[int, Arrays] = {
        2: {"w": np.ones((2, 3), np.float32)},
        4: {"w": np.zeros((2, 3), np.float32)},
    }
    file = kept_file(tmp_path / "node", 7)
    assert load_kept(file) == Kept()
    save_kept(file, Kept("training", 1.5, vectors))
    found = load_kept(file)
    assert (found.training, found.first_loss, set(found.vectors)) == ("training", 1.5, {2, 4})
    np.testing.assert_array_equal(found.vectors[2]["w"], vectors[2]["w"])
    content = bytearray(file.read_bytes())
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        assert load_kept(file) == Kept(), place
    file.write_bytes(content[:-1])
    assert load_kept(file) == Kept()


# ---- phases ----


def test_who_sends_no_gradient_is_not_asked_to_train_and_who_does_not_train_counts_zero() -> None:
    exchange, without = (exchange_of("mime") for _ in range(2))
    server, measuring, training = exchange.server, (0, 1, 2, 3, 5), (0, 1, 2, 3)
    for k in measuring:
        assert not server.accept(str(k), exchange.reply(k))
    assert server.turn() == set(map(str, measuring))
    for k in training:
        assert not server.accept(str(k), exchange.reply(k))
    assert server.accept("4", exchange.reply(4)) == "it sent no gradient before"
    done = server.finish()
    assert (done.used, set(done.refused)) == (len(training), {"4"})
    without.round(measuring)
    assert torch.equal(server.state.m, without.server.state.m)  # all gradients counted
    assert not torch.equal(server.x, without.server.x)


def test_a_corrected_step_needs_the_mean_gradient() -> None:
    exchange = exchange_of("mime")
    with pytest.raises(InputError, match="mean gradient: give it"):
        exchange.clients[0].train(exchange.server.weights(), 0)


# ---- what is refused, and bounded ----


def changed(reply: Reply, **arrays: Any) -> Reply:
    assert reply.second is not None
    return reply._replace(second={**reply.second, **arrays})


BIAS = "2.bias"
SPOILT: dict[str, tuple[Callable[[Reply], Reply], str]] = {
    "NaN": (lambda r: changed(r, **{BIAS: np.full(3, np.nan)}), f"'{BIAS}' has numbers that are not finite"),
    "shape": (lambda r: changed(r, **{BIAS: np.ones(4)}), f"'{BIAS}' is of shape (4,), not (3,)"),
    "type": (lambda r: changed(r, **{BIAS: np.ones(3, np.float32)}), f"'{BIAS}' is of type float32"),
    "list": (lambda r: changed(r, **{BIAS: [1.0]}), f"'{BIAS}' is no array but a list"),
    "unknown": (lambda r: changed(r, c=np.ones(1)), "its arrays are not the model's: 'c' unknown"),
    "not sent": (lambda r: r._replace(second=None), "it sent no "),
    "huge": (lambda r: changed(r, **{BIAS: np.full(3, 1e308)}), "is too large to be weighed"),
}


@pytest.mark.parametrize(("spec", "what"), [("scaffold", "change of memory"), ("mimelite", "gradient")])
def test_a_spoilt_second_vector_is_named_and_refused(spec: str, what: str) -> None:
    exchange, others, there = exchange_of(spec), exchange_of(spec), range(3)
    reply = exchange.reply(4)
    for name, (spoil, why) in SPOILT.items():
        said = exchange.server.accept(name, spoil(reply))
        assert why in said
        assert what in said or name == "huge"
    for each in (exchange, others):
        each.round(there)
    assert torch.equal(exchange.server.x, others.server.x)
    assert all(map(torch.equal, exchange.server.state, others.server.state))


def test_a_loss_that_would_spoil_the_weights_of_all_is_refused() -> None:
    exchange = exchange_of("aaggff")
    reply = exchange.reply(0)
    said = exchange.server.accept("0", reply._replace(numbers={**reply.numbers, "loss": -1.0}))
    assert said == "what the algorithm makes of its numbers is not finite"
    assert exchange.round(range(1, CLIENTS)).moved


def test_a_second_vector_that_nobody_asked_for_is_refused() -> None:
    exchange = exchange_of("fedavg")
    reply = exchange.reply(0)
    assert "was not asked" in exchange.server.accept("0", reply._replace(second=reply.arrays))


@pytest.mark.parametrize("spec", ["scaffold", "mimelite", "fedmgda", "fedfv", "gifair"])
def test_who_sends_long_vectors_alone_gains_no_more_than_a_share(spec: str) -> None:
    """Neither the server's step nor what it remembers is longer than honest clients' by more than that."""

    def moved(factor: float) -> tuple[float, float]:
        exchange = exchange_of(spec, bounds=Bounds(share=0.2))
        before = exchange.server.x.clone()
        for k in range(CLIENTS):
            reply = exchange.reply(k)
            if k == 3:
                longer = {name: array * factor for name, array in reply.arrays.items()}
                second = reply.second and {name: array * factor for name, array in reply.second.items()}
                reply = reply._replace(arrays=longer, second=second)
            assert not exchange.server.accept(str(k), reply)
        done = exchange.server.finish()
        assert factor == 1 or "3" in {c for each in done.capped.values() for c in each} or spec == "fedmgda"
        state = [part.norm() for part in exchange.server.state if part.ndim]
        return float((exchange.server.x - before).norm()), float(sum(state)) if state else 0.0

    honest, lied = moved(1.0), moved(1e6)
    assert lied[0] < 10 * honest[0]  # and not a million times
    assert lied[1] <= 10 * honest[1]


def test_a_capped_weight_goes_to_the_others() -> None:
    """Coefficients have no sum to be divided by: the step would be shorter."""
    exchange = exchange_of("gifair", bounds=Bounds(share=0.34))
    before = exchange.server.x.clone()
    total, share = torch.zeros_like(before), {}
    replies = [exchange.reply(k) for k in range(CLIENTS)]
    sizes = torch.tensor([reply.numbers["size"] for reply in replies])
    for k, reply in enumerate(replies):
        exchange.server.accept(str(k), reply)
    done = exchange.server.finish()
    assert float(sizes.max() / sizes.sum()) > 0.34
    assert done.capped["weight"]
    moved = (before - exchange.server.x).norm()
    for k, reply in enumerate(replies):
        share[k] = float(sizes[k] / sizes.sum())
        total += share[k] * exchange.clients[k].form.vector(reply.arrays)[0]
    assert 0.5 * total.norm() < moved < 2 * total.norm()


@pytest.mark.parametrize("spec", ["scaffold", "afl", "fedmgda"])
def test_clients_are_counted_where_algorithms_count_on_them(spec: str) -> None:
    client = clients(spec)[0]
    with pytest.raises(InputError, match="say how many, as clients="):
        Aggregator(algorithms.build(spec), client.layout, client.start())
    exchange = exchange_of(spec)
    exchange.server = Aggregator(algorithms.build(spec), client.layout, client.start(), clients=2)
    assert exchange.round([5, 3]).used == 2
    assert "it is one more than the 2" in exchange.server.accept("1", exchange.reply(1))
    assert not exchange.server.accept("5", exchange.reply(5))


@pytest.mark.parametrize(
    ("spec", "needs"),
    [
        ("scaffold", "keeps between rounds"),
        ("mime", "mean full gradient"),
        ("ditto", "personal model"),
        ("afl", "sees all reports"),
        ("fedmgda", "inner products"),
    ],
)
def test_where_only_one_sum_is_sent_the_others_are_refused_by_what_they_need(spec: str, needs: str) -> None:
    algorithm, client = algorithms.build(spec), clients("fedavg")[0]
    with pytest.raises(InputError, match=needs):
        LocalClient(TASK, algorithm, 0, sends="sums")
    with pytest.raises(InputError, match=needs):
        Aggregator(algorithm, client.layout, client.start(), clients=8, sends="sums")
    privacy = Privacy(clip=1, weight=1, noise=1, delta=0.1)
    with pytest.raises(InputError, match=needs):
        Aggregator(algorithm, client.layout, client.start(), clients=8, privacy=privacy)
