"""Fairwind from Python: train a task with an algorithm, or compare several."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Unpack

from fairwind import setups
from fairwind.algorithms import REGISTRY, with_sets
from fairwind.comparison import Comparison, Result, load, of_simulation
from fairwind.contract import AnyAlgorithm, is_algorithm
from fairwind.engine.ranks import find, join
from fairwind.engine.settings import Options, Settings
from fairwind.errors import InputError, first_line, in_range, python_numbers, shown
from fairwind.errors import unknown as unknown_name
from fairwind.runs.duration import Duration, seconds_of
from fairwind.runs.hints import LOCAL, near
from fairwind.runs.recipe import Recipe
from fairwind.runs.results import Evaluated
from fairwind.task import Task
from fairwind.tracking import Given, Tracking

P = ParamSpec("P")
R = TypeVar("R")
Algorithms = str | AnyAlgorithm | Sequence[str | AnyAlgorithm] | Mapping[str, str | AnyAlgorithm]


def setup(
    spec: str,
    *,
    data_dir: str | Path | None = None,
    glove: str | Path | None = None,
    cache: str | Path | None = None,
) -> Task:
    """The task of a setup of the paper, such as "cifar10:beta=0.1".

    Its data is generated, read from `data_dir`, taken from the cache or downloaded from the Hugging Face hub.
    """
    places = (None if place is None else Path(place) for place in (data_dir, glove, cache))
    return setups.task(spec, setups.Where(*places), ranks=join())


def takes_settings(function: Callable[P, R]) -> Callable[P, R]:
    """Shows the fields of `Settings` in the signature of a function that takes them as `**options`."""
    shown, fields = signature(function), signature(Settings).parameters
    named = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=fields[name].default, annotation=kind)
        for name, kind in Options.__annotations__.items()
    ]
    tasks_own = [p.replace(default=None) if p.name in ("rounds", "solver") else p for p in options]
    function.__signature__ = shown.replace(parameters=[*named, *tasks_own])  # type: ignore[attr-defined]
    return function


@takes_settings
def simulate(
    task: Task,
    algorithm: Algorithms,
    *,
    seed: int = 0,
    progress: bool = True,
    after_evaluation: Evaluated | None = None,
    time_budget: Duration | None = None,
    track: Given = (),
    **options: Unpack[Options],
) -> Result:
    """Trains a task with one algorithm: "adafedadam:alpha=2", or `fairwind.algorithms.adafedadam(alpha=2)`.

    An algorithm of your own may be given with a name, {"mine": algorithm}. The other arguments are those of
    `compare`.
    """
    refuse_unknown(options, simulate)
    if len(one := labelled(algorithm)) != 1:
        raise InputError(f"simulate trains one algorithm, not {len(one)}: give one, or use compare")
    shown: Any = {"progress": progress, "after_evaluation": after_evaluation, "track": track}
    return compare(task, one, seeds=[seed], time_budget=time_budget, **shown, **options).runs[0]


@takes_settings
def compare(
    task: Task,
    algorithms: Algorithms,
    *,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    checkpoint_every: float = 30,
    progress: bool = True,
    after_evaluation: Evaluated | None = None,
    time_budget: Duration | None = None,
    track: Given = (),
    **options: Unpack[Options],
) -> Comparison:
    """Trains a task with every algorithm and seed, all runs together.

    `algorithms` are specs such as "adafedadam:alpha=2", or a dict of your own algorithms by name. `rounds`
    and `solver` default to the task's; `fairwind.Settings` documents the other options. Training stops early
    once every run's average has reached `target`, or none has improved for `patience` evaluations. History
    and stopping are of validation samples, if the federation has any; results are of test samples.

    With `out`, everything is written into that directory: history, results, trained models, and a checkpoint
    every `checkpoint_every` seconds. The same call resumes an interrupted comparison, with results identical
    bit for bit, and loads a finished one. With more rounds, seeds or algorithms the comparison grows: only
    what is missing is trained, and the results are those of one call.

    `after_evaluation` is called with the newest metrics of every run, a list of dicts; training stops if it
    returns True. It also stops once a `time_budget`, in seconds or as "10m", of training is used up; the same
    call with more goes on. `track` names trackers, such as "mlflow:FOLDER", or is a `fairwind.Tracker` of
    your own.
    """
    from fairwind.runs.session import Session
    from fairwind.runs.training import messages

    refuse_unknown(options, compare)
    if not isinstance(task, Task):
        raise InputError(
            f"a {type(task).__name__} is not a task: make one with fairwind.Task(model, federation)"
        )
    checkpoint_every = python_numbers(checkpoint_every)
    in_range(0, math.inf, checkpoint_every=checkpoint_every)
    if not (after_evaluation is None or callable(after_evaluation)):
        raise InputError(
            f"after_evaluation={shown(after_evaluation)} is not a function of the newest metrics"
        )
    budget = None if time_budget is None else seconds_of(time_budget, "time_budget")
    own = labelled(algorithms)
    recipe = Recipe(task.source, tuple(own), several_seeds(seeds), settings_of(task, options))
    given = {label: algorithm for label, algorithm in own.items() if is_algorithm(algorithm)}
    recipe.check(given)
    path = folder_of(out)
    tracking = Tracking(track if find().first else ())

    def page(path: Path) -> Path | None:
        return page_of(path) if tracking.trackers else None

    trained = Session(
        load=lambda: task,
        recipe=recipe,
        own=given,
        path=path,
        every=checkpoint_every,
        again="" if path is None else f"the same call, with out={str(path)!r}",
        say=partial(warnings.warn, stacklevel=4),
        console=messages() if progress else None,
        tracking=tracking,
        after_evaluation=after_evaluation,
        time_budget=budget,
        finished=page,
    ).run()
    if trained is None:
        assert path is not None
        return load(path, task=task)
    return of_simulation(trained.simulation, trained.results, path if find().first else None, task)


def settings_of(task: Task, options: Options) -> Settings:
    """The settings that are given, and the task's own rounds and solver if they are not."""
    given: Any = {"rounds": task.rounds, "solver": task.solver, **options}
    for name in ("rounds", "solver"):
        given[name] = getattr(task, name) if given[name] is None else given[name]
    return Settings(**given)


def refuse_unknown(given: Mapping[str, object], function: Callable[..., object]) -> None:
    """Refuses settings that a function does not have, with the one that may be meant."""
    names = list(signature(function).parameters)
    for name in given:
        if name in names:
            continue
        if name in ("validation", "new_clients"):
            raise InputError(
                f"{name!r} is the federation's: give Federation.from_clients(…, {name}=…), a setup as in "
                f"'synthetic:{name}=0.2', or federation.with_{name}(…)"
            )
        meant = near(name, (*names, *LOCAL))
        if meant in LOCAL:
            raise InputError(f"{name!r} is the local solver's: give solver=fairwind.Solver({meant}=…)")
        raise unknown_name(f"setting of {function.__name__}", name, names)


def page_of(path: Path) -> Path | None:
    """A comparison's report page for its trackers, if one can be made."""
    try:
        from fairwind.report import write_report

        return write_report(path)[0]
    except (OSError, ImportError, ValueError, MemoryError) as error:
        warnings.warn(f"no report page for the trackers: {first_line(error)}", stacklevel=3)
        return None


def several_seeds(seeds: Any) -> tuple[int, ...]:
    """The seeds as given: a list, a range, an array."""
    found = python_numbers(seeds)
    if isinstance(found, int | float):
        raise InputError(f"seeds={found} is one number: give seeds=[{found}], or range({found}) for so many")
    if not isinstance(found, Iterable):
        raise InputError(f"seeds={shown(seeds)} is no list of numbers: give seeds=[0, 1, 2]")
    return tuple(python_numbers(list(found)))


def folder_of(out: Any) -> Path | None:
    """A directory as users give it."""
    try:
        return None if out is None else Path(out)
    except TypeError:
        raise InputError(f"out={shown(out)} is no path: give the name of a folder") from None


def labelled(given: Algorithms) -> dict[str, AnyAlgorithm | str]:
    """Algorithms by label: a spec is its own label, an algorithm object's is its name, or "own"."""
    if isinstance(given, Mapping):
        for label, algorithm in given.items():
            if not (isinstance(algorithm, str) or is_algorithm(algorithm)):
                raise _no_algorithm(algorithm)
            if not isinstance(label, str) or not label:
                raise InputError(f"an algorithm is called {label!r}: give it a name that is a text")
            if isinstance(algorithm, str) and algorithm != label:
                raise InputError(
                    f"{algorithm!r} is a spec, and keeps its name; to call it {label!r} give the algorithm, "
                    f"fairwind.algorithms.build({algorithm!r})"
                )
        return dict(given)
    if not isinstance(given, Iterable):
        raise _no_algorithm(given)
    found: dict[str, AnyAlgorithm | str] = {}
    several: Any = [given] if isinstance(given, str) or is_algorithm(given) else given
    for algorithm in with_sets(several):
        if not (isinstance(algorithm, str) or is_algorithm(algorithm)):
            raise _no_algorithm(algorithm)
        label = algorithm if isinstance(algorithm, str) else algorithm.name or "own"
        if label in found:
            names = "" if isinstance(algorithm, str) else ": give names, {'one': algorithm, 'other': …}"
            raise InputError(f"algorithm {label!r} is given twice{names}")
        found[label] = algorithm
    return found


def _no_algorithm(given: Any) -> InputError:
    name = getattr(given, "__name__", "")
    if callable(given) and name in REGISTRY:
        return InputError(f"{name} is not an algorithm, but makes one: call it, as in {name}()")
    known = ", ".join(REGISTRY)
    return InputError(
        f"{shown(given)} is not an algorithm: give a name ({known}) or fairwind.algorithms.fedavg(), say"
    )
