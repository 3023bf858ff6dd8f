"""Scores that follow from the loss, or are asked for by name, against scikit-learn: on predictions that are
random, and on perfect ones."""

import dataclasses
import math
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fairwind as fw
from samples import as_dict, as_tensor

SIZES = 40, 25, 60
LENGTH, CLASSES = 6, 4


class Given(nn.Module):
    """A model whose outputs are its inputs."""

    def __init__(self, change: Callable[[Tensor], Any] = lambda x: x):
        super().__init__()
        self.one = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.change = change

    def forward(self, x: Tensor) -> Any:
        return self.change(x * self.one)


def scored(
    outputs: list[Tensor], targets: list[Tensor], change: Callable[[Tensor], Any] = lambda x: x, **given: Any
) -> fw.Result:
    """A run whose model is, up to a step of 10⁻¹², the one that gives these outputs."""
    clients = [{"train": (o[:5], t[:5]), "test": (o, t)} for o, t in zip(outputs, targets, strict=True)]
    task = fw.Task(
        partial(Given, change),
        fw.Federation.from_clients(clients),
        solver=fw.Solver(lr=1e-12),
        rounds=1,
        **given,
    )
    return fw.simulate(task, "fedavg", compile="off", progress=False)


def drawn(*shape: int) -> list[Tensor]:
    return [torch.randn(n, *shape, dtype=torch.float64) for n in SIZES]


def labels(high: int, *shape: int) -> list[Tensor]:
    return [torch.randint(high, (n, *shape)) for n in SIZES]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_scores(found: Tensor, expected: list[float]) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)


def accuracies(predicted: list[Tensor], targets: list[Tensor]) -> list[float]:
    pairs = zip(predicted, targets, strict=True)
    return [100 * sk.accuracy_score(t.reshape(-1), p.reshape(-1)) for p, t in pairs]


BINARY = "accuracy", "f1", "auc", "iou"


def binary_scores(margins: list[Tensor], targets: list[Tensor]) -> dict[str, list[float]]:
    pairs = [(m.reshape(-1), t.reshape(-1)) for m, t in zip(margins, targets, strict=True)]
    return {
        "accuracy": accuracies([m > 0 for m, _ in pairs], [t for _, t in pairs]),
        "f1": [sk.f1_score(t, m > 0) for m, t in pairs],
        "auc": [sk.roc_auc_score(t, m) for m, t in pairs],
        "iou": [sk.jaccard_score(t, m > 0, average="macro") for m, t in pairs],
    }


@pytest.mark.parametrize("perfect", [False, True])
@pytest.mark.parametrize("kind", [torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["(B, 1)", "(B,)", "two", "probability"])
def test_two_classes_in_every_form(form: str, kind: torch.dtype, perfect: bool) -> None:
    targets = labels(2)
    margins = [(t - 0.5) * 0.2 if perfect else m for t, m in zip(targets, drawn(), strict=True)]
    loss: Any = nn.BCEWithLogitsLoss()
    outputs = [m[:, None] for m in margins] if form == "(B, 1)" else margins
    if form == "two":
        kind = torch.int64
        outputs, loss = [torch.stack([-m / 2, m / 2], 1) for m in margins], F.cross_entropy
    if form == "probability":
        outputs, loss = [torch.sigmoid(m) for m in margins], F.binary_cross_entropy
    given = [t.to(kind) for t in targets]
    expected = binary_scores(margins, targets)
    result = scored(outputs, given, loss=loss, score=list(BINARY))
    for name in BINARY:
        assert_scores(result.scores[name], expected[name])
        if perfect:
            assert_scores(result.scores[name], [100.0 if name == "accuracy" else 1.0] * 3)
    assert scored(outputs, given, loss=loss).metrics["avg"] == pytest.approx(np.mean(expected["accuracy"]))


@pytest.mark.parametrize("perfect", [False, True])
def test_several_classes(perfect: bool) -> None:
    targets, outputs = labels(CLASSES), drawn(CLASSES)
    if perfect:
        outputs = [F.one_hot(t, CLASSES).double() for t in targets]
    predicted = [o.argmax(1) for o in outputs]
    result = scored(outputs, targets, score=["accuracy", "f1", "iou", "perplexity", "loss"])
    assert_scores(result.scores["accuracy"], accuracies(predicted, targets))
    pairs = list(zip(predicted, targets, strict=True))
    assert_scores(result.scores["f1"], [sk.f1_score(t, p, average="macro") for p, t in pairs])
    assert_scores(result.scores["iou"], [sk.jaccard_score(t, p, average="macro") for p, t in pairs])
    losses = [
        sk.log_loss(t, o.softmax(1), labels=range(CLASSES)) for o, t in zip(outputs, targets, strict=True)
    ]
    assert_scores(result.scores["loss"], losses)
    assert_scores(result.scores["perplexity"], [math.exp(loss) for loss in losses])


@pytest.mark.parametrize("perfect", [False, True])
def test_several_labels(perfect: bool) -> None:
    targets, outputs = labels(2, CLASSES), drawn(CLASSES)
    if perfect:
        outputs = [2.0 * t.double() - 1 for t in targets]
    result = scored(outputs, [t.double() for t in targets], loss=nn.BCEWithLogitsLoss())
    assert result.algorithm == "fedavg"
    expected = [100 - 100 * sk.hamming_loss(t, o > 0) for o, t in zip(outputs, targets, strict=True)]
    assert_scores(result.score, expected)
    named = scored(
        outputs, [t.double() for t in targets], loss=nn.BCEWithLogitsLoss(), score="multilabel_accuracy"
    )
    assert_scores(named.score, expected)


@pytest.mark.parametrize("perfect", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_sequences_with_padding(perfect: bool, second: bool) -> None:
    """Only labels other than −100 count; clients' scores are over all of their tokens together."""
    targets, outputs = labels(CLASSES, LENGTH), drawn(LENGTH, CLASSES)
    for t in targets:
        lengths = torch.randint(1, LENGTH + 1, (len(t), 1))
        t[torch.arange(LENGTH) >= lengths] = -100
    if perfect:
        outputs = [F.one_hot(t.clamp(min=0), CLASSES).double() for t in targets]
    pairs = [(o[t >= 0], t[t >= 0]) for o, t in zip(outputs, targets, strict=True)]
    predicted = [o.argmax(1) for o, _ in pairs]
    kept = [t for _, t in pairs]
    given = [o.mT.contiguous() for o in outputs] if second else outputs
    result = scored(given, targets, loss=F.cross_entropy, score=["accuracy", "f1", "perplexity", "loss"])
    assert_scores(result.scores["accuracy"], accuracies(predicted, kept))
    f1 = [sk.f1_score(t, p, average="macro") for p, t in zip(predicted, kept, strict=True)]
    assert_scores(result.scores["f1"], f1)
    losses = [sk.log_loss(t, o.softmax(1), labels=range(CLASSES)) for o, t in pairs]
    assert_scores(result.scores["loss"], losses)
    assert_scores(result.scores["perplexity"], [math.exp(loss) for loss in losses])
    assert_scores(scored(given, targets, loss=F.cross_entropy).score, accuracies(predicted, kept))


@pytest.mark.parametrize("perfect", [False, True])
@pytest.mark.parametrize("classes", [1, CLASSES])
def test_segmentation(perfect: bool, classes: int) -> None:
    """The score that follows is the intersection over union; with one logit per pixel, too."""
    targets = labels(max(2, classes), 3, 5)
    outputs = drawn(classes, 3, 5)
    loss: Any = nn.CrossEntropyLoss(ignore_index=255)
    if perfect and classes > 1:
        outputs = [F.one_hot(t, classes).double().movedim(-1, 1) for t in targets]
    elif perfect:
        outputs = [2.0 * t[:, None] - 1 for t in targets]
    given = [t.clone() for t in targets]
    if classes == 1:
        loss = nn.BCEWithLogitsLoss()
        given = [t[:, None].double() for t in targets]
    else:
        for t in given:
            t[torch.rand(t.shape) < 0.3] = 255
    predicted = [o.argmax(1) if classes > 1 else (o[:, 0] > 0).long() for o in outputs]
    masks = [(t != 255).reshape(p.shape) for t, p in zip(given, predicted, strict=True)]
    pairs = [(p[m], t[m]) for p, t, m in zip(predicted, targets, masks, strict=True)]
    result = scored(outputs, given, loss=loss)
    assert_scores(result.score, [sk.jaccard_score(t, p, average="macro") for p, t in pairs])
    right = scored(outputs, given, loss=loss, score="accuracy")
    assert_scores(right.score, accuracies([p for p, _ in pairs], [t for _, t in pairs]))


@pytest.mark.parametrize("perfect", [False, True])
@pytest.mark.parametrize("form", ["(B, 1)", "(B,)", "(B, 4)"])
def test_regression(form: str, perfect: bool) -> None:
    shape = (CLASSES,) if form == "(B, 4)" else ()
    targets = drawn(*shape)
    outputs = targets if perfect else drawn(*shape)
    given = [o[:, None] for o in outputs] if form == "(B, 1)" else outputs
    pairs = list(zip(targets, outputs, strict=True))
    result = scored(given, targets, loss=F.mse_loss, score=["rmse", "mse", "mae"])
    assert_scores(result.scores["mse"], [sk.mean_squared_error(t, o) for t, o in pairs])
    assert_scores(result.scores["rmse"], [math.sqrt(sk.mean_squared_error(t, o)) for t, o in pairs])
    assert_scores(result.scores["mae"], [sk.mean_absolute_error(t, o) for t, o in pairs])
    if not shape:
        r2 = scored(given, targets, loss=F.mse_loss, score="r2")
        assert_scores(r2.score, [sk.r2_score(t, o) for t, o in pairs])
    assert_scores(scored(given, targets, loss=F.mse_loss).score, result.scores["rmse"].tolist())


FOLLOWS = {
    "rmse": (nn.MSELoss(), drawn, drawn),
    "mae": (nn.L1Loss(), drawn, drawn),
    "accuracy": (nn.SoftMarginLoss(), drawn, lambda: [2.0 * t - 1 for t in labels(2)]),
    "loss": (nn.PoissonNLLLoss(), drawn, lambda: [t.double() for t in labels(5)]),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", FOLLOWS)
def test_the_score_follows_from_the_loss(name: str) -> None:
    loss, outputs, targets = FOLLOWS[name]
    assert list(scored(outputs(), targets(), loss=loss).scores) == [name]  # type: ignore[no-untyped-call]


def soft_targets() -> list[Tensor]:
    return [t.softmax(1) for t in drawn(CLASSES)]


def test_soft_labels_are_scored_by_their_largest() -> None:
    outputs, targets = drawn(CLASSES), soft_targets()
    found = scored(outputs, targets, loss=nn.CrossEntropyLoss())
    assert_scores(found.score, accuracies([o.argmax(1) for o in outputs], [t.argmax(1) for t in targets]))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets) ** 2


def one_logit(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs[:, 0], targets.double(), reduction="none")


def own_margin(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.multi_margin_loss(outputs, targets, reduction="none")


@pytest.mark.parametrize(
    ("given", "outputs", "targets", "said"),
    [
        ({"loss": F.mse_loss, "score": "accuracy"}, drawn(), drawn(), "the loss does not say which"),
        (
            {"loss": F.mse_loss, "score": fw.scores.accuracy.above(0)},
            drawn(),
            drawn(),
            "labels 0 and 1, and a target is",
        ),
        ({"loss": one_logit, "score": "accuracy"}, drawn(1), labels(2), r"give scores\.accuracy\.above\(0\)"),
        ({"loss": F.mse_loss, "score": "auc"}, drawn(3), drawn(3), "AUC is for two classes.*take f1"),
        ({"score": "rmse"}, drawn(3), labels(3), r"'rmse' does not fit.*cannot be subtracted"),
        ({"loss": F.mse_loss, "score": "perplexity"}, drawn(3), drawn(3), "'perplexity' does not fit"),
        ({"loss": F.mse_loss, "score": lambda o, t: o.mean()}, drawn(), drawn(), "not one number per sample"),
        ({"loss": F.mse_loss, "score": lambda o, t: o @ o}, drawn(3), drawn(3), "fails on outputs"),
        (
            {"score": fw.Score("right", lambda o, t: 100.0 * (o.argmax(1) == t), "accuracy")},
            drawn(3),
            labels(3),
            "must be from 0 to 1",
        ),
    ],
)
def test_a_score_that_does_not_fit_is_refused(
    given: dict[str, Any], outputs: list[Tensor], targets: list[Tensor], said: str
) -> None:
    with pytest.raises(fw.InputError, match=said):
        scored(outputs, targets, **given)


def test_an_own_accuracy_that_right_outputs_do_not_reach_is_a_warning() -> None:
    first = fw.Score("first", lambda o, t: (o.argmin(1) == t).double(), "accuracy")
    with pytest.warns(UserWarning, match=r"'first' is .* for outputs that are right, and not 100"):
        scored(drawn(3), labels(3), score=first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scored(
            drawn(3), labels(3), score=fw.Score("first", lambda o, t: (o.argmax(1) == t).double(), "accuracy")
        )


def test_a_threshold_of_ones_own() -> None:
    outputs, targets = drawn(1), labels(2)
    found = scored(outputs, targets, loss=one_logit, score=fw.scores.accuracy.above(0))
    assert_scores(found.score, accuracies([o > 0 for o in outputs], targets))


def test_an_own_loss_of_classes_is_scored_by_accuracy_and_others_by_the_loss() -> None:
    outputs, targets = drawn(3), labels(3)
    found = scored(outputs, targets, loss=lambda o, t: F.cross_entropy(o, t, reduction="none"))
    assert_scores(found.score, accuracies([o.argmax(1) for o in outputs], targets))
    assert list(scored(drawn(1), labels(2), loss=one_logit).scores) == ["loss"]


@pytest.mark.parametrize(
    "loss", [squares, lambda o, t: ((o - t) ** 2).mean(), lambda o, t: (o - t).abs().mean(1)]
)
def test_outputs_that_broadcast_against_targets_are_refused(loss: Any) -> None:
    """(B, 1) and (B,) make (B, B): every output would be compared with every target."""
    with pytest.raises(fw.InputError, match=r"broadcasts outputs \(B, 1\) with targets \(B,\).*squeeze"):
        scored(drawn(1), drawn(), loss=loss)
    with pytest.raises(fw.InputError, match=r"broadcasts outputs \(B,\) with targets \(B, 1\)"):
        scored(drawn(), drawn(1), loss=loss)


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: (o[:, 0] - t) ** 2,
        lambda o, t: ((o[:, 0] - t) ** 2).mean(),
        lambda o, t: ((o - t[:, None]) ** 2)[:, 0],
        lambda o, t: F.softplus((o[:, 0] - o) * (t[:, None] - t).sign()).mean(),  # all pairs of a batch
    ],
)
def test_losses_that_bring_both_to_one_shape_train(loss: Any) -> None:
    assert list(scored(drawn(1), drawn(), loss=loss).scores) == ["loss"]


def test_outputs_of_other_kinds_need_a_loss_and_a_score_that_read_them() -> None:
    with pytest.raises(fw.InputError, match=r"output is a dict.*loss and a score of your own"):
        scored(drawn(3), labels(3), lambda x: {"logits": x})
    own = {"loss": lambda o, t: F.cross_entropy(o["y"], t, reduction="none")}
    with pytest.raises(fw.InputError, match=r"'accuracy' does not fit.*output is a dict"):
        scored(drawn(3), labels(3), lambda x: {"y": x}, **own, score="accuracy")
    assert list(scored(drawn(3), labels(3), lambda x: {"y": x}, **own).scores) == ["loss"]


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "said"),
    [
        (nn.CrossEntropyLoss(), drawn(1), labels(2), r"label 1, but the model has 1 outputs.*BCEWith"),
        (nn.CrossEntropyLoss(), drawn(), labels(2), r"do not fit.*take nn\.BCEWithLogitsLoss\(\)"),
        (nn.BCEWithLogitsLoss(), drawn(3), labels(2), r"do not fit: this loss needs equal shapes"),
        (nn.BCEWithLogitsLoss(), drawn(), labels(3), "has target 2, but BCEWithLogitsLoss needs"),
        (nn.SoftMarginLoss(), drawn(), labels(2), "has target 0, but SoftMarginLoss needs targets −1 and 1"),
        (nn.CrossEntropyLoss(), drawn(3), labels(2, 3), r"one-hot labels targets\.argmax\(1\)"),
        (nn.CrossEntropyLoss(), drawn(3), labels(2, 1), r"give targets\.squeeze\(1\)"),
        (nn.CrossEntropyLoss(), drawn(3), [t.double() for t in labels(3)], r"give targets\.long\(\)"),
        (nn.GaussianNLLLoss(), drawn(), drawn(), "needs 2 tensors as outputs: the mean and the variance"),
        (nn.LinearCrossEntropyLoss(3, 2), drawn(3), labels(2), "has parameters, which would not be trained"),
        ("model", drawn(3), labels(2), "has no loss: let it return an object with `loss`"),
        (lambda o, t: (o.sum(1), o.square().sum(1)), drawn(3), labels(2), "divisors depend on the outputs"),
        (lambda o, t, mask: o.sum(), drawn(3), labels(2), r"takes a mask, but is .* it must leave out"),
        (lambda o, t: 3.0, drawn(3), labels(2), "the loss returns a float, not a tensor"),
    ],
)  # fmt: skip
def test_a_loss_that_does_not_fit_is_refused(
    loss: Any, outputs: list[Tensor], targets: list[Tensor], said: str
) -> None:
    with pytest.raises(fw.InputError, match=said):
        scored(outputs, targets, loss=loss)


def test_a_language_model_computes_its_own_loss() -> None:
    """Hugging Face's causal models shift labels by one: the score is the perplexity of their own loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11, "n_positions": 7}
    model = GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))  # type: ignore[no-untyped-call]
    clients = []
    for n in (9, 6):
        ids = torch.randint(11, (n, 7))
        labels = torch.where(torch.arange(7) < torch.randint(3, 8, (n, 1)), ids, -100)
        clients.append(({"input_ids": ids, "labels": labels}, labels))
    federation = fw.Federation.from_clients(clients)
    task = fw.Task(model, federation, loss="model", solver=fw.Solver(lr=0.1, batch_size=4), rounds=2)
    result = fw.simulate(task, "qfedavg", progress=False)
    assert list(result.scores) == ["perplexity"]
    model.load_state_dict(result.state_dict)
    model.eval()  # type: ignore[no-untyped-call]
    for k in range(2):
        begin = int(federation.start[k] + federation.train[k])
        test = slice(begin, begin + int(federation.test[k]))
        with torch.no_grad():
            loss = float(
                model(**{name: each[test] for name, each in as_dict(federation.inputs).items()}).loss
            )
        assert float(result.loss[k]) == pytest.approx(loss, rel=1e-5)
        assert float(result.score[k]) == pytest.approx(math.exp(loss), rel=1e-5)
    with pytest.raises(fw.InputError, match=r"'accuracy' does not fit.*shifted by one.*'perplexity'"):
        fw.simulate(dataclasses.replace(task, score="accuracy"), "fedavg", progress=False)


class WithLoss(nn.Module):
    """Computes a loss of its own, with weights of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
        logits = self.layer(x)
        return SimpleNamespace(
            loss=F.cross_entropy(logits, labels, weight=torch.tensor([1.0, 2, 3])), logits=logits
        )


def test_a_classifier_that_computes_its_own_loss_is_scored_by_accuracy() -> None:
    clients = [((torch.randn(n, 3), t), t) for n in SIZES for t in [torch.randint(3, (n,))]]
    task = fw.Task(WithLoss, fw.Federation.from_clients(clients), loss="model", rounds=1)
    assert list(fw.simulate(task, "fedavg", progress=False).scores) == ["accuracy"]


README = (Path(__file__).parents[2] / "README.md").read_text()


def readme_task(model: Callable[[], nn.Module], targets: Callable[[Tensor], Tensor], **given: Any) -> fw.Task:
    """The README's ten clients, with other targets."""
    torch.manual_seed(0)
    inputs = [torch.randn(20 * (k + 1), 8) + torch.randn(8) for k in range(10)]
    federation = fw.Federation.from_clients([(x, targets(x)) for x in inputs])
    return fw.Task(model, federation, rounds=20, solver=fw.Solver(lr=0.02), **given)


@pytest.mark.parametrize("name", ["one logit", "regression"])
def test_the_readmes_example_prints_what_a_hand_written_check_prints(name: str) -> None:
    assert "inputs = [torch.randn(20 * (k + 1), 8) + torch.randn(8) for k in range(10)]" in README
    if name == "one logit":
        task = readme_task(lambda: nn.Linear(8, 1), lambda x: x[:, 0] > x[:, 1], loss=nn.BCEWithLogitsLoss())
    else:
        task = readme_task(lambda: nn.Linear(8, 1), lambda x: x[:, 0] - 2 * x[:, 1] + 3, loss=F.mse_loss)
    compared = fw.compare(task, ["fedavg", "adafedadam:lr=0.1"], seeds=[0], progress=False)
    printed = str(compared)
    for run in compared:
        model = nn.Linear(8, 1)
        model.load_state_dict(run.state_dict)
        expected = []
        for k in range(10):
            begin = int(task.federation.start[k] + task.federation.train[k])
            test = slice(begin, begin + int(task.federation.test[k]))
            with torch.no_grad():
                outputs = model(as_tensor(task.federation.inputs)[test]).squeeze(1)
            targets = as_tensor(task.federation.targets)[test]
            right = 100 * ((outputs > 0) == (targets > 0.5)).double().mean()
            expected.append(
                float(right if name == "one logit" else (outputs - targets).square().mean().sqrt())
            )
        np.testing.assert_allclose(run.score.numpy(), expected, rtol=1e-4)
        row = next(line for line in printed.splitlines() if line.strip().startswith(run_name(run)))
        average = float(re.findall(r"\d+\.\d+", row.replace(run_name(run), ""))[0])
        assert average == pytest.approx(np.mean(expected), rel=5e-3)
    assert ("Accuracy over clients" if name == "one logit" else "RMSE over clients") in printed


def run_name(run: fw.Result) -> str:
    return {"fedavg": "FedAvg", "adafedadam:lr=0.1": "AdaFedAdam (lr=0.1)"}[run.algorithm]
