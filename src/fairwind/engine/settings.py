"""Training options and their defaults."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import nn

from fairwind.codecs import codec_of
from fairwind.engine.solver import Solver
from fairwind.errors import InputError, in_range, positive, store_python_numbers, whole
from fairwind.robust.attacks import build_attack
from fairwind.robust.defence import build_defence
from fairwind.scores import Score

Model = nn.Module | Callable[[], nn.Module]
Engine = Literal["auto", "stacked", "loop"]
Switch = Literal["auto", "on", "off"]
DataOn = Literal["auto", "device", "host"]
ClientSelection = Literal["uniform", "size"]
Precision = Literal["auto", "float32", "tf32", "bf16"]

LARGEST = 2.0**20  # GiB
NUMBERS = 1
"""Version of the engine's numbers: raised by hand where the same settings give others, beyond rounding."""


MACHINE = {"effect": "machine"}  # how a machine computes a run: it may be resumed with another value
ROUNDING = {"effect": "rounding"}  # the same numbers, up to rounding
HISTORY = {"effect": "history"}  # which rounds are evaluated
Effect = Literal["numbers", "rounding", "machine", "history"]


@dataclass(frozen=True)
class Settings:
    """How to train, the same for every run of a simulation."""

    # Everything else follows from a field: its option, whose help is the text below it, and its place in
    # recipes and studies. A field decides the numbers of a run, unless its metadata says otherwise.
    rounds: int = 100
    """Rounds of training."""
    solver: Solver = field(default_factory=Solver)
    """How clients train."""
    participation: float = 1.0
    """Share of the clients that train in a round."""
    clients_per_round: int | None = None
    """Number of clients that train in a round, instead of a share."""
    selection: ClientSelection = "uniform"
    """How these are drawn: uniform, all alike; or size, by their numbers of training samples."""
    probe_samples: int | None = None
    """Samples on which clients measure loss and gradient before training (all if not given)."""
    codec: str | None = None
    """How clients send updates in fewer bytes: bf16, int8, or topk:share=0.01; what is left out is added to a
    client's next update."""
    eval_every: int = field(default=10, metadata=HISTORY)
    """Rounds between evaluations of all clients, on their validation samples, or test samples if there are
    none."""
    finetune: float = 0
    """Local epochs of fine-tuning: after the last round each client trains the model for so many, and what
    becomes of it is evaluated beside it."""
    target: float | None = None
    """Stop early once the average of every run has reached this, in percent if the score is accuracy."""
    patience: int | None = None
    """Stop early once no run's average has improved for so many evaluations; the trained models are the last
    ones, not the best."""
    attack: str | None = None
    """Some clients lie: signflip, inflated, noise, alie or labelflip, with their share, as in
    signflip:share=0.3. The others are evaluated."""
    defence: str | None = None
    """A robust sum in the place of the sum over clients: bounds, trimmed, median, multikrum, geometric or
    clipping."""
    engine: Engine = field(default="auto", metadata=MACHINE)
    """stacked trains all clients of all runs at once, loop one after another; auto takes the faster of those
    that can train the model."""
    device: str = field(default="auto", metadata=MACHINE)
    """cpu, cuda, cuda:1, …; auto takes a GPU where there is one."""
    compile: Switch = field(default="auto", metadata=MACHINE)
    """Compile the local step; auto does where a compiler is found and the run is long enough."""
    precision: Precision = field(default="auto", metadata=ROUNDING)
    """How local steps are computed: float32 is exact; tf32 rounds the factors of products, bf16 all but
    weights and sums, both for speed on a GPU. auto is tf32 on a GPU, float32 on a CPU."""
    memory: float | None = field(default=None, metadata=MACHINE)
    """GiB that clients training at once may take; the rest wait (if not given: on a CPU 1/32, which stays
    near its cache, or more if uncompiled steps have many operations; on a GPU a quarter of its memory)."""
    data_on: DataOn = field(default="auto", metadata=MACHINE)
    """Where samples are kept: on the device, or on the host, from where those of a few clients at a time are
    copied to the device; auto is the host if they would take more than half of a GPU's memory."""
    workers: int | None = field(default=None, metadata=MACHINE)
    """Threads that share the clients out on a CPU (one for each core if not given)."""

    def __post_init__(self) -> None:
        store_python_numbers(self)
        object.__setattr__(self, "device", str(self.device))  # it may be a torch.device
        if not isinstance(self.solver, Solver):
            raise InputError(
                f"solver={self.solver!r} is not a solver: give fairwind.Solver(lr=…, momentum=…)"
            )
        whole(1, rounds=self.rounds, eval_every=self.eval_every)
        for name in ("clients_per_round", "probe_samples", "patience", "workers"):
            if getattr(self, name) is not None:
                whole(1, **{name: getattr(self, name)})
        if self.clients_per_round is not None and self.participation != 1.0:
            raise InputError("participation and clients_per_round are both given: give one of them")
        if not isinstance(self.participation, int | float) or not 0 < self.participation <= 1:
            raise InputError(
                f"participation={self.participation} is not a share of the clients, from 0 to 1; "
                "for a number of clients give clients_per_round"
            )
        if self.codec is not None:
            object.__setattr__(self, "codec", codec_of(self.codec).name)
        if self.memory is not None:
            positive(memory=self.memory)
            in_range(0, LARGEST, memory=self.memory)
        in_range(0, 2**31, finetune=self.finetune)
        if self.target is not None:
            in_range(-math.inf, math.inf, target=self.target)
        if self.attack is not None:
            build_attack(self.attack)
        if self.defence is not None:
            build_defence(self.defence)
        for name, value, known in (
            ("selection", self.selection, get_args(ClientSelection)),
            ("engine", self.engine, get_args(Engine)),
            ("compile", self.compile, get_args(Switch)),
            ("precision", self.precision, get_args(Precision)),
            ("data_on", self.data_on, get_args(DataOn)),
        ):
            if value not in known:
                raise InputError(f"{name}={value!r} is not one of {', '.join(known)}")

    @property
    def fine_tuning(self) -> Solver:
        """How clients fine-tune: all of the model, for so many epochs, at the solver's first rate."""
        whole_model: dict[str, Any] = {"steps": None, "personal_first": None}
        return replace(self.solver, epochs=self.finetune, **whole_model, lr_decay=1.0, lr_schedule=None)

    def check_target(self, score: Score) -> None:
        """Refuses a share as the target of a score in percent, which would be reached at once."""
        if self.target is not None and score.percent and 0 < self.target <= 1:
            raise InputError(
                f"target={self.target:g}: {score.name} is in percent, so give {100 * self.target:g}"
            )


class Options(TypedDict, total=False):
    """The fields of `Settings` as keywords, for editors and type checkers; a test compares the two."""

    rounds: int | None  # None is the task's own, also of the solver
    solver: Solver | None
    participation: float
    clients_per_round: int | None
    selection: ClientSelection
    probe_samples: int | None
    codec: str | None
    eval_every: int
    finetune: float
    target: float | None
    patience: int | None
    attack: str | None
    defence: str | None
    engine: Engine
    device: str | torch.device
    compile: Switch
    precision: Precision
    memory: float | None
    data_on: DataOn
    workers: int | None


def names_of(*effects: Effect) -> tuple[str, ...]:
    """The settings that have one of these effects."""
    return tuple(f.name for f in fields(Settings) if f.metadata.get("effect", "numbers") in effects)
