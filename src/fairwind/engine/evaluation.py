"""Every client's loss and scores: under which models, computed how, and kept round after round."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fairwind.contract import CohortAlgorithm, PersonalAlgorithm, PooledAlgorithm
from fairwind.data.counter import segments
from fairwind.data.federation import Federation
from fairwind.engine.executor import Run
from fairwind.engine.local import trains_alone
from fairwind.engine.losses.loss import Loss
from fairwind.engine.memory import Memories, OwnParts
from fairwind.engine.plain import PlainModel
from fairwind.engine.ranks import ALONE, Ranks
from fairwind.engine.stacked.chunks import chunks
from fairwind.runs.schema import Baseline, HistoryLine, Part
from fairwind.scores import Score, segment_sums

Pick = Callable[[Tensor], Tensor]  # clients -> their samples' indices, client after client


class Scorer(Protocol):
    """A model that can score samples."""

    per_sample: int  # activations
    evaluated_numbers: int  # of a batch, over all models, about
    stacks: bool  # whether it holds the activations of all models at once
    loss: Loss
    judges: tuple[Score, ...]
    sample_weights: Tensor | None  # what samples add to the divisor of a mean loss, if not 1

    @property
    def batch(self) -> int | None:
        """How many samples of one client are scored together, if what is computed depends on that."""
        ...

    def scores(self, x: Tensor, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
        """Each sample's loss, and the numbers of each score, (R, B) or (R, B, S) under models x (R, P)."""
        ...


class PersonalScorer(Scorer, Protocol):
    """A model that can score each client's samples under that client's own parameters."""

    def own_scores(self, x: Tensor, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
        """The same with different samples for each model x (R, P): (R, B, …)."""
        ...


@torch.no_grad()
def client_scores(
    model: Scorer, federation: Federation, x: Tensor, sizes: Tensor, pick: Pick, ranks: Ranks = ALONE
) -> tuple[Tensor, ...]:
    """Loss and each score of every client under each model x (R, P), as (R, K) float64 tensors.

    `sizes` (K,) are the clients' numbers of samples, `pick` selects them; a client without samples gets NaN.
    Ranks share whole chunks, so a client's numbers are bit for bit the same for any number of ranks.
    """
    at_once = len(x) if model.stacks else 1
    limit = max(16, model.evaluated_numbers // (max(64, model.per_sample) * at_once))
    judges = model.loss.as_score, *model.judges
    found = torch.zeros(len(judges), len(x), len(sizes), dtype=torch.float64, device=x.device)
    tested = sizes.nonzero()[:, 0]
    for part in chunks(sizes[tested], limit)[ranks.rank :: ranks.world]:
        clients = tested[part]
        batches = _batches(pick(clients), sizes[clients], model.batch, limit)
        judged = [model.scores(x, *federation.at(batch)) for batch in batches]
        for of_clients, score, each in zip(found, judges, zip(*judged, strict=True), strict=True):
            values = torch.cat(each, dim=1)
            of_clients[:, clients.to(x.device)] = score.of_clients(values, sizes[clients])
    return tuple(_over_ranks(found, sizes, ranks))


def training_losses(model: Scorer, federation: Federation, x: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """F_k of every client under each model x (R, P), over its training samples: (R, K).

    It is 0 for a client without labels that count, as in its probes.
    """
    sizes, pick = split(federation, "train")
    losses = client_scores(model, federation, x, sizes, pick, ranks)[0]
    if model.sample_weights is None:
        return losses
    weights = model.sample_weights[pick(torch.arange(len(sizes)))]
    return torch.where(segment_sums(weights[None, :, None], sizes)[..., 0] > 0, losses, 0)


def _batches(samples: Tensor, sizes: Tensor, batch: int | None, limit: int) -> Sequence[Tensor]:
    """Samples of clients in batches across clients; or in batches of a size, of one client each."""
    if batch is None:
        return torch.split(samples, limit)
    own = samples.split_with_sizes(sizes.tolist())
    return [part for each in own for part in torch.split(each, batch)]


@torch.no_grad()
def own_scores(
    model: PersonalScorer,
    federation: Federation,
    models: Pick,
    sizes: Tensor,
    pick: Pick,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> Tensor:
    """Loss and each score of every client under its own model, as float64 (·, K).

    `models` gives the whole models (n, ·) of some clients.
    """
    limit = max(16, model.evaluated_numbers // max(64, model.per_sample))
    judges = model.loss.as_score, *model.judges
    found = torch.zeros(len(judges), len(sizes), dtype=torch.float64, device=device)
    if model.batch is not None:  # padding would count
        for k in sizes.nonzero()[:, 0].tolist()[ranks.rank :: ranks.world]:
            samples = pick(torch.tensor([k]))
            own = models(torch.tensor([k])), sizes[k : k + 1], lambda _, samples=samples: samples
            found[:, k] = torch.stack(client_scores(model, federation, *own))[:, 0, 0]
        return _over_ranks(found, sizes, ranks)
    # Clients of similar size together: shorter batches are padded with the client's first sample.
    order = torch.argsort(sizes, stable=True)
    order = order[sizes[order] > 0]
    for part in chunks(sizes[order] + 1, limit)[ranks.rank :: ranks.world]:
        clients = order[part]
        counts = sizes[clients]
        owner, place = segments(counts)
        batch = torch.zeros(len(clients), int(counts.max()), dtype=torch.int64)
        samples = pick(clients)
        batch[:] = (counts.cumsum(0) - counts)[:, None]
        batch[owner, place] = torch.arange(len(owner))
        given = federation.at(samples[batch.to(samples.device)])
        values = model.own_scores(models(clients), *given)
        for of_clients, score, each in zip(found, judges, values, strict=True):
            mine = each[owner.to(device), place.to(device)][None]
            of_clients[clients.to(device)] = score.of_clients(mine, counts)[0]
    return _over_ranks(found, sizes, ranks)


def _over_ranks(found: Tensor, sizes: Tensor, ranks: Ranks) -> Tensor:
    """Clients' numbers (·, K), each from one rank; NaN for clients without samples."""
    return ranks.sum(found)[0].masked_fill(sizes.to(found.device) == 0, torch.nan)


def split(federation: Federation, part: Part) -> tuple[Tensor, Pick]:
    """Sizes and picker of all clients' samples of a part."""
    start, sizes = federation.part(part)

    def pick(clients: Tensor) -> Tensor:
        owner, place = segments(sizes[clients])
        return (start[clients][owner] + place).to(federation.device)

    return sizes, pick


class EvaluatedModel(NamedTuple):
    """A model of a run, or one for each client; a global or averaged one may have parts of each client's."""

    label: str
    seed: int
    run: int
    model: Literal["global", "averaged", "personal"] = "global"
    baseline: Baseline | None = None  # what it is, if it is not an algorithm's own model


class Models(NamedTuple):
    """The models of all runs at some round."""

    runs: Sequence[Run]
    x: Tensor  # (R, P)
    states: Sequence[Any]  # of the servers
    memories: Memories
    own: OwnParts
    recomputed: Mapping[EvaluatedModel, Tensor]  # by view, statistics (·,) in place of the averaged ones
    new: bool = False  # of clients that took no part in training: they have the mean of what others keep

    def shared(self, view: EvaluatedModel) -> Tensor:
        """The vector (P,) of a view's model that all clients share."""
        if view.model == "averaged":
            return averaged(self.runs[view.run], self.states[view.run]).to(self.x.dtype)
        return self.x[view.run]

    def whole(self, view: EvaluatedModel, clients: Tensor) -> Tensor:
        """The whole models of some clients (n, ·), in the parts' order."""
        if view.model == "personal":
            return self.memories.take(view.run, clients)
        if not self.own.width:
            return self.shared(view).expand(len(clients), -1)
        averages = self.recomputed.get(view, self.own.averages[view.run])
        shared, averages = (part.expand(len(clients), -1) for part in (self.shared(view), averages))
        kept: list[Tensor] = []
        if self.own.kept and self.new:
            kept = [self.own.mean(view.run).expand(len(clients), -1)]
        elif self.own.kept:
            kept = [self.own.of_clients(view.run, clients)]
        return torch.cat([shared, *kept, averages], 1)


def views_of(runs: Sequence[Run]) -> list[EvaluatedModel]:
    """In the order of the runs, each followed by its additional models."""
    found = []
    for r, run in enumerate(runs):
        if trains_alone(run):
            found.append(EvaluatedModel(run.label, run.seed, r, "personal", "local"))
            continue
        pooled: Baseline | None = "pooled" if isinstance(run.algorithm, PooledAlgorithm) else None
        found.append(EvaluatedModel(run.label, run.seed, r, baseline=pooled))
        if isinstance(run.algorithm, CohortAlgorithm) and run.algorithm.averaged_model is not None:
            found.append(EvaluatedModel(f"{run.label} (averaged)", run.seed, r, "averaged"))
        if isinstance(run.algorithm, PersonalAlgorithm):
            found.append(EvaluatedModel(f"{run.label} (personal)", run.seed, r, "personal"))
    return found


def fine_tuned(views: Sequence[EvaluatedModel]) -> list[EvaluatedModel]:
    """What clients make of each model of a federation."""
    return [
        EvaluatedModel(f"{view.label} (fine-tuned)", view.seed, view.run, "personal", "finetuned")
        for view in views
        if view.model == "global" and view.baseline is None
    ]


def averaged(run: Run, state: Any) -> Tensor:
    """The additional model (P,) of a run that has one."""
    assert isinstance(run.algorithm, CohortAlgorithm)
    assert run.algorithm.averaged_model is not None
    return run.algorithm.averaged_model(state)


def judge_views(
    views: Sequence[EvaluatedModel],
    models: Models,
    scorers: tuple[Scorer, PersonalScorer],
    federation: Federation,
    sizes: Tensor,
    pick: Pick,
    ranks: Ranks,
) -> tuple[Tensor, ...]:
    """Every client's mean loss and scores under each view's model, (views, K) each, on the host.

    The first of the `scorers` is for shared models, the second for those of each client.
    """
    one, rows = torch.zeros(1, dtype=torch.int64), {}
    shared = [view for view in views if view.model != "personal" and (models.new or not models.own.kept)]
    x = models.x
    if shared and (models.own.width or [view.run for view in shared] != list(range(len(x)))):
        x = torch.cat([models.whole(view, one) for view in shared])
    if shared:
        found = client_scores(scorers[0], federation, x, sizes, pick, ranks)
        rows = {view: [each[i] for each in found] for i, view in enumerate(shared)}
    for view in views:
        if view not in shared:
            own = own_scores(
                scorers[1], federation, partial(models.whole, view), sizes, pick, models.x.device, ranks
            )
            rows[view] = list(own)
    in_order = [rows[view] for view in views]
    return tuple(torch.stack(each).cpu() for each in zip(*in_order, strict=True))


@torch.no_grad()
def recomputed(
    model: PlainModel, models: Models, views: Sequence[EvaluatedModel], federation: Federation
) -> dict[EvaluatedModel, Tensor]:
    """The statistics of batch norm (·,) of each view's model, on the training samples of all clients.

    They are the mean of the statistics of batches, by their numbers of samples. A batch is of one client, of
    the size of local steps, and normalised by its own statistics. A single sample may have no variance, so
    batches of one are left out if there are others.
    """
    sizes, pick = split(federation, "train")
    batches = {
        k: torch.split(pick(torch.tensor([k])), model.batch_size) for k in sizes.nonzero()[:, 0].tolist()
    }
    least = min(2, max((len(part) for parts in batches.values() for part in parts), default=1))
    found = {}
    for view in (view for view in views if view.model != "personal"):
        first, count = models.own.averages[view.run], 0
        total = torch.zeros_like(first, dtype=torch.float64)
        for k, parts in batches.items():
            model.load(model.whole.parts(models.whole(view, torch.tensor([k]))[0]))
            for samples in (part for part in parts if len(part) >= least):
                total += len(samples) * model.batch_statistics(federation.at(samples)[0])
                count += len(samples)
        found[view] = torch.where(models.own.counters, first, (total / max(1, count)).to(first.dtype))
    return found


class Evaluation(NamedTuple):
    """How each view's model does on a part of the samples."""

    views: list[EvaluatedModel]
    lines: list[HistoryLine]  # metrics over the clients
    loss: Tensor  # (views, K) of each client
    score: Tensor  # likewise, of the main score
    other_scores: list[Tensor]


MAX_CURVE_BYTES = 1 << 28


class Curves:
    """The main score of each client in each run (R, K), round after round.

    If they take too much memory, every second evaluation is dropped, repeatedly.
    """

    def __init__(self, rounds: Sequence[int] = (), values: Tensor | None = None):
        self.rounds = list(rounds)
        self.values = [] if values is None else list(values)

    def add(self, round: int, score: Tensor) -> None:
        self.rounds.append(round)
        self.values.append(score.float())
        while len(self.rounds) > 2 and 4 * score.numel() * len(self.rounds) > MAX_CURVE_BYTES:
            self.rounds, self.values = self.rounds[::-2][::-1], self.values[::-2][::-1]

    def drop(self, round: int) -> None:
        """Forgets a round if it is the last that was added."""
        if self.rounds[-1:] == [round]:
            self.rounds, self.values = self.rounds[:-1], self.values[:-1]

    def tensor(self) -> Tensor:
        """(evaluations, R, K)."""
        return torch.stack(self.values) if self.values else torch.empty(0)
