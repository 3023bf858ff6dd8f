"""The results of a comparison, as in results.json."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairwind.data.federation import Federation
from fairwind.engine.evaluation import split
from fairwind.engine.simulation import Simulation
from fairwind.metrics import METRICS, OF_GROUPS, over_seeds
from fairwind.runs.cost import round_cost
from fairwind.runs.environment import environment
from fairwind.runs.recipe import Recipe, to_jsonable

Evaluated = Callable[[list[dict[str, Any]]], object]
"""A callback that gets the newest line of every run's history: round, average, worst 30 % and so on."""


def summarise(simulation: Simulation, recipe: Recipe) -> dict[str, Any]:
    """The content of results.json."""
    last = simulation.history[-len(simulation.views) :]
    given = simulation.federation.train, simulation.settings, simulation.x.shape[1]
    costs = [round_cost(run.algorithm, *given) for run in simulation.runs]
    rows: list[dict[str, Any]] = []
    for view, line in zip(simulation.views, last, strict=True):
        final = {k: v for k, v in line.items() if k in (*METRICS, *OF_GROUPS)}
        row = {"algorithm": view.label, "seed": view.seed, "rounds": simulation.round, "final": final}
        row["cost"] = costs[view.run].times(simulation.round)
        row |= {k: line[k] for k in ("groups", "worst_group", "scores") if k in line}
        if view.model != "global":
            row["model"] = view.model
        counts = {"left_out": simulation.left_out, "stalled_rounds": simulation.stalled}
        rows.append(row | {name: int(count[view.run]) for name, count in counts.items()})
    seconds = max(simulation.seconds, 1e-9)
    own = {"own": dict(recipe.own)} if recipe.own else {}
    return own | {
        "setup": recipe.setup,
        "task": simulation.name,
        "command": recipe.command(),
        "config": {"algorithms": recipe.algorithms, "seeds": recipe.seeds}
        | to_jsonable(dataclasses.asdict(simulation.settings)),
        "plan": simulation.plan.to_json(),
        "scores": _scores(simulation),
        "environment": environment(simulation.settings.device),
        "federation": described(simulation),
        "data": recipe.data,
        "runs": rows,
        "summary": summary_of(rows),
        "timing": {
            "seconds": simulation.seconds,
            "rounds_per_second": simulation.round / seconds,
            "run_rounds_per_second": simulation.round * len(simulation.runs) / seconds,
            "client_steps_per_second": simulation.client_steps / seconds,
        },
    }


def about(simulation: Simulation) -> dict[str, Any]:
    """What a page of an unfinished comparison must know beside its recipe and history."""
    return {
        "task": simulation.name,
        "scores": _scores(simulation),
        "federation": described(simulation),
    }


def _scores(simulation: Simulation) -> list[dict[str, Any]]:
    return [{"name": score.name, "kind": score.kind} for score in simulation.scores]


def described(simulation: Simulation) -> dict[str, Any]:
    """The federation in numbers, with what a model that has learned nothing would reach."""
    about = simulation.federation.describe()
    found = commonest_answer(simulation.federation) if simulation.scores[0].kind == "accuracy" else None
    return about if found is None else {**about, "commonest": found}


def commonest_answer(federation: Federation) -> float | None:
    """Accuracy in percent, averaged over clients, of always giving the class that does best so."""
    targets, test = federation.targets, federation.test
    if federation.classes is None or not isinstance(targets, Tensor) or targets.dim() != 1:
        return None
    if targets.is_floating_point() or not 0 <= int(targets.min()) <= int(targets.max()) < federation.classes:
        return None
    sizes, pick = split(federation, "test")
    tested = (test > 0).nonzero()[:, 0]
    labels = targets[pick(tested).to(targets.device)].cpu()
    share = (1 / sizes[tested].double()).repeat_interleave(sizes[tested]) / len(tested)
    return 100 * float(torch.bincount(labels, share, federation.classes).max())


def summary_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each metric over the seeds of each algorithm, from the rows of runs."""
    summary = []
    for label in dict.fromkeys(row["algorithm"] for row in rows):
        mine = [row for row in rows if row["algorithm"] == label]
        line = {"algorithm": label} | _over_seeds([row["final"] for row in mine]) | _groups_over_seeds(mine)
        names = mine[0].get("scores", {})
        if names:
            each = {name: [row["scores"][name] for row in mine] for name in names}
            line["scores"] = {name: _over_seeds(of) | _groups_over_seeds(of) for name, of in each.items()}
        summary.append(line)
    return summary


def _over_seeds(finals: list[dict[str, Any]]) -> dict[str, Any]:
    known = [metric for metric in (*METRICS, *OF_GROUPS) if any(metric in final for final in finals)]
    return {metric: over_seeds([final.get(metric) for final in finals]) for metric in known}


def _groups_over_seeds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Each group's average over the seeds, if clients are in groups."""
    known = runs[0].get("groups", {})
    found = {
        label: {"clients": group["clients"], "avg": over_seeds([run["groups"][label]["avg"] for run in runs])}
        for label, group in known.items()
    }
    return {"groups": found} if found else {}


def warnings_of(simulation: Simulation) -> list[str]:
    """Where runs diverged: clients left out, rounds without a step."""
    found = []
    for r, run in enumerate(simulation.runs):
        left_out, stalled = int(simulation.left_out[r]), int(simulation.stalled[r])
        if left_out or stalled:
            what = []
            if left_out:
                what.append(f"{left_out:,} client contributions were left out, being not finite")
            if stalled:
                what.append(f"the model stayed where it was in {stalled:,} rounds")
            which = f"{run.label} (seed {run.seed})"
            found.append(f"{which}: {'; '.join(what)}. A smaller learning rate may help")
    return found
