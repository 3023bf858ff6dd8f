"""The results of a comparison, as in results.json."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from fairwind.data.federation import Federation
from fairwind.engine.evaluation import EvaluatedModel, split
from fairwind.engine.settings import NUMBERS, Settings
from fairwind.engine.simulation import Simulation
from fairwind.metrics import METRICS, OF_GROUPS, over_seeds
from fairwind.runs.cost import round_cost, with_fine_tuning
from fairwind.runs.environment import environment
from fairwind.runs.gains import joining_summary
from fairwind.runs.recipe import Recipe, to_jsonable
from fairwind.runs.schema import (
    Baseline,
    Config,
    Environment,
    FederatedConfig,
    FederationFacts,
    GroupAverage,
    HistoryLine,
    JoiningSummary,
    Metrics,
    ModelGroups,
    ModelMetrics,
    OverSeeds,
    Part,
    Parts,
    Plan,
    PrivacyLoss,
    Results,
    RunRow,
    ScoreKind,
    SettingsConfig,
    SharingFacts,
    Stopped,
    SummaryMetrics,
    SummaryRow,
    Timing,
    TotalCost,
)
from fairwind.scores import Score

Evaluated = Callable[[list[HistoryLine]], object]
"""A callback that gets the newest line of every run's history: round, average, worst 30 % and so on.

If it returns True, training stops."""


def results_of(
    *,
    setup: str,
    task: str,
    command: str,
    config: Config | FederatedConfig,
    scores: Sequence[Score],
    parts: Parts | None = None,
    environment: Environment,
    federation: FederationFacts,
    data: str | None,
    runs: list[RunRow],
    timing: Timing,
    algorithm_digests: Mapping[str, str] | None = None,
    task_digests: Mapping[str, str] | None = None,
    sharing: SharingFacts | None = None,
    plan: Plan | None = None,
    engine: str = "",
    joining: JoiningSummary | None = None,
    stopped: Stopped | None = None,
) -> Results:
    """The content of results.json, of a simulation or a real federation."""
    results: Results = {
        "numbers": NUMBERS,
        "algorithm_digests": dict(algorithm_digests or {}),
        "setup": setup,
        "task": task,
        "task_digests": dict(task_digests or {}),
        "command": command,
        "config": config,
        "plan": plan or {},
        "engine": engine,
        "scores": score_kinds(scores),
        "parts": parts or {"history": "test", "final": "test"},
        "stopped": stopped or {"by": "target", "why": ""},
        "environment": environment,
        "federation": federation,
        "data": data,
        "runs": runs,
        "summary": summary_of(runs),
        "timing": timing,
    }
    if not algorithm_digests:
        del results["algorithm_digests"]
    if not task_digests:
        del results["task_digests"]
    if sharing:
        results["sharing"] = sharing
    if plan is None:
        del results["plan"]
    if not engine:
        del results["engine"]
    if joining is not None:
        results["joining"] = joining
    if stopped is None:
        del results["stopped"]
    return results


def summarise(simulation: Simulation, recipe: Recipe, plan: Plan | None = None) -> Results:
    """The results of a simulation; `plan` is that of its first start, if it was resumed."""
    numbers = simulation.federation.train, simulation.settings, simulation.x.shape[1]
    costs = [round_cost(run.algorithm, *numbers).times(simulation.round) for run in simulation.runs]
    final, new = simulation.final(), simulation.final_of_new_clients()

    def cost(view: EvaluatedModel) -> TotalCost:
        known = costs[view.run]
        tuned = view.baseline == "finetuned"
        return with_fine_tuning(known, *numbers[:2]) if tuned else known

    of_new = {} if new is None else dict(zip(new.views, new.lines, strict=True))
    rows = [
        run_row(
            line,
            simulation.round,
            left_out=int(simulation.left_out[view.run]),
            stalled=int(simulation.stalled[view.run]),
            cost=cost(view),
            model=view.model,
            baseline=view.baseline,
            of_new_clients=of_new.get(view),
        )
        for view, line in zip(final.views, final.lines, strict=True)
    ]
    kind, names = simulation.scores[0].kind, simulation.federation.names
    return results_of(
        setup=recipe.setup,
        task=simulation.name,
        command=recipe.command(),
        config=config_of(recipe, simulation.settings),
        scores=simulation.scores,
        parts=parts_of(simulation, "test"),
        environment=environment(simulation.settings.device),
        federation=described(simulation, "test"),
        data=recipe.data,
        runs=rows,
        timing=timing(
            simulation.seconds, simulation.round, len(simulation.runs), client_steps=simulation.client_steps
        ),
        algorithm_digests=recipe.algorithm_digests,
        task_digests=recipe.task_digests,
        sharing=recipe.sharing,
        plan=plan or simulation.plan.to_json(),
        joining=joining_summary(rows, final.score, kind, names),
        stopped=simulation.stopping.stopped if simulation.round < simulation.settings.rounds else None,
    )


def run_row(
    line: HistoryLine,
    rounds: int,
    *,
    left_out: int,
    stalled: int,
    cost: TotalCost | None = None,
    model: str = "global",
    baseline: Baseline | None = None,
    of_new_clients: HistoryLine | None = None,
    privacy: PrivacyLoss | None = None,
) -> RunRow:
    """A run of the results, from the last line of its history."""
    row: dict[str, object] = {
        "algorithm": line["algorithm"],
        "seed": line["seed"],
        "rounds": rounds,
        "final": final_metrics(line),
    }
    row |= {} if cost is None else {"cost": cost}
    row |= {name: value for name, value in line.items() if name in ("groups", "worst_group", "scores")}
    row |= {} if model == "global" else {"model": model}
    row |= {} if baseline is None else {"baseline": baseline}
    row |= {} if of_new_clients is None else {"new_clients": model_line(of_new_clients)}
    row |= {"left_out": left_out, "stalled_rounds": stalled}
    row |= {} if privacy is None else {"privacy": privacy}
    return cast(RunRow, row)


def final_metrics(line: ModelMetrics) -> Metrics[float | None]:
    """The metrics of the main score, without those of groups and other scores."""
    names = (*METRICS, *OF_GROUPS)
    return cast(Metrics[float | None], {name: value for name, value in line.items() if name in names})


def model_line(line: ModelMetrics) -> ModelMetrics:
    """The same with those of groups."""
    groups = {name: value for name, value in line.items() if name in ("groups", "worst_group")}
    return cast(ModelMetrics, {**final_metrics(line), **groups})


def config_of(recipe: Recipe, settings: Settings) -> Config:
    """What a comparison was started with."""
    chosen: SettingsConfig = to_jsonable(dataclasses.asdict(settings))
    return {"algorithms": recipe.algorithms, "seeds": recipe.seeds, **chosen}


def timing(seconds: float, rounds: int, runs: int, *, client_steps: int | None) -> Timing:
    """The speed of training."""
    lasted = max(seconds, 1e-9)
    return {
        "seconds": seconds,
        "rounds_per_second": rounds / lasted,
        "run_rounds_per_second": rounds * runs / lasted,
        "client_steps_per_second": None if client_steps is None else client_steps / lasted,
    }


def about(simulation: Simulation) -> dict[str, object]:
    """What a page of an unfinished comparison must know beside its recipe and history."""
    return {
        "task": simulation.name,
        "scores": score_kinds(simulation.scores),
        "parts": parts_of(simulation, simulation.watched),
        "federation": described(simulation, simulation.watched),
        "baselines": {view.label: view.baseline for view in simulation.views if view.baseline},
    }


def parts_of(simulation: Simulation, final: Part) -> Parts:
    """Which samples the numbers are of; a note where that is not all test samples, or one chose on these."""
    federation, settings, watched = simulation.federation, simulation.settings, simulation.watched
    asked = [f"{n}={v:g}" for n in ("target", "patience") if (v := getattr(settings, n)) is not None]
    if (request := simulation.stopping.request) is not None and request["by"] == "after_evaluation":
        asked.append("after_evaluation")
    overlooked = int(((federation.validation == 0) & (federation.test > 0)).sum())
    lying = _lying(simulation)
    if watched == "test" and not asked and not lying:
        return {"history": watched, "final": final}
    if watched == "test" and not asked:
        note = ""
    elif watched == "test":
        note = (
            f"When to stop ({', '.join(asked)}) was decided on the test samples, so these numbers may be too "
            "good: keep validation samples for that, with validation=0.1 in the federation or setup."
        )
    elif final == "validation":
        note = "All numbers are of validation samples; the test samples are read once, after the last round."
    else:
        note = (
            "The test samples were read once, after the last round: tables and clients are of these. Curves "
            "and rounds to a target are of validation samples."
        )
    if watched != "test" and overlooked:
        have = "has" if overlooked == 1 else "have"
        note += f" {overlooked} of {len(federation)} clients {have} no validation samples."
    return {"history": watched, "final": final, "note": " ".join(filter(None, (note, lying)))}


def _lying(simulation: Simulation) -> str:
    """Who lies, and what is done against it; empty without an attack or a defence."""
    settings, clients, parts = simulation.settings, len(simulation.federation), []
    if simulation.attack is not None:
        liars = int(simulation.attack.liars(clients).sum())
        parts.append(f"{liars} of {clients} clients lie ({settings.attack}), and numbers are of the others.")
    if settings.defence is not None:
        parts.append(f"The server's sums are robust ones ({settings.defence}).")
    return " ".join(parts)


def score_kinds(scores: Sequence[Score]) -> list[ScoreKind]:
    return [{"name": score.name, "kind": score.kind} for score in scores]


def described(simulation: Simulation, part: Part) -> FederationFacts:
    """The federation in numbers, with what a model that has learned nothing would reach on a part."""
    facts = simulation.federation.describe()
    if simulation.scores[0].kind == "accuracy":
        commonest = commonest_answer(simulation.federation, part)
        if commonest is not None:
            facts["commonest"] = commonest
    return facts


def commonest_answer(federation: Federation, part: Part = "test") -> float | None:
    """Accuracy in percent, averaged over clients, of always giving the class that does best so."""
    targets = federation.targets
    if federation.classes is None or not isinstance(targets, Tensor) or targets.dim() != 1:
        return None
    if targets.is_floating_point() or not 0 <= int(targets.min()) <= int(targets.max()) < federation.classes:
        return None
    sizes, pick = split(federation, part)
    tested = (sizes > 0).nonzero()[:, 0]
    labels = targets[pick(tested).to(targets.device)].cpu()
    share = (1 / sizes[tested].double()).repeat_interleave(sizes[tested]) / len(tested)
    return 100 * float(torch.bincount(labels, share, federation.classes).max())


def summary_of(rows: Sequence[RunRow]) -> list[SummaryRow]:
    """Each metric over the seeds of each algorithm, from the rows of runs."""
    summary: list[SummaryRow] = []
    for label in dict.fromkeys(row["algorithm"] for row in rows):
        mine = [row for row in rows if row["algorithm"] == label]
        means = _over_seeds([row["final"] for row in mine], mine)
        line = cast(SummaryRow, {"algorithm": label, **means})
        if "scores" in mine[0]:
            by_score = {name: [row["scores"][name] for row in mine] for name in mine[0]["scores"]}
            line["scores"] = {name: _over_seeds(models, models) for name, models in by_score.items()}
        if "new_clients" in mine[0]:
            of_new = [row["new_clients"] for row in mine]
            line["new_clients"] = _over_seeds(of_new, of_new)
        summary.append(line)
    return summary


def _over_seeds(finals: Sequence[Metrics[float | None]], groups: Sequence[ModelGroups]) -> SummaryMetrics:
    """Metrics of several seeds, and where clients are in groups each group's average."""
    measured = [metric for metric in (*METRICS, *OF_GROUPS) if any(metric in final for final in finals)]
    means: dict[str, OverSeeds | dict[str, GroupAverage[OverSeeds]]] = {
        metric: over_seeds([final.get(metric) for final in finals]) for metric in measured
    }
    averages: dict[str, GroupAverage[OverSeeds]] = {
        label: {
            "clients": group["clients"],
            "avg": over_seeds([seed["groups"][label]["avg"] for seed in groups]),
        }
        for label, group in groups[0].get("groups", {}).items()
    }
    if averages:
        means["groups"] = averages
    return cast(SummaryMetrics, means)


def warnings_of(simulation: Simulation) -> list[str]:
    """Where runs diverged: clients left out, rounds without a step."""
    lines = []
    for r, run in enumerate(simulation.runs):
        left_out, stalled = int(simulation.left_out[r]), int(simulation.stalled[r])
        if left_out or stalled:
            what = []
            if left_out:
                what.append(f"{left_out:,} client contributions were left out, being not finite")
            if stalled:
                what.append(f"the model stayed where it was in {stalled:,} rounds")
            which = f"{run.label} (seed {run.seed})"
            lines.append(f"{which}: {'; '.join(what)}. A smaller learning rate may help")
    return lines
