"""What the source looks like: which package may import which."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fairwind"

# From the bottom up: a folder or module may import what comes before it, and itself. The longest name counts.
LAYERS = (
    ("runs.hints", "engine.tuning"),
    ("errors", "runs.files", "runs.progress", "data.counter", "contract", "algorithms.simplex"),
    ("algorithms.ranges",),
    ("runs.spec", "runs.folder", "runs.cache", "aggregation", "scores.reading"),
    ("codecs",),
    ("scores",),
    ("runs.schema",),
    ("runs.seals", "metrics", "intervals", "algorithms", "layers", "data.samples", "testing"),
    ("data", "models"),
    ("augment",),
    ("robust",),
    ("engine",),
    ("runs.cost",),
    ("task", "runs.environment"),
    ("setups", "runs.references"),
    ("runs",),
    ("tracking",),
    ("runs.session",),
    ("study",),
    ("report", "exchange", "serving"),
    ("comparison",),
    ("api", "flower", "nvflare"),
    ("choosing",),
    ("paper",),
    ("cli",),
)

# The same within a package.
ENGINE = (
    ("tuning",),
    ("workers", "ranks", "layout", "solver", "checkpoint", "modules"),
    ("settings", "backends.native", "backends.graphs"),
    ("stopping",),
    ("machine",),
    ("losses", "augmentation", "plan", "round_updates"),
    ("plain", "schedule", "executor"),
    ("stacked.gradients",),
    ("stacked.model", "local", "memory"),
    ("stacked.steps", "stacked.chunks", "checks"),
    ("evaluation", "stacked.workspace", "stacked.sums", "loop"),
    ("backends", "extras"),
    ("stacked",),
    ("builder",),
    ("simulation",),
)

RUNS = (
    ("hints", "files", "progress", "schema", "duration"),
    ("spec", "folder", "cache"),
    ("seals", "cost", "environment", "references", "gains"),
    ("recipe",),
    ("results",),
    ("directory",),
    ("training", "growth"),
    ("session",),
)

ROBUST = (("limits", "rules"), ("defence",), ("attacks",), ("rounds",))

EXCHANGE = (
    ("message",),
    ("bounds", "capping", "own_loop", "compression", "evaluation", "secure", "kept", "releases"),
    ("privacy", "holding"),
    ("accounting",),
    ("client", "server"),
    ("monitoring",),
    ("results",),
)

STUDY = (("runs",), ("panel",), ("grid", "job"))

REPORT = (
    ("table", "latex", "vega"),
    ("record",),
    ("paired",),
    ("finding", "paper_comparison", "theme", "html"),
    ("charts", "legend", "provenance"),
    ("spread", "pareto", "labels", "theory", "targets"),
    ("groups", "sizes", "clients", "joining", "newcomers"),
    ("page", "panel", "search"),
    ("plane", "interim"),
    ("study", "live"),
)


def imported(file: Path) -> set[str]:
    """The package's modules that a file imports, inside functions too, without the leading "fairwind."."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fairwind"):
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return {name.removeprefix("fairwind.") for name in found}


def height(name: str, layers: tuple[tuple[str, ...], ...]) -> int | None:
    found = [
        (len(start), i)
        for i, layer in enumerate(layers)
        for start in layer
        if f"{name}.".startswith(f"{start}.")
    ]
    return max(found)[1] if found else None


@pytest.mark.parametrize(
    ("folder", "layers"),
    [
        ("", LAYERS),
        ("engine", ENGINE),
        ("runs", RUNS),
        ("robust", ROBUST),
        ("exchange", EXCHANGE),
        ("study", STUDY),
        ("report", REPORT),
    ],
)
def test_imports_point_downwards(folder: str, layers: tuple[tuple[str, ...], ...]) -> None:
    wrong = []
    for file in (SOURCE / folder).rglob("*.py"):
        own = ".".join(file.relative_to(SOURCE / folder).with_suffix("").parts)
        mine = height(own, layers)
        if mine is None:
            assert file.stem in ("__init__", "__main__"), f"{own} has no place among the layers"
            continue
        for name in imported(file):
            if folder and not name.startswith(f"{folder}."):
                continue
            theirs = height(name.removeprefix(f"{folder}.") if folder else name, layers)
            if theirs is not None and theirs > mine:
                wrong.append(f"{own} imports {name}")
    assert not wrong, wrong


def test_only_one_file_leans_on_pytorchs_insides() -> None:
    """Names that begin with an underscore may change with any release."""
    private = []
    for file in SOURCE.rglob("*.py"):
        if file.name == "compiling.py" or file.parent.name == "layers":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and "._" in node.module:
                private.append(f"{file.name}: {node.module}")
    assert not private


@pytest.mark.parametrize(("framework", "package"), [("flwr", "flower"), ("nvflare", "nvflare")])
def test_only_one_package_imports_a_framework(framework: str, package: str) -> None:
    importing = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            if any(name.partition(".")[0] == framework for name in named):
                importing.add(file.relative_to(SOURCE).parts[0])
    assert importing == {package}


def test_the_top_level_holds_what_users_import() -> None:
    modules = [file.stem for file in SOURCE.glob("*.py") if not file.stem.startswith("__")]
    assert len(modules) <= 12, modules


def test_no_files_lie_flat_in_the_engine_beside_its_folders_without_need() -> None:
    """A map of the engine: new parts belong into a folder, not beside it."""
    folders = {file.name for file in (SOURCE / "engine").iterdir() if file.is_dir() and file.name[0] != "_"}
    assert folders == {"backends", "loop", "losses", "stacked"}
    assert len(list((SOURCE / "engine").glob("*.py"))) <= 24
