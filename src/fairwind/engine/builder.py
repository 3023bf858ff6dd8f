"""Builds the executor that trains a task's clients, for simulations and for clients of a real federation."""

import warnings
from dataclasses import replace
from typing import NamedTuple

from fairwind.data.federation import Federation
from fairwind.engine.backends.backend import COMPILER
from fairwind.engine.backends.compiling import compiler_found
from fairwind.engine.executor import Executor, Run
from fairwind.engine.loop.executor import Loop, summing
from fairwind.engine.memory import Memories
from fairwind.engine.plain import PlainModel
from fairwind.engine.plan import Choice, Decision, ExecutionPlan, compiling, loop_threads, placing
from fairwind.engine.precision import products
from fairwind.engine.ranks import ALONE, Ranks
from fairwind.engine.schedule import Planner
from fairwind.engine.settings import Settings
from fairwind.engine.stacked.executor import Stacked

NO_GRAPHS = Decision("none", "they are for stacked clients on a GPU")


class Built(NamedTuple):
    """An executor, the settings with what was decided, and the plan with the reasons."""

    executor: Executor
    settings: Settings
    plan: ExecutionPlan


def chunk_numbers(settings: Settings, element_size: int) -> int:
    """How many numbers the clients that train at once may hold together."""
    assert settings.memory is not None
    return max(1, int(settings.memory * 2**30 / element_size))


def build_executor(
    choice: Choice,
    plain: PlainModel,
    federation: Federation,
    planner: Planner,
    runs: list[Run],
    memories: Memories,
    given: Settings,
    settings: Settings,
    ranks: Ranks = ALONE,
) -> Built:
    """By the choice of an executor and by the settings, `given` and resolved."""
    assert settings.workers is not None
    workers_asked, plain_sgd = settings.workers, settings.device == "cpu" and planner.solver.plain
    shown = placing(given, settings, on_host=federation.compute_device is not None)
    shown["executor"] = choice.decision
    asked = "one per core" if given.workers is None else f"workers={given.workers}"
    size = plain.start.element_size()
    memory = Decision(settings.memory or 0.0, _default_memory(given, settings))
    if choice.stacked is None:
        workers, threads = loop_threads(
            plain, planner.solver.batch_size, planner.participants * len(runs), workers_asked
        )
        if given.workers == 1:
            workers = Decision(1, asked)
        factors = plain_sgd and not summing(runs)
        loop = Loop(
            plain,
            federation,
            planner,
            runs,
            memories,
            workers=int(workers.value),
            threads=int(threads.value),
            factors=factors,
        )
        shown |= {
            "steps": Decision("eager", "clients train one after another"),
            "gradients": _gradients(factors, len(loop.workers.states[0].layers)),
            "graphs": NO_GRAPHS,
            "workers": workers,
            "threads": threads,
            "memory": memory,
        }
        return Built(loop, replace(settings, compile="off"), ExecutionPlan(**shown))
    stacked = Stacked(
        choice.stacked,
        federation,
        planner,
        runs,
        memories,
        budget=chunk_numbers(settings, size),
        workers=workers_asked,
        ranks=ranks,
    )
    saved, takes, missing = 0.0, 0.0, ""
    if settings.compile == "auto":
        with products(settings.precision, federation.device):
            saved, takes = stacked.compile_seconds()
        if settings.rounds * saved >= takes and not compiler_found(federation.device):
            missing = "Triton" if federation.device.type == "cuda" else COMPILER
            warnings.warn(f"{missing} was not found: steps run uncompiled, and slower", stacklevel=4)
    compiled, why = compiling(settings.compile, settings.rounds, settings.rounds * saved, takes, missing)
    settings = replace(settings, compile="on" if compiled else "off")
    if compiled:
        stacked.compile()
    elif given.memory is None:
        settings = replace(settings, memory=stacked.enlarge() * size / 2**30)
        if settings.memory != memory.value:
            memory = Decision(settings.memory or 0.0, "uncompiled steps have many operations to launch")
    how = "eager" if not compiled else "hand-written" if stacked.handwritten else "compiled"
    graphs = Decision(stacked.graphs, "launching small kernels takes longer than running them")
    shown |= {
        "steps": Decision(how, why),
        "gradients": _gradients(plain_sgd, len(choice.stacked.factored)),
        "graphs": graphs if stacked.graphs != "none" else NO_GRAPHS,
        "workers": Decision(workers_asked, asked),
        "threads": Decision(1, "threads share the clients, not the kernels"),
        "memory": memory,
    }
    return Built(stacked, settings, ExecutionPlan(**shown))


def _gradients(tried: bool, layers: int) -> Decision:
    if layers:
        return Decision("factored", f"{layers} large dense layer{'s' * (layers > 1)}")
    return Decision("dense", "no large dense layer" if tried else "factors are for plain SGD on a CPU")


def _default_memory(given: Settings, settings: Settings) -> str:
    if given.memory is not None:
        return f"memory={given.memory:g}"
    return "near the size of a CPU's cache" if settings.device == "cpu" else "a quarter of the GPU's memory"
