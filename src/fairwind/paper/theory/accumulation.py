"""Adam with accumulated updates beside Adam at equal budgets: Section 4.2, Theorem 1.

Ju, Zhang, Toor, Hellander: Accelerating Fair Federated Learning: Adaptive Federated Adam.
IEEE Transactions on Machine Learning in Communications and Networking, 2024.
"""

import math
from collections.abc import Iterator

import numpy as np

from fairwind.metrics import Floats
from fairwind.paper.theory.naccadam import (
    DIMENSIONS,
    EXTENTS,
    LOCAL_RATE,
    ROUNDING,
    SETTINGS,
    Adam,
    Extent,
    Path,
    Problem,
    fitted,
    measure,
    problems,
)
from fairwind.paper.theory.problems import Check, Row, Scale, judge

CHOSEN_C = (0.01, 0.1, 0.5, 0.9)


def speedup(updates: int, c: float) -> float:
    """Theorem 1's S = Nc/(1 − (1−c)^N) − ½, for c in [0, 1]; ½ in the limit c = 0."""
    if c == 0:
        return 0.5
    shrunk = 1.0 if c == 1 else -math.expm1(updates * math.log1p(-c))  # 1 − (1−c)^N
    return updates * c / shrunk - 0.5


def break_even(updates: int) -> float:
    """The c above which the bound favours N-AccAdam over Adam at equal gradients, S(N)/N > S(1); N ≥ 2."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(updates, middle) / updates > 0.5 else (middle, high)
    return high


def equal_budgets(scale: Scale, seed: int = 0) -> Check:
    """Theorem 1's consequence: with as many gradients, N-AccAdam is slower than Adam."""
    extent, paths = EXTENTS[scale], measure(scale, seed)
    first = {(p.problem.name, p.noise, p.setting): p for p in paths if p.updates == 1}
    fewest = extent.budgets[-1] // extent.updates[-1]  # rounds that every N has
    rows: list[Row] = []
    for path in paths:
        adam = first[path.problem.name, path.noise, path.setting]
        cases = [("gradients", b, b // path.updates, b) for b in extent.budgets if b >= path.updates]
        for equal, budget, rounds, rounds_of_adam in [*cases, ("rounds", fewest, fewest, fewest)]:
            gap = path.gaps[rounds] / path.gaps[0]
            gap_of_adam = adam.gaps[rounds_of_adam] / adam.gaps[0]
            square = path.squares[:rounds].mean(0)
            rows.append(
                {
                    "problem": path.problem.name,
                    "noise": path.noise,
                    "setting": path.setting,
                    "equal": equal,
                    "budget": budget,
                    "N": path.updates,
                    "rounds": rounds,
                    "gap_mean": float(gap.mean()),
                    "gap_std": float(gap.std()),
                    "square_mean": float(square.mean()),
                    "square_std": float(square.std()),
                    "beside_adam": "itself" if path is adam else _compared(gap, gap_of_adam),
                }
            )
    constants = {p.name: _constants(p, paths) for p in problems(extent.seeds, seed)}
    decided = [r for r in rows if r["equal"] == "gradients" and r["beside_adam"] in ("slower", "faster")]
    slower = [r for r in decided if r["beside_adam"] == "slower"]
    return Check(
        name="theorem1_equal_budgets",
        claim="With as many gradients and the same hyper-parameters, N-AccAdam is slower than Adam.",
        setting={
            "dimensions": DIMENSIONS,
            "seeds": extent.seeds,
            "local_rate_times_L": LOCAL_RATE,
            "gap": "f(x) − f* as a share of the first",
            "square": "mean of ‖∇f‖² over the rounds",
            "problems": constants,
        },
        rows=rows,
        verdict=judge(len(slower), len(decided)),
        explanation=" ".join([*_told(rows, extent), _violated(constants)]),
    )


def _compared(gap: Floats, gap_of_adam: Floats) -> str:
    """Whether runs are slower or faster than Adam from the same starts: two standard errors of log gaps."""
    if max(gap.max(), gap_of_adam.max()) < ROUNDING:
        return "both converged"
    difference = np.log(np.maximum(gap, ROUNDING) / np.maximum(gap_of_adam, ROUNDING))
    error = 2 * difference.std(ddof=1) / math.sqrt(len(difference))
    return "slower" if difference.mean() > error else "faster" if difference.mean() < -error else "undecided"


def _constants(problem: Problem, paths: tuple[Path, ...]) -> dict[str, float]:
    """A problem's constants, the setting that meets the conditions, and by how much the defaults do not."""
    adam, default = problem.conditions(), Adam()
    return {
        "L": problem.smooth,
        "mu": problem.convex,
        "G": problem.steepest,
        "steepest_seen": max(float(p.steepest.max()) for p in paths if p.problem.name == problem.name),
        "conditions_eps": float(adam.eps),
        "conditions_lr": float(adam.lr),
        "default_lr_times_2L_over_eps": float(default.lr * 2 * problem.smooth / default.eps),
        "default_one_minus_beta2_times_16G2_over_eps2": float(
            (1 - default.beta2) * 16 * problem.steepest**2 / default.eps**2
        ),
    }


def _told(rows: list[Row], extent: Extent) -> Iterator[str]:
    last, most = extent.budgets[-1], extent.updates[-1]
    for noise in ("none", "gradient noise"):
        for setting in SETTINGS:
            mine = [r for r in rows if r["noise"] == noise and r["setting"] == setting and r["N"] > 1]
            counted = [r["beside_adam"] for r in mine if r["equal"] == "gradients"]
            words = {"conditions": "the theorem's conditions", "defaults": "Adam's defaults"}[setting]
            yield (
                f"{'Without noise' if noise == 'none' else 'With noise'}, under {words}: N-AccAdam is slower"
                f" than Adam in {counted.count('slower')} and faster in {counted.count('faster')} of"
                f" {len(counted)} comparisons at equal gradients (problem, budget, N); the others are"
                " undecided, or both have converged to rounding."
            )
            for name in dict.fromkeys(r["problem"] for r in mine):
                at = {
                    r["N"]: r["gap_mean"]
                    for r in rows
                    if (r["problem"], r["noise"], r["setting"]) == (name, noise, setting)
                    and (r["equal"], r["budget"]) == ("gradients", last)
                }
                yield (
                    f"After {last} gradients on the {name} Adam has {at[1]:.1e} of its first gap left and N"
                    f" = {most} has {at[most]:.1e}."
                )
    same = [r for r in rows if (r["equal"], r["setting"], r["noise"]) == ("rounds", "defaults", "none")]
    adam = {r["problem"]: r["gap_mean"] for r in same if r["N"] == 1}
    alike = [r["gap_mean"] / adam[r["problem"]] for r in same if r["N"] > 1]
    yield (
        "The theorem knows no noise. Accumulating N gradients averages their noise, so where noise and not"
        " distance limits Adam, a larger N ends lower. With Adam's defaults ε is negligible and Adam does"
        " not see the length of what it is fed with: a round moves about as far for every N, so N-AccAdam"
        f" pays N gradients for one step (without noise its gap after as many rounds is {min(alike):.2f} to"
        f" {max(alike):.2f} times Adam's). Under the conditions ε is large, an update P times as long as the"
        " gradient makes a step up to P times as long, and η ≤ ε/2L bounds the step for a gradient only."
    )


def _violated(constants: dict[str, dict[str, float]]) -> str:
    rate = [each["default_lr_times_2L_over_eps"] for each in constants.values()]
    memory = [each["default_one_minus_beta2_times_16G2_over_eps2"] for each in constants.values()]
    return (
        f"Adam's defaults violate both conditions: η is {min(rate):.0e} to {max(rate):.0e} times ε/2L, and 1"
        f" − β₂ {min(memory):.0e} to {max(memory):.0e} times ε²/16G²; the theorem says nothing about them,"
        " nor about β₁ = 0.9."
    )


def bound_of_theorem1(scale: Scale, seed: int = 0) -> Check:
    """S(N) of Theorem 1 for the measured c and for chosen ones, and how much of it one gradient buys."""
    extent = EXTENTS[scale]
    constants = [(*key, *value) for key, value in fitted(scale, seed).items()]
    measured = [c for *_, c in constants]
    rows: list[Row] = [
        {
            "problem": problem,
            "noise": noise,
            "A": a,
            "c": c,
            "N": n,
            "S": speedup(n, c),
            "S_per_gradient": speedup(n, c) / n,
            "times_adam": speedup(n, c) / n / speedup(1, c),
            "break_even_c": break_even(n) if n > 1 else None,
        }
        for problem, noise, a, c in [*constants, *(("chosen c", "none", None, c) for c in CHOSEN_C)]
        for n in extent.updates
    ]
    later = [r for r in rows if r["N"] > 1]
    worse = [r for r in later if r["times_adam"] < 1]
    most = extent.updates[-1]
    best = max(later, key=lambda r: r["times_adam"])
    return Check(
        name="theorem1_bound",
        claim="The bound's speed-up S grows slower than the number N of gradients that it costs.",
        setting={"local_rate_times_L": LOCAL_RATE, "measured_c": measured, "chosen_c": list(CHOSEN_C)},
        rows=rows,
        verdict=judge(len(worse), len(later)),
        explanation=(
            f"S(1) = {speedup(1, measured[0]):g} for every c, so with N = 1 the bound is 2(f(x¹) − f*)(√β₂G"
            " + ε)/(ηT), which is Adam's; the speed-up over Adam is therefore S(N)/S(1) = 2S and not S. With"
            " a budget of B gradients there are T = B/N rounds, so the bound falls as S/N. S/N tends to c"
            " for large N: S is linear in N in the end, with slope c. For the measured c, from"
            f" {min(measured):.3f} to {max(measured):.3f}, the bound at N = {most} promises"
            f" {min(_times(rows, measured, most)):.3f} to {max(_times(rows, measured, most)):.3f} of Adam's"
            f" speed for as many gradients. The claim is not true for every c: above {break_even(2):.3f} (N"
            f" = 2) or {break_even(most):.3f} (N = {most}) the printed bound favours N-AccAdam, by up to"
            f" {best['times_adam']:.2f} (c = {best['c']:g}, N = {best['N']}); that region cannot be reached,"
            " because S assumes R_t = N (see theorem1_best_case). As printed, the numerator f(x¹) −"
            " f(x*)(√β₂G + ε) lacks parentheses around f(x¹) − f(x*)."
        ),
    )


def _times(rows: list[Row], c: list[float], n: int) -> list[float]:
    return [r["times_adam"] for r in rows if r["c"] in c and r["N"] == n]
