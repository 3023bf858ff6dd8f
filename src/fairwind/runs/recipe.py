"""A recipe: everything that determines a comparison's numbers, as JSON."""

import dataclasses
import hashlib
import json
import math
import shlex
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from fairwind import algorithms, setups
from fairwind.aggregation import first_state
from fairwind.contract import AnyAlgorithm, Report
from fairwind.data.federation import Federation
from fairwind.data.values import ColumnNames
from fairwind.engine.checks import build
from fairwind.engine.executor import Run
from fairwind.engine.layout import ALL_SHARED, Division, Sharing
from fairwind.engine.losses.fitting import loss_name
from fairwind.engine.ranks import join
from fairwind.engine.settings import NUMBERS, Settings, names_of
from fairwind.engine.simulation import Simulation
from fairwind.engine.solver import Method, Solver, name_of, option_names
from fairwind.errors import InputError, unknown
from fairwind.runs.references import is_reference, load_algorithm, not_an_algorithm
from fairwind.runs.rehearsal import COMPUTED, DATA, STARTS, Rehearsal, rehearsed
from fairwind.runs.schema import SharingFacts
from fairwind.task import Task
from fairwind.testing import client_numbers, rehearse


class Named(NamedTuple):
    """What the name of a local solver stands for."""

    optimizer: str
    momentum: float = 0.0
    nesterov: bool = False


SOLVERS = {name: Named(name) for name in get_args(Method)} | {
    "momentum": Named("sgd", 0.9),
    "nesterov": Named("sgd", 0.9, nesterov=True),
}
NONE: Mapping[str, AnyAlgorithm] = {}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that determines a comparison's numbers."""

    setup: str
    """A setup's spec, or FILE.py:NAME; empty for a task made in Python."""
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: Settings
    data: str | None = None
    """Digest of the samples, unless a setup generates them: then the rehearsal tells."""
    model: str | None = None
    """Digest of the names, shapes and types of the model's parameters and buffers."""
    judged_by: tuple[str, ...] = ("cross_entropy", "accuracy")
    """Names of the loss and the scores."""
    algorithm_digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By label, a digest of each algorithm: of its results for a few made-up reports."""
    augment: str = ""
    """Names of the functions that change training inputs."""
    task_digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """In a study, by seed, digests of a user's task: see `task_digests`."""
    sharing: SharingFacts | None = None
    """What stays with each client, and what is done with batch norm; None if all is averaged."""
    rehearsal: Rehearsal | None = None
    """What the task computes for a few samples, if it is kept in a directory."""
    schedule: tuple[float, ...] = ()
    """The factor of the learning rate in each round, if a function gives it."""
    columns: ColumnNames = dataclasses.field(default_factory=dict)
    """Names of columns and classes, where they have names."""
    numbers: int = NUMBERS
    """Version of the engine's numbers; 0 if it was begun before there was one."""

    @property
    def in_python(self) -> bool:
        """Whether the task was created in Python, so that no command can find it."""
        return not (is_reference(self.setup) or self.setup.partition(":")[0] in setups.SETUPS)

    def check(self, own: Container[str] = ()) -> None:
        """Checks everything that can be checked before data is read; algorithms called `own` are given."""
        for kind, given in (("algorithm", self.algorithms), ("seed", self.seeds)):
            for value in given:
                if list(given).count(value) > 1:
                    raise InputError(f"{kind} {value!r} is given twice")
        for label in self.algorithms:
            if label not in own:
                build_algorithm(label)

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Every algorithm under every seed."""
        return [(label, seed) for label in self.algorithms for seed in self.seeds]

    def build(
        self,
        task: Task,
        own: Mapping[str, AnyAlgorithm] = NONE,
        among: Container[tuple[str, int]] | None = None,
    ) -> Simulation:
        """The simulation at round 0, with algorithms by their labels, or `own` ones; of some runs, or all."""
        self.check(own)
        local = self.settings.solver
        known = {f.name: getattr(task.solver, f.name) for f in dataclasses.fields(local)}
        lost = {name: known[name] for name in known if isinstance(getattr(local, name), FunctionName)}
        settings = dataclasses.replace(self.settings, solver=dataclasses.replace(local, **lost))
        built = {label: own.get(label) or build_algorithm(label) for label in self.algorithms}
        chosen = [run for run in self.runs if among is None or run in among]
        runs = [Run(label, built[label], seed) for label, seed in chosen]
        return Simulation(
            task.model,
            task.federation,
            runs,
            settings,
            loss=task.loss,
            score=task.score,
            augment=task.augment,
            sharing=task.sharing,
            ranks=join(),
            name=task.name,
        )

    def with_digests(self, task: Task, simulation: Simulation, *, rehearse: bool = True) -> "Recipe":
        """The same recipe with settings resolved, and all that tells whether a task computes the same.

        Names of clients and tasks decide nothing, and neither does where a task comes from. A directory
        needs the rehearsal.
        """
        settings, rehearsal = simulation.settings, None
        # The last bits of what a setup generates depend on the processor
        generated = self.setup.partition(":")[0] in setups.SETUPS and not task.federation.origin
        if rehearse:
            given = _starts(simulation) | ({DATA: _samples(task.federation)} if generated else {})
            rehearsal = rehearsed(task, settings.solver, simulation.federation).beginning_with(**given)
        return dataclasses.replace(
            self,
            settings=settings,
            data=None if generated else task.federation.digest(),
            model=model_digest(simulation),
            judged_by=(loss_name(task.loss), *(score.name for score in simulation.scores)),
            algorithm_digests={run.label: algorithm_digest(run.algorithm) for run in simulation.runs},
            augment=simulation.plain.augmentation.name,
            sharing=sharing_facts(task.sharing, simulation.plain.division),
            rehearsal=rehearsal,
            schedule=schedule_of(settings.solver, settings.rounds),
            columns=simulation.federation.meanings,
        )

    def grows(self, other: "Recipe") -> bool:
        """Whether this one, which has all of another recipe, has more, or another order."""
        before, now = ((each.algorithms, each.seeds, each.settings.rounds) for each in (self, other))
        return before != now

    def lacks(self, other: "Recipe", trained: int) -> str:
        """What this one has not of another's algorithms and seeds, and of the rounds that are trained."""
        seeds = [str(seed) for seed in other.seeds if seed not in self.seeds]
        labels = [label for label in other.algorithms if label not in self.algorithms]
        rounds = self.settings.rounds
        found = [f"{trained} rounds, not {rounds}"] if trained > rounds else []
        for kind, missing in (("seed", seeds), ("algorithm", labels)):
            found += [f"{kind}{'s' * (len(missing) > 1)} {', '.join(missing)}"] if missing else []
        return "; ".join(found)

    def part(self, other: "Recipe") -> "Recipe":
        """What this recipe has of another's rounds, seeds and algorithms."""
        digests = {label: each for label, each in self.algorithm_digests.items() if label in other.algorithms}
        return dataclasses.replace(
            self,
            algorithms=other.algorithms,
            seeds=other.seeds,
            settings=dataclasses.replace(self.settings, rounds=other.settings.rounds),
            algorithm_digests=digests,
        )

    def differs(self, other: "Recipe") -> str:
        """The first field that differs in another recipe, a setting with both values; empty if none does.

        Numbers are compared up to rounding, as the other may be of another machine.
        """
        words = {
            "setup": "task",
            "judged_by": "loss or score",
            "augment": "augmentation",
            "task_digests": "task",
            "sharing": "personal part or batch_norm",
            "numbers": "version of Fairwind's numbers",
        }
        # What is shared decides the model's digest, too
        for field in sorted(dataclasses.fields(self), key=lambda field: field.name != "sharing"):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name in _DIFFERENCES:
                if found := _DIFFERENCES[field.name](mine, theirs):
                    return found
            elif mine != theirs:
                return words.get(field.name, field.name)
        return ""

    def command(self) -> str:
        """The command to repeat it, with options where it differs from the task's own settings."""
        if self.in_python:
            return ""
        words = ["fairwind", "compare", self.setup, "--algorithms", *self.algorithms]
        words += ["--seeds", *map(str, self.seeds)]
        for name, value in self._options().items():
            values = value if isinstance(value, list | tuple) else (value,)
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
        return shlex.join(words)

    def _options(self) -> dict[str, object]:
        """The options that turn the task's own settings into these; always rounds, if its file may change."""
        in_a_file, local = is_reference(self.setup), self.settings.solver
        own = Settings() if in_a_file else settings_of(self.setup)
        options: dict[str, object] = {"rounds": self.settings.rounds} if in_a_file else {}
        options |= _changed(self.settings, own, names_of("numbers", "rounding", "history"))
        options |= _changed(local, own.solver, option_names())
        options.pop("solver", None)
        kind = local.name
        if kind == "sgd" and local.momentum:
            kind = "nesterov" if local.nesterov else "momentum"
        if kind in SOLVERS and _changed(local, own.solver, Named._fields):
            options["solver"] = kind
            if local.momentum == SOLVERS[kind].momentum:
                options.pop("momentum", None)
        return options

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = to_jsonable(dataclasses.asdict(self))
        for name in ("task_digests", "sharing", "rehearsal", "schedule", "columns"):
            if not content[name]:
                del content[name]
        return content

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Recipe":
        settings = dict(content["settings"])
        solver = dict(settings["solver"])
        for name, value in solver.items():
            if isinstance(value, list):
                solver[name] = tuple(value)
            elif isinstance(value, str) and ":" in value:
                solver[name] = FunctionName(value)
        settings["solver"] = Solver(**solver)
        return cls(
            content["setup"],
            tuple(content["algorithms"]),
            tuple(content["seeds"]),
            Settings(**settings),
            content.get("data"),
            content.get("model"),
            tuple(content.get("judged_by", cls.judged_by)),
            content.get("algorithm_digests", {}),
            content.get("augment", ""),
            content.get("task_digests", {}),
            content.get("sharing"),
            Rehearsal(**content["rehearsal"]) if "rehearsal" in content else None,
            tuple(content.get("schedule", ())),
            content.get("columns", {}),
            content.get("numbers", 0),
        )

    @property
    def digest(self) -> str:
        """Identifies this recipe; checkpoints with another digest are refused.

        Settings at their defaults are left out, so that a new setting changes no digest.
        """
        content, plain = self.to_json(), to_jsonable(dataclasses.asdict(Settings()))
        settings, solver = content["settings"], content["settings"]["solver"]
        solver = {name: value for name, value in solver.items() if value != plain["solver"][name]}
        settings = {name: value for name, value in settings.items() if value != plain[name]}
        text = json.dumps(content | {"settings": settings | {"solver": solver}}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class FunctionName:
    """Stands for a function of which a stored recipe only has the name."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *_: object) -> Any:
        raise InputError(f"{self.name} was made in Python, and is known here by its name only")


def to_jsonable(value: Any) -> Any:
    """Settings as JSON, with functions and classes by name."""
    if isinstance(value, dict):
        return {name: to_jsonable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_jsonable(part) for part in value)
    if isinstance(value, FunctionName):
        return value.name
    return name_of(value) if callable(value) else value


def _numbers(settings: Settings) -> dict[str, object]:
    """The settings that decide the numbers of a run, those of the solver by name."""
    content: dict[str, Any] = to_jsonable(dataclasses.asdict(settings))
    solver: dict[str, Any] = content["solver"]
    return {name: content[name] for name in names_of("numbers") if name != "solver"} | solver


def _changed_setting(mine: Settings, theirs: Settings) -> str:
    before, now = _numbers(mine), _numbers(theirs)
    changed = next((name for name in before if before[name] != now[name]), None)
    return f"setting {changed!r}, which was {before[changed]} and is {now[changed]}" if changed else ""


def _changed_algorithm(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    changed = next((label for label in {**mine, **theirs} if mine.get(label) != theirs.get(label)), None)
    return f"algorithm {changed!r}" if changed is not None else ""


def _changed_task(mine: Rehearsal | None, theirs: Rehearsal | None) -> str:
    if mine is None or theirs is None:
        return "" if mine is theirs else "task"
    return mine.differs(theirs)


def _changed_schedule(mine: Sequence[float], theirs: Sequence[float]) -> str:
    for t, (was, now) in enumerate(zip(mine, theirs, strict=False)):  # of the rounds that both have
        if not math.isclose(was, now, rel_tol=COMPUTED):
            return f"lr_schedule, which gave {was:g} for round {t} and gives {now:g}"
    return ""


def _changed_names(mine: ColumnNames, theirs: ColumnNames) -> str:
    for place in mine.keys() & theirs.keys():
        was, now = (", ".join(each[place]) for each in (mine, theirs))
        if was != now:
            return f"names of {place}, which were {was} and are {now}"
    return ""


_DIFFERENCES: Mapping[str, Callable[[Any, Any], str]] = {
    "settings": _changed_setting,
    "algorithm_digests": _changed_algorithm,
    "rehearsal": _changed_task,
    "schedule": _changed_schedule,
    "columns": _changed_names,
}


def on_any_machine(settings: Settings) -> Settings:
    """Settings with the defaults of those that may differ between machines."""
    plain = Settings()
    return dataclasses.replace(settings, **{name: getattr(plain, name) for name in names_of("machine")})


def on_the_same_machine(settings: Settings, before: Settings) -> Settings:
    """Settings to go on with: what is not given is as it was before."""
    plain, named = Settings(), names_of("machine", "rounding")
    unset = [name for name in named if getattr(settings, name) == getattr(plain, name)]
    return dataclasses.replace(
        settings, **{name: getattr(before, name) for name in (*unset, *names_of("history"))}
    )


def _changed(record: object, other: object, names: Iterable[str]) -> dict[str, object]:
    """What of a record is given, and not the same in another."""
    both = {name: (getattr(record, name), getattr(other, name)) for name in names}
    return {name: mine for name, (mine, theirs) in both.items() if mine is not None and mine != theirs}


def settings_of(setup: str, **changes: Any) -> Settings:
    """A setup's own settings with some of them changed, as `changed_settings` does."""
    known = setups.find(setup)
    return changed_settings(known.solver, known.rounds, **changes)


def changed_settings(own: Solver, own_rounds: int, **changes: Any) -> Settings:
    """Settings with a task's solver and rounds, and changes: fields of Settings, and of the solver by name.

    The change `solver` is a name in SOLVERS.
    """
    solver_fields = [field.name for field in dataclasses.fields(Solver)]
    names = [field.name for field in dataclasses.fields(Settings)] + solver_fields
    for name in changes:
        if name not in names:
            raise unknown("setting", name, names)
    named = changes.pop("solver", None)
    if named is not None and named not in SOLVERS:
        raise unknown("solver", str(named), SOLVERS)
    local = {name: changes.pop(name) for name in solver_fields if name in changes}
    for one, other in (("epochs", "steps"), ("steps", "epochs")):
        if one in local:  # replaces the task's own
            local.setdefault(other, None)
    solver = dataclasses.replace(own, **{**(SOLVERS[named]._asdict() if named else {}), **local})
    return Settings(**{"rounds": own_rounds, **changes, "solver": solver})


def build_algorithm(label: str) -> AnyAlgorithm:
    """The algorithm of a spec such as adafedadam:alpha=2, or FILE.py:NAME."""
    if label.partition(":")[0] in setups.SETUPS:
        raise not_an_algorithm(label, "setup")
    return load_algorithm(label) if is_reference(label) else algorithms.build(label)


def model_digest(simulation: Simulation) -> str:
    """SHA-256 of the names, shapes and types of a model's tensors."""
    described = [f"{n} {tuple(v.shape)} {v.dtype}" for n, v in simulation.plain.module.state_dict().items()]
    return hashlib.sha256(repr([simulation.layout.all_names, described]).encode()).hexdigest()


def _samples(federation: Federation) -> list[Any]:
    """All tensors of a federation, and of its new clients."""
    new = federation.new_clients
    counts = federation.start, federation.train, federation.validation, federation.test
    return [federation.inputs, federation.targets, counts, [] if new is None else _samples(new)]


def _starts(simulation: Simulation) -> dict[str, Any]:
    """The numbers with which a model begins under each seed: those that train, and others."""
    plain = simulation.plain
    trained = {name for names in plain.whole.all_names for name in names}
    others = {n: v for n, v in plain.module.state_dict().items() if not n.endswith("dropout_key")}
    fixed = [value for name, value in others.items() if name not in trained]
    rows = {run.seed: r for r, run in enumerate(simulation.runs)}
    own = simulation.own.start if simulation.own.width else simulation.x[:, :0]
    return {f"{STARTS} {seed}": [simulation.x[r], own[r], *fixed] for seed, r in rows.items()}


def schedule_of(solver: Solver, rounds: int) -> tuple[float, ...]:
    """What a function of the user's gives as the rate's factor of each round; nothing without one."""
    schedule = solver.lr_schedule
    return () if schedule is None else tuple(float(schedule(t)) for t in range(rounds))


def sharing_facts(sharing: Sharing, division: Division) -> SharingFacts | None:
    """What a recipe and results say of it; nothing if algorithms average the whole model."""
    if sharing == ALL_SHARED:
        return None
    return {"batch_norm": sharing.batch_norm, "personal": list(division.kept_names)}


def _bytes(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def task_digests(task: Task, seeds: Iterable[int], rounds: int) -> dict[str, str]:
    """By seed, SHA-256 of a user's task: data, initial model, and what is computed for a few samples."""
    parts = [task.federation.digest(), loss_name(task.loss), rehearsed(task, task.solver).text]
    parts += [f"{factor:.6g}" for factor in schedule_of(task.solver, rounds)]
    if facts := sharing_facts(task.sharing, Division.of(build(task.model, 0), task.sharing)):
        parts.append(json.dumps(facts))
    found = {}
    for seed in seeds:
        seen, model = hashlib.sha256("\n".join(parts).encode()), build(task.model, seed)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            seen.update(f"{name}{tuple(value.shape)}{value.dtype}{name in trained}".encode())
            seen.update(_bytes(value))
        found[str(seed)] = seen.hexdigest()
    return found


def algorithm_digest(algorithm: AnyAlgorithm) -> str:
    """SHA-256 of an algorithm's results in some rounds of made-up reports, to six digits.

    They are far apart, so that clients conflict, and what is done beyond a threshold is seen.
    """
    draw = torch.Generator().manual_seed(0)

    def reports(clients: int, decades: float, scale: float = 1.0) -> Report:
        spread = torch.rand(len(Report._fields), clients, generator=draw, dtype=torch.float64) - 0.5
        size, steps = (torch.randint(1, most, (clients,), generator=draw).double() for most in (500, 50))
        return Report(*(scale * 10 ** (2 * decades * spread)))._replace(size=size, steps=steps)

    x, shared = torch.randn(2, 30, generator=draw, dtype=torch.float64)
    state, fields = first_state(algorithm, x, 20), algorithm._asdict()
    averaged = fields.get("averaged_model")
    told = {n: value for n, value in fields.items() if n != "name" and isinstance(value, str | float | int)}
    seen = hashlib.sha256(f"{type(algorithm).__name__} {json.dumps(told)}".encode())
    values = client_numbers(algorithm, state, reports(10000, 3))
    values += client_numbers(algorithm, state, Report(*torch.zeros(len(Report._fields), 1)))
    for scale, absent in ((1, 0), (1, 16), (0.1, 2), (1, 17), (10, 2), (0.01, 10)) * 3:  # a warm-up ends
        report, delta = reports(20, 1, scale), torch.randn(20, 31, generator=draw, dtype=torch.float64)
        report.size[:absent] = 0
        x, state, _ = rehearse(
            algorithm, x, state, report, scale * (delta[:, :30] + 2 * delta[:, 30:] * shared)
        )
        values += [*client_numbers(algorithm, state, report), x, *state]
        values += () if averaged is None else (averaged(state),)
    for value in values:
        seen.update(_bytes(_rounded(value.double())))
    return seen.hexdigest()


def _rounded(value: Tensor) -> Tensor:
    """To six digits; what is zero but for rounding is zero."""
    value = value.nan_to_num(nan=1e300)
    least = 1e-12 * value.abs().amax().clamp(min=1) if value.numel() else 0
    mantissa, exponent = torch.frexp(torch.where(value.abs() > least, value, 0))
    return torch.ldexp((mantissa * 2**20).round() / 2**20, exponent) + 0.0
