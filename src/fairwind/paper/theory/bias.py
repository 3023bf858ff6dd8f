"""Where algorithms come to rest when clients' smoothness and local steps differ: Section 4.3.

Ju, Zhang, Toor, Hellander: Accelerating Fair Federated Learning: Adaptive Federated Adam.
IEEE Transactions on Machine Learning in Communications and Networking, 2024.
"""

from typing import Any

import numpy as np

from fairwind.algorithms import adafedadam, fedadam, fedavg, fednova
from fairwind.contract import Algorithm
from fairwind.metrics import Floats
from fairwind.paper.theory.problems import (
    Check,
    Federation,
    LogCosh,
    Objective,
    Quadratics,
    Row,
    Scale,
    judge,
    settle,
)

LARGE_EPS = 1e6  # so that Adam moves like gradient descent; where it rests does not depend on ε
EXACT = 1e-8  # a bias below this is rounding
NAMES = ("fedavg", "fedadam", "fednova", "adafedadam")


def gentle(name: str, step: float, alpha: float = 0.0) -> Algorithm[Any, Any]:
    """An algorithm that settles: AdaFedAdam steps by `step` times its pseudo-gradient, without momentum.

    FedAvg and FedNova are as they are; FedAdam's pseudo-gradient is the mean update, taken whole.
    """
    if name == "adafedadam":
        return adafedadam(alpha=alpha, lr=step * LARGE_EPS, beta1=0, eps=LARGE_EPS, warmup=None)
    if name == "fedadam":
        return fedadam(lr=LARGE_EPS, beta1=0, eps=LARGE_EPS)
    return fednova() if name == "fednova" else fedavg()


def pulls(federation: Federation, quadratics: Quadratics, normalised: bool) -> Floats:
    """Each client's p_k(I − (I − ηH_k)^τ), divided by τ where `normalised` (FedNova) (K, d, d)."""
    unit = np.eye(quadratics.matrices.shape[1])
    left = [
        np.linalg.matrix_power(unit - federation.rate * h, int(t))
        for h, t in zip(quadratics.matrices, federation.steps, strict=True)
    ]
    scale = federation.shares / federation.steps if normalised else federation.shares
    pulled: Floats = scale[:, None, None] * (unit - np.array(left))
    return pulled


def resting_place(federation: Federation, quadratics: Quadratics, normalised: bool) -> Floats:
    """Where FedAvg (or FedNova, `normalised`) comes to rest on quadratics, in closed form."""
    weights = pulls(federation, quadratics, normalised)
    return np.linalg.solve(weights.sum(0), np.einsum("kde,ke->d", weights, quadratics.centres))


def unequal_smoothness(scale: Scale, seed: int = 0) -> Check:
    """Two clients of unequal smoothness, with equal and unequal numbers of local steps."""
    ratios = np.geomspace(1, 100, {"smoke": 2, "reduced": 3, "full": 5}[scale]).tolist()
    cases = ((20, 20), (20, 5)) if scale == "smoke" else ((20, 20), (20, 5), (5, 20))
    rate = 0.5 / 100
    rows: list[Row] = []
    for problem in ("quadratics in 2-D", "log cosh in 1-D"):
        for ratio in ratios:
            for steps in cases:
                rows += _compare(problem, ratio, steps, rate)

    def biases(name: str) -> list[float]:
        return [r["bias"] for r in rows if r["algorithm"] == name]

    equal = [r for r in rows if r["local_steps_1"] == r["local_steps_2"] and r["ratio"] == ratios[-1]]
    at = {r["algorithm"]: r for r in equal if r["problem"] == "quadratics in 2-D"}
    nova = [r for r in rows if r["algorithm"] == "fednova" and r["ratio"] > 1]
    favoured = [r for r in nova if r["local_steps_1"] == r["local_steps_2"]]
    right = [r for r in favoured if r["weight_1"] > r["true_weight_1"]]
    unbiased = max(biases("adafedadam")) < EXACT
    return Check(
        name="bias_unequal_smoothness",
        claim=(
            "With as many local steps, updates divided by their numbers of steps favour clients of small"
            " smoothness; normalised to the gradient's length they do not."
        ),
        setting={
            "local_rate": rate,
            "smoothness_1": 1.0,
            "sizes": "equal",
            "weight_1": "position on the segment",
        },
        rows=rows,
        verdict=judge(len(right) + unbiased, len(favoured) + 1),
        explanation=(
            "F_1 and F_2 have smoothness 1 and `ratio`. A client goes 1 − (1 − ηL)^τ of the way to its"
            " centre, which grows slower than L, so FedAvg, FedAdam (whose pseudo-gradient is FedAvg's) and"
            f" FedNova (divided by τ) give client 1 too much weight: at a ratio of {ratios[-1]:g} with equal"
            f" steps {at['fednova']['weight_1']:.3f} by FedNova and {at['fedavg']['weight_1']:.3f} by"
            f" FedAvg, where {at['fednova']['true_weight_1']:.4f} is right. FedNova over-weights the client"
            f" of smaller smoothness in {len(right)} of {len(favoured)} cases with equal steps and a ratio"
            f" above 1. The largest bias, in distances between the centres, is {max(biases('fedavg')):.3f}"
            f" for FedAvg, {max(biases('fednova')):.3f} for FedNova and {max(biases('adafedadam')):.1e} for"
            " AdaFedAdam with α = 0: where an update is collinear with its gradient (any convex loss in one"
            " dimension, a quadratic with one curvature), normalising makes it the gradient. Unequal steps"
            f" alone, at a ratio of 1, bias FedAvg by {_alone(rows, 'fedavg'):.3f} and FedNova by"
            f" {_alone(rows, 'fednova'):.3f}. Measured resting places of FedAvg and FedNova on quadratics"
            " differ from the closed form by at most"
            f" {max(r['from_closed_form'] for r in rows if r['from_closed_form'] is not None):.1e}."
        ),
    )


def _alone(rows: list[Row], name: str) -> float:
    """The bias by unequal steps alone."""
    unequal = [r for r in rows if r["ratio"] == 1 and r["local_steps_1"] != r["local_steps_2"]]
    return max(float(r["bias"]) for r in unequal if r["algorithm"] == name)


def _compare(problem: str, ratio: float, steps: tuple[int, int], rate: float) -> list[Row]:
    smooth = np.array([1.0, ratio])
    quadratics = None
    objective: Objective
    if problem == "log cosh in 1-D":
        centres = np.array([[-1.0], [1.0]])
        objective = LogCosh(smooth[:, None], centres)
    else:
        centres = np.array([[-1.0, 0.5], [1.0, 2.0]])
        objective = quadratics = Quadratics(smooth[:, None, None] * np.eye(2), centres)
    federation = Federation(objective, np.ones(2), rate, np.array(steps, dtype=np.float64))
    between = centres[1] - centres[0]
    start = centres.mean(0)
    best = federation.optimum(start)
    rows: list[Row] = []
    for name in NAMES:
        rest = settle(federation, gentle(name, step=1 / smooth.mean()), start, rounds=5000, tolerance=1e-11)
        closed = None
        if quadratics is not None and name != "adafedadam":
            closed = resting_place(federation, quadratics, normalised=name == "fednova")
        rows.append(
            {
                "problem": problem,
                "ratio": ratio,
                "local_steps_1": steps[0],
                "local_steps_2": steps[1],
                "algorithm": name,
                "weight_1": _weight(rest, centres),
                "true_weight_1": _weight(best, centres),
                "closed_weight_1": None if closed is None else _weight(closed, centres),
                "bias": float(np.linalg.norm(rest - best) / np.linalg.norm(between)),
                "from_closed_form": None if closed is None else float(np.linalg.norm(rest - closed)),
            }
        )
    return rows


def _weight(x: Floats, centres: Floats) -> float:
    """Client 1's weight w if x = w·c_1 + (1 − w)·c_2."""
    between = centres[0] - centres[1]
    return float((x - centres[1]) @ between / (between @ between))


def unequal_curvature(scale: Scale, seed: int = 0) -> Check:
    """Clients whose Hessians differ in shape, not in size only: the bias that normalising leaves."""
    conditions, steps, problems = {
        "smoke": ((1, 10), (1, 20), 2),
        "reduced": ((1, 3, 10), (1, 5, 20), 4),
        "full": ((1, 3, 10, 30), (1, 5, 20), 6),
    }[scale]
    rows: list[Row] = []
    for condition in conditions:
        for taken in steps:
            found = np.array([_biases(condition, taken, [seed, p]) for p in range(problems)])  # (problems, 2)
            for name, each in zip(("fednova", "adafedadam"), found.T, strict=True):
                rows.append(
                    {
                        "condition": condition,
                        "local_steps": taken,
                        "algorithm": name,
                        "bias_mean": float(each.mean()),
                        "bias_std": float(each.std()),
                        "bias_max": float(each.max()),
                        "adafedadam_nearer_share": float((found[:, 1] < found[:, 0]).mean()),
                    }
                )
    ours = [r for r in rows if r["algorithm"] == "adafedadam"]
    shaped = [r for r in ours if r["condition"] > 1 and r["local_steps"] > 1]
    others = [r for r in rows if r["algorithm"] == "fednova" and r["condition"] > 1 and r["local_steps"] > 1]
    round_ones = [r for r in ours if r["condition"] == 1 or r["local_steps"] == 1]
    return Check(
        name="bias_unequal_curvature",
        claim="Normalising updates to the gradient's length removes the bias, whatever the local objectives.",
        setting={
            "clients": 3,
            "dimensions": 3,
            "problems": problems,
            "bias": "distance from the optimum over the largest distance between centres",
            "condition": "largest over smallest eigenvalue of each Hessian",
            "fednova": "in closed form; with equal steps FedAvg and FedAdam rest there too",
        },
        rows=rows,
        verdict=judge(len([r for r in ours if r["bias_max"] < EXACT]), len(ours)),
        explanation=(
            "With Hessians of one eigenvalue, or one local step, AdaFedAdam's largest bias is"
            f" {max(r['bias_max'] for r in round_ones):.1e}. Several steps turn an update away from the"
            " gradient where curvatures differ between directions, and its length cannot undo the turn: the"
            f" mean bias is then {min(r['bias_mean'] for r in shaped):.4f} to"
            f" {max(r['bias_mean'] for r in shaped):.3f} of the largest distance between centres, where"
            f" FedNova's is {min(r['bias_mean'] for r in others):.3f} to"
            f" {max(r['bias_mean'] for r in others):.3f}. AdaFedAdam rests nearer to the optimum in"
            f" {np.mean([r['adafedadam_nearer_share'] for r in shaped]):.0%} of these problems."
        ),
    )


def _biases(condition: float, steps: int, seed: list[int]) -> tuple[float, float]:
    """The bias of FedNova, and of AdaFedAdam with α = 0."""
    rng = np.random.default_rng(seed)
    axes = [rng.permutation(np.geomspace(1, condition, 3)) for _ in range(3)]
    turns = [np.linalg.qr(rng.standard_normal((3, 3)))[0] for _ in range(3)]
    sizes = np.array([1.0, 2.0, 4.0])
    matrices = np.array([s * q @ np.diag(a) @ q.T for s, q, a in zip(sizes, turns, axes, strict=True)])
    quadratics = Quadratics(matrices, rng.standard_normal((3, 3)))
    largest = 4.0 * condition
    federation = Federation(quadratics, np.ones(3), 0.5 / largest, np.full(3, float(steps)))
    between = max(np.linalg.norm(a - b) for a in quadratics.centres for b in quadratics.centres)
    best = federation.optimum(np.zeros(3))
    ours = settle(
        federation, gentle("adafedadam", step=1 / largest), np.zeros(3), rounds=3000, tolerance=1e-11
    )
    nova = resting_place(federation, quadratics, normalised=True)
    return float(np.linalg.norm(nova - best) / between), float(np.linalg.norm(ours - best) / between)
