"""The local solver: how a client trains the model it received."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from fairwind.errors import InputError, first_line, in_range, positive, store_python_numbers, unknown, whole

Method = Literal["sgd", "adam", "adamw", "rmsprop"]
Rate = Tensor | float


class Trait(NamedTuple):
    """What distinguishes a method, besides its formula in `Solver.update`."""

    module: type[torch.optim.Optimizer]  #: PyTorch's own.
    moments: int = 0  #: Numbers of optimizer state that each parameter has, besides the momentum's.
    takes_momentum: bool = False
    decoupled: bool = False  #: Whether weight decay shrinks the parameters; else it is added to the gradient.


TRAITS: dict[Method, Trait] = {
    "sgd": Trait(torch.optim.SGD, takes_momentum=True),
    "adam": Trait(torch.optim.Adam, moments=2),
    "adamw": Trait(torch.optim.AdamW, moments=2, decoupled=True),
    "rmsprop": Trait(torch.optim.RMSprop, moments=1, takes_momentum=True),
}
PYTHON_ONLY = {"command_line": False}  # no option of the command line


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """In which moments, steps and sums of a model of this type are computed: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def name_of(function: Callable[..., Any]) -> str:
    """A function or class as module:name; a partial one with its arguments, another object by its class."""
    if isinstance(function, partial):
        given = *map(_shown, function.args), *(f"{k}={_shown(v)}" for k, v in function.keywords.items())
        return f"{name_of(function.func)}({', '.join(given)})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _shown(value: object) -> str:
    """An argument's value; of an object its class alone, because others show where they lie in memory."""
    if callable(value):
        return name_of(value)
    return repr(value) if isinstance(value, int | float | str | tuple | None) else type(value).__name__


@dataclass(frozen=True)
class Solver:
    """Mini-batch SGD, Adam, AdamW or RMSprop; momentum and moments start at zero in every round.

    A client trains for one epoch a round, unless `epochs` or `steps` are given.
    """

    lr: float = 0.01
    """Local learning rate, η_k."""
    momentum: float = 0.0
    """Momentum ρ of SGD and RMSprop."""
    nesterov: bool = field(default=False, metadata=PYTHON_ONLY)  #: Whether SGD's momentum is Nesterov's.
    weight_decay: float = 0.0
    """Local weight decay; AdamW's is decoupled from the gradient, else it is added to it."""
    batch_size: int = 10
    """Samples in a local batch; the last of an epoch may have fewer."""
    epochs: float | tuple[float, float] | None = None
    """Local epochs a round, also parts of one: 0.5 is half of the batches, rounded up. Between two numbers
    one is drawn uniformly for each client and round: a whole one if both are."""
    steps: int | tuple[int, int] | None = None
    """Local steps a round, instead of epochs; every epoch begun is shuffled anew. Between two numbers one is
    drawn, as for epochs."""
    personal_first: float | None = field(default=None, metadata=PYTHON_ONLY)
    """How many of a round's epochs, or steps, come first and train the personal part of the model alone; the
    others train the shared part alone. With 0 the personal part does not train; None trains both together."""
    optimizer: Method | Callable[..., torch.optim.Optimizer] = field(default="sgd", metadata=PYTHON_ONLY)
    """A name, or any class of torch.optim, called as optimizer(parameters, lr=…), which cannot be stacked."""
    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata=PYTHON_ONLY)  #: Adam's.
    eps: float = field(default=1e-8, metadata=PYTHON_ONLY)  #: Adam's and RMSprop's.
    smoothing: float = field(default=0.99, metadata=PYTHON_ONLY)  #: RMSprop's α.
    clip: float | None = None
    """Largest norm of a batch's gradient; longer ones are scaled down to it."""
    lr_decay: float = 1.0
    """What the local learning rate is multiplied by after every round."""
    lr_schedule: Callable[[int], float] | None = field(default=None, metadata=PYTHON_ONLY)
    """Factor of the learning rate in a round, counted from 0."""

    def __post_init__(self) -> None:
        store_python_numbers(self)
        in_range(0, float("inf"), weight_decay=self.weight_decay)
        in_range(0, 1, momentum=self.momentum, smoothing=self.smoothing)
        whole(1, batch_size=self.batch_size)
        in_range(1, 2**31, batch_size=self.batch_size)
        self._settle_work()
        positive(lr=self.lr, eps=self.eps, lr_decay=self.lr_decay)
        if self.clip is not None:
            positive(clip=self.clip)
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise InputError(f"betas={self.betas} is not a pair of numbers, as in betas=(0.9, 0.999)")
        for beta in self.betas:
            in_range(0, 1, betas=beta)
        if not (self.lr_schedule is None or callable(self.lr_schedule)):
            raise InputError(f"lr_schedule={self.lr_schedule!r} is not a function of the round")
        if not callable(self.optimizer) and self.optimizer not in get_args(Method):
            raise unknown("optimizer", str(self.optimizer), get_args(Method))
        given = {field.name: getattr(self, field.name) != field.default for field in fields(self)}
        ignored = [name for name in ("weight_decay", "betas", "eps", "smoothing") if given[name]]
        if callable(self.optimizer) and ignored:
            raise InputError(
                f"{ignored[0]} is not passed on to optimizer={self.name}: give it there, with "
                f"functools.partial(…, {ignored[0]}={getattr(self, ignored[0])})"
            )
        if self.nesterov and (not self.momentum or self.optimizer != "sgd"):
            raise InputError("nesterov needs SGD with momentum > 0")
        if self.momentum and not (self.trait and self.trait.takes_momentum):
            raise InputError(f"momentum is for SGD and RMSprop; {self.name} has betas, or its own arguments")

    def _settle_work(self) -> None:
        """Checks epochs and steps; what is the same number of epochs becomes the same value."""
        if self.epochs is not None and self.steps is not None:
            raise InputError(
                f"epochs={self.epochs} and steps={self.steps} are both given: give one of them, "
                "and None for the other"
            )
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1)
        name = "epochs" if self.steps is None else "steps"
        given = getattr(self, name)
        work = list(given) if isinstance(given, list | tuple) else [given] * 2
        if len(work) != 2:
            raise InputError(f"{name}={given} is neither a number nor a pair, the lowest and the highest")
        for value in work:
            if name == "steps":
                whole(1, steps=value)
            positive(**{name: value})
            in_range(0, 2**31, **{name: value})
        if work[1] < work[0]:
            raise InputError(f"{name}=({work[0]}, {work[1]}): the larger number comes second")
        work = [int(value) if value == int(value) else value for value in work]
        object.__setattr__(self, name, tuple(work) if isinstance(given, list | tuple) else work[0])

        first = self.personal_first
        if first is not None:
            in_range(0, 2**31, personal_first=first)
            first = int(first) if first == int(first) else first
            if name == "steps":
                whole(0, personal_first=first)  # type: ignore[arg-type]
            object.__setattr__(self, "personal_first", first)
            if first >= work[0]:
                raise InputError(
                    f"personal_first={first} leaves nothing of {name}={given} for the shared part: "
                    f"give more {name}"
                )

    @property
    def name(self) -> str:
        return name_of(self.optimizer).partition(":")[2] if callable(self.optimizer) else self.optimizer

    @property
    def trait(self) -> Trait | None:
        """Of the method; None for a class of torch.optim."""
        return None if callable(self.optimizer) else TRAITS[self.optimizer]

    @property
    def work(self) -> tuple[float, float]:
        """The fewest and the most epochs of a round, or steps."""
        given = self.epochs if self.steps is None else self.steps
        assert given is not None
        return given if isinstance(given, tuple) else (given, given)

    def drawn_work(self, hashes: Tensor) -> Tensor:
        """Between the fewest and the most, from 32-bit hashes."""
        low, high = self.work
        if isinstance(low, int) and isinstance(high, int):
            return low + hashes % (high - low + 1)
        return low + (high - low) / 2**32 * hashes.double()

    def local_steps(self, work: Tensor | float, per_epoch: Tensor) -> Tensor:
        """τ of clients that do so many epochs, or steps, and have so many batches in an epoch."""
        if self.steps is not None:
            return torch.zeros_like(per_epoch) + work
        # 0.07 · 100 is a little more than 7 in floating point, and must not become 8.
        steps = torch.ceil(work * per_epoch.double() * (1 - 1e-12))
        return steps.clamp(min=1).long()

    def personal_steps(self, steps: Tensor, per_epoch: Tensor) -> Tensor:
        """How many of τ steps come first and train the personal part alone; always fewer than all."""
        first = self.personal_first
        return self.local_steps(first, per_epoch).minimum(steps - 1) if first else torch.zeros_like(steps)

    @property
    def plain(self) -> bool:
        """Whether a step is −η times the gradient: plain SGD."""
        return self.optimizer == "sgd" and not (self.momentum or self.weight_decay or self.clip)

    @property
    def moments(self) -> int:
        """How many numbers of optimizer state each parameter has."""
        return (self.trait.moments if self.trait else 2) + bool(self.momentum)

    def rate(self, round: int) -> float:
        """η in a round."""
        lr = float("inf")
        with contextlib.suppress(OverflowError):
            lr = self.lr * self.lr_decay**round * self.scheduled(round)
        if not 0 < lr < float("inf"):
            raise InputError(f"the learning rate in round {round} is {lr}: check lr_decay or lr_schedule")
        return lr

    def scheduled(self, round: int) -> float:
        """What the schedule multiplies the learning rate by in a round."""
        if self.lr_schedule is None:
            return 1.0
        try:
            return float(self.lr_schedule(round))
        except InputError:
            raise
        except Exception as error:  # whatever a user's function raises, or returns
            raise InputError(
                f"lr_schedule gives no number for round {round}: {type(error).__name__}: {first_line(error)}"
            ) from error

    def check_rates(self, rounds: int) -> None:
        """Refuses a learning rate that is of no use in any of the rounds."""
        for round in (0, rounds - 1) if self.lr_schedule is None else range(rounds):
            self.rate(round)

    def accumulated(self, steps: Tensor) -> Tensor:
        """‖a‖₁ after τ steps: the total weight of the gradients in the update.

        With heavy-ball momentum, the gradient of i steps before the last has weight 1 + ρ + … + ρⁱ. A
        Nesterov step is g + ρ·buffer, which gives τ plus ρ times the heavy-ball sum. NaN if a step is not a
        sum of gradients.
        """
        if self.optimizer != "sgd":
            return torch.full_like(steps, torch.nan)
        rho = self.momentum
        if not rho:
            return steps
        heavy = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return steps + rho * heavy if self.nesterov else heavy

    def update(
        self, x: Tensor, g: Tensor, moments: tuple[Tensor, ...], lr: Rate, step: Rate
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The change of parameters `x` with gradient `g` in a `step`, counted from 1; and the new moments."""
        assert self.trait is not None
        decayed = -lr * self.weight_decay * x if self.trait.decoupled else 0.0
        if self.weight_decay and not self.trait.decoupled:
            g = g + self.weight_decay * x
        if self.optimizer in ("adam", "adamw"):
            m = moments[0] + (1 - self.betas[0]) * (g - moments[0])
            v = self.betas[1] * moments[1] + (1 - self.betas[1]) * g * g
            corrected = v.sqrt() / (1 - self.betas[1] ** step) ** 0.5 + self.eps
            return decayed - lr / (1 - self.betas[0] ** step) * m / corrected, (m, v)
        kept: tuple[Tensor, ...] = ()
        if self.optimizer == "rmsprop":
            v = self.smoothing * moments[0] + (1 - self.smoothing) * g * g
            g, kept, moments = g / (v.sqrt() + self.eps), (v,), moments[1:]
        if not self.momentum:
            return -lr * g, kept
        buffer = self.momentum * moments[0] + g
        return -lr * (g + self.momentum * buffer if self.nesterov else buffer), (*kept, buffer)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns errors of a user's optimizer into one line."""
        try:
            yield
        except Exception as error:  # whatever it raises
            if not callable(self.optimizer):
                raise
            raise InputError(
                f"optimizer={self.name} cannot train this model: {type(error).__name__}: "
                f"{first_line(error)}; give a class of torch.optim that takes (parameters, lr=…), and whose "
                "step needs no closure"
            ) from error

    def build(self, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """PyTorch's own optimiser, for a loop over clients."""
        if callable(self.optimizer):
            with self.explained():
                made = self.optimizer(parameters, lr=lr)
                _ = made.step, made.zero_grad
            return made
        assert self.trait is not None
        if any(wide_type(parameter.dtype) != parameter.dtype for parameter in parameters):
            return InFloat32(parameters, lr, self)
        options: dict[str, Any] = {"lr": lr, "weight_decay": self.weight_decay}
        if self.trait.takes_momentum:
            options["momentum"] = self.momentum
        own: dict[str, Any] = {"nesterov": self.nesterov}
        if self.optimizer == "rmsprop":
            own = {"alpha": self.smoothing, "eps": self.eps}
        elif self.optimizer != "sgd":
            own = {"betas": self.betas, "eps": self.eps}
        return self.trait.module(parameters, **options, **own)


class InFloat32(torch.optim.Optimizer):
    """A solver for parameters of 16 bits, whose moments and steps are computed in float32.

    In 16 bits Adam's 0.999 is 1, or the squares of gradients are 0.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, solver: Solver):
        super().__init__(parameters, {})
        self.parameters, self.lr, self.solver = parameters, lr, solver
        count = solver.moments
        self.moments = {p: (torch.zeros_like(p, dtype=torch.float32),) * count for p in parameters}
        self.steps = dict.fromkeys(parameters, 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.parameters:
            if p.grad is not None:
                self.steps[p] += 1
                given = p.float(), p.grad.float(), self.moments[p], self.lr, self.steps[p]
                change, self.moments[p] = self.solver.update(*given)
                p.add_(change)


def option_names() -> list[str]:
    """The fields that are options of the command line."""
    return [field.name for field in fields(Solver) if field.metadata.get("command_line", True)]
