"""How a comparison is computed, and why: from counts and settings, not from measurements.

So the same task is always trained in the same way. The constants of seconds are fits to measured steps of
small and middle-sized modules, on a core of a server; only their ratios matter. `benchmarks/zoo_speed.py`
compares the executor that is chosen with a plain loop.
"""

from typing import NamedTuple

from torch import nn

from fairwind.data.federation import Federation
from fairwind.engine.plain import PlainModel
from fairwind.engine.precision import compute_type
from fairwind.engine.ranks import Ranks
from fairwind.engine.settings import Engine, Settings
from fairwind.engine.stacked.model import CannotStackError, StackedModel
from fairwind.errors import InputError

LARGE_PARAMETERS = 1 << 20  # of a model whose kernels fill all cores in the loop,
LARGE_STEP_OPERATIONS = 5e9  # or of its local step


class Decision(NamedTuple):
    """One part of a plan."""

    value: str | int | float
    why: str


class ExecutionPlan(NamedTuple):
    """How a comparison is computed. Other plans give the same numbers, up to rounding and the precision."""

    device: Decision  #: "cpu", "cuda", …
    data: Decision  #: Where samples are kept: "device" or "host".
    precision: Decision  #: Of local steps.
    executor: Decision  #: "stacked" (all clients at once) or "loop" (one after another).
    steps: Decision  #: "eager", "compiled", or "hand-written" C++.
    gradients: Decision  #: "dense", or "factored": large layers' are added to weights without being stored.
    graphs: Decision  #: CUDA graphs: "none", "steps" or "rounds".
    workers: Decision  #: Threads that share the clients.
    threads: Decision  #: Threads of one kernel on a CPU.
    memory: Decision  #: GiB for clients that train at once.

    def __str__(self) -> str:
        return "\n".join(
            f"{name:<10} {d.value if isinstance(d.value, str) else f'{d.value:g}'}: {d.why}"
            for name, d in self._asdict().items()
        )

    def to_json(self) -> dict[str, dict[str, str | int | float]]:
        return {name: decision._asdict() for name, decision in self._asdict().items()}


def placing(given: Settings, resolved: Settings, *, on_host: bool) -> dict[str, Decision]:
    """Where and how precisely it is computed."""
    on_gpu = resolved.device != "cpu"
    default = {
        "device": "a GPU was found" if on_gpu else "no GPU was found",
        "precision": "the default on a GPU" if on_gpu else "the default on a CPU",
    }
    found = {
        name: Decision(getattr(resolved, name), f"{name}={getattr(given, name)}")
        if getattr(given, name) != "auto"
        else Decision(getattr(resolved, name), why)
        for name, why in default.items()
    }
    if given.data_on != "auto":
        why = f"data_on={given.data_on}"
    elif not on_gpu:
        why = "the device is the host"
    else:
        why = f"samples take {'more' if on_host else 'no more'} than half of the GPU's memory"
    return found | {"data": Decision("host" if on_host else "device", why)}


def loop_threads(plain: PlainModel, batch_size: int, rows: int, cores: int) -> tuple[Decision, Decision]:
    """Worker threads that share the clients of the loop, and threads of each kernel."""
    if cores == 1:
        return Decision(1, "one core"), Decision(1, "one core")
    # Several large models do not fit into the cache; small steps would wait for the GIL.
    alone = "kernels use the threads instead"
    if rows < cores:
        return Decision(1, alone), Decision(cores, f"{rows} clients are fewer than {cores} cores")
    if plain.layout.parameters >= LARGE_PARAMETERS or plain.operations(batch_size) >= LARGE_STEP_OPERATIONS:
        return Decision(1, alone), Decision(cores, "a large model's kernels fill all cores")
    one = Decision(1, "kernels are small")
    if plain.uses_generators:
        return Decision(1, "the model draws from PyTorch's generator, which threads share"), one
    if not plain.fills_a_core(batch_size):
        return Decision(1, "steps are so small that threads would wait for each other"), one
    return Decision(cores, "a local step keeps a core busy"), one


def compiling(setting: str, rounds: int, saved: float, takes: float, missing: str) -> tuple[bool, str]:
    """Whether steps are compiled: it saves so many seconds in all rounds, and takes so many."""
    if setting != "auto":
        return setting == "on", f"compile={setting}"
    if saved < takes:
        return False, f"compiling takes about {takes:.0f} s, and saves about {saved:.2g} s in {rounds} rounds"
    if missing:
        return False, f"{missing} was not found"
    return True, f"compiling takes about {takes:.0f} s, and saves about {saved:.0f} s in {rounds} rounds"


# Numbers of a chunk for each operation of an uncompiled step: with so many, launching an operation takes
# about a quarter of its time.
LAUNCHED = 1 << 14


def loop_seconds(plain: PlainModel, batch_size: int, workers: int) -> float:
    """Of a client that trains by itself."""
    # Functional dropout is replaced in a mode that slows down every call.
    launch = 9e-6 if plain.randomness == "functional" else 5e-6
    around = 134e-6 + launch * plain.counts.operations
    kernels = plain.kernel_seconds(batch_size)
    return (around + kernels) * (0.2 + 0.8 / workers if plain.fills_a_core(batch_size) else 1)


def stacked_seconds(
    stacked: StackedModel, plain: PlainModel, batch_size: int, rows: int, workers: int, *, compiled: bool
) -> float:
    """Of one row, if so many train at once."""
    numbers, parameters = 2 * batch_size * stacked.per_sample, plain.layout.parameters
    work = 3.9e-9 * numbers + _work(plain, batch_size)
    shared = rows * (numbers + 5 * parameters) >= LAUNCHED * stacked.operations  # among workers
    if compiled or shared:
        work *= _among(workers)
    return work if compiled else work + 22e-6 * stacked.operations / rows


def least_stacked_seconds(plain: PlainModel, batch_size: int, workers: int) -> float:
    """Of one row at least, whatever stacking it takes: trying that is expensive for a large model."""
    return _work(plain, batch_size) * _among(workers)


def _work(plain: PlainModel, batch_size: int) -> float:
    return 1.3e-9 * plain.layout.parameters + 6e-12 * plain.operations(batch_size)


def _among(workers: int) -> float:
    return 0.4 + 0.6 / workers


SURELY = 0.9  # share of the loop's estimated time; the loop is the safe choice where they are close


class Choice(NamedTuple):
    """The model that an executor trains: a stacked one, or none for the loop; and why."""

    stacked: StackedModel | None
    why: str

    @property
    def engine(self) -> Engine:
        return "loop" if self.stacked is None else "stacked"

    @property
    def decision(self) -> Decision:
        return Decision(self.engine, self.why)

    def __str__(self) -> str:
        order = "one client after another" if self.stacked is None else "all clients at once"
        return f"{order}: {self.why}"


def choose(
    model: nn.Module,
    plain: PlainModel,
    federation: Federation,
    settings: Settings,
    ranks: Ranks,
    rows: int,
) -> Choice:
    """Stacked if possible and faster for so many rows; the engine in the settings, or an error."""
    solver = settings.solver
    if settings.engine == "loop":
        return Choice(None, "engine=loop")
    compute = compute_type(settings.precision)
    on_cpu = federation.device.type == "cpu"
    free = on_cpu and not _needs_stacked(settings, ranks)
    size, workers, compiled = solver.batch_size, settings.workers or 1, settings.compile == "on"
    alone = SURELY * loop_seconds(plain, size, workers)
    reason = ""
    stacked = None
    if callable(solver.optimizer):
        reason = f"{solver.name} is not one of the optimizers that are stacked (sgd, adam, adamw, rmsprop)"
    elif free and alone < least_stacked_seconds(plain, size, workers):
        return _gains_nothing(plain, size, rows)
    else:
        try:
            factored = on_cpu and solver.plain and compute is None
            stacked = StackedModel(model, plain, federation, compute=compute, factored=factored)
        except CannotStackError as error:
            reason = f"the model cannot be stacked: {error}"
    if stacked is None:
        remedy = _needs_stacked(settings, ranks)
        if remedy:
            raise InputError(f"{reason}; {remedy}")
        return Choice(None, reason)
    if settings.engine == "stacked":
        return Choice(stacked, "engine=stacked")
    if free and alone < stacked_seconds(stacked, plain, size, rows, workers, compiled=compiled):
        return _gains_nothing(plain, size, rows)
    return Choice(stacked, "the model can be stacked")


def _gains_nothing(plain: PlainModel, batch_size: int, rows: int) -> Choice:
    why = "a local step of this model keeps a core busy"
    if not plain.fills_a_core(batch_size):
        why = f"the clients at once ({rows}) are few for the operations of a local step"
    return Choice(None, f"on a CPU {why}, and stacking gains nothing")


def _needs_stacked(settings: Settings, ranks: Ranks) -> str:
    """A remedy if a setting needs the stacked executor, else empty."""
    if settings.engine == "stacked":
        return "engine=loop trains it"
    if settings.precision == "bf16":
        return "with precision=float32 it can train one client after another"
    if ranks.world > 1:
        return "without torchrun it can train one client after another"
    return ""
