"""A study from a TOML file: grids of setups, algorithms, settings and seeds."""

import dataclasses
import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fairwind import algorithms
from fairwind.engine.settings import Settings, names_of
from fairwind.engine.solver import Solver
from fairwind.errors import InputError, first_line, unknown, whole
from fairwind.runs.spec import expand
from fairwind.study.panel import Panel, Study

CHARTS = ("curves", "distribution", "plane", "targets", "pareto", "rsd", "tuned", "labels")
RANGES = ("epochs", "steps")  # settings of which two numbers are one value


def read_study(file: Path) -> Study:
    """A study from a TOML file: a title, and grids of settings. See docs/studies.md."""
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
    charts = content.get("charts", ["plane", "curves", "distribution"])
    if not isinstance(charts, list):
        raise InputError(f"charts of {file} must be a list, such as ['curves']")
    for chart in charts:
        if chart not in CHARTS:
            raise unknown(f"chart of {file}", str(chart), CHARTS)
    title, question = (
        str(content.get(name, default)) for name, default in (("title", file.stem), ("question", ""))
    )
    return Study(file.stem, title, question, panels, tuple(charts))


def _panels(file: str, grid: Mapping[str, object]) -> Iterator[Panel]:
    """A grid's panels: one for each setup and each combination of the settings that are lists."""
    varied = {name: value for name, value in grid.items() if name not in ("setups", "algorithms", "seeds")}
    names = [f.name for kind in (Settings, Solver) for f in dataclasses.fields(kind)]
    for name, value in varied.items():
        if name not in names:
            raise unknown(f"setting in a grid of {file}", name, ["setups", "algorithms", "seeds", *names])
        if isinstance(value, list) and (not value or name in names_of("machine", "history")):
            why = "changes no result" if value else "has no value"
            raise InputError(f"{name}={value} in a grid of {file} {why}: give it one value, or leave it out")
    lists = {k: v if isinstance(v, list) and k not in RANGES else [v] for k, v in varied.items()}
    texts = algorithms.with_sets(_texts(file, grid, "algorithms", algorithms.PAPER))
    given = [spec for text in texts for spec in expand(text)]
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


def _texts(file: str, grid: Mapping[str, object], name: str, default: Iterable[str]) -> list[str]:
    value = grid.get(name, list(default))
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise InputError(f"{name} in a grid of {file} must be a list of names, such as ['synthetic']")
    return value
