"""Linear classifiers on a CPU: a row takes its steps in C++ written for them, without PyTorch.

Multinomial logistic regression is the field's convex task, and a step of it is so small that calling one
operation takes as long as computing it.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairwind.engine import tuning
from fairwind.engine.backends.native import build, library, source
from fairwind.engine.backends.trial import same
from fairwind.engine.layout import Parts
from fairwind.engine.local import Rules
from fairwind.engine.solver import Solver
from fairwind.engine.stacked.model import StackedModel
from fairwind.engine.stacked.steps import Batches, Rows

KINDS = {"training": 0, "personal": 0, "gradient": 1, "loss": 2}  # as in the C++
TYPES = {torch.float32: "float", torch.float64: "double"}
FILES = "classifier.cpp", "subnormal.h"


class Classifier:
    """Steps of a kind of linear classifiers; any number of threads may use it."""

    @staticmethod
    def applies(kind: str, model: StackedModel, data: tuple[Any, Any], rules: Rules, solver: Solver) -> bool:
        """Whether the model is a linear classifier, and the C++ knows its steps of a kind."""
        if kind not in KINDS or rules.corrected or any(callable(scale) for scale in rules.scales):
            return False
        return (solver.plain or kind in ("gradient", "loss")) and _classifies(model, *data)

    def __init__(self, kind: str, model: StackedModel, data: tuple[Any, Any], rules: Rules):
        self.kind = KINDS[kind]
        self.scales = torch.tensor(rules.scales, dtype=model.dtype)
        function = f"classify_{TYPES[model.dtype]}"
        self._run = getattr(library(source(*FILES), function, lambda made: build(FILES[0], made)), function)
        self._run.restype = None

    def driver(self) -> "Classifier":
        return self

    def __call__(self, rows: Rows, batches: Batches, inputs: Any, targets: Any, counts: list[int]) -> None:
        """Step s updates the first counts[s] rows."""
        weight, bias = _parts(rows.weights)
        sums = _parts(rows.kept[0]) if rows.kept else (None, None)
        offset = _parts(rows.offset) if rows.offset else (None, None)
        steps = (ctypes.c_int64 * len(counts))(*counts)
        size = batches.samples.shape[1]
        numbers = [self.kind, counts[0], *weight.shape[1:], size, len(counts)]
        for part in (weight, bias, *sums, *offset):
            numbers += [0] * 4 if part is None else [part.data_ptr(), *part.stride(), 0][:4]
        read = rows.loss, inputs, batches.lr, targets, batches.samples
        numbers += [*(tensor.data_ptr() for tensor in read), ctypes.addressof(steps)]
        numbers += [tensor.data_ptr() for tensor in rows.rule] or [0] * 3
        numbers.append(self.scales.data_ptr())
        self._run((ctypes.c_int64 * len(numbers))(*numbers))


def _parts(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of rows."""
    weight = next(part for part in parts if part.ndim == 3)
    return weight, next((part for part in parts if part.ndim == 2), None)


def _classifies(model: StackedModel, inputs: Any, targets: Any) -> bool:
    """Whether a model's scores are W·x + b, its loss is cross-entropy, and both are small enough."""
    shapes = model.layout.shapes
    matrices, vectors = ([shape for shape in shapes if len(shape) == n] for n in (2, 1))
    if model.random or len(matrices) != 1 or len(vectors) > 1 or len(shapes) != len(matrices + vectors):
        return False
    classes, features = matrices[0]
    plain = model.loss.classifies and model.dtype in TYPES and model.compute == model.dtype
    if not plain or vectors not in ([], [(classes,)]):
        return False
    if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
        return False
    fit = inputs[0].numel() == features and inputs.dtype == model.dtype and targets.dtype == torch.int64
    small = features * classes * model.dtype.itemsize <= tuning.MAX_CLASSIFIER_BYTES
    return fit and small and inputs.is_contiguous() and targets.is_contiguous() and _is_linear(model, inputs)


def _is_linear(model: StackedModel, inputs: Tensor) -> bool:
    """Whether its scores are W·x + b."""

    def expected(parts: Parts, x: Tensor) -> Tensor:
        weight, bias = _parts([part[None] for part in parts])
        return F.linear(x.flatten(1), weight[0], None if bias is None else bias[0])

    modules = model.training, model.evaluating
    return all(same(module, model.layout, inputs, expected) for module in modules)
