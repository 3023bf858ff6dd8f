"""Whichever path a comparison takes, it gives the numbers of the plain loop, for every type of algorithm.

The plain loop trains one client after another, uncompiled, in one thread.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor, nn

from conftest import CLASSES, DEVICE, FEATURES, compiler_found, make_federation, make_model
from fairwind.contract import TYPES, GradientAlgorithm, MemoryAlgorithm
from fairwind.engine import plan
from fairwind.engine.backends.backend import HANDWRITTEN, Handwritten
from fairwind.engine.backends.classifier import Classifier
from fairwind.engine.backends.convolutions import Convolutions
from fairwind.engine.plan import Decision, Gradients, Graphs, Place, Steps
from fairwind.engine.settings import Engine
from fairwind.engine.simulation import Simulation
from own_algorithms import built
from replay import Replayer
from simulations import SOLVERS, dropout_model, simulation

# ---- what is computed ----

# Of each type; `scaled` uses the batch's loss in its steps, `mime` a second gradient
ALGORITHMS = (
    *("fedavg", "adafedadam", "fedprox", "scaled", "scaffold", "mimelite", "mime", "ditto"),
    *("worst_first", "afl", "by_angle", "fedmgda", "local", "pooled"),
)
SEEING = ("worst_first", "afl", "by_angle", "fedmgda")  # servers that decide on the host

WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64))
WORK: dict[str, dict[str, Any]] = {
    "epoch": {"solver": SOLVERS["sgd"]},
    "drawn epochs of some": {"solver": SOLVERS["uneven"], "participation": 0.7},
    "steps, weighted": {"solver": SOLVERS["steps"], "loss": WEIGHTED},
    "nesterov, few probed": {"solver": SOLVERS["nesterov"], "probe_samples": 6},
    "decay, dropout": {"solver": SOLVERS["decay"], "model": dropout_model},
    "int8": {"solver": SOLVERS["uneven"], "participation": 0.7, "codec": "int8"},
    "topk": {"solver": SOLVERS["sgd"], "codec": "topk:share=0.3"},
}
REPEATED = tuple(
    name for name in WORK if name not in ("drawn epochs of some", "int8")
)  # every round is alike
PLAIN = tuple(name for name, work in WORK.items() if work["solver"].plain)
ROUNDS = 4  # of which the second is recorded, and later ones replayed


def takes(work: str, name: str) -> bool:
    """Whether an algorithm's clients may send their updates by the codec, if there is one."""
    coded = "codec" in WORK[work]
    return not (coded and isinstance(built(name), MemoryAlgorithm | GradientAlgorithm))


# ---- the paths ----


class Path(NamedTuple):
    """How a path is taken, and by what it shows that it was."""

    settings: dict[str, Any]
    plan: dict[str, Any]  # parts of the execution plan
    constants: Mapping[str, object] = MappingProxyType({})  # by which even a small model takes it
    shown: Callable[[Simulation], bool] = lambda made: True  # where the plan does not say it
    model: Callable[[], nn.Module] = make_model
    work: tuple[str, ...] = tuple(WORK)  # for which it is taken
    never: tuple[str, ...] = ()  # algorithms that do not take it
    graphs: Graphs = "none"  # what a stand-in for CUDA graphs records, which a plan for a CPU never has
    code: type[Handwritten] | None = None  # what computes hand-written steps


def linear_model() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES).double()


def convolutions() -> nn.Module:
    first = nn.Unflatten(1, (1, 1, FEATURES)), nn.Conv2d(1, 4, (1, 2)), nn.ReLU(), nn.MaxPool2d((1, 2))
    second = nn.Conv2d(4, 3, 1), nn.Tanh(), nn.Flatten(), nn.Linear(6, CLASSES)
    return nn.Sequential(*first, *second).double()


def small_convolutions() -> nn.Module:
    first = nn.Unflatten(1, (1, 1, FEATURES)), nn.Conv2d(1, 4, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(4, 3, (1, 2), bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(6, CLASSES)
    return nn.Sequential(*first, *second).double()


class Viewed(nn.Module):
    """The same, with a `view` of what the convolutions give."""

    def __init__(self) -> None:
        super().__init__()
        self.all = convolutions()

    def forward(self, x: Tensor) -> Tensor:
        maps = self.all[:-2](x)  # type: ignore[index]
        out: Tensor = self.all[-1](maps.view(len(x), -1))  # type: ignore[index]
        return out


def kept_in_memory(last: bool) -> Callable[[Simulation], bool]:
    """Whether the loop's activations have their channels last."""

    def shown(made: Simulation) -> bool:
        executor: Any = made.executor
        seen = []
        for learner in executor.workers.states:
            second = [layer for layer in learner.model.module.modules() if isinstance(layer, nn.Conv2d)][1]
            hook = second.register_forward_hook(lambda layer, given, out: seen.append(out.stride(1) == 1))
            learner.model.module(torch.zeros(2, FEATURES, dtype=torch.float64))
            hook.remove()
        return bool(seen) and all(one == last for one in seen)

    return shown


def in_chunks(made: Simulation) -> bool:
    executor: Any = made.executor
    kinds = ("training", "corrected", "personal")
    return any(len(executor.cutter.cut(kind, executor.cutter.rows(kind))) > 2 for kind in kinds)


def computed_by(code: type[Handwritten]) -> Callable[[Simulation], bool]:
    def shown(made: Simulation) -> bool:
        executor: Any = made.executor
        workspaces = [each for states in executor.workers.states for each in states.values()]
        return any(isinstance(workspace.compiled, code) for workspace in workspaces)

    return shown


def replayed(graphs: str) -> Callable[[Simulation], bool]:
    return lambda made: getattr(made.executor, graphs).replays > 0


TUNING = "fairwind.engine.tuning"
FACTORED = {f"{TUNING}.MIN_FACTORED_NUMBERS": 1}
RECORDED: dict[str, Any] = {
    "fairwind.engine.stacked.executor.Graphs": Replayer,
    f"{TUNING}.NUMPY_SORTS": False,  # as on a GPU
}
CHUNKS, HOST, LOOP, ON = {"memory": 4e-5}, {"data_on": "host"}, {"engine": "loop"}, {"compile": "on"}
TWO = {"workers": 2} if DEVICE == "cpu" else {}
UNMODELLED = tuple(name for name, work in WORK.items() if "model" not in work)
LONG_STEPS = {f"{TUNING}.MIN_THREADED_SECONDS": 0}
COMPILED = "ahead-of-time" if DEVICE == "cpu" else "torch.compile"

EAGER = {
    "stacked": Path(
        {},
        {
            "executor": "stacked",
            "steps": "eager",
            "gradients": "dense",
            "data": "device",
            "convolutions": "none",
        },
    ),
    "chunks": Path(CHUNKS, {"executor": "stacked"}, shown=in_chunks),
    "workers": Path(TWO | CHUNKS, {"executor": "stacked", "workers": 2}, shown=in_chunks),
    "factors": Path({}, {"executor": "stacked", "gradients": "factored"}, FACTORED, work=PLAIN),
    "factors in chunks": Path(CHUNKS, {"gradients": "factored"}, FACTORED, in_chunks, work=PLAIN),
    "host": Path(HOST, {"executor": "stacked", "data": "host"}),
    "host and workers": Path(HOST | TWO | CHUNKS, {"data": "host", "workers": 2}, shown=in_chunks),
    "recorded rounds": Path(
        {"memory": 1e-4},
        {},
        RECORDED,
        replayed("round_graphs"),
        work=REPEATED,
        never=SEEING,
        graphs="rounds",
    ),
    "recorded steps of long rounds": Path(
        {},
        {},
        RECORDED | {f"{TUNING}.MAX_GRAPH_STEPS": 0},
        replayed("step_graphs"),
        work=REPEATED,
        never=SEEING,
        graphs="rounds",
    ),
    "recorded steps": Path({}, {}, RECORDED, replayed("step_graphs"), graphs="steps"),
    "loop": Path(LOOP, {"executor": "loop"}, {f"{TUNING}.MAX_REPORTED_CLIENTS": 3}),
    "loop and host": Path(LOOP | HOST, {"executor": "loop", "data": "host"}),
    "loop and workers": Path(LOOP | TWO, {"executor": "loop", "workers": 2}, LONG_STEPS),
    "convolutions as products": Path(
        {"engine": "stacked"},
        {"executor": "stacked", "convolutions": "products"},
        model=convolutions,
        work=UNMODELLED,
    ),
    "loop, channels last": Path(
        LOOP | TWO,
        {"executor": "loop", "convolutions": "channels last"},
        LONG_STEPS | {f"{TUNING}.MIN_CHANNELS_LAST_FLOPS": 0},
        kept_in_memory(last=True),
        model=convolutions,
        work=UNMODELLED,
    ),
    "loop, viewed": Path(
        LOOP,
        {"executor": "loop", "convolutions": "as called"},
        constants={f"{TUNING}.MIN_CHANNELS_LAST_FLOPS": 0},
        shown=kept_in_memory(last=False),
        model=Viewed,
        work=UNMODELLED,
    ),
    "hand-written": Path(
        ON | TWO,
        {"steps": "hand-written"},
        shown=computed_by(Classifier),
        code=Classifier,
        model=linear_model,
        work=("epoch", "drawn epochs of some", "topk"),
        never=("scaled", "mime"),
    ),
}
EAGER["hand-written convolutions"] = EAGER["hand-written"]._replace(
    shown=computed_by(Convolutions), code=Convolutions, model=small_convolutions
)
AHEAD_OF_TIME = {
    # In chunks of one and of two rows, too, as compiled code likes least
    "compiled": Path(ON | TWO | {"memory": 1e-6}, {"steps": COMPILED, "gradients": "dense"}, shown=in_chunks),
    "compiled factors": Path(ON, {"steps": COMPILED, "gradients": "factored"}, FACTORED, work=PLAIN),
    "compiled and host": Path(ON | HOST | CHUNKS, {"steps": COMPILED, "data": "host"}),
}
PATHS = EAGER | AHEAD_OF_TIME
CPU_ONLY = (
    "workers",
    "channels last",
    "viewed",
    "factors",
    "host and workers",
    "loop and workers",
    "hand-written",
)

Numbers = dict[tuple[str, int], dict[str, Tensor]]  # by label and seed


def test_all_hand_written_code_is_a_path_here() -> None:
    assert {path.code for path in PATHS.values()} - {None} == set(HANDWRITTEN)


def test_every_value_of_a_plan_is_a_path_here() -> None:
    elsewhere = {"auto", "torch.compile" if DEVICE == "cpu" else "ahead-of-time"}  # settings; other devices
    values = {value for path in PATHS.values() for value in (*path.plan.values(), path.graphs)}
    for part in (Engine, Steps, Gradients, plan.Convolutions, Graphs, Place):
        assert set(get_args(part)) - elsewhere <= values


@pytest.fixture
def path(request: pytest.FixtureRequest) -> Path:
    name = request.param
    if DEVICE != "cpu" and any(part in name for part in (*CPU_ONLY, "recorded")):
        pytest.skip("is for a CPU")
    if PATHS[name].settings.get("compile") == "on" and not compiler_found(torch.device(DEVICE)):
        pytest.skip("needs a compiler")
    return PATHS[name]


# ---- the battery ----


def numbers(made: Simulation) -> Numbers:
    """All that a path may not change: models and servers' states in every round, memories, test results."""
    found: Numbers = {(run.label, run.seed): {} for run in made.runs}
    for t in range(ROUNDS):
        made.step()
        for r, run in enumerate(made.runs):
            mine = found[run.label, run.seed]
            mine[f"x after round {t + 1}"] = made.x[r].clone()
            for name, value in made.states[r]._asdict().items():
                mine[f"{name} after round {t + 1}"] = value.clone()
    for r, run in enumerate(made.runs):
        mine = found[run.label, run.seed]
        mine |= {"loss0": made.loss0[r], "left out": made.left_out[r], "lowest": made.lowest[r]}
        if r in made.memories.values:
            mine["memory"] = made.memories.values[r]
        if r in made.left_out_of_updates:
            mine["left out of updates"] = made.left_out_of_updates[r]
    for i, view in enumerate(made.views):
        mine = found[made.runs[view.run].label, view.seed]
        mine |= {f"losses of {view.label}": made.loss[i], f"scores of {view.label}": made.score[i]}
    return found


@cache
def plain_loop(work: str, model: Callable[[], nn.Module]) -> Numbers:
    options = {"model": model} | WORK[work]
    names = [name for name in ALGORITHMS if takes(work, name)]
    made = simulation(FEDERATION, names, SEEDS, engine="loop", workers=1, **options)
    if made.plan.convolutions.value != "none":
        other = made.plan._replace(convolutions=Decision("as called", "the plain loop"))
        made = simulation(FEDERATION, names, SEEDS, engine="loop", workers=1, plan=other, **options)
    return numbers(made)


FEDERATION = make_federation([1, 2, 3, 17, 45, 8, 1, 26])  # single samples, partial batches, full ones
SEEDS = [0, 1]


def assert_gives_the_loops_numbers(
    path: Path,
    work: str,
    names: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    seeds: Sequence[int] = SEEDS,
) -> None:
    expected = plain_loop(work, path.model)
    for constant, value in path.constants.items():
        monkeypatch.setattr(constant, value)
    options = {"model": path.model} | WORK[work] | path.settings
    made = simulation(FEDERATION, names, [*seeds], **options)
    if path.graphs != "none":
        other = made.plan._replace(graphs=Decision(path.graphs, "replayed on a CPU"))
        made = simulation(FEDERATION, names, [*seeds], plan=other, **options)
    for part, taken in path.plan.items():
        assert getattr(made.plan, part).value == taken, made.plan
    found = numbers(made)
    assert path.shown(made)
    for run in found:
        for what, value in found[run].items():
            same = torch.allclose(
                value.cpu(), expected[run][what].cpu(), rtol=1e-9, atol=1e-10, equal_nan=True
            )
            assert same, f"{what} of {run}: {value}, and in the plain loop {expected[run][what]}"


def test_every_type_of_algorithm_is_there() -> None:
    assert {type(built(name)) for name in ALGORITHMS} == set(TYPES)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("path", "name"),
    [
        pytest.param(key, name, marks=slow if key in AHEAD_OF_TIME else ())
        for key, path in PATHS.items()
        for name in ALGORITHMS
        if name not in path.never and not (name == "pooled" and path.shown is in_chunks)  # it has two rows
    ],
    indirect=["path"],
)
def test_it_gives_the_numbers_of_the_plain_loop(
    path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_gives_the_loops_numbers(path, "epoch", (name,), monkeypatch)


@pytest.mark.parametrize(
    ("path", "work"),
    [
        pytest.param(key, work, marks=slow if key in AHEAD_OF_TIME else ())
        for key, path in PATHS.items()
        for work in path.work
        if work != "epoch"
    ],
    indirect=["path"],
)
def test_it_does_so_for_all_together_whatever_the_work(
    path: Path, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tuple(name for name in ALGORITHMS if name not in path.never and takes(work, name))
    assert_gives_the_loops_numbers(path, work, names, monkeypatch, seeds=[0])


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("compiled", ("scaled", "scaffold", "adafedadam")),
        ("compiled factors", ("fedavg", "scaled", "scaffold")),
    ],
    indirect=["path"],
)
def test_compiled_steps_give_them_too(
    path: Path, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few kinds of steps, as compiling takes long; all of them are among the slow tests."""
    assert_gives_the_loops_numbers(path, "epoch", names, monkeypatch)
