"""Trains the missing runs of panels, stacked into jobs, and stores them."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fairwind import setups
from fairwind.engine.settings import Settings
from fairwind.errors import InputError
from fairwind.runs.directory import RunDirectory
from fairwind.runs.files import HISTORY, RECIPE, RESULTS, lock, read_json
from fairwind.runs.folder import CHECKPOINTS, holds_run
from fairwind.runs.recipe import Recipe, on_any_machine, to_jsonable
from fairwind.runs.references import is_reference
from fairwind.runs.seals import damaged
from fairwind.runs.session import Session
from fairwind.runs.training import Console
from fairwind.setups import Where
from fairwind.study.panel import Panel, choose, digests_of, own_task
from fairwind.study.runs import Finished, RunKey
from fairwind.tracking import Tracking

RUNS = "runs"  # the folder of a study's output that holds the runs


class Job(NamedTuple):
    """Runs to be trained together."""

    recipe: Recipe
    where: Where


def missing(
    panels: Iterable[Panel],
    runs: list[Finished],
    where: Callable[[str], Where],
    digest: Callable[[str], str | None] = lambda setup: None,
    **options: Any,
) -> list[Job]:
    """The missing runs of the panels, stacked if setup, settings and seeds are the same.

    `digest` identifies the data of a setup, if several are known; `options` are settings.
    """
    groups: dict[tuple[str, str, tuple[int, ...]], tuple[Settings, Mapping[str, str], list[str]]] = {}
    planned: set[tuple[RunKey, object]] = set()
    for panel in panels:
        settings, keys = panel.settings(**options), panel.keys()
        for spec, there in choose(panel, runs, digest(panel.setup)).items():
            done = {run.key for run in there}
            left = [key for key in keys[spec] if key not in done]
            left = [key for key in left if (key, panel.changes.get("precision")) not in planned]
            planned |= {(key, panel.changes.get("precision")) for key in left}
            if left:
                seeds, tasks = tuple(key.seed for key in left), panel.task_digests()
                place = panel.setup, json.dumps(to_jsonable(dataclasses.asdict(settings))), seeds
                groups.setdefault(place, (settings, tasks, []))[2].append(spec)
    return [
        Job(
            Recipe(
                setup,
                tuple(specs),
                seeds,
                settings,
                algorithm_digests=digests_of(specs),
                task_digests={seed: digest for seed, digest in tasks.items() if int(seed) in seeds},
            ),
            where(setup),
        )
        for (setup, _, seeds), (settings, tasks, specs) in groups.items()
    ]


def run(
    job: Job,
    out: Path,
    say: Callable[[str], None],
    console: Console | None = None,
    *,
    every: float = 30,
    again: str = "",
    wait: bool = False,
) -> None:
    """Trains or resumes a job in its own directory below `out`; a finished one that is damaged, again.

    The stored files are small and contain no local paths: the results with their settings, the history and
    the clients' numbers. If another process trains the job, it is waited for, or `BusyError` is raised.
    """
    own, name = is_reference(job.recipe.setup), job.recipe.setup.partition(":")[0]
    task = own_task(job.recipe.setup) if own else setups.task(job.recipe.setup, job.where, say)
    recipe = replace(job.recipe, data=task.federation.origin.get("digest"))
    key = replace(recipe, settings=on_any_machine(recipe.settings)).digest[:10]
    Session(
        recipe=recipe,
        load=lambda: task,
        where=job.where,
        path=out / RUNS / f"{Path(name).stem if own else name}-{key}",
        find=_begun,
        models=False,
        wait=wait,
        every=every,
        again=again,
        explain=False,
        say=say,
        console=console,
        tracking=Tracking(),
        finished=_clear,
    ).run()


def clear(out: Path) -> None:
    """Removes what a kill left of finished jobs below `out`: recipes, which name local paths, checkpoints."""
    for path in (out / RUNS).glob("*"):
        if (path / RESULTS).exists() and holds_run(path):
            with lock(path) as mine:
                if mine and not damaged(path):
                    _clear(path)


def _clear(path: Path) -> None:
    """Removes what only an unfinished job needs."""
    if HISTORY in read_json(path / RESULTS)["files"]:  # it was finished by 'fairwind resume'
        return
    shutil.rmtree(path / CHECKPOINTS, ignore_errors=True)
    for name in (HISTORY, RECIPE):  # the recipe last: it tells that something is left
        (path / name).unlink(missing_ok=True)


def _begun(path: Path) -> RunDirectory | None:
    """The directory of a job that was begun, if it can go on."""
    try:
        return RunDirectory.open(path) if holds_run(path) else None
    except InputError:  # its recipe is lost, but known to the job
        return None
