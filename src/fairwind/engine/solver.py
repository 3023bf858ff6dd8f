"""The local solver: what a client does with the model it received."""

from dataclasses import dataclass

from torch import Tensor

from fairwind.errors import InputError, in_range, positive, whole


@dataclass(frozen=True)
class Solver:
    """Mini-batch SGD, with heavy-ball or Nesterov momentum that starts at zero in every round."""

    lr: float = 0.01  # η_k
    momentum: float = 0.0  # ρ
    nesterov: bool = False
    weight_decay: float = 0.0
    batch_size: int = 10
    epochs: int | tuple[int, int] = 1
    """Local epochs a round; a pair (low, high) is drawn uniformly for each client and round."""

    def __post_init__(self) -> None:
        in_range(0, float("inf"), weight_decay=self.weight_decay)
        in_range(0, 1, momentum=self.momentum)
        whole(1, batch_size=self.batch_size)
        if not isinstance(self.epochs, int) and len(self.epochs) != 2:
            raise InputError(
                f"epochs={self.epochs} is neither a number nor a pair, the lowest and the highest"
            )
        for epochs in (self.fewest, self.most):
            whole(1, epochs=epochs)
        positive(lr=self.lr)
        if self.most < self.fewest:
            raise InputError(f"epochs=({self.fewest}, {self.most}): the larger number comes second")
        if self.nesterov and not self.momentum:
            raise InputError("nesterov needs momentum > 0")

    @property
    def fewest(self) -> int:
        return self.epochs if isinstance(self.epochs, int) else self.epochs[0]

    @property
    def most(self) -> int:
        return self.epochs if isinstance(self.epochs, int) else self.epochs[1]

    @property
    def plain(self) -> bool:
        """Whether a step is −η times the gradient, and nothing else."""
        return not (self.momentum or self.weight_decay)

    def accumulated(self, steps: Tensor) -> Tensor:
        """‖a‖₁ after τ steps: how often each gradient counts in the update, summed over gradients.

        A gradient taken i steps before the last enters heavy-ball updates 1 + ρ + … + ρⁱ times. A Nesterov
        step is g + ρ·buffer, so there it is τ + ρ times the heavy-ball sum.
        """
        rho = self.momentum
        heavy = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return steps + rho * heavy if self.nesterov else heavy

    def update(self, x: Tensor, g: Tensor, buffer: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The change −η·d of parameters `x` with gradient `g`, and the new momentum buffer."""
        if self.weight_decay:
            g = g + self.weight_decay * x
        if buffer is None:
            return -self.lr * g, None
        buffer = self.momentum * buffer + g
        return -self.lr * (g + self.momentum * buffer if self.nesterov else buffer), buffer
