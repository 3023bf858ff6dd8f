"""Builds what trains and evaluates clients, for simulations and for clients of a real federation.

The plan is decided here, once, and everything is built as it says.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairwind.codecs import codec_of
from fairwind.contract import Contribution, MemoryAlgorithm, PersonalAlgorithm, Stateless
from fairwind.data.federation import Federation
from fairwind.engine.backends.backend import handwritten
from fairwind.engine.checks import check_room
from fairwind.engine.evaluation import Scorer
from fairwind.engine.executor import Executor, Run, seeing
from fairwind.engine.layout import ALL_SHARED, Sharing
from fairwind.engine.local import locals_of
from fairwind.engine.loop.executor import Loop
from fairwind.engine.machine import Machine, compute_type, find_machine
from fairwind.engine.memory import Compression, Memories, OwnParts, first_vectors
from fairwind.engine.modules import columns_of
from fairwind.engine.plain import PlainModel
from fairwind.engine.plan import (
    Case,
    Counts,
    ExecutionPlan,
    Placement,
    StackedCounts,
    decide,
    place,
    resolved_settings,
    why_not_stacked,
)
from fairwind.engine.ranks import ALONE, Ranks
from fairwind.engine.schedule import Planner
from fairwind.engine.settings import Settings
from fairwind.engine.stacked.chunks import row_numbers
from fairwind.engine.stacked.executor import Stacked
from fairwind.engine.stacked.model import CannotStackError, StackedModel, stack
from fairwind.engine.workers import keep_memory, threads
from fairwind.errors import InputError, SlowPathWarning
from fairwind.layers.gpu import lstm


class BuiltEngine(NamedTuple):
    """What trains and evaluates the clients of some runs."""

    settings: Settings  # with what was decided
    plan: ExecutionPlan
    federation: Federation
    planner: Planner
    plain: PlainModel
    stacked: StackedModel | None
    x: Tensor  # (R, P) the runs' first models
    memories: Memories
    own: OwnParts
    executor: Executor
    compression: Compression | None  # of the updates that clients send

    @property
    def scorer(self) -> Scorer:
        """Scores models that share samples."""
        return self.stacked if self.stacked is not None and self.plan.scorer.value == "all" else self.plain

    @property
    def prober(self) -> Scorer:
        """Scores models that share samples as probes do."""
        return self.plain.as_probed() if self.plain.normed_by_batch else self.scorer

    def place(self, federation: Federation) -> Federation:
        """Other clients' samples where these are, in the model's type."""
        there = self.federation
        federation = federation.arranged(there.meanings, "those of training").narrowed(self.x.dtype)
        return federation.to(there.device, keep_on_host=there.compute_device is not None)

    def threads(self, count: int) -> AbstractContextManager[None]:
        """Sets the number of threads of kernels on a CPU; has no effect on a GPU."""
        return _threads(self.plan, count)


def build_engine(
    models: Mapping[int, nn.Module],
    federation: Federation,
    runs: Sequence[Run],
    settings: Settings,
    *,
    loss: Any,
    score: Any = None,
    augment: Any = None,
    sharing: Sharing = ALL_SHARED,
    ranks: Ranks = ALONE,
    first_client: int = 0,
    plan: ExecutionPlan | None = None,
) -> BuiltEngine:
    """From a model for each seed; by a `plan` of the same runs, if given, else by one that is decided here.

    `first_client` is the index of the federation's first client among all.
    """
    runs, machine, first = list(runs), find_machine(settings, ranks), next(iter(models.values()))
    dtype = next((p.dtype for p in first.parameters() if p.requires_grad), torch.float32)
    federation = federation.arranged(columns_of(first), "those of the model's training").narrowed(dtype)
    placed = Placement(*plan[:3]) if plan else place(settings, machine, federation.bytes)
    federation = federation.to(placed.device.value, keep_on_host=placed.data.value == "host")
    planner = Planner(
        federation,
        settings.solver,
        settings.participation,
        settings.clients_per_round,
        settings.probe_samples,
        first_client,
        settings.selection,
    )
    with _threads(placed, 1):
        size = planner.solver.batch_size
        plain = PlainModel.fitted(first, federation, loss, score, size, augment, sharing)
        if settings.solver.personal_first is not None and not plain.division.trained:
            raise InputError(
                f"personal_first={settings.solver.personal_first} trains a personal part first, and no "
                'parameter is personal: give Task(…, personal="head.*")'
            )
        if plan is None:
            plan, stacked = _planned(first, plain, planner, runs, settings, machine, placed)
        else:
            stacked = _stacked(first, plain, federation, plan) if plan.executor.value == "stacked" else None
    if plan.convolutions.value == "channels last":
        plain.put_channels_last()
    start = {seed: plain.whole.flatten(model).to(plan.device.value) for seed, model in models.items()}
    whole = torch.stack([start[run.seed] for run in runs])
    x, own_start = whole[:, : plain.layout.parameters].contiguous(), whole[:, plain.layout.parameters :]
    if not plan.on_gpu:
        keep_memory()
    check_room(runs, planner.participants * x[0].nbytes, machine)
    on_host = plan.client_vectors.value == "host"
    keep = partial(Memories, clients=len(federation), device=x.device, on_host=on_host)
    memories, compression = keep(first_vectors(runs, x, own_start)), None
    own = OwnParts(plain.division, own_start, federation.train, on_host=on_host)
    if settings.codec is not None:
        nothing = {r: torch.zeros_like(first) for r, first in enumerate(x)}
        compression = Compression(codec_of(settings.codec), keep(nothing))
    plain.evaluated_numbers = plan.sizes.evaluated_numbers
    executor: Executor
    if stacked is not None:
        stacked.evaluated_numbers = plan.sizes.evaluated_numbers
        executor = Stacked(stacked, federation, planner, runs, memories, own, plan, ranks, compression)
    else:
        executor = Loop(plain, federation, planner, runs, memories, own, plan, compression)
    settings = resolved_settings(settings, machine, plan)
    made = settings, plan, federation, planner, plain, stacked, x, memories, own, executor
    return BuiltEngine(*made, compression)


def pooled_engine(
    models: Mapping[int, nn.Module],
    federation: Federation,
    runs: Sequence[Run],
    settings: Settings,
    **task: Any,
) -> BuiltEngine:
    """What trains on the samples of all clients in one place, with as much work as in a round of all."""
    solver = settings.solver
    if isinstance(solver.steps, tuple):
        solver = replace(solver, steps=(solver.steps[0] * len(federation), solver.steps[1] * len(federation)))
    elif solver.steps is not None:
        solver = replace(solver, steps=solver.steps * len(federation))
    settings = replace(settings, solver=solver, participation=1.0, clients_per_round=None, codec=None)
    return build_engine(models, federation.pooled(), runs, settings, **task)


CLIENTS_ALONE = PersonalAlgorithm[Stateless, Stateless](
    init=lambda x: Stateless(),
    client=lambda report: Contribution(torch.zeros_like(report.size), Stateless()),
    server=lambda x, state, total, sums: (x, state),
    probe="none",
    pull=0.0,
    alone=True,
)


def fine_tuned_engine(
    models: Mapping[int, nn.Module],
    federation: Federation,
    runs: Sequence[Run],
    first: Sequence[Tensor],
    x: Tensor,
    round: int,
    settings: Settings,
    **task: Any,
) -> BuiltEngine:
    """Trains every client alone from its first model of each run (K, ·), with batches as of this round.

    The clients' `memories` are then their models (K, ·), by run; x (R, P) are the runs' models. The learning
    rate is the solver's first.
    """
    alone = replace(settings, solver=settings.fine_tuning, participation=1.0, clients_per_round=None)
    alone = replace(alone, codec=None, compile="off")
    runs = [run._replace(algorithm=CLIENTS_ALONE) for run in runs]
    engine = build_engine(models, federation, runs, alone, **task)
    for r, kept in engine.memories.values.items():
        kept.copy_(first[r])
    loss0 = torch.full((len(runs), len(federation)), torch.nan, dtype=torch.float64, device=x.device)
    with engine.threads(engine.executor.threads):
        engine.executor.prepare(round)
        engine.executor.round(x, loss0, lambda r: x[r], lambda sums: None)
    return engine


def _threads(plan: ExecutionPlan | Placement, count: int) -> AbstractContextManager[None]:
    return threads(count) if plan.device.value == "cpu" else nullcontext()


def _planned(
    model: nn.Module,
    plain: PlainModel,
    planner: Planner,
    runs: list[Run],
    settings: Settings,
    machine: Machine,
    placed: Placement,
) -> tuple[ExecutionPlan, StackedModel | None]:
    """The plan, and the stacked model if it has one."""
    case = Case(settings, machine, _counts(plain, planner, runs, coded=settings.codec is not None))
    stacked: StackedModel | None = None
    stacking: StackedCounts | str = why_not_stacked(case)
    if not stacking:
        try:
            compute = compute_type(placed.precision.value)
            stacked = stack(model, plain, planner.federation, compute=compute, factored=case.factors_help)
            stacking = _stacked_counts(stacked, planner, runs, machine)
        except CannotStackError as error:
            stacking = f"the model cannot be stacked: {error}"
    plan = decide(case, placed, stacking)
    if machine.missing and machine.missing in plan.steps.why:
        why = f"{machine.missing} was not found: steps run uncompiled, and slower"
        warnings.warn(why, SlowPathWarning, stacklevel=4)
    if plan.executor.value == "loop":
        return plan, None
    if stacked is not None and plan.gradients.value == "factored":
        stacked.factor()
    return plan, stacked


def _stacked(
    model: nn.Module, plain: PlainModel, federation: Federation, plan: ExecutionPlan
) -> StackedModel:
    """The stacked model of a plan that is given."""
    factored, compute = plan.gradients.value == "factored", compute_type(plan.precision.value)
    try:
        stacked = stack(model, plain, federation, compute=compute, factored=factored)
    except CannotStackError as error:
        raise InputError(f"the model cannot be stacked: {error}") from error
    if factored:
        stacked.factor()
    return stacked


def _counts(plain: PlainModel, planner: Planner, runs: Sequence[Run], *, coded: bool) -> Counts:
    solver, size, kinds = planner.solver, planner.federation.train, [type(run.algorithm) for run in runs]
    steps = solver.local_steps(solver.work[1], -(-size // solver.batch_size))
    keeping = sum(issubclass(kind, MemoryAlgorithm | PersonalAlgorithm) for kind in kinds)
    keeping += len(runs) if coded else 0
    return Counts(
        rows=planner.participants * len(runs),
        repeats=planner.repeats,
        mean_steps=float(steps.double().mean()),
        most_steps=int(steps.max()),
        summed=not seeing(runs),
        phases=solver.personal_first is not None,
        own_parts=bool(plain.division.own.names),
        kept_numbers=len(size) * (keeping * plain.whole.parameters + len(runs) * plain.division.kept_numbers),
        batch_size=solver.batch_size,
        plain_sgd=solver.plain,
        own_optimizer=solver.name if callable(solver.optimizer) else "",
        parameters=plain.layout.parameters,
        number_bytes=plain.start.element_size(),
        operations=plain.counts.operations,
        convolutions=plain.counts.convolutions,
        recurrent=plain.counts.recurrent,
        flops=plain.flops,
        replaces_functions=plain.randomness == "functional",
        channels_last=plain.channels_last,
        draws_by_generator=plain.uses_generators,
    )


def _stacked_counts(
    stacked: StackedModel, planner: Planner, runs: Sequence[Run], machine: Machine
) -> StackedCounts:
    ways = locals_of(runs, torch.empty(0, dtype=stacked.dtype))
    vectors = max(each.rules.vectors for each in ways.values())
    recurrent = [layer for layer in stacked.training.modules() if isinstance(layer, nn.RNNBase)]
    own_parts = len(stacked.whole.names) > len(
        stacked.shared.names
    )  # of which hand-written steps do not know
    return StackedCounts(
        per_sample=stacked.per_sample,
        row_numbers=row_numbers(stacked, planner.solver, planner.solver.batch_size, vectors),
        operations=stacked.operations,
        factored_layers=len(stacked.factorable),
        handwritten="none" if machine.on_gpu or own_parts else handwritten(stacked, planner, runs, ways),
        recurrent_layers=len(recurrent),
        by_token=sum(not lstm.fits(layer) for layer in recurrent),
        waits=stacked.waits,
    )
