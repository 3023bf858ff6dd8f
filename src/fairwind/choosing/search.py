"""The search: Optuna proposes settings in batches; a batch is a stack, which the worse ones leave early.

The defaults are trained to the end, so that the choice is never worse on the validation samples.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fairwind import algorithms
from fairwind.algorithms.ranges import ranges
from fairwind.engine.checkpoint import load_checkpoint, save_checkpoint
from fairwind.engine.simulation import Simulation
from fairwind.errors import InputError, first_line, needs_extra, positive
from fairwind.runs.cost import Cost, round_cost
from fairwind.runs.files import read_sealed, sealed, write_json
from fairwind.runs.recipe import Recipe
from fairwind.runs.spec import parameters, with_parameters
from fairwind.task import Task

KEPT_SHARE = 1 / 3  # of the settings stays at each rung, besides the defaults
FIRST_ROUNDS = 10  # at least, before a setting may leave
BATCH = 32  # settings that are proposed together; the second batch learns from the first
CHECKPOINT_SECONDS = 30
RUNGS = "rungs.json"  # of a batch: which settings are still in training
DIVERGED, UNFAIR, FAIR = range(3)  # what a setting is, before its value counts


class Aim(NamedTuple):
    """What is searched for: the best average, the best worst 30 %, or the best average that is fair."""

    metric: str = "worst30"  # "average" or "worst30"
    within: float | None = None  # the worst 30 % may be so many points from the average

    @classmethod
    def read(cls, text: str) -> "Aim":
        """From "average", "worst30", or "within=5": the best average, its worst 30 % at most 5 points off."""
        if text in ("average", "worst30"):
            return cls(text)
        name, _, points = text.partition("=")
        try:
            within = float(points)
        except ValueError:
            within = math.nan
        if name != "within" or math.isnan(within):
            raise InputError(f"aim {text!r} is none of average, worst30 and within=POINTS, as in within=5")
        positive(within=within)
        return cls("average", within)

    def judge(self, average: float | None, worst30: float | None, sign: int) -> tuple[int, float, float]:
        """Larger is better. A model that is not fair enough is below all that are, whatever its value.

        The last number decides among equal values: a worst 30 % of 0 is common after few rounds.
        """
        if average is None or worst30 is None:
            return DIVERGED, 0.0, 0.0
        if self.within is not None and abs(average - worst30) > self.within:
            return UNFAIR, -abs(average - worst30), sign * average
        first, second = (average, worst30) if self.metric == "average" else (worst30, average)
        return FAIR, sign * first, sign * second

    def __str__(self) -> str:
        if self.within is not None:
            return f"the best average whose worst 30 % is within {self.within:g} points"
        return f"the best {'average' if self.metric == 'average' else 'worst 30 %'}"


class Trial(NamedTuple):
    """A setting, and how it did on the validation samples."""

    spec: str
    lr: float  #: The local learning rate.
    rounds: int  #: It was trained for so many; fewer than all if it fell behind.
    average: float | None  #: After these rounds.
    worst30: float | None
    kind: int  #: 2 is as fair as asked, 1 is not, 0 diverged.
    value: float  #: By the aim; larger is better, among those of a kind.
    second: float  #: Of average and worst 30 % the other; larger is better, among equal values.

    @property
    def order(self) -> tuple[int, float, float]:
        """Larger is better."""
        return self.kind, self.value, self.second

    @property
    def told(self) -> float:
        """The same as one number, for a sampler that looks at the order alone."""
        value, second = (number / (1 + abs(number)) for number in (self.value, self.second))
        return 3 * self.kind + value + 1e-9 * second


class Search(NamedTuple):
    """What is searched, and how far."""

    task: Task  # its test part is the validation part of the user's
    algorithms: tuple[str, ...]
    aim: Aim
    trials: int
    rounds: int
    seed: int
    rates: tuple[float, ...]  # local learning rates
    recipe: Recipe  # of which algorithms are replaced
    folder: Path | None
    owner: str = ""  # a digest of all that decides what is found: files of another search are not read

    @property
    def rungs(self) -> list[int]:
        """The rounds after which settings leave, the last being all."""
        found = [self.rounds]
        while found[0] * KEPT_SHARE >= FIRST_ROUNDS:
            found.insert(0, math.ceil(found[0] * KEPT_SHARE))
        return found


def space(spec: str) -> dict[str, Any]:
    """Where to search for the parameters of an algorithm that its spec does not give."""
    name, _, rest = spec.partition(":")
    given = {item.partition("=")[0] for item in rest.split(",")}
    return {key: where for key, where in ranges(algorithms.REGISTRY[name]).items() if key not in given}


def search(asked: Search, say: Callable[[str], None]) -> tuple[list[Trial], dict[str, float]]:
    """All settings that were tried, and what they cost together. Killed and begun anew, it goes on."""
    study = _study(asked)
    done: list[Trial] = []
    cost: dict[str, float] = {}
    for number, first in enumerate(range(0, asked.trials, BATCH)):
        wanted = min(BATCH, asked.trials - first)
        folder = None if asked.folder is None else asked.folder / f"batch-{number + 1}"
        settings = _asked(study, asked, first, wanted)
        finished = None if folder is None else folder.with_suffix(".json")
        kept = None if finished is None else _finished(finished, asked, settings, say)
        if kept is not None:
            trials, spent = kept
        else:
            say(f"{wanted} settings, {asked.rungs[0]} to {asked.rounds} rounds each")
            began = time.perf_counter()
            trials, spent = _raced(asked, settings, len(asked.algorithms) - first, folder, say)
            spent["seconds"] = time.perf_counter() - began
            if finished is not None:
                write_json(finished, sealed({"owner": asked.owner, "trials": trials, "cost": spent}))
        _tell(study, first, trials, asked)
        done += trials
        cost = {name: cost.get(name, 0.0) + value for name, value in spent.items()}
    return done, cost


def _finished(
    file: Path, asked: Search, settings: list[tuple[str, float]], say: Callable[[str], None]
) -> tuple[list[Trial], dict[str, float]] | None:
    """A batch that was trained before."""
    with _trained_again(say):
        content = _read(file, asked)
        trials = [Trial(*each) for each in content["trials"]]
        if [(trial.spec, trial.lr) for trial in trials] != settings:
            raise ValueError(f"{file.name} is of other settings")
        return trials, dict(content["cost"])
    return None


def _read(file: Path, asked: Search) -> dict[str, Any]:
    """What a file of this search holds."""
    content = read_sealed(file)
    if content["owner"] != asked.owner:
        raise ValueError(f"{file.name} is of another search")
    return content


@contextmanager
def _trained_again(say: Callable[[str], None]) -> Iterator[None]:
    """Passes over what cannot be read of a batch: it is trained again."""
    try:
        yield
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError) as error:
        say(f"{first_line(error)}: its batch is trained again")


# ---- what Optuna does: it proposes settings ----


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise needs_extra("a search", error, "tune") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def _quietly() -> Iterator[None]:
    """Without Optuna's warnings that some of its options may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _study(asked: Search) -> Any:
    """In memory: what is proposed follows from the seed and from the batches before."""
    with _quietly():
        study = _optuna().create_study(direction="maximize")
        for spec in asked.algorithms:  # the defaults are tried first
            known = parameters(algorithms.REGISTRY[spec.partition(":")[0]])
            given = {f"{spec} {key}": known[key][1] for key in space(spec)}
            study.enqueue_trial({"algorithm": spec, "local rate": asked.rates[0], **given})
    return study


def _asked(study: Any, asked: Search, first: int, wanted: int) -> list[tuple[str, float]]:
    """Spec and local rate of each setting of a batch."""
    optuna, settings = _optuna(), []
    with _quietly():
        for number in range(first, first + wanted):
            # A sampler of its own for each, so that a search that was killed proposes the same.
            study.sampler = optuna.samplers.TPESampler(
                seed=1000 * asked.seed + number,
                n_startup_trials=BATCH,
                multivariate=True,
                group=True,
                constant_liar=True,
            )
            trial = study.ask()
            spec = trial.suggest_categorical("algorithm", asked.algorithms)
            trial.suggest_categorical("local rate", asked.rates)
            for key, where in space(spec).items():
                trial.suggest_float(f"{spec} {key}", where.low, where.high, log=where.log)
            settings.append(_setting(trial.params))
    return settings


def _setting(given: dict[str, Any]) -> tuple[str, float]:
    """A spec with parameters of three digits, and a local rate."""
    spec = given["algorithm"]
    own = {name.rpartition(" ")[2]: value for name, value in given.items() if name.startswith(f"{spec} ")}
    return with_parameters(spec, **{k: float(f"{v:.3g}") for k, v in own.items()}), given["local rate"]


def _tell(study: Any, first: int, trials: Sequence[Trial], asked: Search) -> None:
    optuna = _optuna()
    with _quietly():
        for number, trial in enumerate(trials, first):
            if trial.rounds < asked.rounds:
                proposed = study.get_trials(deepcopy=False)[number]
                optuna.trial.Trial(study, proposed._trial_id).report(trial.told, step=trial.rounds)
                study.tell(number, state=optuna.trial.TrialState.PRUNED)
            else:
                study.tell(number, trial.told)


# ---- what the engine does: it trains a batch as one stack for each local rate ----


class Stack(NamedTuple):
    """Settings with the same local rate, in training."""

    lr: float
    specs: tuple[str, ...]
    simulation: Simulation

    @property
    def name(self) -> str:
        """Whose checkpoints are whose: those of more settings must not be read as of fewer."""
        return ", ".join(self.specs)


def _raced(
    asked: Search,
    settings: list[tuple[str, float]],
    defaults: int,
    folder: Path | None,
    say: Callable[[str], None],
) -> tuple[list[Trial], dict[str, float]]:
    """Trains a batch, from rung to rung; two thirds of the settings leave at each.

    The batch's first `defaults` settings stay, so that the choice is among them.
    """
    begun, stacks, results = _restored(asked, settings, folder, say)
    stay = set(settings[: max(0, defaults)])
    for place, rung in enumerate(asked.rungs[begun:], begun):
        for stack in stacks:
            _train(asked, stack, rung, folder)
            results |= {(trial.spec, trial.lr): trial for trial in _trials(asked, stack)}
        running = [(spec, stack.lr) for stack in stacks for spec in stack.specs]
        running.sort(key=lambda setting: results[setting].order, reverse=True)
        best = results[running[0]]
        say(f"round {rung}: {len(running)} settings, the best is {best.spec} (local rate {best.lr:g})")
        if rung < asked.rounds:
            others = [setting for setting in running if setting not in stay]
            left = stay | set(others[: math.ceil(len(others) * KEPT_SHARE)])
            stacks = [narrowed for stack in stacks if (narrowed := _narrowed(asked, stack, left)) is not None]
            _save(asked, folder, place + 1, stacks, results)
    cost = dict.fromkeys(("rounds", *Cost._fields), 0.0)
    simulation = stacks[0].simulation
    train, size = simulation.federation.train, simulation.x.shape[1]
    for trial in results.values():
        one = round_cost(algorithms.build(trial.spec), train, simulation.settings, size)
        cost["rounds"] += trial.rounds
        for name, value in one._asdict().items():
            cost[name] += trial.rounds * value
    return [results[setting] for setting in settings], cost


def _train(asked: Search, stack: Stack, rounds: int, folder: Path | None) -> None:
    """Trains a stack up to a round, with checkpoints once its batch has some."""
    saved = time.monotonic()
    while stack.simulation.round < rounds:
        stack.simulation.step()
        if folder is not None and (folder / RUNGS).exists() and time.monotonic() - saved > CHECKPOINT_SECONDS:
            save_checkpoint(folder / repr(stack.lr), stack.simulation.checkpoint(), stack.name)
            saved = time.monotonic()


def _stacks(asked: Search, settings: list[tuple[str, float]]) -> list[Stack]:
    return [
        _stack(asked, lr, tuple(dict.fromkeys(spec for spec, own in settings if own == lr)))
        for lr in dict.fromkeys(lr for _, lr in settings)
    ]


def _stack(asked: Search, lr: float, specs: tuple[str, ...]) -> Stack:
    given = asked.recipe.settings
    solver = replace(given.solver, lr=lr)
    settings = replace(given, solver=solver, eval_every=asked.rounds + 1, target=None, patience=None)
    recipe = replace(asked.recipe, algorithms=specs, settings=settings)
    return Stack(lr, specs, recipe.build(asked.task))


def _trials(asked: Search, stack: Stack) -> list[Trial]:
    """How a stack's settings are doing now."""
    simulation = stack.simulation
    if simulation.history[-1]["round"] != simulation.round:
        simulation.evaluate()
    sign = simulation.scores[0].sign
    newest = simulation.history[-len(simulation.views) :]
    # Of a run with personal models these come last: what clients use is what is judged.
    lines = {
        view.run: line
        for line, view in zip(newest, simulation.views, strict=True)
        if view.model != "averaged"
    }
    return [
        Trial(
            spec,
            stack.lr,
            simulation.round,
            line["avg"],
            line["worst30"],
            *asked.aim.judge(line["avg"], line["worst30"], sign),
        )
        for spec, line in zip(stack.specs, lines.values(), strict=True)
    ]


def _narrowed(asked: Search, stack: Stack, left: set[tuple[str, float]]) -> Stack | None:
    """The stack without the settings that leave it; those that stay go on where they are."""
    places = [i for i, spec in enumerate(stack.specs) if (spec, stack.lr) in left]
    if len(places) == len(stack.specs) or not places:
        return stack if places else None
    smaller = _stack(asked, stack.lr, tuple(stack.specs[i] for i in places))
    smaller.simulation.restore(stack.simulation.checkpoint_of(places))
    return smaller


def _save(
    asked: Search,
    folder: Path | None,
    rungs: int,
    stacks: Sequence[Stack],
    results: dict[tuple[str, float], Trial],
) -> None:
    """Keeps the settings that stay, after so many rungs."""
    if folder is None:
        return
    folder.mkdir(exist_ok=True)
    for stack in stacks:
        save_checkpoint(folder / repr(stack.lr), stack.simulation.checkpoint(), stack.name)
    content = {
        "owner": asked.owner,
        "rungs": rungs,
        "round": stacks[0].simulation.round,
        "stacks": [[stack.lr, stack.specs] for stack in stacks],
        "results": list(results.values()),
    }
    write_json(folder / RUNGS, sealed(content))  # last: it makes the checkpoints valid


def _restored(
    asked: Search, settings: list[tuple[str, float]], folder: Path | None, say: Callable[[str], None]
) -> tuple[int, list[Stack], dict[tuple[str, float], Trial]]:
    """How many rungs are done, the stacks after them, and what was found; from the start if nothing is."""
    if folder is not None:
        with _trained_again(say):
            return _read_rungs(asked, settings, folder)
    return 0, _stacks(asked, settings), {}


def _read_rungs(
    asked: Search, settings: list[tuple[str, float]], folder: Path
) -> tuple[int, list[Stack], dict[tuple[str, float], Trial]]:
    content = _read(folder / RUNGS, asked)
    kept = []
    for lr, specs in content["stacks"]:
        stack = _stack(asked, lr, tuple(specs))
        checkpoint, refused = load_checkpoint(folder / repr(stack.lr), stack.name)
        if checkpoint is None or checkpoint.round < content["round"]:
            raise ValueError("; ".join(refused) or f"a checkpoint of {folder.name} is missing")
        stack.simulation.restore(checkpoint)
        kept.append(stack)
    results = [Trial(*each) for each in content["results"]]
    if {(trial.spec, trial.lr) for trial in results} != set(settings):
        raise ValueError(f"{RUNGS} is of other settings")
    return content["rungs"], kept, {(trial.spec, trial.lr): trial for trial in results}
