"""Replies made to break a round: each is named and refused, or bounded, and the others' round completes."""

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conftest import make_federation
from exchanged import Exchange, task_of
from fairwind import InputError, algorithms
from fairwind.engine.layout import Layout
from fairwind.exchange import UNBOUNDED, Aggregator, Bounds, Reply
from fairwind.exchange.capping import CappedSum, Term
from fairwind.exchange.message import FIRST
from fairwind.exchange.server import Round
from fairwind.robust.limits import OFF, Limits, factors

LAYOUT = Layout((("w",), ("b",)), (torch.Size([2, 3]), torch.Size([2])), ((3, 1), (1,)), torch.float32)
P = 8


def server(spec: str = "adafedadam", **options: Any) -> Aggregator:
    return Aggregator(algorithms.build(spec), LAYOUT, torch.zeros(P), **options)


def reply(seed: int = 0, scale: float = 1.0, **numbers: Any) -> Reply:
    """An honest client's, but for what is given."""
    draw = np.random.default_rng(seed)
    arrays = {"w": scale * draw.normal(size=(2, 3)), "b": scale * draw.normal(size=2)}
    usual = {"size": 100, "steps": 10.0, "lr": 0.1, "loss": 1.0, "loss0": 2.0, "grad_norm": 4.0}
    return Reply({name: each.astype(np.float32) for name, each in arrays.items()}, usual | numbers)


def without(name: str) -> Reply:
    found = reply()
    return Reply(
        {n: v for n, v in found.arrays.items() if n != name},
        {n: v for n, v in found.numbers.items() if n != name},
    )


def arrays(**changed: Any) -> Reply:
    found = reply()
    return Reply(found.arrays | changed, found.numbers)


HOSTILE = {
    "NaN": (arrays(b=np.array([1, np.nan], np.float32)), "'b' has numbers that are not finite"),
    "Inf": (arrays(w=np.full((2, 3), np.inf, np.float32)), "'w' has numbers that are not finite"),
    "-Inf": (arrays(b=np.array([-np.inf, 0], np.float32)), "'b' has numbers that are not finite"),
    "shape": (arrays(b=np.ones(3, np.float32)), "'b' is of shape (3,), not (2,)"),
    "turned": (arrays(w=np.ones((3, 2), np.float32)), "'w' is of shape (3, 2), not (2, 3)"),
    "type": (arrays(b=np.ones(2)), "'b' is of type float64, not float32"),
    "integers": (arrays(b=np.ones(2, np.int64)), "'b' is of type int64"),
    "objects": (arrays(b=np.array([None, 1], object)), "'b' is of type object"),
    "list": (arrays(b=[1.0, 2.0]), "'b' is no array but a list"),
    "missing array": (without("b"), "its arrays are not the model's: 'b' missing"),
    "further array": (arrays(c=np.ones(2, np.float32)), "its arrays are not the model's: 'c' unknown"),
    "a thousand arrays": (
        arrays(**{f"c{i}": np.ones(1, np.float32) for i in range(1000)}),
        "'c0', 'c1', 'c2', 'c3', … unknown",
    ),
    "missing number": (without("loss"), "its numbers are not those asked for: 'loss' missing"),
    "further number": (reply(bonus=1.0), "'bonus' unknown"),
    "size 0": (reply(size=0), "its size is 0, which is not positive"),
    "size -5": (reply(size=-5), "its size is -5, which is not positive"),
    "size NaN": (reply(size=math.nan), "its size is nan, which is not finite"),
    "size of digits": (reply(size=10**400), "its size is inf, which is not finite"),
    "size text": (reply(size="100"), "its size is no number but '100'"),
    "size true": (reply(size=True), "its size is no number but True"),
    "size list": (reply(size=[1.0]), "its size is no number but [1.0]"),
    "loss Inf": (reply(loss=math.inf), "its loss is inf, which is not finite"),
    "loss negative": (reply(loss=-1.0), "what the algorithm makes of its numbers is not finite"),
    "first loss NaN": (reply(loss0=math.nan), "its loss0 is nan"),
    "steps 0": (reply(steps=0), "its steps is 0, which is not positive"),
    "rate negative": (reply(lr=-0.1), "its lr is -0.1, which is not positive"),
    "gradient negative": (reply(grad_norm=-1.0), "its grad_norm is -1, which is negative"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_spoilt_reply_is_named_and_refused_and_the_round_is_that_of_the_others(name: str) -> None:
    spoilt, why = HOSTILE[name]
    found, others = server(), server()
    for k in range(5):
        for each in (found, others):
            assert not each.accept(f"node {k}", reply(k))
    said = found.accept("bad", spoilt)
    assert why in said
    assert said.isprintable()
    done, expected = found.finish(), others.finish()
    assert done.refused == {"bad": said}
    assert (done.used, done.moved) == (5, True)
    assert expected.refused == {}
    assert torch.equal(found.x, others.x)


def test_a_client_replies_once_in_a_round() -> None:
    found = server()
    assert not found.accept("a", reply())
    assert "before" in found.accept("a", reply(1))
    assert found.finish().used == 1
    assert not found.accept("a", reply())


# ---- lies ----

LIES = {
    "a loss overstated ×10": {"loss": 10.0},
    "a loss overstated ×100": {"loss": 100.0},
    "a loss overstated without measure": {"loss": 1e300},
    "a first loss near zero": {"loss0": 1e-300},
    "a size without measure": {"size": 1e300},
    "a gradient without measure": {"grad_norm": 1e300},
    "a gradient near zero": {"grad_norm": 1e-300},
    "a learning rate near zero": {"lr": 1e-300},
    "steps without measure": {"steps": 1e300},
    "all of them": {"loss": 1e100, "loss0": 1e-100, "size": 1e100, "grad_norm": 1e-100},
}
HONEST = 19


def shares(aggregator: Aggregator, lie: dict[str, float], scale: float = 1.0) -> tuple[float, float]:
    """Of the weight, and of the total update: what a liar among twenty has in a round that it has to itself.

    The liar's is measured by its direction: its update is all of the last two parameters.
    """
    for k in range(HONEST):
        honest = reply(k)
        assert not aggregator.accept(f"node {k}", honest._replace(arrays=honest.arrays | {"b": _b(0.0)}))
    told = reply(99, scale, **lie)
    liar = told._replace(arrays={"w": np.zeros((2, 3), np.float32), "b": _b(scale)})
    aggregator.accept("liar", liar)
    capped = deepcopy(aggregator.sum)
    assert isinstance(capped, CappedSum)
    sizes = {term.client: term.size for term in capped.held}
    if "liar" not in sizes:  # refused
        return 0.0, 0.0
    done = capped.finish()
    lighter = {client: done.factors[0].get(client, 1.0) for client in sizes}
    weights = {client: size.weight * lighter[client] for client, size in sizes.items()}
    pulls = {c: size.length * weights[c] * done.factors[1].get(c, 1.0) for c, size in sizes.items()}
    assert done.sums[0] == pytest.approx(sum(weights.values()))
    return weights["liar"] / sum(weights.values()), pulls["liar"] / sum(pulls.values())


def _b(value: float) -> np.ndarray:
    return np.full(2, value, np.float32)


@pytest.mark.parametrize(
    "spec", ["adafedadam", "adafedadam:alpha=2,warmup=0", "qfedavg", "fednova", "fedavg"]
)
@pytest.mark.parametrize("lie", LIES)
def test_no_lie_buys_more_than_the_cap(spec: str, lie: str) -> None:
    aggregator = server(spec)
    known = {"fedavg": ("size", "steps", "lr"), "fednova": ("size", "steps", "lr")}
    asked = known.get(spec, ("size", "steps", "lr", "loss", "loss0", *["grad_norm"] * ("ada" in spec)))
    plain = {k: v for k, v in LIES[lie].items() if k in asked}

    def cut(told: Reply) -> Reply:
        return told._replace(numbers={k: v for k, v in told.numbers.items() if k in asked})

    accept = aggregator.accept
    aggregator.accept = lambda client, told: accept(client, cut(told))  # type: ignore[assignment, method-assign]
    for _ in range(3):
        weight, update = shares(aggregator, plain)
        assert weight <= 0.1 * (1 + 1e-12)
        assert update <= 2 * 0.1 * (1 + 1e-12)  # twice the median length, of a tenth of the weight
        done = aggregator.finish()
        assert done.moved
        assert torch.isfinite(aggregator.x).all()


def test_an_absurd_update_is_cut_down_and_its_sender_named() -> None:
    aggregator = server("fedavg")
    honest = {"size": 100, "steps": 10.0, "lr": 0.1}
    for k in range(HONEST):
        aggregator.accept(f"node {k}", Reply(reply(k).arrays, honest))
    aggregator.accept("liar", Reply(reply(99, 1e37).arrays, honest))
    done = aggregator.finish()
    assert {what: set(factors) for what, factors in done.capped.items()} == {"update": {"liar"}}
    assert "liar is capped: its update counts" in done.lines()[0]
    assert float(aggregator.x.norm()) < 10


def test_where_many_are_capped_the_log_counts_them() -> None:
    done = Round(0, capped={"weight": {f"node {k}": 0.5 + k / 100 for k in range(11)}}, moved=True)
    assert done.lines("node") == ["11 nodes are capped: their weight counts 0.5 to 0.6 times"]


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"size": 1e300}, "a size of 1e+300 taken as 1e+04"),
        ({"loss": 1e300}, "a loss of 1e+300 taken as 100"),
        ({"grad_norm": 1e-300}, "a step worth of"),
        ({"steps": 1e300}, "a number of steps of 1e+300 taken as 1e+03"),
        ({"lr": 1e-300}, "a learning rate of 1e-300 taken as 0.01"),
    ],
)
def test_from_the_second_round_on_numbers_are_bounded_by_those_of_the_others(
    lie: dict[str, float], said: str
) -> None:
    aggregator = server()
    for _ in range(2):
        for k in range(HONEST):
            aggregator.accept(f"node {k}", reply(k))
        aggregator.accept("liar", reply(99, **lie))
        done = aggregator.finish()
    assert said in done.bounded["liar"][0]
    assert set(done.bounded) == {"liar"}


def test_a_client_is_held_to_its_first_first_loss() -> None:
    aggregator = server()
    for loss0 in (2.0, 1e-3):
        for k in range(HONEST):
            aggregator.accept(f"node {k}", reply(k))
        aggregator.accept("turncoat", reply(99, loss0=loss0))
        assert isinstance(aggregator.sum, CappedSum)
        weights = {term.client: term.sums[0] for term in aggregator.sum.held}
        assert weights.get("turncoat", 50.0) == 50.0
        aggregator.finish()
    assert aggregator.first_losses["turncoat"] == 2.0


def test_a_lie_about_first_losses_hardly_moves_what_late_clients_are_told() -> None:
    aggregator = server()
    for k in range(HONEST):
        aggregator.accept(f"node {k}", reply(k))
    aggregator.accept("liar", reply(99, loss0=1e30))
    aggregator.finish()
    assert aggregator.first_loss("late") == pytest.approx((19 * 2.0 + 20.0) / 20)


def of_sums(first_loss: float, first_losses: float = 1.0) -> Reply:
    """A reply of AdaFedAdam's sums."""
    numbers = {"weight": 50.0, "certainty": 50.0, "first_loss": first_loss, "first_losses": first_losses}
    return Reply(reply().arrays, numbers)


def test_where_sums_are_sent_a_lie_about_first_losses_hardly_moves_it_either() -> None:
    aggregator = server(sends="sums")
    for k in range(HONEST):
        assert not aggregator.accept(f"node {k}", of_sums(2.0))
    assert not aggregator.accept("liar", of_sums(1e30))
    for lie in (of_sums(-1e6), of_sums(2.0, first_losses=1e-3), of_sums(2.0, first_losses=-19.0)):
        assert "first loss" in aggregator.accept(f"liar {id(lie)}", lie)
    aggregator.finish()
    assert aggregator.first_loss("late") == pytest.approx((19 * 2.0 + 20.0) / 20)
    assert aggregator.first_loss("node 3") == 2.0


@pytest.mark.parametrize(("first_loss", "first_losses"), [(-1e6, 20.0), (40.0, 1e-9), (40.0, -20.0)])
def test_late_clients_are_not_told_a_mean_of_first_losses_that_cannot_be(
    first_loss: float, first_losses: float
) -> None:
    """In a secure sum nobody sees who lies."""
    aggregator = server(sends="sums", bounds=UNBOUNDED)
    for told, known in (((40.0, 20.0), 2.0), ((first_loss, first_losses), 2.0), ((60.0, 20.0), 3.0)):
        numbers = {"weight": 50.0, "certainty": 50.0, **dict(zip(FIRST, told, strict=True))}
        aggregator.take_sum(torch.zeros(len(aggregator.x)).double(), numbers, 20)
        aggregator.finish()
        assert aggregator.first_loss("late") == known


def test_common_certainty_hardly_moves_for_a_gradient_near_zero() -> None:
    found = {}
    for lie in (4.0, 1e-300):
        aggregator = server("adafedadam:warmup=0")
        for _ in range(3):
            for k in range(HONEST):
                aggregator.accept(f"node {k}", reply(k))
            aggregator.accept("liar", reply(99, grad_norm=lie))
            aggregator.finish()
        found[lie] = float(aggregator.state.certainty)
    assert found[1e-300] < found[4.0] + 0.5


def test_without_bounds_the_same_lie_has_everything() -> None:
    aggregator = server(bounds=UNBOUNDED)
    shares(aggregator, {"loss0": 1e-300})
    assert isinstance(aggregator.sum, CappedSum)
    assert aggregator.sum.sums[0] > 1e300


def test_a_step_that_fails_names_whose_update_was_largest() -> None:
    aggregator = server(bounds=UNBOUNDED)
    for k in range(5):
        aggregator.accept(f"node {k}", reply(k))
    aggregator.accept("liar", reply(99, grad_norm=1e300))
    done = aggregator.finish()
    assert not done.moved
    assert "the step is not finite; liar has the largest share in it" in done.lines()[-1]
    assert not aggregator.x.any()
    assert aggregator.stalled == 1


# ---- several that lie together ----


@pytest.mark.parametrize("liars", [1, 4, 5, 9])
def test_liars_of_a_minority_cannot_carry_the_model_away(liars: int) -> None:
    aggregator = server("fedavg")
    numbers = {"size": 100, "steps": 10.0, "lr": 0.1}
    told = numbers | {"size": 1e12}
    for k in range(20):
        lies = k < liars
        aggregator.accept(
            f"node {k}", Reply(reply(k, 1e9 if lies else 1.0).arrays, told if lies else numbers)
        )
    done = aggregator.finish()
    assert set(done.capped["update"]) == {f"node {k}" for k in range(liars)}
    assert float(aggregator.x.norm()) < 3 * float(torch.stack([_length(k) for k in range(20)]).median())


def _length(k: int) -> Tensor:
    whole = torch.cat([torch.from_numpy(each).reshape(-1) for each in reply(k).arrays.values()])
    return whole.norm()  # type: ignore[no-any-return]


def test_two_that_lie_about_certainty_do_not_decide_it() -> None:
    found = {}
    for lie in (4.0, 1e-9):
        aggregator = server("adafedadam:warmup=0")
        for k in range(20):
            aggregator.accept(f"node {k}", reply(k, grad_norm=lie if k < 2 else 4.0))
        aggregator.finish()
        found[lie] = float(aggregator.state.certainty)
    assert found[1e-9] < 3 * found[4.0]


# ---- the running sum ----


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=60),
    st.sampled_from([Limits(), Limits(0.5), Limits(together=2.0), OFF]),
)
def test_a_running_sum_is_that_of_all_at_once(told: list[tuple[float, float]], limits: Limits) -> None:
    running = CappedSum(1, 1, limits)
    terms = [Term(str(k), w, torch.tensor([d]), (w,), d) for k, (w, d) in enumerate(told)]
    cut = factors([term.size for term in terms], limits)
    for term in terms:
        running.add(term._replace(update=term.update.clone()))
    found = running.finish()
    weights = [term.sums[0] * each.weight for term, each in zip(terms, cut, strict=True)]
    pulls = [w * each.update * t.length for w, each, t in zip(weights, cut, terms, strict=True)]
    assert found.sums[0] == pytest.approx(sum(weights))
    assert float(found.total) == pytest.approx(sum(pulls), rel=1e-5)
    assert set(found.factors[0]) == {str(k) for k, each in enumerate(cut) if each.weight < 1}


def test_few_contributions_of_a_large_model_are_held_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fairwind.exchange.capping.ROOM", 1)
    running, most = CappedSum(1, 1, Limits()), 0
    for k in range(300):
        running.add(Term(str(k), 1.0, torch.ones(1), (1.0,), 1.0))
        most = max(most, len(running.held))
    assert most == 16
    assert float(running.finish().total) == 300


def test_of_more_contributions_than_are_held_the_largest_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairwind.exchange.capping.ROOM", 1)
    running = CappedSum(1, 1, Limits())
    for k in range(300):
        large = 1e6 if k % 30 == 0 else 1.0
        running.add(Term(str(k), large, torch.ones(1) * large, (large,), large))
    found = running.finish()
    assert set(found.factors[0]) == {str(k) for k in range(0, 300, 30)}
    assert float(found.total) < 2 * 300


def test_honest_equal_clients_are_never_capped() -> None:
    for clients in (1, 2, 3, 7, 20, 100):
        exchange = Exchange(task_of(make_federation([12] * min(clients, 7))), "fedavg", bounds=Bounds())
        done = exchange.round()
        assert done.lines() == []


def test_bounds_out_of_range_are_refused() -> None:
    wrongs = {"share": 0}, {"share": 1.5}, {"together": -1}, {"norm": 0.5}, {"size": 0.5}, {"loss": math.nan}
    for wrong in wrongs:
        with pytest.raises(InputError):
            Bounds(**wrong)
