"""A study: panels of runs over setups, algorithms, settings and seeds, put together from finished runs.

A run is known by what decides its numbers (`RunKey`). What is missing is trained, runs of the same data and
settings stacked. What was trained before is found by its key, whichever study, machine or day it comes from.
"""

import dataclasses
import gzip
import itertools
import json
import shutil
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from fairwind import algorithms, setups
from fairwind.directory import RunDirectory, check_free, held
from fairwind.engine.settings import Settings
from fairwind.engine.simulation import Simulation
from fairwind.engine.solver import Solver
from fairwind.errors import InputError, first_line, unknown, whole
from fairwind.files import CLIENTS, HISTORY, RECIPE, RESULTS, write_atomic
from fairwind.recipe import Recipe, settings_of
from fairwind.setups import Where
from fairwind.spec import arguments, expand, parameters

Floats = NDArray[np.float32]

RUNS = "runs"  # the folder of a study's output that holds the runs
EXACT = ("float32", "tf32", "bf16")  # the most exact first
CHARTS = ("curves", "distribution", "targets", "pareto", "rsd", "tuned", "labels")
ALIKE = ("device", "compile", "memory", "engine", "workers", "eval_every")  # settings that decide no number


@dataclass(frozen=True)
class Panel:
    """Algorithms compared on one setup under the same settings: one table, one set of curves."""

    title: str
    setup: str
    algorithms: tuple[str, ...] = algorithms.PAPER
    seeds: tuple[int, ...] = (0, 1, 2)
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings other than the setup's own, as `settings_of` takes them."""
    published: str = ""
    """Where the paper's numbers for it are, in paper/published.json."""

    def check(self) -> None:
        """Refuses what can be refused before anything is read or trained."""
        self.settings()
        setups.arguments_of(self.setup)
        Recipe(self.setup, self.algorithms, self.seeds, self.settings()).check()

    def settings(self, **options: Any) -> Settings:
        """The settings of its runs; `options` are those that do not decide numbers, such as the device."""
        return settings_of(self.setup, **{**options, **self.changes})

    def keys(self) -> dict[str, list["RunKey"]]:
        """The runs it wants: for each algorithm, one for each seed."""
        settings = dataclasses.asdict(self.settings())
        return {
            spec: [RunKey.of(self.setup, spec, seed, settings) for seed in self.seeds]
            for spec in self.algorithms
        }


@dataclass(frozen=True)
class Study:
    """A question, the panels that answer it, and which charts its page shows."""

    name: str
    title: str
    question: str
    panels: tuple[Panel, ...]
    charts: tuple[str, ...] = ("curves", "distribution")


class RunKey(NamedTuple):
    """What decides a run's numbers up to rounding; every parameter is spelt out, given or not."""

    setup: str
    algorithm: str
    seed: int
    settings: str

    @classmethod
    def of(cls, setup: str, algorithm: str, seed: int, settings: Mapping[str, Any]) -> "RunKey":
        name, known = algorithm.partition(":")[0], {n: parameters(b) for n, b in algorithms.REGISTRY.items()}
        given = (name, arguments("algorithm", algorithm, known))
        data = (setup.partition(":")[0], setups.arguments_of(setup))
        decide = {k: settings[k] for k in ("rounds", "solver", "participation", "probe_samples")}
        for name in ("clients_per_round", "target"):  # older files do not know them
            if settings.get(name) is not None:
                decide[name] = settings[name]
        decide["solver"] = dataclasses.asdict(Solver()) | decide["solver"]  # older files say less
        texts = [json.dumps(value, sort_keys=True) for value in (data, given, decide)]
        return cls(texts[0], texts[1], seed, texts[2])


class Finished(NamedTuple):
    """A run that was trained to its end."""

    key: RunKey
    row: dict[str, Any]  # of results.json
    history: list[dict[str, Any]]
    accuracy: Floats | None  # (K,) None where no per-client numbers were kept
    clients: dict[str, Any]  # train_size, test_size (K,), names
    results: dict[str, Any]  # of the comparison it was part of: config, environment, federation, timing
    folder: Path

    @property
    def digest(self) -> str | None:
        """Of the data, where that was prepared from files."""
        found: str | None = self.results["federation"].get("digest")
        return found

    @property
    def precision(self) -> str:
        return str(self.results["config"].get("precision", "float32"))


def read_runs(*roots: Path) -> tuple[list[Finished], list[str]]:
    """All finished runs below the folders, and what could not be read."""
    found: list[Finished] = []
    refused = []
    for file in sorted(file for root in roots for file in root.rglob(RESULTS)):
        try:
            found += _read(file.parent)
        except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
            refused.append(f"{file} is passed over: {first_line(error)}")
    return found, refused


def _read(folder: Path) -> Iterator[Finished]:
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    config, rows = results["config"], results["runs"]
    lines = [json.loads(line) for line in _history(folder).splitlines() if line.strip()]
    accuracy, clients = _clients(folder)
    given = list(itertools.product(config["algorithms"], config["seeds"]))
    for r, ((spec, seed), row) in enumerate(zip(given, rows, strict=True)):
        # By place: older files drop an algorithm's parameters from its name.
        named = {"algorithm": spec, "seed": seed}
        yield Finished(
            key=RunKey.of(results["setup"], spec, seed, config),
            row=row | named,
            history=[line | named for line in lines[r :: len(rows)]],
            accuracy=None if accuracy is None else accuracy[r],
            clients=clients,
            results=results,
            folder=folder,
        )


def _history(folder: Path) -> str:
    """The text of history.jsonl, compressed or not; empty where it was not kept."""
    packed = folder / f"{HISTORY}.gz"
    if packed.exists():
        return gzip.decompress(packed.read_bytes()).decode()
    return (folder / HISTORY).read_text(encoding="utf-8") if (folder / HISTORY).exists() else ""


def _clients(folder: Path) -> tuple[Floats | None, dict[str, Any]]:
    if not (folder / CLIENTS).exists():
        return None, {}
    with safe_open(folder / CLIENTS, framework="numpy") as file:
        main = "score" if "score" in file.keys() else "accuracy"  # older files' name  # noqa: SIM118
        tensors = {key: file.get_tensor(key) for key in (main, "train_size", "test_size")}
        names = (file.metadata() or {}).get("names")
    accuracy = tensors.pop(main)
    tensors["names"] = json.loads(names) if names else [str(k) for k in range(accuracy.shape[1])]
    return accuracy, tensors


def choose(panel: Panel, runs: Iterable[Finished], digest: str | None = None) -> dict[str, list[Finished]]:
    """The panel's finished runs, for each algorithm in the order of seeds.

    Runs on other data than `digest` are left out; where it is not given, on other data than most. Of several
    with the same key the most exact is taken, then the newest; a panel that names a precision takes that.
    """
    wanted = {key for keys in panel.keys().values() for key in keys}
    precision = panel.changes.get("precision", "auto")
    found = [run for run in runs if run.key in wanted and precision in ("auto", run.precision)]
    if digest is None and found:
        digests = [run.digest for run in found]
        digest = max(dict.fromkeys(digests), key=digests.count)
    found = [run for run in found if run.digest == digest]
    found.sort(key=lambda run: str(run.results["environment"].get("date", "")), reverse=True)
    found.sort(key=lambda run: (run.accuracy is None, EXACT.index(run.precision)))
    first: dict[RunKey, Finished] = {}
    for run in found:
        first.setdefault(run.key, run)
    return {spec: [first[key] for key in keys if key in first] for spec, keys in panel.keys().items()}


def narrowed(panels: Iterable[Panel], names: Iterable[str], seeds: tuple[int, ...]) -> list[Panel]:
    """The panels of some setups only, with some seeds only; none named is all."""
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
    """What the panels want and the runs do not hold, stacked where setup, settings and seeds are the same.

    `digest` names the data of a setup that counts, where several are known; `options` are settings.
    """
    groups: dict[tuple[str, str, tuple[int, ...]], tuple[Settings, list[str]]] = {}
    planned: set[tuple[RunKey, object]] = set()
    for panel in panels:
        settings, keys = panel.settings(**options), panel.keys()
        for spec, there in choose(panel, runs, digest(panel.setup)).items():
            done = {run.key for run in there}
            left = [key for key in keys[spec] if key not in done]
            left = [key for key in left if (key, panel.changes.get("precision")) not in planned]
            planned |= {(key, panel.changes.get("precision")) for key in left}
            if left:
                place = panel.setup, json.dumps(dataclasses.asdict(settings)), tuple(key.seed for key in left)
                groups.setdefault(place, (settings, []))[1].append(spec)
    return [
        Job(Recipe(setup, tuple(specs), seeds, settings), where(setup))
        for (setup, _, seeds), (settings, specs) in groups.items()
    ]


Train = Callable[[RunDirectory, Simulation], None]


def run(job: Job, out: Path, train: Train, say: Callable[[str], None]) -> None:
    """Trains a job in a directory of its own below `out`, or goes on with it there.

    What is kept is small, and holds no path of this machine: the results, which say how they were made, the
    history and the clients' numbers.
    """
    recipe, where = job
    task = setups.task(recipe.setup, where, say)
    recipe = replace(recipe, data=task.federation.origin.get("digest"))
    anywhere = replace(recipe.settings, device="auto", compile="auto", memory=None)
    key = replace(recipe, settings=anywhere).digest[:10]
    path = out / RUNS / f"{recipe.setup.partition(':')[0]}-{key}"
    if (path / RESULTS).exists():
        return
    with held(path):
        if (path / RECIPE).exists():
            directory = RunDirectory.open(path)
            simulation = directory.recipe.build(task)
        else:
            check_free(path)
            simulation = recipe.build(task)
            vouched = replace(recipe, settings=simulation.settings)
            directory = RunDirectory.create(path, vouched, where, str(simulation.choice))
        for line in directory.restore(simulation):
            say(line)
        train(directory, simulation)
        packed = gzip.compress((path / HISTORY).read_bytes(), mtime=0)
        write_atomic(path / f"{HISTORY}.gz", packed)
        directory.write_results(simulation, models=False)
        for name in (HISTORY, RECIPE):
            (path / name).unlink()
        shutil.rmtree(directory.checkpoints, ignore_errors=True)


def read_study(file: Path) -> Study:
    """A study from a TOML file: a title, and grids whose lists are varied. See docs/studies.md."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not TOML: {first_line(error)}") from None
    known = ("title", "question", "charts", "grid")
    for name in content:
        if name not in known:
            raise unknown(f"key of {file}", name, known)
    grids = content.get("grid", [])
    if not isinstance(grids, list) or not grids or not all(isinstance(grid, dict) for grid in grids):
        raise InputError(f"{file} has no [[grid]]: name at least its setups and algorithms in one")
    panels = tuple(panel for grid in grids for panel in _panels(str(file), grid))
    charts = content.get("charts", ["curves", "distribution"])
    if not isinstance(charts, list):
        raise InputError(f"charts of {file} must be a list, such as ['curves']")
    for chart in charts:
        if chart not in CHARTS:
            raise unknown(f"chart of {file}", str(chart), CHARTS)
    title, question = (
        str(content.get(name, default)) for name, default in (("title", file.stem), ("question", ""))
    )
    return Study(file.stem, title, question, panels, tuple(charts))


def _panels(file: str, grid: dict[str, Any]) -> Iterator[Panel]:
    """A grid's panels: one for each setup and each choice from the settings that are lists."""
    varied = {name: value for name, value in grid.items() if name not in ("setups", "algorithms", "seeds")}
    names = [f.name for kind in (Settings, Solver) for f in dataclasses.fields(kind)]
    for name, value in varied.items():
        if name not in names:
            raise unknown(f"setting in a grid of {file}", name, ["setups", "algorithms", "seeds", *names])
        if isinstance(value, list) and (not value or name in ALIKE):
            why = "changes no result" if value else "has no value"
            raise InputError(f"{name}={value} in a grid of {file} {why}: give it one value, or leave it out")
    lists = {k: v if isinstance(v, list) and k != "epochs" else [v] for k, v in varied.items()}
    given = [spec for text in _texts(file, grid, "algorithms", algorithms.PAPER) for spec in expand(text)]
    seeds = grid.get("seeds", [0, 1, 2])
    if not isinstance(seeds, list) or not seeds:
        raise InputError(f"seeds in a grid of {file} must be a list of whole numbers, such as [0, 1, 2]")
    for seed in seeds:
        whole(0, seed=seed)
    for setup in [spec for text in _texts(file, grid, "setups", ()) for spec in expand(text)]:
        for values in itertools.product(*lists.values()):
            changes = dict(zip(lists, values, strict=True))
            shown = [f"{k} {v}" for k, v in changes.items() if len(lists[k]) > 1]
            panel = Panel(", ".join([setup, *shown]), setup, tuple(given), tuple(seeds), changes)
            panel.check()
            yield panel


def _texts(file: str, grid: dict[str, Any], name: str, default: Iterable[str]) -> list[str]:
    value = grid.get(name, list(default))
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise InputError(f"{name} in a grid of {file} must be a list of names, such as ['synthetic']")
    return value
