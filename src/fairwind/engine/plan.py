"""How a comparison is computed, and why: from counts, settings and facts of the machine, not measurements.

So the same task is always trained in the same way. The functions here are pure. Executors and servers obey
the plan: another one, made with `_replace`, is another path to the same numbers, up to rounding.
"""

from dataclasses import replace
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

from fairwind.engine import tuning
from fairwind.engine.machine import Machine
from fairwind.engine.settings import Engine, Precision, Settings
from fairwind.engine.solver import Method
from fairwind.errors import InputError

Value = TypeVar("Value", bound=str | int | float, covariant=True)
Place = Literal["device", "host"]
Steps = Literal["eager", "ahead-of-time", "torch.compile", "hand-written"]
Gradients = Literal["dense", "factored"]
Convolutions = Literal["none", "as called", "channels last", "products"]
Graphs = Literal["none", "steps", "rounds"]
Scored = Literal["all", "one"]


class Decision(NamedTuple, Generic[Value]):
    """One part of a plan."""

    value: Value
    why: str


class ExecutionPlan(NamedTuple):
    """How a comparison is computed. Other plans give the same numbers, up to rounding and the precision."""

    device: Decision[str]  #: "cpu", "cuda", …
    data: Decision[Place]  #: Where samples are kept: "device" or "host".
    precision: Decision[Precision]  #: Of local steps.
    executor: Decision[Engine]  #: "stacked" (all clients at once) or "loop" (one after another).
    steps: Decision[Steps]  #: "eager", "ahead-of-time" (compiled), "torch.compile" or "hand-written" (C++).
    gradients: Decision[Gradients]  #: "factored" ones are never stored.
    convolutions: Decision[Convolutions]  #: PyTorch's ("as called" or "channels last"), or "products".
    graphs: Decision[Graphs]  #: What is recorded as CUDA graphs.
    workers: Decision[int]  #: Threads that share the clients.
    threads: Decision[int]  #: Threads of one kernel on a CPU.
    memory: Decision[float]  #: GiB for clients that train at once.
    client_vectors: Decision[Place]  #: Where vectors are that clients keep between rounds.
    scorer: Decision[Scored]  #: How many models are evaluated at once.

    @property
    def sizes(self) -> tuning.Sizes:
        return tuning.GPU if self.on_gpu else tuning.CPU

    @property
    def on_gpu(self) -> bool:
        return self.device.value != "cpu"

    @property
    def order(self) -> str:
        """In which order clients train, and why."""
        order = "one client after another" if self.executor.value == "loop" else "all clients at once"
        return f"{order}: {self.executor.why}"

    def __str__(self) -> str:
        return "\n".join(
            f"{name:<14} {d.value if isinstance(d.value, str) else f'{d.value:g}'}: {d.why}"
            for name, d in self._asdict().items()
        )

    def to_json(self) -> dict[str, dict[str, str | int | float]]:
        return {name: decision._asdict() for name, decision in self._asdict().items()}


class Placement(NamedTuple):
    """What is decided before the model is tried: as in the plan."""

    device: Decision[str]
    data: Decision[Place]
    precision: Decision[Precision]


class Counts(NamedTuple):
    """What a plan depends on besides settings and machine, whether or not the model is stacked."""

    rows: int  # clients of all runs that train in a round
    repeats: bool  # whether the same clients take the same steps in every round
    mean_steps: float  # of clients,
    most_steps: int  # and at most
    summed: bool  # whether servers need no more than sums: not all updates
    phases: bool  # whether parts of the model train in turn
    own_parts: bool  # whether a part of the model is not in the vector that is summed
    kept_numbers: int  # of vectors that clients keep between rounds
    batch_size: int
    plain_sgd: bool
    own_optimizer: str  # the name of an optimizer that cannot be stacked
    parameters: int
    number_bytes: int  # of a parameter
    operations: int  # that a local step launches
    convolutions: int
    recurrent: int
    flops: int  # of a sample's forward pass
    replaces_functions: bool  # to draw random numbers, which slows down every operation
    channels_last: bool  # whether a CPU may keep activations with channels last in memory
    draws_by_generator: bool  # from PyTorch's generators, which threads share


class StackedCounts(NamedTuple):
    """The same of a model that was stacked."""

    per_sample: int  # activations
    row_numbers: int  # that a row holds while it trains, apart from its samples
    operations: int  # that a step launches
    factored_layers: int  # dense layers whose gradients need not be stored
    handwritten: Literal["all", "some", "none"]  # kinds of steps for which there is C++
    recurrent_layers: int
    by_token: int  # those that our kernels cannot run
    waits: bool  # whether the host waits for a GPU within an uncompiled step


def chunk_numbers(memory: float, number_bytes: int) -> int:
    """How many numbers the clients that train at once may hold together."""
    return max(1, int(memory * 2**30 / number_bytes))


def place(settings: Settings, machine: Machine, data_bytes: int) -> Placement:
    """Where and how precisely it is computed, given the size of all samples."""
    on_gpu, data_on = machine.on_gpu, settings.data_on
    device = Decision(machine.device, "a GPU was found" if on_gpu else "no GPU was found")
    if settings.device != "auto":
        device = Decision(machine.device, f"device={settings.device}")
    precision: Decision[Precision] = Decision("float32", "the default on a CPU")
    if settings.precision != "auto":
        precision = Decision(settings.precision, f"precision={settings.precision}")
    elif on_gpu:
        precision = Decision("tf32", "the default on a GPU")
    if data_on != "auto":
        return Placement(device, Decision(data_on, f"data_on={data_on}"), precision)
    if not on_gpu:
        return Placement(device, Decision("device", "the device is the host"), precision)
    large = data_bytes > tuning.GPU_DATA_SHARE * machine.memory
    why = f"samples take {'more' if large else 'no more'} than half of the GPU's memory"
    return Placement(device, Decision("host" if large else "device", why), precision)


class Case(NamedTuple):
    """What a plan is decided from."""

    settings: Settings
    machine: Machine
    counts: Counts

    @property
    def workers(self) -> int:
        return self.settings.workers or self.machine.cores

    @property
    def remedy(self) -> str:
        """What to change if a setting needs the stacked executor, else empty."""
        if self.settings.engine == "stacked":
            return "engine=loop trains it"
        if self.settings.precision == "bf16":
            return "with precision=float32 it can train one client after another"
        if self.machine.world > 1:
            return "without torchrun it can train one client after another"
        return ""

    @property
    def chosen_by_speed(self) -> bool:
        return not self.machine.on_gpu and not self.remedy

    @property
    def factors_help(self) -> bool:
        """Whether gradients of stacked clients may be left as factors."""
        return not self.machine.on_gpu and self.counts.plain_sgd and self.settings.precision != "bf16"

    @property
    def step_flops(self) -> int:
        """Of a local step, about: forward, and twice as much backward."""
        return 3 * self.counts.flops * self.counts.batch_size

    @property
    def kernel_seconds(self) -> float:
        """About how long a local step on a CPU is in kernels, beyond launching them."""
        layers = tuning.LOOP_SECONDS_PER_CONVOLUTION * self.counts.convolutions
        layers += tuning.LOOP_SECONDS_PER_RECURRENT_LAYER * self.counts.recurrent
        return layers + tuning.LOOP_SECONDS_PER_FLOP * self.step_flops

    @property
    def fills_a_core(self) -> bool:
        """Whether a local step on a CPU is long in kernels, during which other threads can run."""
        return self.kernel_seconds >= tuning.MIN_THREADED_SECONDS

    @property
    def loop_seconds(self) -> float:
        """Of a client that trains by itself, less some in its favour."""
        launch = tuning.LOOP_SECONDS_PER_OPERATION
        if self.counts.replaces_functions:
            launch = tuning.LOOP_SECONDS_PER_REPLACED_OPERATION
        seconds = tuning.LOOP_SECONDS_PER_CLIENT + launch * self.counts.operations + self.kernel_seconds
        if self.fills_a_core:
            seconds *= tuning.LOOP_SERIAL_SHARE + (1 - tuning.LOOP_SERIAL_SHARE) / self.workers
        return tuning.SURE_LOOP_SHARE * seconds

    def stacked_seconds(self, stacked: StackedCounts | None = None) -> float:
        """Of one row; at least, as long as stacking was not tried."""
        counts, share = self.counts, tuning.STACKED_SERIAL_SHARE
        work = tuning.STACKED_SECONDS_PER_PARAMETER * counts.parameters
        work += tuning.STACKED_SECONDS_PER_FLOP * self.step_flops
        shared = share + (1 - share) / self.workers
        if stacked is None:
            return work * shared
        numbers, compiled = 2 * counts.batch_size * stacked.per_sample, self.settings.compile == "on"
        work += tuning.STACKED_SECONDS_PER_NUMBER * numbers
        passing = counts.rows * (numbers + 5 * counts.parameters)
        if compiled or passing >= tuning.MIN_NUMBERS_PER_LAUNCH * stacked.operations:
            work *= shared
        launching = tuning.STACKED_SECONDS_PER_OPERATION * stacked.operations / counts.rows
        return work if compiled else work + launching

    @property
    def gains_nothing(self) -> str:
        why = "a local step of this model keeps a core busy"
        if not self.fills_a_core:
            why = f"the clients at once ({self.counts.rows}) are few for the operations of a local step"
        return f"on a CPU {why}, and stacking gains nothing"


def why_not_stacked(case: Case) -> str:
    """Why clients train one after another, even if the model can be stacked; empty if that must be tried."""
    if case.settings.engine == "loop":
        return "engine=loop"
    if case.counts.phases:
        return "personal_first trains parts of the model in turn, one client after another"
    if own := case.counts.own_optimizer:
        return f"{own} is not one of the optimizers that are stacked ({', '.join(get_args(Method))})"
    # Trying is expensive for a large model, so it is left out where stacking cannot gain.
    if case.chosen_by_speed and case.loop_seconds < case.stacked_seconds():
        return case.gains_nothing
    return ""


def decide(case: Case, placed: Placement, stacking: StackedCounts | str) -> ExecutionPlan:
    """The plan; `stacking` says why the model is not stacked, or counts what it is then."""
    if isinstance(stacking, str):
        if case.remedy:
            raise InputError(f"{stacking}; {case.remedy}")
        return _loop(case, placed, stacking)
    if case.settings.engine == "stacked":
        return _stacked(case, placed, stacking, "engine=stacked")
    if _handwritten_convolutions(case, stacking, _steps(case, placed, stacking)):
        return _stacked(case, placed, stacking, "there are C++ steps for its convolutions")
    if case.chosen_by_speed and case.loop_seconds < case.stacked_seconds(stacking):
        return _loop(case, placed, case.gains_nothing)
    return _stacked(case, placed, stacking, "the model can be stacked")


def _handwritten_convolutions(case: Case, stacked: StackedCounts, steps: Decision[Steps]) -> bool:
    """Whether all local steps and probes are C++ for convolutions, which is faster than the loop."""
    return bool(case.counts.convolutions) and stacked.handwritten == "all" and steps.value == "hand-written"


def resolved_settings(settings: Settings, machine: Machine, plan: ExecutionPlan) -> Settings:
    """Settings with what was decided, which recipes keep: with these, the same is decided again."""
    return replace(
        settings,
        device=plan.device.value,
        precision=plan.precision.value,
        engine=plan.executor.value,
        compile="off" if plan.steps.value == "eager" else "on",
        memory=plan.memory.value,
        workers=settings.workers or machine.cores,
    )


def _loop(case: Case, placed: Placement, why: str) -> ExecutionPlan:
    workers, threads = _loop_threads(case)
    return ExecutionPlan(
        *placed,
        executor=Decision("loop", why),
        steps=Decision("eager", "clients train one after another"),
        gradients=Decision("dense", "clients train one after another"),
        convolutions=_loop_convolutions(case),
        graphs=Decision("none", "they are for stacked clients on a GPU"),
        workers=workers,
        threads=threads,
        memory=_memory(case),
        client_vectors=_client_vectors(case),
        scorer=Decision("one", "clients train one after another"),
    )


def _stacked(case: Case, placed: Placement, stacked: StackedCounts, why: str) -> ExecutionPlan:
    settings, counts, memory, vectors = case.settings, case.counts, _memory(case), _client_vectors(case)
    steps = _steps(case, placed, stacked)
    gib = tuning.MIN_NUMBERS_PER_LAUNCH * stacked.operations * counts.number_bytes / 2**30
    if steps.value == "eager" and not case.machine.on_gpu and settings.memory is None and gib > memory.value:
        memory = Decision(gib, "uncompiled steps have many operations to launch")
    scorer: Decision[Scored] = Decision("all", "their layers are computed together")
    if case.machine.on_gpu and counts.flops >= tuning.MIN_SINGLE_SCORED_FLOPS:
        scorer = Decision("one", "one model's batch fills the GPU")
    if _handwritten_convolutions(case, stacked, steps):
        scorer = Decision("one", "PyTorch's convolutions are faster than those of all models at once")
    asked = "one per core" if settings.workers is None else f"workers={settings.workers}"
    return ExecutionPlan(
        *placed,
        executor=Decision("stacked", why),
        steps=steps,
        gradients=_gradients(case.factors_help, stacked.factored_layers),
        convolutions=_stacked_convolutions(case),
        graphs=_graphs(
            case,
            hosted="host" in (placed.data.value, vectors.value),
            waits=stacked.waits and steps.value == "eager",
        ),
        workers=Decision(case.workers, asked),
        threads=Decision(1, "threads share the clients, not the kernels"),
        memory=memory,
        client_vectors=vectors,
        scorer=scorer,
    )


def _loop_threads(case: Case) -> tuple[Decision[int], Decision[int]]:
    """Worker threads that share the clients of the loop, and threads of each kernel."""
    counts, cores = case.counts, case.workers
    if case.machine.on_gpu:
        return Decision(1, "the GPU computes"), Decision(1, "the GPU computes")
    if cores == 1:
        why = "one core" if case.settings.workers is None else "workers=1"
        return Decision(1, why), Decision(1, why)
    # Several large models do not fit into the cache; small steps would wait for the GIL.
    alone = "kernels use the threads instead"
    if counts.rows < cores:
        return Decision(1, alone), Decision(cores, f"{counts.rows} clients are fewer than {cores} cores")
    if counts.parameters >= tuning.MIN_LARGE_PARAMETERS or case.step_flops >= tuning.MIN_LARGE_STEP_FLOPS:
        return Decision(1, alone), Decision(cores, "a large model's kernels fill all cores")
    one = Decision(1, "kernels are small")
    if counts.draws_by_generator:
        return Decision(1, "the model draws from PyTorch's generator, which threads share"), one
    if not case.fills_a_core:
        return Decision(1, "steps are so small that threads would wait for each other"), one
    return Decision(cores, "a local step keeps a core busy"), one


def _memory(case: Case) -> Decision[float]:
    if case.settings.memory is not None:
        return Decision(case.settings.memory, f"memory={case.settings.memory:g}")
    if case.machine.on_gpu:
        return Decision(
            tuning.GPU_MEMORY_SHARE * case.machine.memory / 2**30, "a quarter of the GPU's memory"
        )
    return Decision(tuning.CPU_MEMORY_GIB, "near the size of a CPU's cache")


def _client_vectors(case: Case) -> Decision[Place]:
    counts = case.counts
    room = tuning.GPU_CLIENT_VECTORS_SHARE * chunk_numbers(_memory(case).value, counts.number_bytes)
    if case.machine.on_gpu and counts.kept_numbers > room:
        return Decision("host", "they would take more than a quarter of the memory for clients")
    return Decision("device", "they fit" if counts.kept_numbers else "there are none")


def _steps(case: Case, placed: Placement, stacked: StackedCounts) -> Decision[Steps]:
    """Compiled if that saves more time than it takes."""
    settings, machine, counts = case
    how: Steps = "torch.compile" if machine.on_gpu else "ahead-of-time"
    takes = (tuning.GPU if machine.on_gpu else tuning.CPU).compile_seconds
    if stacked.handwritten != "none":
        how = "hand-written"
    if stacked.handwritten == "all":
        takes = tuning.HANDWRITTEN_SECONDS
    if settings.compile != "auto":
        return Decision(how if settings.compile == "on" else "eager", f"compile={settings.compile}")
    numbers = counts.rows // machine.world * stacked.row_numbers
    if machine.on_gpu:  # passes over memory; but many small products gain nothing
        slow = stacked.by_token or not machine.runs_kernels or placed.precision.value == "float32"
        a_round = tuning.SAVED_SECONDS_PER_NUMBER * numbers * counts.mean_steps
        a_round = 0.0 if stacked.recurrent_layers and slow else a_round
    else:
        room = chunk_numbers(_memory(case).value, counts.number_bytes)
        a_round = tuning.SAVED_SECONDS_PER_CALL * max(
            counts.most_steps, int(numbers // room * counts.mean_steps)
        )
    if stacked.handwritten == "all" and counts.convolutions:  # about half of what the loop takes
        a_round = counts.rows * counts.mean_steps * case.loop_seconds / 2
    saved, what = settings.rounds * a_round, f"compiling takes about {takes:.0f} s, and saves about"
    if saved < takes:
        return Decision("eager", f"{what} {saved:.2g} s in {settings.rounds} rounds")
    if machine.missing:
        return Decision("eager", f"{machine.missing} was not found")
    return Decision(how, f"{what} {saved:.0f} s in {settings.rounds} rounds")


def _gradients(possible: bool, layers: int) -> Decision[Gradients]:
    if possible and layers:
        return Decision("factored", f"{layers} large dense layer{'s' * (layers > 1)}")
    return Decision("dense", "no large dense layer" if possible else "factors are for plain SGD on a CPU")


def _loop_convolutions(case: Case) -> Decision[Convolutions]:
    if not case.counts.convolutions:
        return Decision("none", "the model has none")
    if case.machine.on_gpu:
        return Decision("as called", "channels last is for a CPU")
    if not case.counts.channels_last:
        return Decision("as called", "the model has no nn.Conv2d, or cannot train with channels last")
    if case.counts.flops < tuning.MIN_CHANNELS_LAST_FLOPS:
        return Decision("as called", "kernels are so small that their memory layout does not matter")
    return Decision("channels last", "a CPU's kernels are faster for this memory layout")


def _stacked_convolutions(case: Case) -> Decision[Convolutions]:
    if not case.counts.convolutions:
        return Decision("none", "the model has none")
    return Decision("products", "clients have different kernels")


def _graphs(case: Case, *, hosted: bool, waits: bool) -> Decision[Graphs]:
    if not case.machine.on_gpu:
        return Decision("none", "they are for stacked clients on a GPU")
    if waits:
        return Decision("none", "the model or its loss copies numbers between host and GPU in every step")
    if hosted:
        return Decision("steps", "what is kept on the host is copied in every round")
    if not case.counts.summed:
        return Decision("steps", "servers that see all updates decide on the host")
    if case.counts.own_parts:
        return Decision("steps", "what clients keep is stored after every chunk")
    if case.machine.world > 1:
        return Decision("steps", "processes exchange sums in every round")
    if not case.counts.repeats:
        return Decision("steps", "other clients or steps in every round")
    return Decision("rounds", f"all rounds are alike; if of up to {tuning.MAX_GRAPH_STEPS} steps, else these")
