"""Studies and their panels: which runs they need, and which finished ones they use."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from fairwind import algorithms, setups
from fairwind.engine.settings import Settings
from fairwind.errors import InputError, unknown
from fairwind.runs.recipe import (
    Recipe,
    algorithm_digest,
    build_algorithm,
    changed_settings,
    settings_of,
    task_digests,
    to_jsonable,
)
from fairwind.runs.references import is_reference, load_task
from fairwind.study.runs import EMPTY, Finished, RunKey
from fairwind.task import Task

EXACT = ("float32", "tf32", "bf16")  # the most precise first


@dataclass(frozen=True)
class Panel:
    """Algorithms compared on one setup under the same settings: one table, one set of curves."""

    title: str
    setup: str
    """A setup's spec; or a task of one's own, FILE.py:NAME."""
    algorithms: tuple[str, ...] = algorithms.PAPER
    seeds: tuple[int, ...] = (0, 1, 2)
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings other than the setup's own, as `settings_of` takes them."""
    published: str = ""
    """Where the paper's numbers for it are, in paper/published.json."""

    def check(self) -> None:
        """Checks everything that can be checked before anything is read or trained."""
        self.settings()
        if not is_reference(self.setup):
            setups.arguments_of(self.setup)
        Recipe(self.setup, self.algorithms, self.seeds, self.settings()).check()

    def settings(self, **options: Any) -> Settings:
        """The settings of its runs; `options` are those that do not affect numbers, such as the device."""
        changes = {**options, **self.changes}
        if is_reference(self.setup):
            task = own_task(self.setup)
            return changed_settings(task.solver, task.rounds, **changes)
        return settings_of(self.setup, **changes)

    def keys(self) -> dict[str, list[RunKey]]:
        """The runs it needs: for each algorithm, one per seed."""
        settings, digests = to_jsonable(dataclasses.asdict(self.settings())), digests_of(self.algorithms)
        tasks = self.task_digests()
        return {
            spec: [
                RunKey.of(self.setup, spec, seed, settings, digests, tasks.get(str(seed), ""))
                for seed in self.seeds
            ]
            for spec in self.algorithms
        }

    def task_digests(self) -> Mapping[str, str]:
        """By seed, digests of a task of one's own; none of a setup."""
        if not is_reference(self.setup):
            return EMPTY
        return _task_digests(self.setup, self.seeds, self.settings().rounds)


@dataclass(frozen=True)
class Study:
    """A question, the panels that answer it, and which charts its page shows."""

    name: str
    title: str
    question: str
    panels: tuple[Panel, ...]
    charts: tuple[str, ...] = ("curves", "distribution")


@cache
def own_task(reference: str) -> Task:
    """The task that a reference names, loaded once."""
    return load_task(reference)


@cache
def _task_digests(reference: str, seeds: tuple[int, ...], rounds: int) -> Mapping[str, str]:
    return task_digests(own_task(reference), seeds, rounds)


def digests_of(labels: Iterable[str]) -> dict[str, str]:
    """By label, a digest of each algorithm."""
    return {label: _digest_of(label) for label in labels}


def _digest_of(label: str) -> str:
    return algorithm_digest(build_algorithm(label)) if is_reference(label) else _digest_of_spec(label)


@cache
def _digest_of_spec(spec: str) -> str:
    return algorithm_digest(build_algorithm(spec))


def choose(panel: Panel, runs: Iterable[Finished], digest: str | None = None) -> dict[str, list[Finished]]:
    """The panel's finished runs, for each algorithm in the order of seeds.

    Only runs on the data `digest` are used; if it is not given, those on the data that most runs have. Of
    several with the same key the most precise one is used, then the newest; or a panel's own precision.
    """
    wanted = {key for keys in panel.keys().values() for key in keys}
    precision = panel.changes.get("precision", "auto")
    usable = [run for run in runs if run.key in wanted and precision in ("auto", run.precision)]
    if digest is None and usable:
        digests = [run.digest for run in usable]
        digest = max(dict.fromkeys(digests), key=digests.count)
    usable = [run for run in usable if run.digest == digest]
    usable.sort(key=lambda run: str(run.results["environment"].get("date", "")), reverse=True)
    usable.sort(key=lambda run: (run.accuracy is None, EXACT.index(run.precision)))
    first: dict[RunKey, Finished] = {}
    for run in usable:
        first.setdefault(run.key, run)
    return {spec: [first[key] for key in keys if key in first] for spec, keys in panel.keys().items()}


def narrowed(panels: Iterable[Panel], names: Iterable[str], seeds: tuple[int, ...]) -> list[Panel]:
    """The study restricted to some setups and seeds; empty means all."""
    panels, names = list(panels), list(names)
    known = dict.fromkeys(n for p in panels for n in (p.setup, p.setup.partition(":")[0]))
    for name in names:
        if name not in known:
            raise unknown("setup of these studies", name, known)
    for seed in seeds:
        if not any(seed in p.seeds for p in panels):
            raise InputError(f"seed {seed} is in none of these studies; leave it out of --seeds")
    kept = [p for p in panels if not names or {p.setup, p.setup.partition(":")[0]} & set(names)]
    return [replace(p, seeds=tuple(s for s in p.seeds if not seeds or s in seeds)) for p in kept]
