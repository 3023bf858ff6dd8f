"""The models to evaluate: every run's own, and additional ones of some runs."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fairwind.contract import CohortAlgorithm, PersonalAlgorithm
from fairwind.data.federation import Federation
from fairwind.engine.evaluation.evaluate import Pick, Scorer, client_scores, own_scores
from fairwind.engine.executor import Run
from fairwind.engine.memory import Memories
from fairwind.engine.ranks import Ranks


class View(NamedTuple):
    """A model of a run, or one for each client."""

    label: str
    seed: int
    run: int
    model: Literal["global", "averaged", "personal"] = "global"


def views_of(runs: Sequence[Run]) -> list[View]:
    """In the order of the runs, each followed by its additional models."""
    found = []
    for r, run in enumerate(runs):
        found.append(View(run.label, run.seed, r))
        if isinstance(run.algorithm, CohortAlgorithm) and run.algorithm.also is not None:
            found.append(View(f"{run.label} (averaged)", run.seed, r, "averaged"))
        if isinstance(run.algorithm, PersonalAlgorithm):
            found.append(View(f"{run.label} (personal)", run.seed, r, "personal"))
    return found


def averaged(run: Run, state: Any) -> Tensor:
    """The additional model (P,) of a run that has one."""
    assert isinstance(run.algorithm, CohortAlgorithm)
    assert run.algorithm.also is not None
    return run.algorithm.also(state)


def judge_views(
    views: Sequence[View],
    runs: Sequence[Run],
    x: Tensor,
    states: Sequence[Any],
    memories: Memories,
    scorers: tuple[Scorer, Scorer],
    federation: Federation,
    sizes: Tensor,
    pick: Pick,
    ranks: Ranks,
) -> tuple[Tensor, ...]:
    """Every client's mean loss and scores under each view's model, (views, K) each, on the host.

    The first of the `scorers` is for shared models, the second for personal ones.
    """
    shared = [view for view in views if view.model != "personal"]
    if len(shared) > len(x):
        both = {"global": lambda r: x[r], "averaged": lambda r: averaged(runs[r], states[r]).to(x.dtype)}
        x = torch.stack([both[view.model](view.run) for view in shared])
    found = client_scores(scorers[0], federation, x, sizes, pick, ranks)
    rows = {(view.label, view.seed): [each[i] for each in found] for i, view in enumerate(shared)}
    for view in views:
        if view.model == "personal":
            own = own_scores(scorers[1], federation, memories.values[view.run], sizes, pick, x.device)
            rows[view.label, view.seed] = list(own)
    in_order = [rows[view.label, view.seed] for view in views]
    return tuple(torch.stack(each).cpu() for each in zip(*in_order, strict=True))
