"""A comparison: several algorithms under several seeds on one setup, kept in a directory as it goes."""

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from fairwind import __version__, algorithms, setups
from fairwind.data import store
from fairwind.data.federation import Federation
from fairwind.engine.checkpoint import load_checkpoint, save_checkpoint
from fairwind.engine.executor import Run
from fairwind.engine.ranks import find, join
from fairwind.engine.settings import Settings
from fairwind.engine.simulation import Simulation
from fairwind.engine.solver import Solver
from fairwind.errors import InputError, unknown
from fairwind.files import (
    CLIENTS,
    HISTORY,
    MODELS,
    RECIPE,
    RESULTS,
    default_cache,
    lock,
    write_atomic,
    write_json,
)
from fairwind.metrics import METRICS, over_seeds
from fairwind.setups import Where

SOLVERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "momentum": 0.0, "nesterov": False},
    "momentum": {"optimizer": "sgd", "momentum": 0.9, "nesterov": False},
    "nesterov": {"optimizer": "sgd", "momentum": 0.9, "nesterov": True},
    "adam": {"optimizer": "adam", "momentum": 0.0, "nesterov": False},
    "adamw": {"optimizer": "adamw", "momentum": 0.0, "nesterov": False},
    "rmsprop": {"optimizer": "rmsprop", "momentum": 0.0, "nesterov": False},
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that decides a comparison's numbers, in words that fit into JSON."""

    setup: str
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: Settings
    data: str | None = None
    """Digest of the data, where it was prepared from files."""

    def check(self) -> None:
        """Refuses what can be refused before data is read."""
        for kind, given in (("algorithm", self.algorithms), ("seed", self.seeds)):
            for value in given:
                if list(given).count(value) > 1:
                    raise InputError(f"{kind} {value!r} is given twice")
        for spec in self.algorithms:
            algorithms.build(spec)

    def build(self, federation: Federation) -> Simulation:
        """The simulation at round 0."""
        self.check()
        built = {spec: algorithms.build(spec) for spec in self.algorithms}
        runs = [Run(spec, algorithm, seed) for spec, algorithm in built.items() for seed in self.seeds]
        return Simulation(
            lambda: setups.build_model(self.setup, federation), federation, runs, self.settings, ranks=join()
        )

    def command(self) -> str:
        """The command that trains it again, with what differs from the setup's own settings."""
        own = dataclasses.asdict(settings_of(self.setup))
        given = dataclasses.asdict(self.settings)
        local, own_local = given.pop("solver"), own.pop("solver")
        machine = ("device", "compile", "memory", "engine", "workers")  # whatever the next machine has
        # As text, because 1 (one client) and 1.0 (all of them) are equal.
        changed = {k: v for k, v in given.items() if json.dumps(v) != json.dumps(own[k]) and k not in machine}
        changed |= {k: v for k, v in local.items() if v != own_local[k]}
        if {"optimizer", "momentum", "nesterov"} & set(changed):
            kind = local["optimizer"]
            if kind == "sgd" and local["momentum"]:
                kind = "nesterov" if local["nesterov"] else "momentum"
            for name in ("optimizer", "nesterov"):
                changed.pop(name, None)
            changed["solver"] = kind
            if local["momentum"] == SOLVERS[kind]["momentum"]:
                changed.pop("momentum", None)
        words = ["fairwind compare", self.setup, "--algorithms", *self.algorithms]
        words += ["--seeds", *map(str, self.seeds)]
        for name, value in changed.items():
            values = value if isinstance(value, list | tuple) else (value,)
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Recipe":
        settings = dict(content["settings"])
        solver = dict(settings["solver"])
        for name, value in solver.items():
            if isinstance(value, list):
                solver[name] = tuple(value)
        settings["solver"] = Solver(**solver)
        named = tuple(content["algorithms"]), tuple(content["seeds"])
        return cls(content["setup"], *named, Settings(**settings), content.get("data"))

    @property
    def digest(self) -> str:
        """Names this recipe; a checkpoint that carries another name is not taken for its own."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def settings_of(setup: str, **changes: Any) -> Settings:
    """A setup's own settings with some of them changed: fields of Settings, and of the solver by their names.

    `solver` is a name in SOLVERS.
    """
    known = setups.find(setup)
    solver_fields = [field.name for field in dataclasses.fields(Solver)]
    names = [field.name for field in dataclasses.fields(Settings)] + solver_fields
    for name in changes:
        if name not in names:
            raise unknown("setting", name, names)
    named = changes.pop("solver", None)
    if named is not None and named not in SOLVERS:
        raise unknown("solver", str(named), SOLVERS)
    local = {name: changes.pop(name) for name in solver_fields if name in changes}
    if isinstance(local.get("epochs"), list):
        local["epochs"] = tuple(local["epochs"])
    for name in ("lr", "momentum", "weight_decay"):
        if isinstance(local.get(name), int):
            local[name] = float(local[name])
    solver = dataclasses.replace(known.solver, **{**(SOLVERS[named] if named else {}), **local})
    return Settings(**{"rounds": known.rounds, **changes, "solver": solver})


class RunDirectory:
    """The directory of a comparison: its recipe, checkpoints, history and results."""

    def __init__(self, path: Path, recipe: Recipe, where: Where, made_with: dict[str, Any]):
        self.path, self.recipe, self.where, self.made_with = path, recipe, where, made_with
        self.checkpoints = path / "checkpoints"

    @staticmethod
    def check_free(path: Path) -> None:
        """Refuses a directory that holds anything."""
        try:
            if (path / RECIPE).exists():
                raise InputError(
                    f"{path} already holds a run: go on with 'fairwind resume {path}', or give another --out"
                )
            if path.exists() and any(path.iterdir()):
                raise InputError(f"{path} is not empty: give another --out, so that nothing is overwritten")
        except OSError as error:
            raise InputError(f"cannot write to {path}: {error.strerror}") from None

    @classmethod
    def create(cls, path: Path, recipe: Recipe, where: Where) -> "RunDirectory":
        """A new directory; one that holds anything is left alone."""
        cls.check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            made_with = environment(recipe.settings.device)
            places = {k: str(v.absolute()) for k, v in where._asdict().items() if v is not None}
            content = {**recipe.to_json(), "where": places, "environment": made_with}
            write_json(path / RECIPE, content)
        except OSError as error:
            raise InputError(f"cannot write to {path}: {error.strerror}") from None
        return cls(path, recipe, where, made_with)

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """The directory of an earlier comparison."""
        try:
            content = json.loads((path / RECIPE).read_bytes())
            where = Where(**{k: Path(v) for k, v in content.get("where", {}).items()})
            return cls(path, Recipe.from_json(content), where, content["environment"])
        except OSError:
            raise InputError(f"{path} holds no run: there is no {RECIPE} in it") from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path / RECIPE} cannot be read as a recipe: {error}") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from training in this directory."""
        with lock(self.path / RECIPE) as held:
            if not held:
                raise InputError(f"another process is training in {self.path}; wait for it or stop it")
            yield

    def changed(self) -> list[str]:
        """What is not as it was when the run began, and may change its last bits."""
        before, now = ({"ranks": 1, **e} for e in (self.made_with, environment(self.recipe.settings.device)))
        watched = "fairwind", "torch", "processor", "threads", "device", "ranks"
        return [f"{k} was {before.get(k)}, is {now[k]}" for k in watched if before.get(k) != now[k]]

    def federation(self, cache: Path | None = None) -> Federation:
        """The very data that the run began with."""
        where = self.where if cache is None else self.where._replace(cache=cache)
        digest = self.recipe.data
        if digest is None:
            return setups.federation(self.recipe.setup, Where())
        entry = store.find(digest, where.cache)
        if entry is None:
            cache = where.cache or default_cache()
            given = {"data-dir": where.data_dir, "glove": where.glove, "cache": where.cache}
            options = "".join(f" --{name} {value}" for name, value in given.items() if value is not None)
            raise InputError(
                f"the data of this run (digest {digest[:12]}…) is not in {cache}: "
                f"make it again with 'fairwind data {self.recipe.setup}{options}', or name its --cache"
            )
        return entry.load()

    def restore(self, simulation: Simulation) -> list[str]:
        """Brings a simulation to the newest good checkpoint; returns what was refused on the way."""
        checkpoint, refused = load_checkpoint(self.checkpoints, self.recipe.digest)
        if checkpoint is not None:
            simulation.restore(checkpoint)
        elif refused:
            raise InputError(
                f"no usable checkpoint in {self.checkpoints}: {refused[0]}; "
                "delete that folder to start again from round 0"
            )
        if simulation.ranks.first:
            self.write_history(simulation)
        return refused

    def save(self, simulation: Simulation) -> None:
        save_checkpoint(self.checkpoints, simulation.checkpoint(), self.recipe.digest)

    def write_history(self, simulation: Simulation, since: int = 0) -> None:
        """Writes the history anew, or appends what came after its first `since` lines."""
        lines = "".join(json.dumps(line, allow_nan=False) + "\n" for line in simulation.history[since:])
        if since:
            with open(self.path / HISTORY, "a") as file:
                file.write(lines)
        else:
            write_atomic(self.path / HISTORY, lines.encode())

    def write_results(self, simulation: Simulation) -> dict[str, Any]:
        """The final numbers, and the per-client vectors."""
        clients = {
            "accuracy": simulation.accuracy.float(),
            "loss": simulation.loss.float(),
            "train_size": simulation.federation.train,
            "test_size": simulation.federation.test,
        }
        names = {"names": json.dumps(simulation.federation.names)}
        write_atomic(self.path / CLIENTS, save(clients, metadata=names))
        results = summarise(simulation, self.recipe)
        write_json(self.path / RESULTS, results)
        return results

    def write_models(self, simulation: Simulation) -> None:
        """The trained models."""
        models = {
            f"{run.label}/{run.seed}/{name}": value.cpu().contiguous()
            for r, run in enumerate(simulation.runs)
            for name, value in simulation.state_dict(r).items()
        }
        write_atomic(self.path / MODELS, save(models))


def summarise(simulation: Simulation, recipe: Recipe) -> dict[str, Any]:
    """The content of results.json."""
    last = simulation.history[-len(simulation.runs) :]
    rows: list[dict[str, Any]] = []
    for r, (run, line) in enumerate(zip(simulation.runs, last, strict=True)):
        final = {k: v for k, v in line.items() if k in METRICS}
        row = {"algorithm": run.label, "seed": run.seed, "rounds": simulation.round, "final": final}
        counts = {"left_out": simulation.left_out, "stalled_rounds": simulation.stalled}
        rows.append(row | {name: int(count[r]) for name, count in counts.items()})
    seconds = max(simulation.seconds, 1e-9)
    return {
        "setup": recipe.setup,
        "command": recipe.command(),
        "config": {"algorithms": recipe.algorithms, "seeds": recipe.seeds}
        | dataclasses.asdict(simulation.settings),
        "engine": str(simulation.choice),
        "environment": environment(simulation.settings.device),
        "federation": simulation.federation.describe(),
        "runs": rows,
        "summary": summary_of(rows),
        "timing": {
            "seconds": simulation.seconds,
            "rounds_per_second": simulation.round / seconds,
            "run_rounds_per_second": simulation.round * len(simulation.runs) / seconds,
            "client_steps_per_second": simulation.client_steps / seconds,
        },
    }


def summary_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each metric over the seeds of each algorithm, from the rows of runs."""
    summary = []
    for label in dict.fromkeys(row["algorithm"] for row in rows):
        finals = [row["final"] for row in rows if row["algorithm"] == label]
        summary.append({"algorithm": label} | {m: over_seeds([f.get(m) for f in finals]) for m in METRICS})
    return summary


def environment(device: str) -> dict[str, Any]:
    """What the numbers were made with."""
    on_gpu = device.startswith("cuda")
    world = find().world
    return {
        "fairwind": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        **({"ranks": world} if world > 1 else {}),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """The commit of the source tree this runs from, with + where it was changed; None if installed.

    A copy without its history is told by FAIRWIND_COMMIT what it is a copy of.
    """
    if given := os.environ.get("FAIRWIND_COMMIT"):
        return given
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != here.parents[1]:
            return None
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"
