"""Section 3.2: the gradient of the α-fair objective shrinks with the losses, and what that does to q-FedAvg.

Ju, Zhang, Toor, Hellander: Accelerating Fair Federated Learning: Adaptive Federated Adam.
IEEE Transactions on Machine Learning in Communications and Networking, 2024.
"""

import numpy as np

from fairwind.algorithms import qfedavg
from fairwind.metrics import Floats
from fairwind.paper.theory.fairness import fair_gradient, fair_minimiser
from fairwind.paper.theory.problems import Check, Federation, Quadratics, Row, Scale, judge, play

ALPHAS = (0.0, 1.0, 2.0, 4.0)
CLIENTS, DIMENSIONS = 10, 5
MOST = {"smoke": 2_000, "reduced": 10_000, "full": 20_000}  # rounds
SOLVED = 0.01  # of the first distance from the solution


def problem(common: bool, seed: int) -> Federation:
    """Quadratics of several curvatures, with one optimum, where all losses vanish, or an optimum each."""
    rng = np.random.default_rng(seed)
    turns = np.linalg.qr(rng.standard_normal((CLIENTS, DIMENSIONS, DIMENSIONS)))[0]
    curvatures = rng.uniform(1, 10, (CLIENTS, DIMENSIONS))
    matrices = np.einsum("kde,ke,kfe->kdf", turns, curvatures, turns)
    centres = np.zeros((CLIENTS, DIMENSIONS)) if common else rng.standard_normal((CLIENTS, DIMENSIONS))
    ones = np.ones(CLIENTS)
    return Federation(Quadratics(matrices, centres), ones, 1 / float(curvatures.max()), ones)


def rounds_of(
    federation: Federation, method: str, alpha: float, x: Floats, most: int
) -> tuple[int | None, float]:
    """Rounds until the distance from the solution is SOLVED of the first, and what is left of F^α."""
    losses = federation.objective.losses
    common = not np.any(losses(federation.spread(np.zeros(DIMENSIONS))))
    solution = np.zeros(DIMENSIONS) if common else fair_minimiser(federation, alpha, x, np.ones(CLIENTS))
    first, away = float((losses(federation.spread(x)) ** alpha).mean()), float(np.linalg.norm(x - solution))
    algorithm, state, taken = qfedavg(q=alpha), None, None
    for t in range(1, most + 1):
        if method == "gradient descent":  # its fixed rate makes the first step as long as with α = 0
            x = x - federation.rate * fair_gradient(federation, alpha, x) / first
        else:
            played = play(federation, algorithm, x, state)
            x, state = played.x, played.state
        if np.linalg.norm(x - solution) <= SOLVED * away:
            taken = t
            break
    return taken, float((losses(federation.spread(x)) ** alpha).mean()) / first


def shrinking_gradients(scale: Scale, seed: int = 0) -> Check:
    """Rounds to the α-fair solution, with a fixed rate and with q-FedAvg's, against α = 0."""
    rows: list[Row] = []
    for optima in ("common", "different"):
        federation = problem(optima == "common", seed)
        start = 3 * np.random.default_rng(seed + 1).standard_normal(DIMENSIONS)
        for method in ("gradient descent", "q-FedAvg"):
            for alpha in ALPHAS:
                taken, left = rounds_of(federation, method, alpha, start, MOST[scale])
                row = {
                    "optima": optima,
                    "method": method,
                    "alpha": alpha,
                    "rounds": taken,
                    "factor_left": left,
                }
                rows.append(row)
    plain = {(r["optima"], r["method"]): r["rounds"] for r in rows if r["alpha"] == 0}
    fair = [r for r in rows if r["alpha"]]
    slower = [r for r in fair if r["rounds"] is None or r["rounds"] > plain[r["optima"], r["method"]]]

    def told(method: str, optima: str) -> str:
        mine = [r for r in rows if (r["method"], r["optima"]) == (method, optima)]
        return ", ".join("never" if r["rounds"] is None else f"{r['rounds']:,}" for r in mine)

    return Check(
        name="alpha_fair_gradients_shrink",
        claim="The factor F^α shrinks the α-fair gradient, which slows gradient descent and q-FedAvg.",
        setting={
            "rounds": f"until the distance from the α-fair solution is {SOLVED:.0%} of the first",
            "at_most": MOST[scale],
            "local_steps": 1,
            "factor_left": "mean of F^α over that at the start",
        },
        rows=rows,
        verdict=judge(len(slower), len(fair)),
        explanation=(
            "Rounds with α = 0, 1, 2 and 4. Where all clients have one optimum, so that losses vanish:"
            f" gradient descent with a fixed rate {told('gradient descent', 'common')}; q-FedAvg"
            f" {told('q-FedAvg', 'common')}. Where optima differ, so that losses stay positive: gradient"
            f" descent {told('gradient descent', 'different')}; q-FedAvg {told('q-FedAvg', 'different')}."
            f" More rounds than with α = 0 are needed in {len(slower)} of {len(fair)} cases. But q-FedAvg is"
            " slower for another reason than gradient descent: it divides by its own F^q, so the factor"
            " cancels. The term q·F^(q−1)·‖∇F‖² of its divisor remains. With quadratic losses that is a"
            " multiple of L·F^q, and costs a constant factor, however small the losses are."
        ),
    )
