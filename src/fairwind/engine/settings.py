"""Training options and their defaults."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import nn

from fairwind.engine.solver import Solver
from fairwind.errors import InputError, in_range, positive, store_python_numbers, whole
from fairwind.scores import Score

Model = nn.Module | Callable[[], nn.Module]
Engine = Literal["auto", "stacked", "loop"]
Switch = Literal["auto", "on", "off"]
DataOn = Literal["auto", "device", "host"]
Precision = Literal["auto", "float32", "tf32", "bf16"]

LARGEST = 2.0**20  # GiB


@dataclass(frozen=True)
class Settings:
    """How to train, the same for every run of a simulation."""

    rounds: int = 100
    """Rounds of training."""
    solver: Solver = field(default_factory=Solver)
    """How clients train."""
    participation: float = 1.0
    """Share of the clients that train in a round."""
    clients_per_round: int | None = None
    """Their number, if given, instead of a share."""
    probe_samples: int | None = None
    """Samples of a probe, which measures loss and gradient before training; None is all, as for F(x⁰)."""
    eval_every: int = 10
    """Rounds between evaluations of all clients on their test samples."""
    target: float | None = None
    """Average score at which training stops early, once every run has reached it; accuracies in percent."""
    engine: Engine = "auto"
    """Train all clients of all runs at once (stacked) or one after another (loop); "auto" chooses the faster
    one that can train the model."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", and so on; "auto" takes a GPU where there is one."""
    compile: Switch = "auto"
    """Compile the stacked step; "auto" does if a compiler is found and the run is long enough."""
    precision: Precision = "auto"
    """Precision of local steps: float32; tf32, which rounds the factors of products; or bf16 with float32
    weights and sums. "auto" is tf32 on a GPU, float32 elsewhere."""
    memory: float | None = None
    """GiB for clients that train at once; None is 1/32 on a CPU, near its cache (more if uncompiled steps
    have many operations), and a quarter of a GPU."""
    data_on: DataOn = "auto"
    """Where samples are kept: on the device, or on the host, from which those of a few clients at a time are
    copied to the device. "auto" is the host if they would take more than half of a GPU's memory."""
    workers: int | None = None
    """Worker threads on a CPU, which share the clients; None is one per core."""

    def __post_init__(self) -> None:
        store_python_numbers(self)
        object.__setattr__(self, "device", str(self.device))  # it may be a torch.device
        if not isinstance(self.solver, Solver):
            raise InputError(
                f"solver={self.solver!r} is not a solver: give fairwind.Solver(lr=…, momentum=…)"
            )
        whole(1, rounds=self.rounds, eval_every=self.eval_every)
        if self.clients_per_round is not None:
            whole(1, clients_per_round=self.clients_per_round)
            if self.participation != 1.0:
                raise InputError("participation and clients_per_round are both given: give one of them")
        if not isinstance(self.participation, int | float) or not 0 < self.participation <= 1:
            raise InputError(
                f"participation={self.participation} is not a share of the clients, from 0 to 1; "
                "for a number of clients give clients_per_round"
            )
        if self.probe_samples is not None:
            whole(1, probe_samples=self.probe_samples)
        if self.memory is not None:
            positive(memory=self.memory)
            in_range(0, LARGEST, memory=self.memory)
        if self.target is not None:
            in_range(-math.inf, math.inf, target=self.target)
        if self.workers is not None:
            whole(1, workers=self.workers)
        for name, value, known in (
            ("engine", self.engine, get_args(Engine)),
            ("compile", self.compile, get_args(Switch)),
            ("precision", self.precision, get_args(Precision)),
            ("data_on", self.data_on, get_args(DataOn)),
        ):
            if value not in known:
                raise InputError(f"{name}={value!r} is not one of {', '.join(known)}")

    def check_target(self, score: Score) -> None:
        """Refuses a share as the target of a score in percent, which would be reached at once."""
        if self.target is not None and score.percent and 0 < self.target <= 1:
            raise InputError(
                f"target={self.target:g}: {score.name} is in percent, so give {100 * self.target:g}"
            )
