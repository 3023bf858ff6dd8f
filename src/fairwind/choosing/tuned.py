"""The result of a search: the choice, its cost, and how it does beside every default on the test part."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from fairwind.algorithms import BASELINES, PAPER, REGISTRY, with_sets
from fairwind.api import compare, folder_of, refuse_unknown, settings_of, several_seeds, takes_settings
from fairwind.choosing.search import FAIR, Aim, Search, Trial, search
from fairwind.comparison import Comparison
from fairwind.engine.ranks import find
from fairwind.engine.settings import Options
from fairwind.engine.solver import Solver
from fairwind.errors import InputError, damaged, in_range, needs_extra, python_numbers, unknown, whole
from fairwind.runs.files import read_json, read_sealed, sealed, write_json
from fairwind.runs.folder import check_writable, held
from fairwind.runs.recipe import Recipe, algorithm_digest, build_algorithm
from fairwind.runs.spec import arguments, parameters
from fairwind.runs.training import messages
from fairwind.task import Task

VALIDATION = 0.1  # share of the samples, where a federation has no validation part
SEARCHED = "search.json"


@dataclass(frozen=True)
class Tuned:
    """The chosen algorithm, and how it was found."""

    spec: str  #: The chosen algorithm with its parameters.
    solver: Solver  #: The chosen local solver.
    aim: str  #: What was searched for, in words.
    trials: list[Trial]  #: All settings that were tried, in order.
    cost: dict[str, float]  #: Of the search: rounds, sample_gradients, bytes_up, bytes_down, seconds.
    compared: Comparison  #: The choice and every default on the test part, under other seeds.
    path: Path | None = None
    """The directory, if it was kept in one."""

    @property
    def choice(self) -> Trial:
        """The trial that was chosen."""
        return best(self.trials)

    def to_pandas(self) -> Any:
        """One row for each setting that was tried."""
        import pandas

        return pandas.DataFrame(self.trials)

    def page(self) -> Path:
        """Writes the page of the search, and of the comparison; returns the path of the first."""
        if self.path is None:
            raise InputError("this search was not kept: give tune(…, out='runs/NAME') for a page")
        try:
            from fairwind.report.search import Page, Point, write_search
        except ModuleNotFoundError as error:
            raise needs_extra("a page", error, "cli") from None
        self.compared.report()
        results, rounds = self.compared.results, max(trial.rounds for trial in self.trials)
        page = Page(
            task=results["task"],
            choice=self.spec,
            chosen=self.trials.index(self.choice),
            aim=self.aim,
            points=[Point(*trial) for trial in self.trials],
            runs=self.cost["rounds"] / rounds,
            sample_gradients=self.cost["sample_gradients"],
            results=results,
            ahead=self.compared.ahead(),
            facts={
                "clients": f"{len(self.compared.clients):,}",
                "local learning rate": f"{self.solver.lr:g}",
            },
        )
        return write_search(self.path, page)

    def __repr__(self) -> str:
        rounds = max(trial.rounds for trial in self.trials)
        finished = sum(trial.rounds == rounds for trial in self.trials)
        return (
            f"{self.spec}, local learning rate {self.solver.lr:g}: {self.aim} of {len(self.trials)} settings "
            f"on the validation samples.\n{finished} were trained for all {rounds} rounds; all of them took "
            f"{self.cost['rounds']:,.0f} rounds, as many as {self.cost['rounds'] / rounds:.1f} whole runs.\n"
            f"On the test samples, under new seeds:\n\n{self.compared!r}"
        )


def _say(text: str) -> None:
    messages().print(f"tune: {text}", soft_wrap=True)


def _quiet(text: str) -> None:
    """Says nothing."""


def best(trials: Sequence[Trial]) -> Trial:
    """Of those trained to the end, the first with the largest value."""
    rounds = max(trial.rounds for trial in trials)
    return max((trial for trial in trials if trial.rounds == rounds), key=lambda trial: trial.order)


@takes_settings
def tune(
    task: Task,
    algorithms: str | Sequence[str] = PAPER,
    *,
    aim: str = "worst30",
    trials: int = 64,
    seeds: Sequence[int] = (1, 2, 3),
    search_seed: int = 0,
    local_rates: Sequence[float] = (),
    out: str | Path | None = None,
    progress: bool = True,
    **options: Unpack[Options],
) -> Tuned:
    """Searches an algorithm and its parameters for a task, and compares the choice with every default.

    The aim is "average", "worst30", or "within=5": the best average whose worst 30 % is at most 5 points
    away. Algorithms are names, whose parameters are searched, or specs, whose given parameters stay. The
    baselines local and pooled are not searched, but stand beside the choice in the end; so do fine-tuned
    models (`finetune`), and new clients are left to the end. The search looks at validation samples only,
    which are taken from the training samples if the federation has none; `seeds` are those of the final
    comparison on the test samples. `local_rates` are further local learning rates to try. Settings train
    together, and two thirds leave at a third of the rounds, and so on; the defaults of all algorithms are
    trained to the end. Where clients have personal models, as with ditto, these are judged. With `out`, the
    same call goes on after a kill. The other options are those of `compare`.
    """
    refuse_unknown(options, tune)
    if find().world > 1:
        raise InputError("a search is done by one process: start it without torchrun")
    say = _say if progress else _quiet
    if not isinstance(task, Task):
        raise InputError(
            f"a {type(task).__name__} is not a task: make one with fairwind.Task(model, federation)"
        )
    trials, search_seed = python_numbers((trials, search_seed))
    whole(1, trials=trials)
    whole(0, search_seed=search_seed)
    every, final_seeds, settings = _named(algorithms), several_seeds(seeds), settings_of(task, options)
    names = tuple(name for name in every if name.partition(":")[0] not in BASELINES)
    if not names:
        raise InputError("there is nothing to search: name at least one algorithm that is no baseline")
    if trials < len(names):
        raise InputError(
            f"trials={trials} is too few for the defaults of {len(names)} algorithms, which are all tried: "
            f"give at least {len(names)}, or fewer algorithms"
        )
    settings = replace(settings, finetune=0)  # which is for the end
    if search_seed in final_seeds:
        raise InputError(f"seed {search_seed} is the search's: give other seeds, or another search_seed")
    Recipe(task.source, names, final_seeds, settings).check()
    for seed in final_seeds:
        whole(0, seeds=seed)
    if not final_seeds:
        raise InputError("there are no seeds for the comparison at the end: give one at least")
    task = _with_validation(task, say)
    solver, others = settings.solver, python_numbers(local_rates)
    others = (others,) if isinstance(others, int | float) else tuple(python_numbers(list(others)))
    rates = tuple(dict.fromkeys([solver.lr, *others]))
    in_range(0, float("inf"), **{f"local_rates[{i}]": rate for i, rate in enumerate(rates)})
    folder = folder_of(out)
    choosing = replace(task, federation=task.federation.for_choosing())
    recipe = Recipe(task.source, names, (search_seed,), settings)
    asked = Search(
        choosing, names, Aim.read(aim), trials, settings.rounds, search_seed, rates, recipe, folder
    )
    found, cost = _searched(asked, say)
    chosen = best(found)
    if chosen.average is None or chosen.worst30 is None:
        raise InputError("no setting converged: take a smaller local learning rate, or more trials")
    if chosen.kind < FAIR:
        raise InputError(
            f"no setting is as fair as asked: the worst 30 % of the fairest, {chosen.spec}, is "
            f"{abs(chosen.average - chosen.worst30):.4g} points off: allow more points, or more trials"
        )
    say(f"{chosen.spec} is {asked.aim} on the validation samples")
    solver = replace(solver, lr=chosen.lr)
    final: Options = {**options, "rounds": settings.rounds, "solver": solver}
    kept = None if folder is None else folder / "test"
    spec = next((name for name in names if _same(name, chosen.spec)), chosen.spec)
    specs = list(dict.fromkeys([spec, *every]))
    compared = compare(task, specs, seeds=final_seeds, out=kept, progress=progress, **final)
    return Tuned(spec, solver, str(asked.aim), found, cost, compared, folder)


def _named(given: str | Sequence[str]) -> tuple[str, ...]:
    """The algorithms to search, each once."""
    several: list[object] = [given] if isinstance(given, str) or not isinstance(given, Sequence) else [*given]
    for each in several:
        if not isinstance(each, str):
            raise InputError(
                f"a search is among algorithms by name, not a {type(each).__name__}: give 'adafedadam', or "
                "'adafedadam:alpha=0' to keep a parameter"
            )
    names: list[str] = []
    for name in with_sets([str(each) for each in several]):
        kind = name.partition(":")[0]
        if kind not in REGISTRY:
            raise unknown("algorithm", name, REGISTRY)
        if not any(_same(name, other) for other in names):
            names.append(name)
    return tuple(names)


def _same(one: str, other: str) -> bool:
    """Whether two specs are one algorithm with the same parameters."""
    known = {name: parameters(builder) for name, builder in REGISTRY.items()}
    kinds = [spec.partition(":")[0] for spec in (one, other)]
    given = [arguments("algorithm", spec, known) for spec in (one, other)]
    return kinds[0] == kinds[1] and given[0] == given[1]


def _with_validation(task: Task, say: Callable[[str], None]) -> Task:
    """The task with validation samples, which most clients must have: a choice overlooks the others."""
    if not task.federation.validation.any():
        if int(task.federation.sizes.max()) * VALIDATION < 1:
            raise InputError(
                f"the clients are too small for validation samples ({VALIDATION:.0%} of each): take a larger "
                "share, as in federation.with_validation(0.3)"
            )
        task = replace(task, federation=task.federation.with_validation(VALIDATION))
        say(f"{VALIDATION:.0%} of each client's samples are taken from training for validation")
    federation = task.federation
    none = int(((federation.validation == 0) & (federation.test > 0)).sum())
    if 2 * none > len(federation):
        raise InputError(
            f"{none} of {len(federation)} clients have no validation samples, and a choice would overlook "
            "them: take a larger share, as in federation.with_validation(0.3)"
        )
    if none:
        say(f"{none} of {len(federation)} clients have no validation samples: the search does not see them")
    return task


def _searched(asked: Search, say: Callable[[str], None]) -> tuple[list[Trial], dict[str, float]]:
    """The search, unless its directory has it already."""
    folder = asked.folder
    if folder is None:
        return search(asked, say)
    recipe = _recipe(asked)
    begun = json.loads(json.dumps({"asked": _identity(asked), "recipe": recipe.to_json()}))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}; give another out") from None
    place = folder / SEARCHED
    with held(folder, reading=place.exists()):
        if place.exists():
            content = _read_search(place)
            known, mine = content["asked"], begun["asked"]
            differs = next((name for name in mine if known.get(name) != mine[name]), "")
            if differs := differs or Recipe.from_json(content["recipe"]).differs(recipe):
                raise InputError(f"{folder} holds a search that differs in its {differs}; give another out")
            if "trials" in content:
                return content["trials"], content["cost"]
            begun = {"asked": known, "recipe": content["recipe"]}  # which may differ in rounding
        check_writable(folder)
        if not place.exists():
            write_json(place, sealed(begun))
        found, cost = search(asked._replace(owner=str(sealed(begun)["sha256"])), say)
        write_json(place, sealed({**begun, "cost": cost, "trials": found}))
    return found, cost


def _read_search(place: Path) -> dict[str, Any]:
    remedy = "delete it, and the same call makes it again from its batches; or give another out"
    with damaged(lambda: f"{place} cannot be read", remedy):
        if "recipe" not in read_json(place):
            raise ValueError("it is of an earlier version of Fairwind")
        content = read_sealed(place)
        if "trials" in content:
            content["trials"] = [Trial(*each) for each in content["trials"]]
        return content


def _identity(asked: Search) -> dict[str, Any]:
    """What a search that goes on must have in common with the one that was begun, beside its recipe."""
    return {
        "algorithms": list(asked.algorithms),
        "aim": str(asked.aim),
        "trials": asked.trials,
        "local rates": list(asked.rates),
    }


def _recipe(asked: Search) -> Recipe:
    """Everything that determines the numbers of its trials, but their parameters."""
    settings = replace(asked.recipe.settings, target=None, patience=None, finetune=0)
    recipe = replace(asked.recipe, algorithms=("fedavg",), settings=settings)
    recipe = recipe.with_digests(asked.task, recipe.build(asked.task))
    digests = {name: algorithm_digest(build_algorithm(name)) for name in asked.algorithms}
    return replace(recipe, algorithms=asked.algorithms, algorithm_digests=digests)
