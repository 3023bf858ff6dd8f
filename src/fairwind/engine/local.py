"""How the algorithms of all runs modify local steps, in a form that stacked rows share."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fairwind.contract import (
    GradientAlgorithm,
    Local,
    LocalAlgorithm,
    Memory,
    MemoryAlgorithm,
    PersonalAlgorithm,
)
from fairwind.engine.executor import Run, Shared
from fairwind.engine.layout import Layout
from fairwind.engine.solver import wide_type

Pass = Literal["training", "corrected", "personal"]  # kinds of training of a client in a round
PASSES: tuple[Pass, ...] = ("training", "corrected", "personal")


class Rules(NamedTuple):
    """What turns a row's gradient g into s(ℓ)·g + μ·y + w."""

    adds: bool = False  # whether any row has μ or w
    own: bool = False  # whether w differs by row, and not only by run
    scales: tuple[float | Callable[[Tensor], Tensor], ...] = ()  # s, by the index of a row's rule
    corrected: bool = False  # whether g is g(y) − g(x)

    @property
    def vectors(self) -> int:
        """How many vectors a row has for them."""
        return self.own + self.corrected

    def scale(self, losses: Tensor, rule: Tensor) -> Tensor | None:
        """s of every row, (rows,); None is 1."""
        if not self.scales:
            return None
        found = torch.ones_like(losses)
        for number, scale in enumerate(self.scales):
            value = scale(losses) if callable(scale) else torch.full_like(losses, scale)
            found = torch.where(rule == number, value, found)
        return found


PLAIN = Rules()


class Modifications(NamedTuple):
    """The modification of local steps in a round, for each run."""

    vectors: list[Tensor]  # w without memories, as matrices (R, n) by the layout; or empty
    rule: tuple[Tensor, Tensor]  # (R,) each: μ, and the index of the scale s
    shared: dict[int, Tensor]  # the servers' u (P,)


class Locals:
    """The modifications of R runs, for one kind of training."""

    def __init__(self, runs: Sequence[Run], way: Pass, like: Tensor):
        """`like` has the models' type and device."""
        self.way = way
        self.parts: dict[int, Local[Any]] = {}
        self.memories: dict[int, Memory] = {}
        for r, run in enumerate(runs):
            if trains(run, way):
                self.parts[r] = local_part(run, way)
                if way == "training" and isinstance(run.algorithm, MemoryAlgorithm):
                    self.memories[r] = run.algorithm.memory
        self.mine = list(self.parts)
        scales = tuple(dict.fromkeys(part.scale for part in self.parts.values() if part.scale != 1.0))
        pulled = any(part.pull or part.shared for part in self.parts.values())
        adds = pulled or bool(self.memories) or way != "training"
        self.rules = Rules(adds, bool(self.memories), scales, corrected=way == "corrected")
        rule, pull = torch.full((len(runs),), -1), torch.zeros(len(runs), dtype=wide_type(like.dtype))
        for r, part in self.parts.items():
            pull[r] = part.pull
            if part.scale in scales:
                rule[r] = scales.index(part.scale)
        self.rule, self.pull = rule.to(like.device), pull.to(like.device)  # (R,)

    def modifications(
        self, layout: Layout, x: Tensor, shared_by: Shared, gradients: dict[int, Tensor]
    ) -> Modifications:
        """From models x (R, P), what the servers share, and mean gradients where steps are corrected."""
        shared = {r: shared_by(r).to(x.dtype) for r, p in self.parts.items() if p.shared is not None}
        if not self.rules.adds:
            return Modifications([], (self.pull, self.rule), shared)
        w = -self.pull[:, None] * x
        for r, vector in shared.items():
            w[r] += vector
        if self.rules.corrected:
            for r, part in self.parts.items():
                assert not callable(part.scale)
                w[r] += part.scale * gradients[r].to(x.dtype)
        return Modifications(layout.as_matrices(layout.parts(w)), (self.pull, self.rule), shared)


def locals_of(runs: Sequence[Run], like: Tensor) -> dict[Pass, Locals]:
    """The modifications of the kinds of training that any run has."""
    found = [Locals(runs, way, like) for way in PASSES]
    return {each.way: each for each in found if each.parts}


def trains(run: Run, way: Pass) -> bool:
    """Whether a run has that kind of training."""
    corrected = isinstance(run.algorithm, GradientAlgorithm) and run.algorithm.corrected
    if way == "personal":
        return isinstance(run.algorithm, PersonalAlgorithm)
    return not trains_alone(run) and corrected == (way == "corrected")


def trains_alone(run: Run) -> bool:
    """Whether clients only train models of their own."""
    return isinstance(run.algorithm, PersonalAlgorithm) and run.algorithm.alone


def local_part(run: Run, way: Pass) -> Local[Any]:
    """A run's modification of local steps; the identity, if its algorithm has none."""
    algorithm = run.algorithm
    if way == "personal":
        assert isinstance(algorithm, PersonalAlgorithm)
        return Local(pull=algorithm.pull)
    if isinstance(algorithm, LocalAlgorithm | MemoryAlgorithm | GradientAlgorithm):
        return algorithm.local
    return Local()
