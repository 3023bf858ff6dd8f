"""Adam with accumulated updates at its best and at its worst: Section 4.2, Theorem 1.

Ju, Zhang, Toor, Hellander: Accelerating Fair Federated Learning: Adaptive Federated Adam.
IEEE Transactions on Machine Learning in Communications and Networking, 2024.
"""

import numpy as np

from fairwind.paper.theory.accumulation import speedup
from fairwind.paper.theory.naccadam import EXTENTS, LOCAL_RATE, ROUNDING, fitted, measure, naccadam, problems
from fairwind.paper.theory.problems import Check, Row, Scale, judge


def best_case(scale: Scale, seed: int = 0) -> Check:
    """Theorem 1's best case R_t = N, and the step of its proof that each round should obey."""
    rows: list[Row] = []
    for path in measure(scale, seed):
        _, c = fitted(scale, seed)[path.problem.name, path.noise]
        n, live = path.updates, path.live
        ratio = path.least_ratio / path.length_ratio  # R_t/P_t
        unit = float(path.adam.lr / (np.sqrt(path.adam.beta2) * path.problem.steepest + path.adam.eps))
        allowed = path.gaps[:-1] - (ratio - 0.5) * unit * path.squares
        broken = path.gaps[1:] > allowed + 1e-13 * path.gaps[0]
        square = path.squares.mean(0)
        bound = path.gaps[0] / (speedup(n, c) * unit * len(path.squares))
        rows.append(
            {
                "problem": path.problem.name,
                "noise": path.noise,
                "setting": path.setting,
                "N": n,
                "R_mean": float(path.least_ratio[live].mean()),
                "R_max": float(path.least_ratio[live].max()),
                "P_mean": float(path.length_ratio[live].mean()),
                "P_max": float(path.length_ratio[live].max()),
                "P_limit": n / (speedup(n, c) + 0.5),  # (1 − (1−c)^N)/c
                "R_over_P_max": float(ratio[live].max()),
                "best_case_share": path.share(path.least_ratio >= n * (1 - 1e-6)),
                "no_guarantee_share": path.share(ratio <= 0.5),
                "descent_broken_share": path.share(broken),
                "rising_share": path.share(path.gaps[1:] > path.gaps[:-1]),
                "square_mean": float(square.mean()),
                "bound_mean": float(bound.mean()),
                "bound_held_share": float((square <= bound).mean()),
            }
        )
    exact = [r for r in rows if r["noise"] == "none" and r["N"] > 1]
    noisy = [r for r in rows if r["noise"] != "none" and r["N"] > 1]
    strict = [r for r in exact if r["setting"] == "conditions"]
    quiet = [r for r in rows if r["noise"] == "none"]
    bounded = [r for r in quiet if r["bound_held_share"] == 1]
    ever = [r for r in exact if r["best_case_share"] > 0]
    over = [r for r in exact if r["P_max"] > r["P_limit"]]
    loose = [r for r in strict if r["descent_broken_share"] > 0]
    failed = [r for r in strict if r["bound_held_share"] < 1]
    return Check(
        name="theorem1_best_case",
        claim="In the best case R_t = N in every round, and the bound with S(N) holds.",
        setting={
            "R": "min over coordinates of |Δ/∇f|",
            "P": "‖Δ‖/‖∇f‖",
            "rounds": f"those that start above {ROUNDING:g} of the first gap",
        },
        rows=rows,
        # Where the premise never occurs, nothing is known against what would follow from it.
        verdict=judge(len(bounded), len(quiet)) if ever else "premise impossible",
        explanation=(
            f"The bound with S(N) held in {len(bounded)} of {len(quiet)} noiseless cases, but not because of"
            " its premise, which never occurs. "
            f"R_t = N occurs in some round of {len(ever)} of {len(exact)} noiseless cases with N > 1; the"
            f" largest R_t/N is {max(r['R_max'] / r['N'] for r in exact):.3f}. The paper calls the case"
            " almost not feasible. It is impossible where f has curvature: R_t is the smallest ratio of"
            " coordinates and P_t the ratio of norms, so R_t ≤ P_t (the largest measured R_t/P_t is"
            f" {max(r['R_over_P_max'] for r in rows):.3f}), and gradient descent never lengthens a convex"
            " function's gradient, so P_t ≤ N, with equality only if the gradient does not change in N"
            " steps; then c = 0 and S = ½. In the inequality that the proof sums up R_t/P_t − ½ is thus"
            " never above ½, which is Adam's. With noise R_t ≥ N occurs in up to"
            f" {max(r['best_case_share'] for r in noisy):.0%} of rounds, because noise lengthens Δ, not"
            " because the rounds are better. Rounds with R_t ≤ P_t/2, for which the proof promises nothing,"
            f" are between {min(r['no_guarantee_share'] for r in exact):.0%} and"
            f" {max(r['no_guarantee_share'] for r in exact):.0%} of all without noise. P_t exceeds its limit"
            f" (1 − (1−c)^N)/c for the fitted c in {len(over)} of {len(exact)} noiseless cases: the last"
            " step of the proof divides two upper bounds by each other. The descent step of the proof, f(x⁺)"
            " ≤ f(x) − (R/P − ½)η‖∇f‖²/(√β₂G + ε), is broken under the conditions without noise for N in"
            f" {sorted({r['N'] for r in loose})}, in up to"
            f" {max((r['descent_broken_share'] for r in loose), default=0.0):.0%} of rounds; f itself rises"
            f" in up to {max(r['rising_share'] for r in strict):.0%} of rounds of these cases, against"
            f" {max(r['rising_share'] for r in rows if r['N'] == 1 and r['noise'] == 'none'):.0%} of Adam's."
            " The proof replaces ΣΔ² by P·Σ∇², where P² is due, and bounds √v by G, where v holds squares of"
            f" Δ, up to (NG)². The bound with S itself fails in {len(failed)} of {len(strict)} of these"
            " cases; theorem1_worst_case has longer runs."
        ),
    )


def worst_case(scale: Scale, seed: int = 0) -> Check:
    """Long noiseless runs under the conditions: where N-AccAdam levels off, Adam converges."""
    updates, rounds = {
        "smoke": ((1, 16), (256, 512)),
        "reduced": ((1, 4, 16), (256, 512, 1024, 2048)),
        "full": ((1, 2, 4, 8, 16, 32), (256, 512, 1024, 2048, 4096)),
    }[scale]
    problem = problems(EXTENTS[scale].seeds, seed)[0]
    _, c = fitted(scale, seed)[problem.name, "none"]
    adam, objective = problem.conditions(), problem.objective
    unit = float(adam.lr / (np.sqrt(adam.beta2) * problem.steepest + adam.eps))
    first = objective.losses(problem.starts) - problem.least
    rows: list[Row] = []
    for n in updates:
        rate = LOCAL_RATE / problem.smooth
        steps = naccadam(objective, problem.starts, adam, updates=n, rate=rate, rounds=rounds[-1])
        squares = np.array([(objective.gradients(step.x) ** 2).sum(1) for step in steps])
        for t in rounds:
            square, bound = squares[:t].mean(0), first / (speedup(n, c) * unit * t)
            rows.append(
                {
                    "N": n,
                    "rounds": t,
                    "square_mean": float(square.mean()),
                    "square_std": float(square.std()),
                    "last_square_mean": float(squares[t - 1].mean()),
                    "bound_mean": float(bound.mean()),
                    "bound_held_share": float((square <= bound).mean()),
                }
            )
    last = {r["N"]: r for r in rows if r["rounds"] == rounds[-1]}
    steady = [n for n, r in last.items() if r["last_square_mean"] > ROUNDING]
    broken = [n for n, r in last.items() if r["bound_held_share"] < 1]
    return Check(
        name="theorem1_worst_case",
        claim="In the worst case N-AccAdam has no convergence guarantee, in a setting where Adam has one.",
        setting={
            "problem": problem.name,
            "c": c,
            "eps": float(adam.eps),
            "lr": float(adam.lr),
            "noise": "none",
        },
        rows=rows,
        verdict="holds" if steady and 1 not in steady else "does not hold",
        explanation=(
            f"After {rounds[-1]} rounds without noise, in the setting that satisfies the conditions, ‖∇f‖²"
            f" is {last[1]['last_square_mean']:.1e} for Adam. It stays above {ROUNDING:g} for N in {steady}"
            + "".join(f", at {last[n]['last_square_mean']:.1e} for N = {n}" for n in steady[-1:])
            + ". With ε large a step is up to ηP/ε = P/2L times the gradient, and beyond 2/L (P > 4) a"
            " quadratic's steepest direction is overshot. The mean of ‖∇f‖² levels off while the best-case"
            f" bound falls as 1/T: by that round it is broken in some seeds for N in {broken}."
        ),
    )
