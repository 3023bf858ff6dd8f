"""The local solver: how a client trains the model it received."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fairwind.errors import InputError, in_range, positive, store_python_numbers, unknown, whole

Method = Literal["sgd", "adam", "adamw", "rmsprop"]
Rate = Tensor | float


@dataclass(frozen=True)
class Solver:
    """Mini-batch SGD, Adam, AdamW or RMSprop; momentum and moments start at zero in every round."""

    lr: float = 0.01  #: Learning rate, η_k.
    momentum: float = 0.0  #: ρ, of SGD and RMSprop.
    nesterov: bool = False  #: Whether SGD's momentum is Nesterov's.
    weight_decay: float = 0.0  #: Of AdamW decoupled from the gradient, else added to it.
    batch_size: int = 10  #: Samples in a batch; the last of an epoch may have fewer.
    epochs: int | tuple[int, int] = 1
    """Local epochs a round; a pair (low, high) is drawn uniformly for each client and round."""
    optimizer: Method | Callable[..., torch.optim.Optimizer] = "sgd"
    """A name, or any class of torch.optim, called as optimizer(parameters, lr=…), which cannot be stacked."""
    betas: tuple[float, float] = (0.9, 0.999)  #: Adam's.
    eps: float = 1e-8  #: Adam's and RMSprop's.
    smoothing: float = 0.99  #: RMSprop's α.
    clip: float | None = None
    """Gradient clipping: the largest norm of a batch's gradient."""
    lr_decay: float = 1.0
    """Factor of the learning rate after every round."""
    lr_schedule: Callable[[int], float] | None = None
    """Factor of the learning rate in a round, counted from 0."""

    def __post_init__(self) -> None:
        store_python_numbers(self)
        in_range(0, float("inf"), weight_decay=self.weight_decay)
        in_range(0, 1, momentum=self.momentum, smoothing=self.smoothing)
        whole(1, batch_size=self.batch_size)
        in_range(1, 2**31, batch_size=self.batch_size)
        if not isinstance(self.epochs, int) and len(self.epochs) != 2:
            raise InputError(
                f"epochs={self.epochs} is neither a number nor a pair, the lowest and the highest"
            )
        for epochs in (self.fewest, self.most):
            whole(1, epochs=epochs)
        positive(lr=self.lr, eps=self.eps, lr_decay=self.lr_decay)
        if self.clip is not None:
            positive(clip=self.clip)
        for beta in self.betas:
            in_range(0, 1, betas=beta)
        if self.most < self.fewest:
            raise InputError(f"epochs=({self.fewest}, {self.most}): the larger number comes second")
        if not callable(self.optimizer) and self.optimizer not in get_args(Method):
            raise unknown("optimizer", str(self.optimizer), get_args(Method))
        if self.nesterov and (not self.momentum or self.optimizer != "sgd"):
            raise InputError("nesterov needs SGD with momentum > 0")
        if self.momentum and self.optimizer not in ("sgd", "rmsprop"):
            raise InputError(f"momentum is for SGD and RMSprop; {self.name} has betas, or its own arguments")

    @property
    def name(self) -> str:
        return getattr(self.optimizer, "__name__", str(self.optimizer))

    @property
    def fewest(self) -> int:
        return self.epochs if isinstance(self.epochs, int) else self.epochs[0]

    @property
    def most(self) -> int:
        return self.epochs if isinstance(self.epochs, int) else self.epochs[1]

    @property
    def plain(self) -> bool:
        """Whether a step is −η times the gradient: plain SGD."""
        return self.optimizer == "sgd" and not (self.momentum or self.weight_decay or self.clip)

    @property
    def moments(self) -> int:
        """How many numbers of optimizer state each parameter has."""
        return {"sgd": 0, "rmsprop": 1}.get(self.name, 2) + bool(self.momentum)

    def rate(self, round: int) -> float:
        """η in a round."""
        factor = 1.0 if self.lr_schedule is None else float(self.lr_schedule(round))
        lr = self.lr * self.lr_decay**round * factor
        if not 0 < lr < float("inf"):
            raise InputError(f"the learning rate in round {round} is {lr}: check lr_decay or lr_schedule")
        return lr

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
        decayed = -lr * self.weight_decay * x if self.optimizer == "adamw" else 0.0
        if self.weight_decay and self.optimizer != "adamw":
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

    def build(self, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """PyTorch's own optimiser, for a loop over clients."""
        if callable(self.optimizer):
            return self.optimizer(parameters, lr=lr)
        decay: dict[str, Any] = {"lr": lr, "weight_decay": self.weight_decay}
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, momentum=self.momentum, nesterov=self.nesterov, **decay)
        if self.optimizer == "rmsprop":
            own: dict[str, Any] = {"alpha": self.smoothing, "eps": self.eps, "momentum": self.momentum}
            return torch.optim.RMSprop(parameters, **own, **decay)
        adam = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return adam(parameters, betas=self.betas, eps=self.eps, **decay)
