"""Any module's loss and scores on every client's samples."""

from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from fairwind.data.federation import Federation
from fairwind.engine import tuning
from fairwind.engine.evaluation import client_scores, split
from fairwind.engine.losses.fitting import fit_loss
from fairwind.engine.losses.loss import Loss, cross_entropy
from fairwind.engine.losses.scoring import fit_scores
from fairwind.engine.machine import find_machine, matmul_precision, seed_generators
from fairwind.engine.modules import activations, call, columns_of, draws
from fairwind.engine.plain import FITTED, check_integers, explained, judged, mixes
from fairwind.engine.plan import place
from fairwind.engine.settings import Settings
from fairwind.engine.solver import Solver
from fairwind.errors import InputError, unknown
from fairwind.layers.batch_norm import is_batch_norm
from fairwind.metrics import model_metrics
from fairwind.runs.schema import GroupAverage, ModelMetrics, Part
from fairwind.scores import Score
from fairwind.serving.model import dtype_of, placed
from fairwind.task import Task


@dataclass(frozen=True, repr=False)
class Evaluation:
    """One model on every client's samples."""

    clients: list[str]  #: Their names.
    samples: list[int]  #: How many samples of each client were scored.
    scores: dict[str, Tensor]  #: (K,) Every score by name, the main one first; NaN without samples.
    loss: Tensor  #: (K,) Each client's mean loss.
    by_score: dict[str, ModelMetrics]  #: The metrics of every score, as in docs/metrics.md.
    group_of: list[str]  #: The clients' group labels, if they have any.

    @property
    def score(self) -> Tensor:
        """(K,) Each client's main score, accuracies in percent."""
        return next(iter(self.scores.values()))

    @property
    def metrics(self) -> ModelMetrics:
        """The metrics of the main score: avg, std, worst30 and so on."""
        return next(iter(self.by_score.values()))

    @property
    def groups(self) -> dict[str, GroupAverage[float | None]]:
        """By group: its clients, and the average of their main score."""
        return self.metrics.get("groups", {})

    def __repr__(self) -> str:
        tested = sum(size > 0 for size in self.samples)
        lines = [f"{tested:,} clients, {sum(self.samples):,} samples"]
        names = {"avg": "average", "std": "STD", "worst30": "worst 30 %", "worst": "worst"}
        for score, metrics in self.by_score.items():
            values = cast(dict[str, float | None], metrics)
            lines.append(f"{score}: " + ", ".join(f"{n} {_text(values[key])}" for key, n in names.items()))
        loss = self.metrics["loss_avg"], self.metrics["loss_worst30"]
        lines.append(f"loss: average {_text(loss[0])}, worst 30 % {_text(loss[1])}")
        groups = [f"{name} {_text(each['avg'])} ({each['clients']:,})" for name, each in self.groups.items()]
        return "\n".join([*lines, *([f"groups: {', '.join(groups)}"] if groups else [])])

    def to_pandas(self) -> Any:
        """One row for each client: its samples, scores and loss."""
        import pandas

        groups = {"group": self.group_of} if self.group_of else {}
        scores = {name: value.numpy() for name, value in self.scores.items()}
        return pandas.DataFrame(
            {"client": self.clients, **groups, "samples": self.samples, **scores, "loss": self.loss.numpy()}
        )


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def evaluate(
    model: nn.Module,
    federation: Federation | Task,
    *,
    loss: Any = None,
    score: Any = None,
    part: Part = "test",
    device: str | torch.device = "auto",
) -> Evaluation:
    """A module's loss and scores on the samples of every client, wherever the module was trained.

    The module is not changed; a copy is evaluated, in evaluation mode. `loss` and `score` are as a `Task`
    takes them, and a task in place of a federation brings its own. `part` is "train", "validation" or
    "test".
    """
    if not isinstance(model, nn.Module):
        whose = " (result.model, or result.model_of(client))" if hasattr(model, "model_of") else ""
        raise InputError(f"a {type(model).__name__} is not a trained model: give a torch.nn.Module{whose}")
    if part not in get_args(Part):
        raise unknown("part of the samples", str(part), get_args(Part))
    batch_size = Solver().batch_size
    if isinstance(federation, Task):
        task = federation
        loss, score = loss if loss is not None else task.loss, score if score is not None else task.score
        federation, batch_size = task.federation, task.solver.batch_size
    elif not isinstance(federation, Federation):
        raise InputError(
            f"a {type(federation).__name__} is not a federation: make one with Federation.from_clients"
        )
    if not federation.part(part)[1].any():
        raise InputError(f"no client has {part} samples")
    federation = federation.arranged(columns_of(model), "those of training")
    settings = Settings(device=str(device), precision="float32")
    placement = place(settings, find_machine(settings), federation.bytes)
    on_device = torch.device(placement.device.value)
    federation = federation.narrowed(dtype_of(model))
    federation = federation.to(on_device, keep_on_host=placement.data.value == "host")
    with matmul_precision("float32", on_device), torch.random.fork_rng(range(torch.cuda.device_count())):
        check_integers(model, federation, part)
        scorer = _Scorer(placed(model, on_device), federation, loss, score, batch_size)
        sizes, pick = split(federation, part)
        found = client_scores(scorer, federation, torch.empty(1, 0, device=on_device), sizes, pick)
    losses, *values = (each[0].cpu() for each in found)
    names = [judge.name for judge in scorer.judges]
    return Evaluation(
        clients=list(federation.names),
        samples=sizes.tolist(),
        scores=dict(zip(names, values, strict=True)),
        loss=losses,
        by_score={
            judge.name: model_metrics(value, losses, sizes, judge.kind, federation.groups)
            for judge, value in zip(scorer.judges, values, strict=True)
        },
        group_of=list(federation.groups),
    )


class _Scorer:
    """A module as it is, which the engine's evaluation takes for one model."""

    stacks = False
    sample_weights: Tensor | None = None
    loss: Loss
    judges: tuple[Score, ...]

    def __init__(self, module: nn.Module, federation: Federation, loss: Any, score: Any, batch_size: int):
        self.module, self.device = module, federation.device
        inputs, targets = federation.at(slice(0, FITTED))
        with explained(inputs, targets, cannot="be evaluated on"):
            self.draws = draws(module, inputs)
            with torch.enable_grad():
                raw = call(module, inputs)
                given = cross_entropy if loss is None else loss
                self.loss = fit_loss(given, raw, targets, federation, batch_size)
                with torch.no_grad():
                    self.judges = fit_scores(score, self.loss, raw, targets, federation.targets)
            for p in module.parameters():  # all activations are counted, not only what a step would keep
                p.requires_grad_(p.is_floating_point())
            own, dtype = federation.at(slice(0, 1))[0], dtype_of(module)
            self.per_sample = activations(module, own, dtype, dtype)
        mixing = any(is_batch_norm(layer) and not layer.track_running_stats for layer in module.modules())
        if not (mixing or self.loss.batched or self.draws):
            with torch.no_grad(), matmul_precision("float32", self.device):
                mixing = mixes(self._losses, inputs, targets, dtype)
        self.batch = batch_size if self.loss.batched or mixing else None
        sizes = tuning.CPU if self.device.type == "cpu" else tuning.GPU
        self.evaluated_numbers = sizes.evaluated_numbers

    def _losses(self, inputs: Any, targets: Any) -> Tensor:
        return judged(self.loss, (), call(self.module, inputs), targets)[0]

    def scores(self, x: Tensor, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
        """Each sample's loss, and the numbers of each score, (1, B, …)."""
        if self.draws:  # the same in every evaluation
            seed_generators(self.device, 0)
        found = judged(self.loss, self.judges, call(self.module, inputs), targets)
        return tuple(each[None] for each in found)
