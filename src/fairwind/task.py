"""A task: a model, the clients' data, how clients train and how they are scored."""

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from torch import nn

from fairwind.data.federation import Federation
from fairwind.engine.augmentation import Augmentation
from fairwind.engine.layout import BatchNorm, Sharing
from fairwind.engine.losses.fitting import check_loss
from fairwind.engine.losses.loss import cross_entropy
from fairwind.engine.settings import Model
from fairwind.engine.solver import Solver
from fairwind.errors import InputError, python_numbers, whole
from fairwind.models.norms import converted
from fairwind.scores import as_scores


@dataclass(frozen=True)
class Task:
    """A model and the data of its clients; every way to train takes a task."""

    model: Model
    """A module, with whose weights training starts; or a function that creates one, with initial weights
    drawn from each run's seed."""
    federation: Federation
    """The clients and their samples."""
    _: KW_ONLY
    loss: Any = cross_entropy
    """One of PyTorch's losses; a function of outputs and targets that returns each sample's loss (B,), a pair
    of sums and divisors (B,), or one number for the batch; or "model" if the model's output has a loss."""
    score: Any = None
    """How test samples are scored: one of `fairwind.scores` or its name, a function that returns one number
    per sample (B,), larger being better, or several, the main one first. None follows from the loss."""
    augment: Any = None
    """A function that changes the inputs of a training batch (B, …) at random, before the model and anew at
    every local step; or several. See `fairwind.augment`."""
    personal: Any = None
    """Which parameters and buffers stay with each client, while algorithms average the others: a pattern of
    names such as "head.*", a type of module such as `torch.nn.LayerNorm`, a function of name and tensor, or
    several of these."""
    batch_norm: BatchNorm | None = None
    """What is done with batch norm: "local" keeps it with each client, "shared" averages its statistics by
    sample counts, "recomputed" computes them after training on all clients' samples, "frozen" leaves layers
    as they are given, "group" replaces them by group norm. None refuses batch norm that trains."""
    solver: Solver = field(default_factory=Solver)
    """How clients train."""
    rounds: int = 100
    """Rounds of training, unless a call says otherwise."""
    name: str = ""
    """Its name in results and on report pages; the federation's name if not given."""
    _found: tuple[str, str] = field(default=("", ""), init=False, repr=False, compare=False)
    """How the command line found it, and the digest of its data then."""

    def __post_init__(self) -> None:
        if not isinstance(self.federation, Federation):
            kind = type(self.federation).__name__
            raise InputError(f"a {kind} is not a federation: make one with Federation.from_clients")
        if not isinstance(self.model, nn.Module) and not callable(self.model):
            kind = type(self.model).__name__
            raise InputError(f"a {kind} is not a model: give a torch.nn.Module or a function that makes one")
        if not isinstance(self.solver, Solver):
            raise InputError(f"solver={self.solver!r} is not a solver: give fairwind.Solver(lr=…)")
        object.__setattr__(self, "rounds", python_numbers(self.rounds))
        whole(1, rounds=self.rounds)
        check_loss(self.loss)
        if self.score is not None:
            as_scores(self.score)
        Augmentation(self.augment)
        if self.sharing.batch_norm in ("frozen", "group"):
            object.__setattr__(self, "model", converted(self.model, self.sharing.batch_norm))
        if not self.name:
            object.__setattr__(self, "name", self.federation.name)

    @property
    def sharing(self) -> Sharing:
        """Which of the model's tensors are averaged."""
        return Sharing(self.personal, self.batch_norm)

    @property
    def source(self) -> str:
        """How the command line finds it: a setup such as cifar10:beta=0.1, or FILE.py:NAME.

        Empty for a task made in Python, as a changed copy of a setup's is, or one with data changed in place.
        """
        source, digest = self._found
        return source if source and self.federation.digest() == digest else ""

    def sourced(self, source: str) -> "Task":
        """The same task, as found by the command line; without a name of its own it has its source's."""
        name = source.rpartition("/")[2] if self.name == Federation.name else self.name
        found = replace(self, name=name)
        object.__setattr__(found, "_found", (source, self.federation.digest()))
        return found
