"""What AdaFedAdam's weights I^α optimise: Section 3.3, Equation 6, and the minimax limit.

Ju, Zhang, Toor, Hellander: Accelerating Fair Federated Learning: Adaptive Federated Adam.
IEEE Transactions on Machine Learning in Communications and Networking, 2024.
"""

import math
from functools import partial
from itertools import pairwise

import numpy as np

from fairwind.algorithms import adafedadam
from fairwind.metrics import Floats
from fairwind.paper.theory.bias import gentle
from fairwind.paper.theory.guarantee import setup
from fairwind.paper.theory.problems import (
    Check,
    Federation,
    Objective,
    Quadratics,
    Row,
    Scale,
    judge,
    newton,
    play,
    settle,
)

ALPHAS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
LARGE_ALPHAS = (16.0, 64.0, 256.0, 1024.0)  # for minimisers only, AdaFedAdam takes long to settle
SIZES = np.array([1.0, 2.0, 3.0])


def fair_gradient(federation: Federation, alpha: float, x: Floats) -> Floats:
    """Σ p_k F_k^α ∇F_k, the gradient of the α-fair objective Σ p_k F_k^(α+1)/(α+1)."""
    at = federation.spread(x)
    losses, slopes = federation.objective.losses(at), federation.objective.gradients(at)
    slope: Floats = (federation.shares * losses**alpha) @ slopes
    return slope


def fair_minimiser(federation: Federation, alpha: float, x: Floats, first: Floats) -> Floats:
    """The minimiser of Σ p_k·first_k·(F_k/first_k)^(α+1), from a starting point.

    With equal first losses it is α-fair; with others AdaFedAdam's weights (F_k/first_k)^α minimise it.
    """

    def parts(at: Floats) -> tuple[float, Floats, Floats]:
        points = federation.spread(at)
        losses, slopes = federation.objective.losses(points), federation.objective.gradients(points)
        lag = losses / first
        lag, highest = lag / lag.max(), float(lag.max())
        weights = federation.shares * lag**alpha
        rank_one = slopes[:, :, None] * slopes[:, None, :] / losses[:, None, None]
        curves = federation.objective.hessians(points) + alpha * rank_one
        # The logarithm and its gradient, because large powers overflow. The curvature leaves out the square
        # of the gradient, which is zero at the minimum, so that it stays positive.
        total = float(federation.shares @ (first * lag ** (alpha + 1)))
        unit = total * highest / (alpha + 1)
        value = math.log(total) + (alpha + 1) * math.log(highest)
        return value, weights @ slopes / unit, np.einsum("k,kde->de", weights, curves) / unit

    return newton(parts, x, steps=2000)


def minimax(objective: Objective, x: Floats, first: Floats) -> tuple[Floats, Floats]:
    """The minimiser of max_k F_k/first_k, and the multipliers λ (K,) that prove it: Σ λ_k∇F_k/first_k = 0.

    First the soft maximum log Σ exp(s·F)/s with a sharpness s that doubles, then Newton on the conditions
    that active losses be equal and the sum above zero.
    """

    def at(x: Floats) -> tuple[Floats, Floats, Floats]:
        points = np.broadcast_to(x, (len(first), len(x)))
        losses, slopes = objective.losses(points) / first, objective.gradients(points) / first[:, None]
        return losses, slopes, objective.hessians(points) / first[:, None, None]

    def soft(x: Floats, sharpness: float) -> tuple[float, Floats, Floats]:
        losses, slopes, curves = at(x)
        powers = np.exp(sharpness * (losses - losses.max()))
        weights = powers / powers.sum()
        slope = weights @ slopes
        spread = np.einsum("k,kd,ke->de", weights, slopes, slopes) - np.outer(slope, slope)
        value = losses.max() + math.log(powers.sum()) / sharpness
        return value, slope, np.einsum("k,kde->de", weights, curves) + sharpness * spread

    sharpness = 1.0
    while sharpness < 1e7:
        sharpness *= 2
        x = newton(partial(soft, sharpness=sharpness), x)
    losses = at(x)[0]
    powers = np.exp(sharpness * (losses - losses.max()))
    active = powers > 1e-4
    weights, level = powers[active] / powers[active].sum(), losses.max()
    d, a = len(x), int(active.sum())
    for _ in range(10):
        losses, slopes, curves = (part[active] for part in at(x))
        residual = np.concatenate([weights @ slopes, losses - level, [weights.sum() - 1]])
        jacobian = np.zeros((d + a + 1, d + a + 1))  # by x, level, λ
        jacobian[:d, :d], jacobian[:d, d + 1 :] = np.einsum("k,kde->de", weights, curves), slopes.T
        jacobian[d : d + a, :d], jacobian[d : d + a, d] = slopes, -1
        jacobian[-1, d + 1 :] = 1
        step = np.linalg.solve(jacobian, residual)
        x, level, weights = x - step[:d], level - step[d], weights - step[d + 1 :]
    multipliers = np.zeros(len(first))
    multipliers[active] = weights
    return x, multipliers


def fair_direction(scale: Scale, seed: int = 0) -> Check:
    """Equation 6: AdaFedAdam's pseudo-gradient beside the gradient of the α-fair objective."""
    points, local_steps = {"smoke": (2, (1, 10)), "reduced": (4, (1, 5, 20)), "full": (16, (1, 2, 5, 20))}[
        scale
    ]
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    elsewhere = rng.standard_normal(5)
    visited = 0.5 * rng.standard_normal((points, 5))
    for steps in local_steps:
        federation = setup(False, steps, seed).federation
        zero = np.zeros(5)  # where every client's loss is log 2
        for first, x0 in (("equal", zero), ("unequal", elsewhere)):
            loss0 = federation.objective.losses(federation.spread(x0))
            for alpha in ALPHAS:
                cosines = np.array([_cosine(federation, alpha, x, loss0) for x in visited])
                rows.append(
                    {
                        "alpha": alpha,
                        "local_steps": steps,
                        "first_losses": first,
                        "first_loss_spread": float(loss0.max() / loss0.min()),
                        "cosine_mean": float(cosines.mean()),
                        "cosine_min": float(cosines.min()),
                        "angle_mean": float(np.degrees(np.arccos(cosines)).mean()),
                        "angle_max": float(np.degrees(np.arccos(cosines)).max()),
                    }
                )

    def of(first: str, one: bool) -> list[Row]:
        return [r for r in rows if r["first_losses"] == first and (r["local_steps"] == 1) == one]

    exact = [r for r in rows if 1 - r["cosine_min"] < 1e-10]
    plain = [r for r in rows if r["alpha"] == 0 and r["local_steps"] == 1]
    unequal = [r for r in of("unequal", True) if r["alpha"] > 0]
    return Check(
        name="equation6_direction",
        claim="AdaFedAdam's pseudo-gradient has the direction of the α-fair gradient Σ p_k F_k^α ∇F_k.",
        setting={
            "clients": len(federation.sizes),
            "points": points,
            "problem": "logistic regression, see theorem 2",
        },
        rows=rows,
        verdict=judge(len(exact), len(rows)),
        explanation=(
            "With equal first losses (all clients start at log 2) and one local step the smallest cosine"
            f" between them is 1 − {1 - min(r['cosine_min'] for r in of('equal', True)):.0e}: Equation 6"
            " holds. α = 0 gives the mean's gradient whatever the first losses (1 −"
            f" {1 - min(r['cosine_min'] for r in plain):.0e}). With several local steps each update turns"
            " away from its gradient: the mean angle is"
            f" {min(r['angle_mean'] for r in of('equal', False)):.1f}° to"
            f" {max(r['angle_mean'] for r in of('equal', False)):.1f}°. With unequal first losses, the"
            f" largest {unequal[0]['first_loss_spread']:.1f} times the smallest, the weights are"
            " (F_k/F_k(x⁰))^α and not F_k^α: with one step the mean angle is"
            f" {unequal[0]['angle_mean']:.1f}° at α = {unequal[0]['alpha']:g} and"
            f" {unequal[-1]['angle_mean']:.1f}° at α = {unequal[-1]['alpha']:g}, and single angles reach"
            f" {max(r['angle_max'] for r in unequal):.0f}°."
        ),
    )


def _cosine(federation: Federation, alpha: float, x: Floats, loss0: Floats) -> float:
    played = play(federation, adafedadam(alpha=alpha), x, None, loss0)
    fair = fair_gradient(federation, alpha, x)
    # The pseudo-gradient g is `total` over the sum of weights; its direction is that of `total`.
    cosine = played.total @ fair / np.linalg.norm(played.total) / np.linalg.norm(fair)
    return float(min(max(cosine, -1), 1))


def three_quadratics() -> Quadratics:
    """Three clients in the plane, F_k = ‖x − c_k‖²/‖c_k‖², all with a loss of 1 at zero."""
    angles, far = np.radians([60, 90, 160]), np.array([1.5, 4.0, 1.0])
    centres = far[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return Quadratics((2 / far**2)[:, None, None] * np.eye(2), centres)


def minimax_limit(scale: Scale, seed: int = 0) -> Check:
    """Minimisers of the α-fair objective as α grows, the minimax solution, and where AdaFedAdam ends."""
    objective = three_quadratics()
    zero, aside = np.zeros(2), np.array([1.0, 1.0])
    loss_aside = objective.losses(np.broadcast_to(aside, (3, 2)))
    best, multipliers = minimax(objective, zero, np.ones(3))
    best_lag, _ = minimax(objective, zero, loss_aside)
    smooth = float(objective.matrices.max())
    alphas = ALPHAS[::2] if scale == "smoke" else ALPHAS
    rows: list[Row] = []
    federations = {t: Federation(objective, SIZES, 0.1 / smooth, np.full(3, float(t))) for t in (1, 10)}
    fair = lagging = zero
    for alpha in (*alphas, *(LARGE_ALPHAS[:2] if scale == "smoke" else LARGE_ALPHAS)):
        fair = fair_minimiser(federations[1], alpha, fair, np.ones(3))
        lagging = fair_minimiser(federations[1], alpha, lagging, loss_aside)
        losses = objective.losses(np.broadcast_to(fair, (3, 2)))
        ends: list[float | None] = [None] * 4
        if alpha in alphas:
            algorithm = gentle("adafedadam", 1 / (smooth * (1 + 2 * alpha)), alpha)
            rests = [settle(federations[t], algorithm, zero, rounds=4000, tolerance=1e-10) for t in (1, 10)]
            moved = settle(federations[1], algorithm, aside, rounds=4000, tolerance=1e-10)
            ends = [float(np.linalg.norm(rest - fair)) for rest in (*rests, moved)]
            ends.append(float(np.linalg.norm(moved - lagging)))
        rows.append(
            {
                "alpha": alpha,
                "x": fair.tolist(),
                "losses": losses.tolist(),
                "largest_loss": float(losses.max()),
                "mean_loss": float(federations[1].shares @ losses),
                "distance_to_minimax": float(np.linalg.norm(fair - best)),
                "lagging_distance_to_minimax": float(np.linalg.norm(lagging - best)),
                "lagging_distance_to_lag_minimax": float(np.linalg.norm(lagging - best_lag)),
                "adafedadam_distance_1_step": ends[0],
                "adafedadam_distance_10_steps": ends[1],
                "adafedadam_distance_unequal": ends[2],
                "adafedadam_distance_unequal_to_lagging": ends[3],
            }
        )
    run = [r for r in rows if r["adafedadam_distance_1_step"] is not None]
    farthest = max(max(r["adafedadam_distance_1_step"], r["adafedadam_distance_10_steps"]) for r in run)
    astray = max(r["adafedadam_distance_unequal"] for r in run)
    distances = [r["distance_to_minimax"] for r in rows]
    nearer = sum(b < a for a, b in pairwise(distances))
    top = objective.losses(np.broadcast_to(best, (3, 2)))
    return Check(
        name="minimax_limit",
        claim="AdaFedAdam's solution is the α-fair one, and a large α restores the minimax solution.",
        setting={
            "sizes": SIZES.tolist(),
            "centres": objective.centres.tolist(),
            "minimax": best.tolist(),
            "minimax_losses": top.tolist(),
            "multipliers": multipliers.tolist(),
            "lag_minimax": best_lag.tolist(),
            "unequal_start": aside.tolist(),
            "unequal_first_losses": loss_aside.tolist(),
        },
        rows=rows,
        verdict=judge(sum((nearer == len(distances) - 1, farthest < 1e-6, astray < 1e-6)), 3),
        explanation=(
            f"The distance of the α-fair minimiser from the minimax solution (largest loss {top.max():.4f})"
            f" falls from {distances[0]:.3f} at α = 0 to {distances[-1]:.1e} at α = {rows[-1]['alpha']:g},"
            f" about as 1/α (the last two rows: {distances[-2] / distances[-1]:.2f} times nearer for"
            f" {rows[-1]['alpha'] / rows[-2]['alpha']:g} times the α); at AdaFedAdam's default α = 1 it is"
            f" {next((r['distance_to_minimax'] for r in rows if r['alpha'] == 1), math.nan):.3f}. Started"
            f" with equal first losses, AdaFedAdam ends within {farthest:.0e} of the α-fair minimiser for α"
            f" up to {run[-1]['alpha']:g}, with 1 and with 10 local steps (these updates keep the gradient's"
            f" direction). Started where first losses are {', '.join(f'{v:.2f}' for v in loss_aside)} it"
            f" ends {run[-1]['adafedadam_distance_unequal']:.3f} away from it at α = {run[-1]['alpha']:g},"
            f" and within {max(r['adafedadam_distance_unequal_to_lagging'] for r in run):.0e} of the"
            " minimiser with losses divided by first ones. That one tends to the minimax of F_k/F_k(x⁰),"
            f" which is {np.linalg.norm(best - best_lag):.3f} from the minimax of F_k: without equal first"
            " losses the claim does not hold."
        ),
    )
