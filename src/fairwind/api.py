"""Fairwind from Python: train a task with an algorithm, or compare several."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, Never

import torch

from fairwind import setups
from fairwind.algorithms import REGISTRY, with_sets
from fairwind.comparison import Comparison, Result, load, of_simulation
from fairwind.contract import AnyAlgorithm, is_algorithm
from fairwind.engine.ranks import join
from fairwind.engine.settings import DataOn, Engine, Precision, Settings, Switch
from fairwind.engine.solver import Solver
from fairwind.errors import InputError, first_line, in_range, python_numbers, shown
from fairwind.errors import unknown as unknown_name
from fairwind.runs.directory import RunDirectory
from fairwind.runs.folder import check_free, explaining, held, holds_run
from fairwind.runs.hints import LOCAL, near
from fairwind.runs.recipe import Recipe
from fairwind.runs.results import Evaluated, summarise, warnings_of
from fairwind.runs.seals import damaged
from fairwind.setups import Where
from fairwind.task import Task
from fairwind.tracking import Given, Tracking

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


def simulate(
    task: Task,
    algorithm: Algorithms,
    *,
    seed: int = 0,
    rounds: int | None = None,
    solver: Solver | None = None,
    participation: float = 1.0,
    clients_per_round: int | None = None,
    probe_samples: int | None = None,
    eval_every: int = 10,
    target: float | None = None,
    engine: Engine = "auto",
    device: str | torch.device = "auto",
    compile: Switch = "auto",
    precision: Precision = "auto",
    memory: float | None = None,
    data_on: DataOn = "auto",
    workers: int | None = None,
    progress: bool = True,
    after_evaluation: Evaluated | None = None,
    track: Given = (),
    **unknown: Never,
) -> Result:
    """Trains a task with one algorithm: "adafedadam:alpha=2", or `fairwind.algorithms.adafedadam(alpha=2)`.

    An algorithm of your own may be given with a name, {"mine": algorithm}. The other arguments are those of
    `compare`.
    """
    _refuse(unknown, simulate)
    if len(one := labelled(algorithm)) != 1:
        raise InputError(f"simulate trains one algorithm, not {len(one)}: give one, or use compare")
    compared = compare(
        task,
        one,
        seeds=[seed],
        rounds=rounds,
        solver=solver,
        participation=participation,
        clients_per_round=clients_per_round,
        probe_samples=probe_samples,
        eval_every=eval_every,
        target=target,
        engine=engine,
        device=device,
        compile=compile,
        precision=precision,
        memory=memory,
        data_on=data_on,
        workers=workers,
        progress=progress,
        after_evaluation=after_evaluation,
        track=track,
    )
    return compared.runs[0]


def compare(
    task: Task,
    algorithms: Algorithms,
    *,
    seeds: Sequence[int] = (0,),
    rounds: int | None = None,
    solver: Solver | None = None,
    participation: float = 1.0,
    clients_per_round: int | None = None,
    probe_samples: int | None = None,
    eval_every: int = 10,
    target: float | None = None,
    engine: Engine = "auto",
    device: str | torch.device = "auto",
    compile: Switch = "auto",
    precision: Precision = "auto",
    memory: float | None = None,
    data_on: DataOn = "auto",
    workers: int | None = None,
    out: str | Path | None = None,
    checkpoint_every: float = 30,
    progress: bool = True,
    after_evaluation: Evaluated | None = None,
    track: Given = (),
    **unknown: Never,
) -> Comparison:
    """Trains a task with every algorithm and seed, all runs together.

    `algorithms` are specs such as "adafedadam:alpha=2", or a dict of your own algorithms by name. `rounds`
    and `solver` default to the task's; `fairwind.Settings` documents the other options. Training stops early
    once every run's average has reached `target`.

    With `out`, everything is written into that directory: history, results, trained models, and a checkpoint
    every `checkpoint_every` seconds. The same call resumes an interrupted comparison, with results identical
    bit for bit, and loads a finished one. `after_evaluation` is called with the newest metrics of every run,
    a list of dicts. `track` names trackers, such as "mlflow:FOLDER", or is a `fairwind.Tracker` of your own.
    """
    from fairwind.runs.training import messages, train, train_on_other_rank

    _refuse(unknown, compare)
    if not isinstance(task, Task):
        raise InputError(
            f"a {type(task).__name__} is not a task: make one with fairwind.Task(model, federation)"
        )
    checkpoint_every = python_numbers(checkpoint_every)
    in_range(0, math.inf, checkpoint_every=checkpoint_every)
    own = labelled(algorithms)
    settings = Settings(
        rounds=task.rounds if rounds is None else rounds,
        solver=solver or task.solver,
        participation=participation,
        clients_per_round=clients_per_round,
        probe_samples=probe_samples,
        eval_every=eval_every,
        target=target,
        engine=engine,
        device=str(device),
        compile=compile,
        precision=precision,
        memory=memory,
        data_on=data_on,
        workers=workers,
    )
    recipe = Recipe(task.source or task.name, tuple(own), _several(seeds), settings)
    given = {label: algorithm for label, algorithm in own.items() if is_algorithm(algorithm)}
    replace(recipe, own=dict.fromkeys(given, "")).check()
    console = messages() if progress else None
    path = None if out is None else Path(out)
    with ExitStack() as stack:
        first = join().first
        tracking = Tracking(track if first else ())
        if path is not None and first:
            stack.enter_context(held(path))
            stack.enter_context(explaining(path, f"the same call, with out={str(path)!r}"))
        directory = RunDirectory.open(path) if path is not None and holds_run(path) else None
        if directory is not None:
            recipe = replace(recipe, settings=_same_machine(recipe.settings, directory.recipe.settings))
        simulation = replace(recipe, own=dict.fromkeys(given, "")).build(task, given)
        recipe = recipe.with_digests(task, simulation)
        if path is not None and directory is None and first:
            check_free(path)
            tracking.record(path)
            directory = RunDirectory.create(path, recipe, Where(), simulation)
            directory.write_history(simulation)
        elif directory is not None:
            if differs := directory.recipe.differs(recipe):
                raise InputError(f"{path} holds a run that differs in its {differs}; give another out")
            if directory.finished and not damaged(directory.path):
                for line in directory.mend_recipe() if first else ():
                    warnings.warn(line, stacklevel=2)
                return load(directory.path)
            for line in [*directory.changed(recipe.settings), *directory.restore(simulation)]:
                warnings.warn(line, stacklevel=2)
        if not first:
            train_on_other_rank(simulation)
            return of_simulation(simulation, summarise(simulation, recipe), None)
        again = f"the same call, with out={str(path)!r}" if path is not None else ""
        stack.enter_context(tracking).begin(simulation, recipe, path)
        train(
            simulation,
            directory,
            console=console,
            every=checkpoint_every,
            again=again,
            after_evaluation=tracking.and_then(after_evaluation),
        )
        if console is None:
            for line in warnings_of(simulation):
                warnings.warn(line, stacklevel=2)
        results = summarise(simulation, recipe) if directory is None else directory.write_results(simulation)
        compared = of_simulation(simulation, results, path)
        tracking.finish(page_of(compared) if tracking.trackers else None)
        return compared


def _refuse(given: Mapping[str, object], function: Callable[..., object]) -> None:
    """Refuses settings that a function does not have, with the one that may be meant."""
    names = [name for name in signature(function).parameters if name != "unknown"]
    for name in given:
        meant = near(name, (*names, *LOCAL))
        if meant in LOCAL:
            raise InputError(f"{name!r} is the local solver's: give solver=fairwind.Solver({meant}=…)")
        raise unknown_name(f"setting of {function.__name__}", name, names)


def page_of(compared: Comparison) -> Path | None:
    """A comparison's report page for its trackers, if it was kept and a page can be made."""
    try:
        return None if compared.path is None else compared.report()
    except (OSError, ImportError, ValueError) as error:
        warnings.warn(f"no report page for the trackers: {first_line(error)}", stacklevel=3)
        return None


def _several(seeds: Any) -> tuple[int, ...]:
    """The seeds as given: a list, a range, an array."""
    found = python_numbers(seeds)
    if isinstance(found, int | float):
        raise InputError(f"seeds={found} is one number: give seeds=[{found}], or range({found}) for so many")
    return tuple(python_numbers(list(found)))


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


def _same_machine(settings: Settings, before: Settings) -> Settings:
    """Settings in which "auto" is replaced by the choices of the directory's run."""
    chosen = {name: getattr(before, name) for name in ("device", "compile", "engine", "precision", "data_on")}
    kept = {name: value for name, value in chosen.items() if getattr(settings, name) == "auto"}
    for name in ("memory", "workers"):
        if getattr(settings, name) is None:
            kept[name] = getattr(before, name)
    return replace(settings, **kept, eval_every=before.eval_every)
