"""The simulation: rounds of all runs, evaluated and resumable."""

import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fairwind.contract import advance
from fairwind.data.federation import Federation
from fairwind.engine.checkpoint import Checkpoint
from fairwind.engine.cohort import Cohort, Loss, accuracy, check, cross_entropy
from fairwind.engine.evaluate import client_means, split
from fairwind.engine.executor import Executor, Run
from fairwind.engine.factors import factor
from fairwind.engine.loop import Loop
from fairwind.engine.precision import Precision, compute_type, products
from fairwind.engine.ranks import find, join
from fairwind.engine.record import Recorder
from fairwind.engine.schedule import Schedule
from fairwind.engine.solver import Solver
from fairwind.engine.stacked import Stacked
from fairwind.errors import InputError, first_line, in_range, positive, whole
from fairwind.metrics import fairness, finite

Model = nn.Module | Callable[[], nn.Module]
Engine = Literal["stacked", "loop"]
Switch = Literal["auto", "on", "off"]

COMPILING = {"cpu": 15, "cuda": 60}  # seconds that it takes, about, and must save


@dataclass(frozen=True)
class Settings:
    """How to train, the same for every run of a simulation."""

    rounds: int = 100
    solver: Solver = field(default_factory=Solver)
    participation: float | int = 1.0
    """Share of clients in a round (a float up to 1.0), or their number (an int)."""
    probe_samples: int | None = None
    """Samples on which a client measures its loss and gradient before training; None is all, as for F(x⁰)."""
    eval_every: int = 10
    engine: Engine = "stacked"
    device: str = "auto"
    compile: Switch = "auto"
    """Compile the local step; "auto" does where a compiler is found and the run is long enough."""
    precision: Precision = "auto"
    """How local steps are computed: exactly (float32), or with factors rounded (tf32) or all but the weights
    and sums in half the bits (bf16) for speed on a GPU. "auto" is tf32 on a GPU, float32 elsewhere."""
    memory: float | None = None
    """GiB that rows training at once may take; None is 1/32 on a CPU, near its cache, a quarter of a GPU."""

    def __post_init__(self) -> None:
        if not isinstance(self.solver, Solver):
            raise InputError(
                f"solver={self.solver!r} is not a solver: give fairwind.Solver(lr=…, momentum=…)"
            )
        whole(1, rounds=self.rounds, eval_every=self.eval_every)
        if self.probe_samples is not None:
            whole(1, probe_samples=self.probe_samples)
        if self.memory is not None:
            positive(memory=self.memory)
        for name, value, known in (
            ("engine", self.engine, ("stacked", "loop")),
            ("compile", self.compile, ("auto", "on", "off")),
            ("precision", self.precision, get_args(Precision)),
        ):
            if value not in known:
                raise InputError(f"{name}={value!r} is not one of {', '.join(known)}")


def resolve(settings: Settings) -> Settings:
    """The settings with device, memory and precision chosen, so that a resumed run computes the same."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"device {device!r} is neither cpu nor cuda")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used here: {first_line(error)}") from None
    if find().world > 1:
        _check_ranks(settings.engine, device)
    memory, precision = settings.memory, settings.precision
    on_gpu = device.startswith("cuda")
    if precision == "auto":
        precision = "tf32" if on_gpu else "float32"
    if precision == "tf32" and not on_gpu:
        raise InputError("precision tf32 is a GPU's; on a CPU take float32")
    if precision == "bf16" and settings.engine == "loop":
        raise InputError("precision bf16 is the stacked engine's; with engine=loop take float32 or tf32")
    if memory is None:
        memory = torch.cuda.get_device_properties(device).total_memory / 2**32 if on_gpu else 1 / 32
    return replace(settings, device=device, memory=memory, precision=precision)


def _check_ranks(engine: Engine, device: str) -> None:
    """Refuses what several processes cannot do together."""
    if engine == "loop":
        raise InputError("the loop is one process: start it without torchrun, or take the stacked engine")
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if device.startswith("cuda:"):
        raise InputError(f"{device!r} is one GPU for all processes: give 'cuda', and each takes its own")
    if device == "cuda" and here > gpus:
        raise InputError(
            f"{here} processes cannot share {gpus} GPU(s): start one for each, or give device 'cpu'"
        )


def _compiler_found(device: str) -> bool:
    if device.startswith("cuda"):
        return find_spec("triton") is not None
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


class Simulation:
    """All runs of a comparison, at some round."""

    def __init__(
        self,
        model: Model,
        federation: Federation,
        runs: Sequence[Run],
        settings: Settings,
        *,
        loss: Loss = cross_entropy,
        score: Loss = accuracy,
    ):
        self.ranks = join()
        self.settings = resolve(settings)
        self.runs = list(runs)
        if not self.runs:
            raise InputError("there is nothing to run: name at least one algorithm and one seed")
        for run in self.runs:
            whole(0, seed=run.seed)
            in_range(0, 2**32, seed=run.seed)
        models = {run.seed: _build(model, run.seed) for run in self.runs}
        first = next(iter(models.values()))
        _check_shared(models)
        compute = compute_type(self.settings.precision)
        self.cohort = Cohort(first, loss, score, compute=compute).to(self.settings.device)
        self.federation = _cast(federation, self.cohort.dtype).to(self.settings.device)
        check(self.cohort, first, self.federation)
        s = self.settings
        if s.engine == "stacked" and s.device == "cpu" and s.solver.plain and compute is None:
            factor(self.cohort, first, self.federation)
        if not federation.test.any():
            raise InputError("no client has test samples; give clients more samples or a smaller train share")

        start = {seed: self.cohort.flatten(m).to(self.settings.device) for seed, m in models.items()}
        self.x = torch.stack([start[run.seed] for run in self.runs])  # (R, P)
        states = [run.algorithm.init(x) for run, x in zip(self.runs, self.x, strict=True)]
        # Written in place, where the models are: none may be another's, or stay behind in a replayed round.
        self.states = [type(state)(*(t.to(self.x.device, copy=True) for t in state)) for state in states]
        self.loss0 = self._first_losses(start)

        self.executor = self._executor()
        self.recorder = Recorder(self.x.device)
        self.test = split(self.federation, "test")
        self.round = 0
        self.client_steps = 0
        self.seconds = 0.0
        self.left_out = torch.zeros(len(self.runs), dtype=torch.int64, device=self.x.device)
        self.stalled = torch.zeros_like(self.left_out)
        self.history: list[dict[str, Any]] = []
        self.evaluate()

    def _first_losses(self, start: dict[int, Tensor]) -> Tensor:
        """Every client's loss F_k(x⁰) under each run (R, K); NaN where the algorithm asks for none."""
        losses = torch.full((len(self.runs), len(self.federation)), torch.nan, dtype=torch.float64)
        losses = losses.to(self.x.device)
        asking = [r for r, run in enumerate(self.runs) if run.algorithm.probe != "none"]
        seeds = sorted({self.runs[r].seed for r in asking})
        if seeds:
            train = split(self.federation, "train")
            models = torch.stack([start[seed] for seed in seeds])
            with self._products():
                first, _ = client_means(self.cohort, self.federation, models, *train, self.ranks)
            for r in asking:
                losses[r] = first[seeds.index(self.runs[r].seed)]
        return losses

    def _executor(self) -> Executor:
        s = self.settings
        self.schedule = Schedule(self.federation, s.solver, s.participation, s.probe_samples)
        if s.engine == "loop":
            self.settings = replace(s, compile="off")
            return Loop(self.cohort, self.federation, self.schedule, self.runs)
        assert s.memory is not None
        budget = int(s.memory * 2**30 / self.x.element_size())
        stacked = Stacked(
            self.cohort, self.federation, self.schedule, self.runs, budget=budget, ranks=self.ranks
        )
        if s.compile == "auto":
            worth = s.rounds * stacked.saves() >= COMPILING[self.x.device.type]
            if worth and not _compiler_found(s.device):
                missing = "Triton" if self.x.is_cuda else "a C++ compiler (g++ or clang++)"
                warnings.warn(f"{missing} was not found: steps run uncompiled, and slower", stacklevel=2)
                worth = False
            self.settings = replace(s, compile="on" if worth else "off")
        if self.settings.compile == "on":
            stacked.compile()
        return stacked

    def _products(self) -> AbstractContextManager[None]:
        return products(self.settings.precision, self.x.device)

    @property
    def done(self) -> bool:
        return self.round >= self.settings.rounds

    def step(self) -> None:
        """One round of every run, and an evaluation if one is due."""
        began = time.perf_counter()
        self.client_steps += self.executor.prepare(self.round)
        if self.executor.repeats:
            self.recorder.do("a round", self._advance)
            if self.executor.ran_short:  # its chunks will be others
                self.recorder.forget()
            if not self.recorder.on:
                self.executor.step_by_step()
        else:
            self._advance()
        self.round += 1
        if self.round % self.settings.eval_every == 0 or self.done:
            self.evaluate()
        self.seconds += time.perf_counter() - began

    def _advance(self) -> None:
        """The clients' work and the servers' steps, in place."""
        with self._products():
            outcome = self.executor.round(self.x, self.loss0)
        stepped = []
        for r, run in enumerate(self.runs):
            sums = outcome.total[r], outcome.sums[r], outcome.used[r]
            stepped.append(advance(run.algorithm, self.x[r], self.states[r], *sums))
            _check_shapes(run.label, self.states[r], stepped[-1][1])
        for r, (x, state, moved) in enumerate(stepped):
            self.x[r] = x
            for old, new in zip(self.states[r], state, strict=True):
                old.copy_(new)
            self.stalled[r] += ~moved
        self.left_out += outcome.left_out

    def run(
        self,
        save: Callable[[], None] | None = None,
        *,
        every: float = 30,
        after_round: Callable[[], None] | None = None,
    ) -> None:
        """All rounds that are left; `save` is called every so many seconds, and at the end."""
        saved = time.monotonic()
        while not self.done:
            self.step()
            if after_round is not None:
                after_round()
            if save is not None and (self.done or time.monotonic() - saved >= every):
                save()
                saved = time.monotonic()

    def evaluate(self) -> None:
        """Every client's test loss and accuracy now, added to the history."""
        with self._products():
            loss, score = client_means(self.cohort, self.federation, self.x, *self.test, self.ranks)
        self.loss, self.accuracy = loss.cpu(), 100 * score.cpu()  # (R, K)
        for r, run in enumerate(self.runs):
            metrics = finite(fairness(self.accuracy[r], self.loss[r], self.federation.test))
            # What the server adapts by; before the first round it has measured nothing.
            state = self.states[r]._asdict() if self.round else {}
            scalars = {k: float(v) for k, v in state.items() if v.ndim == 0}
            line = {"algorithm": run.label, "seed": run.seed, "round": self.round, **metrics}
            self.history.append({**line, **{k: v for k, v in finite(scalars).items() if k not in line}})

    def checkpoint(self) -> Checkpoint:
        """Everything that a continuation needs."""
        tensors = {
            "x": self.x,
            "loss0": self.loss0,
            "left_out": self.left_out,
            "stalled": self.stalled,
            "accuracy": self.accuracy,
            "loss": self.loss,
        }
        for r, state in enumerate(self.states):
            tensors |= {f"state.{r}.{name}": value for name, value in state._asdict().items()}
        record = {"history": list(self.history), "client_steps": self.client_steps, "seconds": self.seconds}
        # Of its own, because states are written in place.
        return Checkpoint(self.round, {name: t.clone() for name, t in tensors.items()}, record)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continues from a checkpoint of this very simulation."""
        tensors = {name: t.to(self.settings.device, copy=True) for name, t in checkpoint.tensors.items()}
        self.x, self.loss0 = tensors["x"], tensors["loss0"]
        self.left_out, self.stalled = tensors["left_out"], tensors["stalled"]
        self.accuracy, self.loss = checkpoint.tensors["accuracy"], checkpoint.tensors["loss"]
        self.states = [
            type(state)(*(tensors[f"state.{r}.{name}"] for name in state._fields))
            for r, state in enumerate(self.states)
        ]
        self.recorder.forget()
        self.round = checkpoint.round
        self.history = list(checkpoint.record["history"])
        self.client_steps, self.seconds = checkpoint.record["client_steps"], checkpoint.record["seconds"]


def _check_shapes(label: str, old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> None:
    """Refuses a state that changes shape: it is kept where it is."""
    for name, before, after in zip(type(old)._fields, old, new, strict=True):  # type: ignore[attr-defined]
        if before.shape != after.shape:
            raise InputError(
                f"{label}: the state's {name!r} is of shape {tuple(before.shape)} at first and "
                f"{tuple(after.shape)} after a step; let init give it its final shape"
            )


def _build(model: Model, seed: int) -> nn.Module:
    """The model itself, or a fresh one whose initial weights are drawn by the seed."""
    if isinstance(model, nn.Module):
        return model
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        return model()


def _check_shared(models: dict[int, nn.Module]) -> None:
    """Refuses seeds whose models differ in what all rows share: frozen parameters and buffers."""

    def shared(model: nn.Module) -> dict[str, Tensor]:
        frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        return frozen | dict(model.named_buffers())

    first, *others = models.values()
    for name, value in shared(first).items():
        if not all(torch.equal(value, shared(other)[name]) for other in others):
            raise InputError(
                f"{name!r} is not trained but differs by seed; make it the same, or use one seed"
            )


def _cast(federation: Federation, dtype: torch.dtype) -> Federation:
    """Floating-point inputs in the model's type."""
    if federation.inputs.is_floating_point():
        return replace(federation, inputs=federation.inputs.to(dtype))
    return federation
