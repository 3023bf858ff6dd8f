"""What a single client may claim in an evaluation."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from conftest import CLASSES, make_federation
from exchanged import task_of
from fairwind import algorithms, scores
from fairwind.exchange import UNBOUNDED, Bounds, Evaluations, Judged, RefusedError
from fairwind.exchange.evaluation import check_judged, lowest_loss

HONEST = 19


def judged(size: int = 10, accuracy: float = 50.0, loss: float = 1.0, train_size: int = 40) -> Judged:
    return Judged(size, train_size, loss, {"accuracy": accuracy})


def line(liar: Judged | None, bounds: Bounds, honest: int = HONEST) -> tuple[Any, Evaluations]:
    evaluations = Evaluations([scores.accuracy], "fedavg", 0, bounds=bounds)
    told = {str(k): judged() for k in range(honest)}
    return evaluations.add(1, told | ({} if liar is None else {"liar": liar}), {}), evaluations


def test_a_claim_of_samples_without_measure_moves_the_weighted_average_by_a_share() -> None:
    liar = judged(2**50, 100.0, train_size=2**50)
    found, evaluations = line(liar, Bounds())
    assert found["avg_weighted"] <= 50 + 0.1 * 50 + 0.5  # whole samples: 21.1 of 211 are 21
    assert found["avg"] == pytest.approx((50 * HONEST + 100) / (HONEST + 1))
    (said,) = evaluations.lines("node")
    assert said.startswith("node liar is not believed: a number of test samples of 1.13e+15 taken as 21, ")
    assert "a number of training samples of 1.13e+15 taken as 84" in said
    assert line(liar, UNBOUNDED)[0]["avg_weighted"] == pytest.approx(100)


@given(
    size=st.integers(1, 2**53 - 1),
    honest=st.integers(3, 60),
    share=st.sampled_from([0.05, 0.1, 0.3]),
    sizes=st.lists(st.integers(1, 1000), min_size=60, max_size=60),
)
def test_no_client_has_more_than_its_share_of_the_samples(
    size: int, honest: int, share: float, sizes: list[int]
) -> None:
    evaluations = Evaluations([scores.accuracy], "fedavg", 0, bounds=Bounds(share=share))
    told = {str(k): judged(sizes[k], accuracy=0.0) for k in range(honest)}
    evaluations.add(1, told | {"liar": judged(size, 100.0)}, {})
    kept = {client: each[0] for client, each in evaluations.sizes.items()}
    limit = max(share, 2 / (honest + 1))
    assert kept["liar"] <= max(1, limit * sum(kept.values()) + 1)  # numbers of samples are whole


def test_a_loss_is_bounded_by_those_of_the_others_as_in_training() -> None:
    found, evaluations = line(judged(loss=1e300), Bounds())
    assert found["loss_avg"] == pytest.approx((HONEST + 100) / (HONEST + 1))
    assert evaluations.lines("client") == ["client liar is not believed: a loss of 1e+300 taken as 100"]
    assert line(judged(loss=math.inf), Bounds())[0]["loss_avg"] == pytest.approx((HONEST + 100) / 20)


@pytest.mark.parametrize("usual", [1.0, -1.0])
def test_below_zero_it_is_bounded_alike(usual: float) -> None:
    """Losses may be negative, as Poisson's is, and a score that is the loss is one of them."""
    evaluations = Evaluations([scores.loss], "fedavg", 0, bounds=Bounds())
    told = {str(k): Judged(10, 40, usual, {"loss": usual}) for k in range(HONEST)}
    found = evaluations.add(1, told | {"liar": Judged(10, 40, -1e300, {"loss": -1e300})}, {})
    assert found["loss_avg"] == found["avg"] == pytest.approx((HONEST * usual - 100) / (HONEST + 1))
    assert "a loss of -1e+300 taken as -100" in evaluations.lines("client")[0]


def test_so_is_a_score_where_lower_is_better() -> None:
    evaluations = Evaluations([scores.mae], "fedavg", 0, bounds=Bounds())
    told = {str(k): Judged(10, 40, 1.0, {"mae": 2.0}) for k in range(HONEST)}
    found = evaluations.add(1, told | {"liar": Judged(10, 40, 1.0, {"mae": 1e30})}, {})
    assert found["avg"] == pytest.approx((2 * HONEST + 200) / (HONEST + 1))
    assert found["worst"] == 200


@pytest.mark.parametrize("bounds", [Bounds(), UNBOUNDED])
def test_honest_clients_are_believed(bounds: Bounds) -> None:
    evaluations = Evaluations([scores.accuracy], "fedavg", 0, bounds=bounds)
    told = {str(k): judged(5 + k % 10, 100.0 * k / 30, 0.1 + k) for k in range(30)}
    told["without"] = Judged(0, 7, math.nan, {"accuracy": math.nan})
    evaluations.add(1, told, {})
    assert evaluations.lines("node") == []
    assert evaluations.last == told


def test_a_further_model_is_bounded_likewise() -> None:
    evaluations = Evaluations([scores.accuracy], "ditto", 0, algorithms.ditto(), bounds=Bounds())
    told = {str(k): judged()._replace(further=judged()) for k in range(HONEST)}
    lie = judged(2**50, 100.0)
    evaluations.add(1, told | {"liar": lie._replace(further=lie)}, {})
    assert [(each["avg_weighted"] or 100) < 56 for each in evaluations.history] == [True, True]


@pytest.mark.parametrize("size", [10.5, -1, math.nan, math.inf, 2.0**53])
def test_a_number_of_samples_that_is_none_is_refused(size: Any) -> None:
    for told in (judged(size), judged(train_size=size), judged()._replace(further=judged(size))):
        with pytest.raises(RefusedError, match="it tells of"):
            check_judged(told, [scores.accuracy])
    whole: Any = 10.0
    assert repr(check_judged(judged(whole), [scores.accuracy])) == repr(judged(10))


@pytest.mark.parametrize(
    ("loss", "fine"),
    [
        (None, False),
        (nn.CrossEntropyLoss(weight=torch.ones(CLASSES)), False),
        (nn.CrossEntropyLoss(weight=-torch.ones(CLASSES)), True),
        (F.mse_loss, False),
        (nn.PoissonNLLLoss(), True),
        (nn.GaussianNLLLoss(), True),
        ("model", True),
        (lambda outputs, targets: -outputs[:, 0], True),
    ],
)
def test_a_negative_loss_is_refused_where_the_tasks_loss_cannot_be(loss: Any, fine: bool) -> None:
    task = task_of(make_federation([20]), **({} if loss is None else {"loss": loss}))
    by_loss = Judged(10, 40, 1.0, {"loss": -1.0})
    for told, known in (
        (judged(loss=-1.0), scores.accuracy),
        (judged()._replace(further=judged(loss=-1.0)), scores.accuracy),
        (by_loss, scores.loss),
    ):
        evaluations = Evaluations([known], "fedavg", 0, lowest=lowest_loss(task))
        if fine:
            assert evaluations.checked(told) == told
        else:
            with pytest.raises(RefusedError, match="its loss is -1, which is"):
                evaluations.checked(told)
    assert Evaluations([scores.accuracy], "fedavg", 0, lowest=0.0).checked(judged(loss=0.0))


def test_scores_that_nobody_asked_for_are_not_kept() -> None:
    told = judged()._replace(scores={"accuracy": 50.0} | {f"bonus {k}": 1.0 for k in range(1000)})
    assert check_judged(told._replace(further=told), [scores.accuracy]) == judged()._replace(further=judged())


@pytest.mark.parametrize("score", ["accuracy", "f1", "auc", "mae", "r2", "loss"])
@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_refused_with_any_score(score: str, loss: float) -> None:
    """Else a single client blanks the mean of all."""
    known = [getattr(scores, score)]
    told = Judged(10, 40, loss, {score: 1.0})
    for each in (told, told._replace(loss=1.0, further=told)):
        with pytest.raises(RefusedError, match=r"its loss is -?(nan|inf), which is not finite"):
            check_judged(each, known)
    nothing = Judged(0, 40, loss, {score: loss})
    assert check_judged(nothing, known).size == 0


@pytest.mark.parametrize(
    ("score", "value", "fine"),
    [
        ("accuracy", 100.0, True),
        ("accuracy", 100.1, False),
        ("accuracy", -1.0, False),
        ("accuracy", math.nan, False),
        ("f1", 1.0, True),
        ("f1", 1.1, False),
        ("auc", -0.1, False),
        ("auc", math.nan, True),  # of clients with one class
        ("iou", 2.0, False),
        ("r2", -1e9, True),
        ("r2", -math.inf, False),
        ("mae", math.inf, False),
        ("r2", 1.1, False),
        ("mae", -0.1, False),
        ("rmse", 1e9, True),
        ("perplexity", -1.0, False),
        ("loss", -3.0, True),
    ],
)
def test_a_score_outside_of_its_range_is_refused(score: str, value: float, fine: bool) -> None:
    told, known = Judged(10, 40, 1.0, {score: value}), [getattr(scores, score)]
    if fine:
        assert check_judged(told, known) == told
    else:
        with pytest.raises(RefusedError, match=f"its {score} is"):
            check_judged(told, known)
