"""The sentence at the top of a page: which algorithm serves the worst-off best."""

import math

from fairwind.report.table import Results, display_name, judged, seed_count


def finding(results: Results) -> str:
    """One sentence: who serves the worst-off 30 % best, by how much, and what that does to the average."""
    score = judged(results)
    worst = {
        row["algorithm"]: row["worst30"] for row in results["summary"] if row["worst30"]["mean"] is not None
    }
    average = {
        row["algorithm"]: row["avg"]["mean"] for row in results["summary"] if row["avg"]["mean"] is not None
    }
    ranked = sorted(worst, key=lambda label: -score.sign * worst[label]["mean"])
    if not ranked or ranked[0] not in average:
        return f"No run ended with a defined {score.name}."
    first, name = ranked[0], display_name(ranked[0])
    reached = f"{score.name} of {score.text(worst[first]['mean'])}"
    if len(ranked) == 1:
        return (
            f"Under {name} clients reach {score.name} of {score.text(average[first])} on average, "
            f"the worst-off 30 % of them {score.text(worst[first]['mean'])}."
        )
    second = ranked[1]
    gap = abs(worst[first]["mean"] - worst[second]["mean"])
    same = 0.05 if score.kind == "accuracy" else 5e-4 * abs(worst[first]["mean"])
    top = max(average, key=lambda label: score.sign * average[label])
    if gap < same:
        tied = [display_name(x) for x in ranked if abs(worst[first]["mean"] - worst[x]["mean"]) < same]
        return (
            f"{_listed(tied)} serve the worst-off 30 % of clients equally well: {reached}; "
            f"the best average over all clients, {score.text(average[top])}, is {display_name(top)}’s."
        )
    if seed_count(results) == 1:
        doubt = " (one seed)"
    elif gap > math.hypot(worst[first]["std"] or 0, worst[second]["std"] or 0):
        doubt = ""
    else:
        doubt = ", which is within the spread of seeds"
    behind = abs(average[top] - average[first])
    if behind < same:
        verdict = "is the best too"
    else:
        verdict = f"is {score.gap(behind)} behind the best, {display_name(top)}’s"
    return (
        f"{name} serves the worst-off 30 % of clients best: {reached}, "
        f"{score.gap(gap)} ahead of {display_name(second)}, the next best{doubt}; "
        f"its average over all clients, {score.text(average[first])}, {verdict}."
    )


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
