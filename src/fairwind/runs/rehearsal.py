"""What a task computes for a few samples, in numbers: a change is noticed, whatever its parts are called."""

import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairwind.data.federation import Federation
from fairwind.data.samples import cast, mapped, take, tensors
from fairwind.engine.checks import build
from fairwind.engine.machine import seed_generators
from fairwind.engine.modules import duplicate, read
from fairwind.engine.plain import FITTED, TOLERANCE, PlainModel, judged
from fairwind.engine.solver import Solver
from fairwind.task import Task

FEWEST, MOST = FITTED, 256  # samples
ROOM = 2**22  # numbers of all samples' inputs, of outputs, and of parameters for each sample
DRAWS = 16  # of an augmentation, each of several samples
SCALES = 1.0, 30.0  # of outputs: those of an untrained model may all be on one side of a threshold
LARGE, CHUNK = 2**27, 2**20  # parameters of a model that is not copied to float64, and numbers at once
# Tolerances relative to a tensor's norm: of what is given in float32, whose last bits may differ between
# processors, and of what float64 makes of that
GIVEN, COMPUTED = 1e-6, 1e-5
ON_CPU = {torch.float64: COMPUTED, torch.float32: 1e-3}
STARTS, DATA = "initial weights under seed", "data"


Fingerprint = list[list[float | None]]


@dataclass(frozen=True)
class Rehearsal:
    """Fingerprints by what they are of, and the tolerance within which they are the same elsewhere."""

    tolerance: float
    found: Mapping[str, Fingerprint]

    def differs(self, other: "Rehearsal") -> str:
        """What is not the same in another rehearsal; empty if all is."""
        tolerance = max(self.tolerance, other.tolerance)
        for name, mine in self.found.items():
            theirs = other.found.get(name, [])
            close = _close(GIVEN if name.startswith((STARTS, DATA)) else tolerance)
            if len(mine) != len(theirs) or not all(map(close, mine, theirs)):
                return name
        return ""

    def beginning_with(self, **given: Any) -> "Rehearsal":
        """Also with what training begins with: tensors by what they are."""
        known = {name: fingerprint(tensors) for name, tensors in given.items()}
        return replace(self, found={**known, **self.found})

    @property
    def text(self) -> str:
        """The same in digits, fewer than the tolerance has."""
        digits, parts = round(-math.log10(self.tolerance)), [f"{self.tolerance:g}"]
        for name, found in self.found.items():
            parts.append(name)
            for size, *others in found:
                parts.append("none" if size is None else f"{size:.{digits}e}")
                parts += [
                    "none" if each is None else f"{each / (size or 1) + 0.0:.{digits}f}" for each in others
                ]
        return " ".join(parts)


def rehearsed(task: Task, solver: Solver, placed: Federation | None = None) -> Rehearsal:
    """What a task's model, loss, scores, augmentation and optimizer compute.

    In float64 on a CPU, or in its own type if that is in a module's code. One that is large, or needs its
    device, computes as it trains, on the `placed` federation (the task's own if not given).
    """
    few = _few(task.federation)
    with warnings.catch_warnings(), _own_randomness():
        warnings.simplefilter("ignore")  # they have been shown where the task was fitted
        model = duplicate(build(task.model, 0))
        if sum(p.numel() for p in model.parameters()) <= LARGE:
            for converted in (nn.Module.double, nn.Module.cpu):
                with suppress(Exception):  # whatever a user's module makes of another type or device
                    return _rehearsed(task, converted(duplicate(model)), few, solver, ON_CPU)
        return _rehearsed(task, model, placed or task.federation, solver, TOLERANCE)


def _rehearsed(
    task: Task,
    model: nn.Module,
    federation: Federation,
    solver: Solver,
    tolerances: Mapping[torch.dtype, float],
) -> Rehearsal:
    dtype = next((p.dtype for p in model.parameters() if p.requires_grad), torch.float32)
    loss = duplicate(task.loss).to(dtype) if isinstance(task.loss, nn.Module) else task.loss
    inputs, targets = (cast(each, dtype) for each in (federation.inputs, federation.targets))
    federation = replace(federation, inputs=inputs, targets=targets)
    plain = PlainModel.fitted(
        model,
        federation,
        loss,
        task.score,
        solver.batch_size,
        augment=task.augment,
        sharing=task.sharing,
    )
    index = _spread(federation.samples)
    inputs = sum(t[:1].numel() for t in tensors(federation.inputs))
    parameters = sum(p.numel() for p in model.parameters())
    samples, many = federation.at(index[: _count(max(inputs, parameters))]), federation.at(index)[1]
    found: dict[str, Fingerprint] = {"augmentation": _augmented(plain, samples[0])}
    with plain.own_generators():
        found |= _evaluated(plain, *samples, many)
        found["local steps"] = _stepped(plain, *samples, solver)
    return Rehearsal(tolerances.get(dtype, 0.1), found)


def _augmented(plain: PlainModel, inputs: Any) -> Fingerprint:
    """Inputs as an augmentation changes them; nothing without one."""
    if not plain.augmentation.functions:
        return []
    found = []
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        for seed in range(DRAWS):
            seed_generators(plain.start.device, seed)
            found.append(plain.augmentation(mapped(torch.clone, inputs)))
    return fingerprint(found)


@torch.no_grad()
def _evaluated(plain: PlainModel, inputs: Any, targets: Any, many: Any) -> dict[str, Fingerprint]:
    """Outputs in evaluation; their losses and scores, also beside `many` other targets."""
    plain.load(plain.whole.parts(plain.first))
    plain.train(False)
    outputs = plain.outputs(inputs, plain.evaluation_randomness)
    losses, *scores = judged(plain.loss, plain.judges, outputs, targets)
    of_loss, of_scores, given = [losses], list(scores), read(outputs)
    size = sum(t[:1].numel() for t in tensors(given) if t.dim())
    many = take(many, slice(0, _count(size)))
    count = len(tensors(many)[0])
    sizes = torch.tensor([count // 3, count - count // 3])
    tiled = mapped(lambda t: t[torch.arange(count) % len(t)] if t.dim() else t, given)
    for factor in SCALES:
        scaled = mapped(partial(_scaled, factor), tiled)
        if not plain.loss.own:
            of_loss += _tried(plain.loss.numbers, scaled, many)
        for score in plain.judges:
            for values in () if score.is_loss else _tried(score.per_sample, scaled, many):
                of_scores += [values, *_tried(score.of_clients, values[None], sizes)]
    kinds = [torch.tensor([score.sign, score.percent]) for score in plain.judges]
    return {
        "model": fingerprint(read(outputs)),
        "loss": fingerprint(of_loss),
        "score": fingerprint([*of_scores, *kinds]),
    }


def _stepped(plain: PlainModel, inputs: Any, targets: Any, solver: Solver) -> Fingerprint:
    """Losses in training mode of two local steps, and what these do to weights and buffers."""
    plain.load(plain.whole.parts(plain.first))
    plain.train()
    before = [weight.detach().clone() for weight in plain.weights]
    lr, losses = solver.rate(0), []
    own = callable(solver.optimizer)  # settings say all of another
    optimizer = solver.build(plain.weights, lr) if own else torch.optim.SGD(plain.weights, lr=lr)
    with torch.enable_grad():
        for key in (1, 2):
            losses.append(plain.training_loss(inputs, targets, key))
            losses[-1].backward()  # type: ignore[no-untyped-call]
            with solver.explained():
                optimizer.step()
                optimizer.zero_grad()
    moved = [(now.detach() - then).reshape(-1) for now, then in zip(plain.weights, before, strict=True)]
    buffers = [buffer for buffer in plain.module.buffers() if buffer.is_floating_point()]
    return fingerprint([*losses, torch.cat(moved) if moved else [], buffers])


def _scaled(factor: float, values: Tensor) -> Tensor:
    return values * factor if values.is_floating_point() else values


def _tried(function: Callable[..., Tensor], *given: Any) -> list[Tensor]:
    """What a user's function returns; nothing if it does not take outputs that it was not made for."""
    try:
        return [function(*given)]
    except Exception:  # whatever it raises
        return []


def fingerprint(found: Any) -> Fingerprint:
    """Of each tensor its norm and a projection, and another of where it is not finite, if it is anywhere."""
    made: Fingerprint = []
    for tensor in tensors(found):
        square = projection = spoilt = 0.0
        for i, part in enumerate(torch.split(tensor.detach().reshape(-1), CHUNK)):
            values = part.cpu().double()
            along = math.cos(i) * _waves()[: len(values)]
            finite = values.isfinite()
            values = torch.where(finite, values, 0)
            square += float(values @ values)
            projection += float(values @ along)
            spoilt += float((~finite).double() @ along)
        numbers = [math.sqrt(square), projection, *([spoilt] if spoilt else [])]
        made.append([number if math.isfinite(number) else None for number in numbers])
    return made


@cache
def _waves() -> Tensor:
    """What a projection is along."""
    return torch.arange(1.0, 1.0 + CHUNK, dtype=torch.float64).cos()


def _close(tolerance: float) -> Callable[[list[float | None], list[float | None]], bool]:
    """Whether the numbers of two tensors are the same up to a tolerance relative to their norm."""

    def close(mine: list[float | None], theirs: list[float | None]) -> bool:
        allowed = tolerance * max(mine[0] or 0, theirs[0] or 0, GIVEN)
        return len(mine) == len(theirs) and all(
            a is b if a is None or b is None else abs(a - b) <= allowed
            for a, b in zip(mine, theirs, strict=True)
        )

    return close


def _few(federation: Federation) -> Federation:
    """Some samples from everywhere in a federation, as one client on a CPU."""
    index = _spread(federation.samples).to(tensors(federation.inputs)[0].device)
    inputs, targets = (
        mapped(lambda t: t[index].cpu(), part) for part in (federation.inputs, federation.targets)
    )
    none = torch.zeros(1, dtype=torch.int64)
    count = none + len(index)
    return Federation(inputs, targets, none, count, none, ("all",), classes=federation.classes)


def _count(numbers: int) -> int:
    """How many samples are taken that need so many numbers each; the same on every machine."""
    return min(max(ROOM // max(numbers, 1), FEWEST), MOST)


def _spread(samples: int) -> Tensor:
    """Places of samples, of which any first ones are from everywhere."""
    golden = (math.sqrt(5) - 1) / 2
    places = (torch.arange(1, 1 + MOST, dtype=torch.float64) * golden % 1 * samples).long()
    return torch.tensor(list(dict.fromkeys(places.tolist())))


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Within, Python's and NumPy's generators begin at a seed; afterwards they are as they were."""
    states = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
