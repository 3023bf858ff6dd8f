"""Losses with models and data that they fit: PyTorch's with their options, and a dozen of one's own.

Each case also says how a hand-written loop calls the loss on a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import DEVICE

FEATURES, CLASSES, LENGTH = 4, 3, 5
WEIGHT = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)
HERE = WEIGHT.to(DEVICE)  # of losses of one's own, whose tensors nobody moves


@dataclass(frozen=True)
class Case:
    name: str
    loss: Any
    model: Callable[[], nn.Module]
    data: Callable[[int], tuple[Any, Any]]  # inputs and targets of so many samples
    by_hand: Callable[[Any, Any], Tensor]  # outputs and targets of a batch to its loss
    whole_batches: bool = False  # whether the loss of a client is a mean over its batches
    stacks: bool = True


class Map(nn.Module):
    """A linear layer, and what a function makes of its outputs."""

    def __init__(self, function: Callable[[Tensor], Any], outputs: int = CLASSES):
        super().__init__()
        self.layer = nn.Linear(FEATURES, outputs)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


class WithLoss(nn.Module):
    """A model that computes its own loss, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
        logits = self.layer(x)
        return SimpleNamespace(
            loss=F.cross_entropy(logits, labels, weight=WEIGHT.to(x.device)), logits=logits
        )


def linear(outputs: int = CLASSES) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(FEATURES, outputs).double()


def mapped(function: Callable[[Tensor], Any], outputs: int = CLASSES) -> Callable[[], nn.Module]:
    return lambda: Map(function, outputs).double()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def labelled(n: int) -> tuple[Tensor, Tensor]:
    return numbers(n, FEATURES), torch.randint(CLASSES, (n,))


def tags(n: int) -> tuple[Tensor, Tensor]:
    """Labels of tokens, with −100 where they do not count; of whole samples, too."""
    labels = torch.randint(CLASSES, (n, LENGTH))
    labels[torch.rand(n, LENGTH) < 0.4] = -100
    labels[::5] = -100
    return numbers(n, LENGTH, FEATURES), labels


def pictures(n: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(CLASSES, (n, 2, 3))
    labels[torch.rand(n, 2, 3) < 0.2] = 255
    return numbers(n, 1, 2, 3), labels


def soft(n: int) -> tuple[Tensor, Tensor]:
    return numbers(n, FEATURES), numbers(n, CLASSES).softmax(1)


def binary(n: int) -> tuple[Tensor, Tensor]:
    return numbers(n, FEATURES), torch.randint(2, (n,))


def several_labels(n: int) -> tuple[Tensor, Tensor]:
    return numbers(n, FEATURES), torch.randint(2, (n, CLASSES)).double()


def regression(n: int) -> tuple[Tensor, Tensor]:
    return numbers(n, FEATURES), numbers(n, CLASSES)


def counts(n: int) -> tuple[Tensor, Tensor]:
    return numbers(n, FEATURES), torch.randint(5, (n, CLASSES)).double()


def signs(n: int) -> tuple[Tensor, Tensor]:
    return numbers(n, FEATURES), 2.0 * torch.randint(2, (n, CLASSES)) - 1


def one_sign(n: int) -> tuple[Tensor, Tensor]:
    return numbers(n, FEATURES), 2.0 * torch.randint(2, (n,)) - 1


def sets(n: int) -> tuple[Tensor, Tensor]:
    """The labels of a sample, the rest −1."""
    labels = torch.stack([torch.randperm(CLASSES) for _ in range(n)])
    ends = torch.randint(1, CLASSES + 1, (n, 1))
    return numbers(n, FEATURES), torch.where(torch.arange(CLASSES) < ends, labels, -1)


def spoken(n: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    labels = torch.randint(1, CLASSES, (n, 2))
    lengths = torch.full((n,), LENGTH), torch.randint(1, 3, (n,))
    return numbers(n, LENGTH, FEATURES), (labels, *lengths)


def survival(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    return numbers(n, FEATURES), (torch.rand(n, dtype=torch.float64), torch.rand(n) < 0.7)


def taught(n: int) -> tuple[Tensor, dict[str, Tensor]]:
    return numbers(n, FEATURES), {"label": torch.randint(CLASSES, (n,)), "teacher": numbers(n, CLASSES)}


def with_labels(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, labels = labelled(n)
    return (x, labels), labels


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses


def quantile(outputs: Tensor, targets: Tensor) -> Tensor:
    error = targets - outputs
    return torch.maximum(0.9 * error, -0.1 * error).mean(1)


def log_cosh(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).cosh().log().sum(1)


def two_parts(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    mean, scale = outputs
    return ((mean - targets) ** 2 / scale.exp() + scale).mean(1)


def named_outputs(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["classes"], targets, reduction="none")


def distillation(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
    hard = F.cross_entropy(outputs, targets["label"], reduction="none")
    kept = F.kl_div(outputs.log_softmax(1), targets["teacher"].softmax(1), reduction="none").sum(1)
    return 0.3 * hard + 0.7 * kept


def by_class(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and divisors: a mean that weighs samples by their classes."""
    return HERE[targets] * F.cross_entropy(outputs, targets, reduction="none"), HERE[targets]


def over_tokens(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    counted = targets >= 0
    losses = F.cross_entropy(outputs.mT, targets.clamp(min=0), reduction="none")
    return torch.where(counted, losses, 0).sum(1), counted.sum(1).double()


def cox(outputs: Tensor, targets: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """The negative partial likelihood of proportional hazards: each event against all still at risk."""
    risk, (time, event) = outputs[:, 0], targets
    at_risk = (time[None] >= time[:, None]) & mask
    each = torch.where(at_risk, risk, -torch.inf).logsumexp(1) - risk
    counted = event & mask
    return torch.where(counted, each, 0).sum() / counted.sum().clamp(min=1)


def cox_by_hand(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    risk, (time, event) = outputs[:, 0], targets
    terms = [risk[time >= time[i]].logsumexp(0) - risk[i] for i in range(len(risk)) if event[i]]
    return torch.stack(terms).mean() if terms else 0 * risk.sum()


def ranking(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of all pairs of a batch: one number, without a mask."""
    apart = (outputs[:, None] - outputs[None]) * (targets[:, None] - targets[None]).sign()
    return F.softplus(-apart).mean()


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Losses (B,) that depend on the other samples of the batch."""
    unit = F.normalize(outputs, dim=1)
    alike = unit @ unit.T / 0.5
    same = (targets[:, None] == targets[None]).double()
    return -(alike.log_softmax(1) * same).sum(1) / same.sum(1)


def dice(outputs: Tensor, targets: Tensor) -> Tensor:
    right = outputs.sigmoid()
    return 1 - 2 * (right * targets).sum() / (right.sum() + targets.sum())


def plain(loss: Any) -> Callable[[Any, Any], Tensor]:
    return lambda outputs, targets: loss(outputs, targets)


def case(name: str, loss: Any, model: Any, data: Any, by_hand: Any = None, **more: bool) -> Case:
    return Case(name, loss, model, data, by_hand or plain(loss), **more)


def classes(name: str, model: Any = None, data: Any = labelled, **options: Any) -> Case:
    return case(f"cross-entropy, {name}", nn.CrossEntropyLoss(**options), model or linear(), data)


def first(function: Callable[..., Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda outputs, targets: function(*outputs, targets)


def squeezed(loss: Any) -> Callable[[Any, Any], Tensor]:
    return lambda outputs, targets: loss(outputs.reshape(targets.shape), targets.double())


segmented = lambda: nn.Conv2d(1, CLASSES, 1).double()  # noqa: E731
logarithms = mapped(lambda t: t.log_softmax(-1))
shares = mapped(torch.sigmoid)
tokens = lambda loss: lambda outputs, targets: loss(outputs.mT, targets)  # noqa: E731
gaussian = mapped(lambda t: (t[:, :CLASSES], t[:, CLASSES:].exp()), 2 * CLASSES)
two_thirds = mapped(lambda t: (t[:, :3], t[:, 3:]), 6)
three = mapped(lambda t: (t[:, :2], t[:, 2:4], t[:, 4:]), 6)
pair = mapped(lambda t: (t[:, 0], t[:, 1]), 2)
speech = mapped(lambda t: t.log_softmax(-1))

weighted_tokens = nn.CrossEntropyLoss(weight=WEIGHT)
ctc = nn.CTCLoss(zero_infinity=True)
triplet_distance = nn.TripletMarginWithDistanceLoss(distance_function=nn.PairwiseDistance(p=1))

CASES = [
    classes("plain"),
    classes("summed", reduction="sum"),
    classes("weights", weight=WEIGHT),
    classes("weights, summed", weight=WEIGHT, reduction="sum"),
    classes("one class ignored", ignore_index=1),
    classes("smoothed", label_smoothing=0.2),
    classes("weights, ignored, smoothed", weight=WEIGHT, ignore_index=0, label_smoothing=0.1),
    classes("segmentation", segmented, pictures, ignore_index=255),
    classes("segmentation, weights", segmented, pictures, ignore_index=255, weight=WEIGHT),
    classes("soft labels", data=soft),
    classes("soft labels, weights, smoothed", data=soft, weight=WEIGHT, label_smoothing=0.1),
    case("tags", F.cross_entropy, linear(), tags, tokens(F.cross_entropy)),  # type: ignore[no-untyped-call]
    case("tags, weights", weighted_tokens, linear(), tags, tokens(weighted_tokens)),  # type: ignore[no-untyped-call]
    case("likelihood", nn.NLLLoss(), logarithms, labelled),
    case("likelihood, weights", nn.NLLLoss(weight=WEIGHT, ignore_index=2), logarithms, labelled),
    case("likelihood, summed", nn.NLLLoss(reduction="sum"), logarithms, labelled),
    case("function, options", partial(F.cross_entropy, weight=WEIGHT), linear(), labelled),
    case("one logit", nn.BCEWithLogitsLoss(), linear(1), binary, squeezed(nn.BCEWithLogitsLoss())),
    case("one logit, squeezed", nn.BCEWithLogitsLoss(), mapped(lambda t: t[:, 0], 1), binary,
         squeezed(nn.BCEWithLogitsLoss())),
    case("logits", nn.BCEWithLogitsLoss(), linear(), several_labels),
    case("logits, weights", nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=2 * WEIGHT), linear(),
         several_labels),
    case("logits, summed", nn.BCEWithLogitsLoss(reduction="sum", pos_weight=WEIGHT), linear(),
         several_labels),
    case("probabilities", nn.BCELoss(), shares, several_labels),
    case("probabilities, weights", nn.BCELoss(weight=WEIGHT), shares, several_labels),
    case("squares", nn.MSELoss(), linear(), regression),
    case("squares, summed", nn.MSELoss(reduction="sum"), linear(), regression),
    case("squares, function", F.mse_loss, linear(1), lambda n: (numbers(n, FEATURES), numbers(n)),
         squeezed(F.mse_loss)),
    case("absolute", nn.L1Loss(), linear(), regression),
    case("huber", nn.HuberLoss(delta=0.3), linear(), regression),
    case("smooth", nn.SmoothL1Loss(beta=0.4), linear(), regression),
    case("smooth, function", partial(F.smooth_l1_loss, beta=0.4), linear(), regression),
    case("poisson", nn.PoissonNLLLoss(full=True), linear(), counts),
    case("poisson, rates", nn.PoissonNLLLoss(log_input=False), mapped(torch.exp), counts),
    case("divergence", nn.KLDivLoss(), logarithms, soft),
    case("divergence, batchmean", nn.KLDivLoss(reduction="batchmean"), logarithms, soft),
    case("divergence, logarithms", nn.KLDivLoss(log_target=True), logarithms,
         lambda n: (numbers(n, FEATURES), numbers(n, CLASSES).log_softmax(1))),
    case("gaussian", nn.GaussianNLLLoss(full=True), gaussian, regression,
         lambda o, t: nn.GaussianNLLLoss(full=True)(o[0], t, o[1]), stacks=False),
    case("margin of classes", nn.MultiMarginLoss(), linear(), labelled),
    case("margin of classes, options", nn.MultiMarginLoss(p=2, margin=0.5, weight=WEIGHT), linear(),
         labelled),
    case("margin of sets", nn.MultiLabelMarginLoss(), linear(), sets),
    case("soft margin of labels", nn.MultiLabelSoftMarginLoss(weight=WEIGHT), linear(), several_labels),
    case("soft margin", nn.SoftMarginLoss(), linear(), signs),
    case("hinge", nn.HingeEmbeddingLoss(margin=0.5), linear(), signs),
    case("cosine", nn.CosineEmbeddingLoss(margin=0.1), two_thirds, one_sign,
         first(nn.CosineEmbeddingLoss(0.1))),
    case("ranking of pairs", nn.MarginRankingLoss(margin=0.2), pair, one_sign,
         first(nn.MarginRankingLoss(0.2))),
    case("triplets", nn.TripletMarginLoss(margin=0.7, swap=True), three, one_sign,
         lambda o, t: nn.TripletMarginLoss(margin=0.7, swap=True)(*o)),
    case("triplets, distance", triplet_distance, three, one_sign, lambda o, t: triplet_distance(*o)),
    case("ctc", ctc, mapped(lambda t: t.log_softmax(-1).transpose(0, 1)), spoken,
         lambda o, t: ctc(o, *t), stacks=False),
    case("own: focal", focal, linear(), labelled, lambda o, t: focal(o, t).mean()),
    case("own: quantile", quantile, linear(), regression, lambda o, t: quantile(o, t).mean()),
    case("own: log-cosh", log_cosh, linear(), regression, lambda o, t: log_cosh(o, t).mean()),
    case("own: two outputs", two_parts, two_thirds, regression, lambda o, t: two_parts(o, t).mean()),
    case("own: named outputs", named_outputs, mapped(lambda t: {"classes": t}), labelled,
         lambda o, t: named_outputs(o, t).mean()),
    case("own: distillation", distillation, linear(), taught, lambda o, t: distillation(o, t).mean()),
    case("own: weights", by_class, linear(), labelled, lambda o, t: F.cross_entropy(o, t, weight=WEIGHT)),
    case("own: tokens", over_tokens, linear(), tags, tokens(F.cross_entropy)),  # type: ignore[no-untyped-call]
    case("own: hazards", cox, linear(1), survival, cox_by_hand, whole_batches=True),
    case("own: ranking", ranking, mapped(lambda t: t[:, 0], 1),
         lambda n: (numbers(n, FEATURES), numbers(n)), whole_batches=True, stacks=False),
    case("own: contrastive", contrastive, linear(), labelled, lambda o, t: contrastive(o, t).mean(),
         whole_batches=True, stacks=False),
    case("own: overlap", dice, linear(), several_labels, whole_batches=True, stacks=False),
    case("own: one number", lambda o, t: F.cross_entropy(o, t, weight=HERE), linear(), labelled,
         lambda o, t: F.cross_entropy(o, t, weight=WEIGHT), whole_batches=True, stacks=False),
    case("the model's own", "model", lambda: WithLoss().double(), with_labels,
         lambda o, t: F.cross_entropy(o.logits, t, weight=WEIGHT), whole_batches=True, stacks=False),
]  # fmt: skip
