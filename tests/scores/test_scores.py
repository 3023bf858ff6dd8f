"""Scores against their definitions, written out client by client."""

import itertools
import math

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from torch import Tensor, nn

from fairwind import Federation, InputError, Task, scores, simulate
from fairwind.intervals import paired_differences
from fairwind.metrics import fairness

LENGTHS = torch.tensor([7, 0, 12, 1, 30])


def judged(score: scores.Score, outputs: Tensor, targets: Tensor) -> list[float]:
    values = torch.stack([score.per_sample(outputs, targets)] * 2)  # two runs
    found = score.of_clients(values, LENGTHS)
    assert torch.equal(found[0].nan_to_num(9), found[1].nan_to_num(9))
    return found[0].tolist()


def clients(*tensors: Tensor) -> list[tuple[np.ndarray, ...]]:
    ends = [0, *LENGTHS.cumsum(0).tolist()]
    return [tuple(t[a:b].numpy() for t in tensors) for a, b in itertools.pairwise(ends)]


@pytest.fixture
def two() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    margins = torch.randint(-4, 5, (50,), generator=draw).double()  # with ties
    return torch.stack([torch.zeros(50).double(), margins], 1), torch.randint(0, 2, (50,), generator=draw)


def test_auc_counts_pairs(two: tuple[Tensor, Tensor]) -> None:
    outputs, targets = two
    for found, (margin, label) in zip(
        judged(scores.auc, outputs, targets), clients(outputs[:, 1], targets), strict=True
    ):
        pairs = [(p > n) + 0.5 * (p == n) for p in margin[label == 1] for n in margin[label == 0]]
        assert found == pytest.approx(np.mean(pairs)) if pairs else math.isnan(found)


@pytest.mark.parametrize("classes", [2, 4])
def test_f1_is_its_definition(classes: int) -> None:
    draw = torch.Generator().manual_seed(1)
    outputs = torch.randn(50, classes, generator=draw)
    targets = torch.randint(0, classes, (50,), generator=draw)
    predicted = outputs.argmax(1)
    for found, (p, t) in zip(judged(scores.f1, outputs, targets), clients(predicted, targets), strict=True):
        each = []
        for c in range(classes):
            there = (p == c).sum() + (t == c).sum()
            each.append(2 * ((p == c) & (t == c)).sum() / there if there else math.nan)
        if not len(p):
            assert math.isnan(found)
        elif classes == 2:
            assert found == pytest.approx(0.0 if math.isnan(each[1]) else each[1])
        else:
            assert found == pytest.approx(np.nanmean(each))


def test_regression_scores_are_their_definitions() -> None:
    draw = torch.Generator().manual_seed(2)
    outputs, targets = torch.randn(50, 1, generator=draw).double(), torch.randn(50, generator=draw).double()
    for score, formula in (
        (scores.mae, lambda o, t: np.abs(o - t).mean()),
        (scores.mse, lambda o, t: ((o - t) ** 2).mean()),
        (scores.rmse, lambda o, t: np.sqrt(((o - t) ** 2).mean())),
        (scores.r2, lambda o, t: 1 - ((o - t) ** 2).sum() / ((t - t.mean()) ** 2).sum()),
    ):
        found = judged(score, outputs, targets)
        for value, (o, t) in zip(found, clients(outputs[:, 0], targets), strict=True):
            if len(t) > 1:
                assert value == pytest.approx(formula(o, t))  # type: ignore[no-untyped-call]
        assert math.isnan(found[1])
    assert math.isnan(judged(scores.r2, outputs, targets)[3])  # one target has no variance


def test_perplexity_of_a_uniform_model_is_the_number_of_classes() -> None:
    found = judged(scores.perplexity, torch.zeros(50, 6), torch.arange(50) % 6)
    assert [v for v in found if not math.isnan(v)] == pytest.approx([6] * 4)


def test_a_score_of_ones_own_is_the_mean_of_its_numbers() -> None:
    def margin(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0] * targets

    (own,) = scores.as_scores(margin)
    assert (own.name, own.kind, own.sign) == ("margin", "higher", 1)
    assert judged(own, torch.ones(50, 1), torch.arange(50.0))[0] == pytest.approx(3)


def test_metrics_follow_the_direction_of_a_score() -> None:
    error, size = [1.0, 2.0, 3.0, 4.0, 10.0, 5.0, 6.0, 7.0, 8.0, 9.0], [5] * 10
    lower = fairness(error, error, size, "lower")
    higher = fairness([-e for e in error], error, size, "higher")
    assert (lower["worst30"], lower["best30"], lower["worst"]) == (9, 2, 10)
    for name in ("avg", "worst30", "best30", "worst", "avg_weighted"):
        assert lower[name] == -higher[name]
    assert lower["std"] == higher["std"]
    assert set(lower) == set(higher)
    assert not {"std_beyond_noise", "rsd_error", "jain", "gini"} & set(lower)
    assert "gini" in fairness(error, error, size)


def test_a_client_without_a_score_is_left_out_of_the_metrics_but_not_of_the_losses() -> None:
    found = fairness([0.5, math.nan, 0.7], [1.0, 2.0, 3.0], [4, 4, 4], "higher")
    assert found["avg"] == pytest.approx(0.6)
    assert found["loss_avg"] == pytest.approx(2)


def test_differences_of_errors_look_at_the_largest() -> None:
    a = np.array([[1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
    found = paired_differences(a + 1, a, kind="lower")
    assert found["worst30"].difference == pytest.approx(1)
    worse = a.copy()
    worse[0, -1] += 30
    assert paired_differences(worse, a, kind="lower")["worst30"].difference == pytest.approx(10)
    assert paired_differences(worse, a, kind="higher")["worst30"].difference == pytest.approx(0)


def test_f1_is_the_mean_over_classes_of_labels_and_predictions_as_in_scikit_learn() -> None:
    targets, predicted = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 2, 1, 1])  # class 2 is only predicted
    values = scores.f1.per_sample(torch.eye(4)[predicted], targets)
    wanted = sk.f1_score(targets, predicted, average="macro")
    assert scores.f1.of_clients(values[None], torch.tensor([4])).item() == pytest.approx(wanted)
    assert wanted == pytest.approx((2 / 3 + 1 + 0) / 3)


def split(values: Tensor, sizes: Tensor) -> list[Tensor]:
    """The values of each client."""
    ends = [0, *sizes.cumsum(0).tolist()]
    return [values[:, a:b] for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_a_score_of_clients_may_be_of_any_type(dtype: torch.dtype) -> None:
    values, lengths = torch.rand(2, 9, 1), torch.tensor([4, 0, 5])

    def most(given: Tensor, sizes: Tensor) -> Tensor:
        parts = [part.amax(1)[:, 0] if part.shape[1] else torch.zeros(2) for part in split(given, sizes)]
        return torch.stack(parts, 1).to(dtype)

    found = scores.Score("most", lambda o, t: o, per_client=most).of_clients(values, lengths)
    assert found.dtype == torch.float64
    assert found.isnan().tolist() == [[False, True, False]] * 2
    assert torch.equal(found[:, 0], values[:, :4, 0].amax(1).to(dtype).double())


@pytest.mark.parametrize("wrong", [lambda v, n: v.mean(), lambda v, n: v[0, :, 0], lambda v, n: 1.0])
def test_a_score_of_clients_of_another_shape_is_refused(wrong: scores.PerClient) -> None:
    score = scores.Score("mine", lambda o, t: o, per_client=wrong)
    with pytest.raises(InputError, match=r"per_client of the score 'mine' gives .*\(2, 3\)"):
        score.of_clients(torch.rand(2, 9, 1), torch.tensor([4, 0, 5]))


def test_a_score_of_clients_that_fails_is_refused_before_training() -> None:
    federation = Federation.from_clients([(torch.randn(8, 3), [0, 1] * 4)])

    def broken(values: Tensor, sizes: Tensor) -> Tensor:
        raise ZeroDivisionError("no luck")

    task = Task(
        nn.Linear(3, 2), federation, score=scores.Score("mine", lambda o, t: o.amax(1), per_client=broken)
    )
    with pytest.raises(InputError, match=r"the score 'mine' fails on .* ZeroDivisionError: no luck"):
        simulate(task, "fedavg", rounds=1)
