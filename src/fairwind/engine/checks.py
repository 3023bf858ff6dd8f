"""Checks before a simulation starts: runs, models and states that cannot be used are refused."""

from collections.abc import Collection, Sequence
from itertools import pairwise, product

import torch
from torch import Tensor, nn

from fairwind.aggregation import first_state, refuses, unasked
from fairwind.codecs import check_coded
from fairwind.contract import PooledAlgorithm
from fairwind.engine import tuning
from fairwind.engine.executor import Run, seeing
from fairwind.engine.machine import Machine
from fairwind.engine.settings import Model, Settings
from fairwind.errors import InputError, first_line, in_range, whole
from fairwind.robust.defence import check_one_vector
from fairwind.runs.schema import FURTHER
from fairwind.testing import CLIENTS, P, rehearse, reports


def check_runs(runs: Sequence[Run], settings: Settings, *, in_one_place: bool = False) -> None:
    """Refuses seeds out of range, and algorithms that the solver or the place of the data rules out.

    Also training where PyTorch computes no gradients.
    """
    if torch.is_inference_mode_enabled():
        raise InputError("torch.inference_mode() switches gradients off for good: train outside of it")
    if not runs:
        raise InputError("there is nothing to run: name at least one algorithm and one seed")
    check_labels(runs)
    solver = settings.solver
    tells_steps = bool(torch.isfinite(solver.accumulated(torch.ones(()))))
    for run in {id(run.algorithm): run for run in runs}.values():
        check_rehearsed(run)
    for run in runs:
        whole(0, seed=run.seed)
        in_range(0, 2**32, seed=run.seed)
        if settings.codec is not None:
            check_coded(run.algorithm)
        if isinstance(run.algorithm, PooledAlgorithm) and not in_one_place:
            raise InputError(
                f"{run.label} trains on the samples of all clients in one place, which a real federation "
                "does not have: simulate it with fairwind.compare"
            )
        if not tells_steps and refuses(run.algorithm, steps=torch.nan):
            raise InputError(
                f"{run.label} divides by its clients' steps (‖a‖₁), which {solver.name} does not have: "
                "take SGD, or another algorithm"
            )
        for name in ("attack", "defence"):
            if getattr(settings, name) is not None:
                check_one_vector(run.algorithm, f"{name}={getattr(settings, name)}")


def check_rehearsed(run: Run) -> None:
    """Refuses an algorithm that fails in a made-up round, or reads what its clients do not measure."""
    x = torch.ones(P, dtype=torch.float64)
    try:
        state = first_state(run.algorithm, x, CLIENTS)
        rehearse(run.algorithm, x, state, *reports(CLIENTS, seed=0))
        read = [name for name in unasked(run.algorithm) if refuses(run.algorithm, **{name: torch.nan})]
    except InputError as error:
        raise InputError(f"{run.label}: {error}") from None
    except Exception as error:  # whatever an author's function raises
        raise InputError(
            f"{run.label} fails in a made-up round: {type(error).__name__}: {first_line(error)}; "
            "fairwind.testing.check_algorithm tests an algorithm"
        ) from error
    if read:
        raise InputError(
            f"{run.label} reads {read[0]!r}, which clients do not measure with "
            f"probe={run.algorithm.probe!r}: ask for another probe"
        )


def check_labels(runs: Sequence[Run]) -> None:
    """Refuses names under which tables and files could not tell two models apart."""
    labels = sorted({run.label for run in runs})
    for label, kind in product(labels, FURTHER):
        if (taken := f"{label} ({kind})") in labels:
            raise InputError(
                f"{taken!r} is what another model of {label!r} is called: give this algorithm another name"
            )
    places = sorted((f"{run.label}/{run.seed}/", run.label) for run in runs)  # in files
    for (place, one), (longer, other) in pairwise(places):
        if longer.startswith(place) and one != other:
            raise InputError(f"files cannot tell {one!r} from {other!r}: give one of them another name")


def check_room(runs: list[Run], updates: int, machine: Machine) -> None:
    """Refuses servers that see all updates of a round, of so many bytes, if they take half of the memory."""
    copies = tuning.ROBUST_SUM_COPIES if any(run.held for run in runs) else 0  # of one run at a time
    together = (len(seeing(runs)) + copies) * updates
    if together > tuning.SERVER_UPDATES_SHARE * machine.memory:
        label = runs[next(iter(seeing(runs)))].label
        raise InputError(
            f"{label} sees all updates of a round at once, {together / 2**30:.3g} of "
            f"{machine.memory / 2**30:.3g} GiB; take fewer clients_per_round, or fewer such runs together"
        )


def check_shapes(label: str, old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> None:
    """Refuses a state that changes shape, because it is updated in place."""
    for name, before, after in zip(type(old)._fields, old, new, strict=True):  # type: ignore[attr-defined]
        if before.shape != after.shape:
            raise InputError(
                f"{label}: the state's {name!r} is of shape {tuple(before.shape)} at first and "
                f"{tuple(after.shape)} after a step; let init give it its final shape"
            )


def build(model: Model, seed: int) -> nn.Module:
    """The model itself, or a fresh one whose initial weights are drawn by the seed."""
    if isinstance(model, nn.Module):
        return model
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        return model()


def check_shared(models: dict[int, nn.Module], own: Collection[str] = ()) -> None:
    """Refuses seeds whose models differ in what all rows share: frozen parameters, buffers but `own` ones."""

    def shared(model: nn.Module) -> dict[str, Tensor]:
        frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        return frozen | {n: b for n, b in model.named_buffers() if n not in own}

    first, *others = models.values()
    for name, value in shared(first).items():
        if not all(torch.equal(value, shared(other)[name]) for other in others):
            raise InputError(
                f"{name!r} is not trained but differs by seed; make it the same, or use one seed"
            )
