"""The paper's theory: closed forms, reductions and inequalities behind `fairwind.paper.theory`."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from fairwind.algorithms import adafedadam
from fairwind.metrics import Floats
from fairwind.paper import theory
from fairwind.paper.theory.accumulation import break_even, speedup
from fairwind.paper.theory.bias import gentle, resting_place
from fairwind.paper.theory.fairness import (
    SIZES,
    fair_gradient,
    fair_minimiser,
    minimax,
    three_quadratics,
)
from fairwind.paper.theory.guarantee import DIMENSIONS, NEAR, bound_of_theorem2, run, setup
from fairwind.paper.theory.naccadam import Adam, linear_rate, naccadam, problems
from fairwind.paper.theory.problems import Federation, LogCosh, Logistic, Quadratics, play, settle


def two_clients(ratio: float, steps: tuple[int, int], rate: float = 0.02) -> Federation:
    """Quadratics of smoothness 1 and `ratio` with one curvature each."""
    matrices = np.array([1.0, ratio])[:, None, None] * np.eye(2)
    quadratics = Quadratics(matrices, np.array([[-1.0, 0.5], [1.0, 2.0]]))
    return Federation(quadratics, np.ones(2), rate, np.array(steps, dtype=np.float64))


@pytest.fixture(scope="module")
def smoke() -> list[theory.Check]:
    return theory.study("smoke")


def named(checks: list[theory.Check], name: str) -> theory.Check:
    return next(check for check in checks if check["name"] == name)


# Theorem 1


def test_s_is_one_half_for_one_update_and_tends_to_c_per_gradient() -> None:
    for c in (0.0, 1e-9, 0.3, 1.0):
        assert speedup(1, c) == pytest.approx(0.5)
    assert speedup(2, 0.5) == pytest.approx(2 * 0.5 / 0.75 - 0.5)
    assert speedup(64, 0.0) == 0.5
    assert speedup(64, 1e-9) == pytest.approx(0.5, abs=1e-6)
    assert speedup(64, 1.0) == 63.5
    assert speedup(10**6, 0.2) / 10**6 == pytest.approx(0.2, abs=1e-6)


def test_the_bound_breaks_even_at_two_thirds_for_two_updates_and_at_one_half_for_many() -> None:
    """S(2)/2 = 1/(2 − c) − ¼ is S(1) = ½ at c = 2/3."""
    assert break_even(2) == pytest.approx(2 / 3)
    assert break_even(10**6) == pytest.approx(0.5, abs=1e-5)
    for n in (2, 8, 64):
        assert speedup(n, break_even(n) - 0.01) / n < 0.5 < speedup(n, break_even(n) + 0.01) / n


def test_naccadam_with_one_update_is_adam() -> None:
    for problem in problems(2, 0):
        start = problem.starts[:1]
        w = torch.tensor(start[0], requires_grad=True)
        adam = torch.optim.Adam([w], lr=1e-3)
        for step in naccadam(problem.objective, start, Adam(), updates=1, rate=0.1, rounds=50):
            w.grad = torch.from_numpy(problem.objective.gradients(w.detach().numpy()[None])[0])
            adam.step()
            np.testing.assert_allclose(step.next[0], w.detach().numpy(), rtol=0, atol=1e-12)


def test_accumulated_updates_of_a_quadratic_have_a_closed_form() -> None:
    """Δ = (I − (I − ηH)^N)(x − c)/η: below N·∇f in every direction of positive curvature, so R_t < N."""
    problem = problems(1, 0)[0]
    assert isinstance(problem.objective, Quadratics)
    h, x = problem.objective.matrices[0], problem.starts
    adam = problem.conditions()
    step = next(naccadam(problem.objective, x, adam, updates=16, rate=0.1, rounds=1))
    left = np.linalg.matrix_power(np.eye(len(h)) - 0.1 * h, 16)
    np.testing.assert_allclose(step.update[0], (np.eye(len(h)) - left) @ x[0] / 0.1)
    values, vectors = np.linalg.eigh(h)
    ratios = (vectors.T @ step.update[0]) / (values * (vectors.T @ x[0]))
    np.testing.assert_allclose(ratios, (1 - (1 - 0.1 * values) ** 16) / (0.1 * values))
    assert ratios.max() < 16


def test_linear_convergence_is_fitted_exactly_where_it_is_exact() -> None:
    assert linear_rate(3 * 0.9 ** np.arange(20.0)) == pytest.approx((1, 0.1))


def test_problem_constants_are_true() -> None:
    """G bounds the gradients at the starts, and no Hessian exceeds L or falls below μ."""
    rng = np.random.default_rng(0)
    for problem in problems(4, 0):
        points = np.concatenate([problem.starts, problem.optimum + rng.standard_normal((20, 10))])
        values = np.linalg.eigvalsh(problem.objective.hessians(points))
        assert values.max() <= problem.smooth * (1 + 1e-12)
        assert values.min() >= problem.convex * (1 - 1e-12)
        assert np.abs(problem.objective.gradients(problem.starts)).max() <= problem.steepest
        assert np.abs(problem.objective.gradients(problem.optimum[None])).max() < 1e-12


def test_the_smallest_coordinate_ratio_never_exceeds_the_ratio_of_norms(smoke: list[theory.Check]) -> None:
    rows = named(smoke, "theorem1_best_case")["rows"]
    assert all(r["R_over_P_max"] <= 1 + 1e-9 for r in rows)
    assert all(r["best_case_share"] == 0 for r in rows if r["N"] > 1 and r["noise"] == "none")


def test_equal_budgets_count_gradients(smoke: list[theory.Check]) -> None:
    check = named(smoke, "theorem1_equal_budgets")
    assert all(r["rounds"] * r["N"] == r["budget"] for r in check["rows"] if r["equal"] == "gradients")
    plain = [r for r in check["rows"] if r["noise"] == "none" and r["equal"] == "gradients" and r["N"] > 1]
    assert {r["beside_adam"] for r in plain} <= {"slower", "both converged"}
    settings = check["setting"]["problems"]
    assert isinstance(settings, dict)
    for constants in settings.values():
        assert constants["steepest_seen"] <= constants["G"]


# Theorem 2


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("local_steps", [1, 10])
def test_theorem_2_holds_with_t_from_far_away(alike: bool, local_steps: int) -> None:
    rounds = 40
    given = setup(alike, local_steps, 0)
    assert given.lr <= given.eps / (2 * given.smooth) * (1 + 1e-12)
    assert given.eps**2 / (16 * given.steepest**2) * (1 + 1e-12) >= 1 - 0.999
    course = run(given, np.zeros(DIMENSIONS), rounds)
    top = 2 * course.gaps[0] * (math.sqrt(0.999) * given.steepest + given.eps) / given.lr
    below = course.ratios.min() * course.certainties.min() * rounds
    assert course.squares.mean() <= top / below
    assert (course.steepest <= given.steepest).all()
    if local_steps == 1:  # Adam itself, where the bound means something
        np.testing.assert_allclose(course.ratios, 1, rtol=1e-6)
        np.testing.assert_allclose(course.certainties, 1, rtol=1e-9)
        assert course.squares.mean() > top / below / 100


def test_theorem_2_fails_near_the_optimum_although_all_its_assumptions_hold() -> None:
    """Heterogeneous clients and several local steps: g does not vanish at x*, and points away from it."""
    given = setup(False, 10, 0)
    aside = np.random.default_rng(0).standard_normal(DIMENSIONS)
    course = run(given, given.optimum + NEAR * aside, 1)
    assert course.ratios[0] >= course.certainties[0] >= 1  # the proof's own R_t ≥ C_t
    top = 2 * course.gaps[0] * (math.sqrt(0.999) * given.steepest + given.eps) / given.lr
    assert course.squares[0] > 5 * top / (course.ratios[0] * course.certainties[0])
    assert course.gaps[1] > course.gaps[0]


def test_the_rounds_of_theorem_2_step_by_c_eta() -> None:
    """In the first round m̂ = g and v̂ = g², so x¹ = x⁰ − C·η·g/(|g| + ε)."""
    given = setup(False, 10, 0)
    federation, x = given.federation, np.zeros(DIMENSIONS)
    course = run(given, x, 1)
    played = play(federation, adafedadam(alpha=0), x)
    g, c = played.total / float(played.sums.weight), float(played.state.certainty)
    assert c > 1.5
    stepped = x - c * given.lr * g / (np.abs(g) + given.eps)
    gap = federation.loss(stepped) - federation.loss(given.optimum)
    assert course.gaps[1] == pytest.approx(gap, rel=1e-12)


# Section 4.3


@pytest.mark.parametrize("steps", [(12, 12), (12, 3), (3, 12)])
@pytest.mark.parametrize("ratio", [1.0, 7.0, 40.0])
def test_fedavg_and_fednova_rest_where_the_closed_form_says(ratio: float, steps: tuple[int, int]) -> None:
    federation = two_clients(ratio, steps)
    quadratics = federation.objective
    assert isinstance(quadratics, Quadratics)
    gone = 1 - (1 - 0.02 * np.array([1.0, ratio])) ** np.array(steps)  # 1 − (1 − ηL)^τ
    for name, pull in (("fedavg", gone), ("fedadam", gone), ("fednova", gone / np.array(steps))):
        rest = settle(federation, gentle(name, 1.0), np.zeros(2), rounds=5000)
        np.testing.assert_allclose(rest, pull @ quadratics.centres / pull.sum(), atol=1e-10)
        np.testing.assert_allclose(rest, resting_place(federation, quadratics, name == "fednova"), atol=1e-10)


@pytest.mark.parametrize("ratio", [1.0, 7.0, 40.0])
def test_adafedadam_is_unbiased_where_updates_are_collinear_with_gradients(ratio: float) -> None:
    federation = two_clients(ratio, (12, 3))
    quadratics = federation.objective
    assert isinstance(quadratics, Quadratics)
    best = np.array([1.0, ratio]) @ quadratics.centres / (1 + ratio)
    np.testing.assert_allclose(federation.optimum(np.zeros(2)), best)
    step = 2 / (1 + ratio)
    rest = settle(federation, gentle("adafedadam", step), np.zeros(2), rounds=5000)
    np.testing.assert_allclose(rest, best, atol=1e-10)
    line = Federation(
        LogCosh(np.array([[1.0], [ratio]]), np.array([[-1.0], [1.0]])), np.ones(2), 0.02, federation.steps
    )
    rest = settle(line, gentle("adafedadam", step), np.zeros(1), rounds=5000)
    np.testing.assert_allclose(rest, line.optimum(np.zeros(1)), atol=1e-10)


def test_adafedadam_with_default_adam_ends_at_the_same_place() -> None:
    """The large ε of the checks does not move the resting place: Adam's own ε, with a rate that falls."""
    federation = two_clients(40.0, (12, 3))
    x, state = np.zeros(2), None
    for rate in 0.1 * 0.5 ** np.arange(16):
        algorithm = adafedadam(alpha=0, lr=float(rate), warmup=None)
        for _ in range(40):
            played = play(federation, algorithm, x, state)
            x, state = played.x, played.state
    np.testing.assert_allclose(x, federation.optimum(np.zeros(2)), atol=1e-4)


def test_hessians_of_different_shapes_leave_adafedadam_a_bias(smoke: list[theory.Check]) -> None:
    rows = named(smoke, "bias_unequal_curvature")["rows"]
    for row in (r for r in rows if r["algorithm"] == "adafedadam"):
        exact = row["condition"] == 1 or row["local_steps"] == 1
        assert row["bias_max"] < 1e-8 if exact else row["bias_mean"] > 1e-3


def test_a_resting_place_of_adafedadam_has_no_pseudo_gradient() -> None:
    matrices = np.array([np.diag([1.0, 10.0]), np.diag([10.0, 1.0])])
    federation = Federation(
        Quadratics(matrices, np.array([[0.0, 0.0], [1.0, 2.0]])), np.array([1.0, 3.0]), 0.05, np.full(2, 20.0)
    )
    rest = settle(federation, gentle("adafedadam", 0.1), np.zeros(2), rounds=5000)
    played = play(federation, adafedadam(alpha=0), rest)
    assert np.linalg.norm(played.total) < 1e-9
    assert np.linalg.norm(federation.gradient(rest)) > 1e-2  # it is not the optimum


# Equation 6 and the minimax limit


def cosine(a: Floats, b: Floats) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0, 4.0, 8.0])
def test_equation_6_is_exact_for_one_local_step_and_equal_first_losses(alpha: float) -> None:
    federation = setup(False, 1, 0).federation
    zero = np.zeros(DIMENSIONS)
    first = federation.objective.losses(federation.spread(zero))
    np.testing.assert_allclose(first, math.log(2))
    unequal = first * np.linspace(1, 3, len(first))
    for x in np.random.default_rng(0).standard_normal((5, DIMENSIONS)):
        fair = fair_gradient(federation, alpha, x)
        g = play(federation, adafedadam(alpha=alpha), x, None, first).total
        assert cosine(g, fair) == pytest.approx(1, abs=1e-10)
        turned = cosine(play(federation, adafedadam(alpha=alpha), x, None, unequal).total, fair)
        assert turned == pytest.approx(1, abs=1e-10) if alpha == 0 else turned < 1 - 1e-6
        if alpha == 0:
            np.testing.assert_allclose(fair, federation.gradient(x))


@pytest.mark.parametrize("first", [np.ones(3), np.array([0.1, 0.6, 4.0])])
def test_the_minimax_solution_satisfies_its_optimality_conditions(first: Floats) -> None:
    quadratics = three_quadratics()
    x, multipliers = minimax(quadratics, np.zeros(2), first)
    points = np.broadcast_to(x, (3, 2))
    losses, slopes = quadratics.losses(points) / first, quadratics.gradients(points) / first[:, None]
    active = multipliers > 0
    assert (multipliers >= 0).all()
    assert multipliers.sum() == pytest.approx(1)
    assert active.sum() >= 2
    assert np.ptp(losses[active]) < 1e-12
    assert (losses[~active] <= losses[active].max()).all()
    np.testing.assert_allclose(multipliers @ slopes, 0, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 8.0, 256.0])
def test_fair_minimisers_have_no_fair_gradient(alpha: float) -> None:
    federation = Federation(three_quadratics(), SIZES, 0.01, np.ones(3))
    x = fair_minimiser(federation, alpha, np.zeros(2), np.ones(3))
    losses = federation.objective.losses(federation.spread(x))
    assert np.linalg.norm(fair_gradient(federation, alpha, x)) < 1e-10 * losses.max() ** alpha


def test_fair_minimisers_approach_the_minimax_as_one_over_alpha(smoke: list[theory.Check]) -> None:
    rows = named(smoke, "minimax_limit")["rows"]
    distances = [r["distance_to_minimax"] for r in rows]
    assert distances == sorted(distances, reverse=True)
    scaled = [r["alpha"] * r["distance_to_minimax"] for r in rows][-2:]
    assert scaled[0] == pytest.approx(scaled[1], rel=0.1)
    for row in rows:
        if row["adafedadam_distance_1_step"] is not None:
            assert max(row["adafedadam_distance_1_step"], row["adafedadam_distance_10_steps"]) < 1e-7
            assert row["adafedadam_distance_unequal_to_lagging"] < 1e-7
            assert row["adafedadam_distance_unequal"] > 0.1 or row["alpha"] == 0


# The problems, and the study


@pytest.mark.parametrize(
    "objective",
    [
        Quadratics(np.array([[[2.0, 0.5], [0.5, 1.0]], [[3.0, 0.0], [0.0, 0.2]]]), np.eye(2)),
        Logistic(np.random.default_rng(1).standard_normal((2, 7, 2)), ridge=0.3),
        LogCosh(np.array([[1.0], [5.0]]), np.array([[0.3], [-1.0]])),
    ],
)
def test_gradients_and_hessians_are_derivatives(objective: Any) -> None:
    rng = np.random.default_rng(0)
    d = objective.gradients(np.zeros((2, 1 if isinstance(objective, LogCosh) else 2))).shape[1]
    x, h = rng.standard_normal((2, d)), 1e-6
    for i, e in enumerate(np.eye(d)):
        slope = (objective.losses(x + h * e) - objective.losses(x - h * e)) / (2 * h)
        np.testing.assert_allclose(objective.gradients(x)[:, i], slope, atol=1e-8)
        curve = (objective.gradients(x + h * e) - objective.gradients(x - h * e)) / (2 * h)
        np.testing.assert_allclose(objective.hessians(x)[:, i], curve, atol=1e-8)


@pytest.mark.parametrize("which", [0, 1])
def test_noisy_gradients_are_unbiased(which: int) -> None:
    objective = problems(1, 0)[which].objective
    points = np.broadcast_to(np.full(10, 0.3), (20000, 10))
    noisy = objective.gradients(points, np.random.default_rng(0))
    error = noisy.std(0) / math.sqrt(len(points))
    assert (noisy.std(0) > 1e-3).all()
    assert (np.abs(noisy.mean(0) - objective.gradients(points[:1])[0]) < 5 * error).all()


def test_the_study_can_be_written_as_json_and_has_every_check(smoke: list[theory.Check]) -> None:
    assert json.loads(json.dumps(smoke, allow_nan=False)) == smoke
    assert [c["name"] for c in smoke] == [
        "theorem1_equal_budgets",
        "theorem1_bound",
        "theorem1_best_case",
        "theorem1_worst_case",
        "theorem2_guarantee",
        "bias_unequal_smoothness",
        "bias_unequal_curvature",
        "equation6_direction",
        "minimax_limit",
        "alpha_fair_gradients_shrink",
    ]
    for check in smoke:
        assert set(check) == {"name", "claim", "setting", "rows", "verdict", "explanation"}
        assert check["verdict"] in ("holds", "holds in part", "does not hold", "premise impossible")
        assert check["rows"]
        assert all(set(row) == set(check["rows"][0]) for row in check["rows"])
        assert "nan" not in check["explanation"]


def test_a_premise_that_never_occurs_is_not_held_against_its_bound(smoke: list[theory.Check]) -> None:
    check = named(smoke, "theorem1_best_case")
    assert all(r["bound_held_share"] == 1 for r in check["rows"] if r["noise"] == "none")
    assert check["verdict"] == "premise impossible"


def test_alpha_fair_gradients_shrink(smoke: list[theory.Check]) -> None:
    """α = 0 with one local step is gradient descent in both; where losses vanish, so does F^α."""
    rows = named(smoke, "alpha_fair_gradients_shrink")["rows"]
    found = {(r["optima"], r["method"], r["alpha"]): r for r in rows}
    for optima in ("common", "different"):
        first, second = (found[optima, method, 0.0]["rounds"] for method in ("gradient descent", "q-FedAvg"))
        assert first == second
    common = [found["common", "gradient descent", alpha] for alpha in (0.0, 1.0, 2.0)]
    assert common[0]["factor_left"] == 1
    assert common[1]["factor_left"] < 0.05
    assert common[1]["rounds"] is None or common[1]["rounds"] > 3 * common[0]["rounds"]


def test_the_study_repeats_itself(smoke: list[theory.Check]) -> None:
    again = bound_of_theorem2("smoke")
    assert again == named(smoke, "theorem2_guarantee")
    assert bound_of_theorem2("smoke", seed=1) != again
