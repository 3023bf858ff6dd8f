"""Small convolutional networks on a CPU: a row takes its steps in C++ written for them, without PyTorch.

An operation of such a network takes a few tens of microseconds, and calling it as long. The C++ knows stages
of a convolution, ReLU and max pooling, followed by dense layers.
"""

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fairwind.engine import tuning
from fairwind.engine.backends.native import build, library, source
from fairwind.engine.backends.trial import same, trial
from fairwind.engine.layout import Layout, Parts
from fairwind.engine.local import Rules
from fairwind.engine.solver import Solver
from fairwind.engine.stacked.model import StackedModel
from fairwind.engine.stacked.steps import Batches, Rows

KINDS = {"training": 0, "personal": 0, "gradient": 1, "loss": 2}  # as in the C++
TYPES = {torch.float32: "float", torch.float64: "double"}
FILES = "convolutions.cpp", "subnormal.h"
VECTOR_BYTES = 64  # as in the C++


class Stage(NamedTuple):
    """A convolution or a dense layer, and what follows it."""

    weight: int  # which part of the layout it is,
    bias: int | None
    image: tuple[int, int, int]  # channels, height and width of what it reads
    outputs: int
    kernel: tuple[int, int]  # a dense layer's is the whole image
    padding: int
    dense: bool
    relu: bool
    pool: int  # height and width that become one maximum


class Convolutions:
    """Steps of a kind of small convolutional networks; any number of threads may use it."""

    @staticmethod
    def applies(kind: str, model: StackedModel, data: tuple[Any, Any], rules: Rules, solver: Solver) -> bool:
        """Whether the model is such a network, and the C++ knows its steps of a kind."""
        if kind not in KINDS or rules.corrected or any(callable(scale) for scale in rules.scales):
            return False
        return (solver.plain or kind in ("gradient", "loss")) and bool(_network(model, *data))

    def __init__(self, kind: str, model: StackedModel, data: tuple[Any, Any], rules: Rules):
        self.kind, self.stages = KINDS[kind], _network(model, *data)
        self.lanes = VECTOR_BYTES // model.dtype.itemsize
        self.scales = torch.tensor(rules.scales, dtype=model.dtype)
        function = f"convolve_{TYPES[model.dtype]}"
        self._run = getattr(library(source(*FILES), function, lambda made: build(FILES[0], made)), function)
        self._run.restype = None

    def driver(self) -> "Convolutions":
        return self

    def __call__(self, rows: Rows, batches: Batches, inputs: Any, targets: Any, counts: list[int]) -> None:
        """Step s updates the first counts[s] rows."""
        rows, size = rows.first(counts[0]), batches.samples.shape[1]
        channels, height, width = self.stages[0].image
        weights, offsets = self._packed(rows.weights), self._packed(rows.offset)
        sums = [torch.zeros_like(block) for block in weights] if rows.kept else []
        steps = (ctypes.c_int64 * len(counts))(*counts)
        numbers = [self.kind, counts[0], size, len(counts), len(self.stages), self.stages[-1].outputs]
        numbers += [height * width, channels]
        read = rows.loss, inputs, batches.lr, targets, batches.samples
        numbers += [*(tensor.data_ptr() for tensor in read), ctypes.addressof(steps)]
        numbers += [tensor.data_ptr() for tensor in rows.rule] or [0] * 3
        numbers.append(self.scales.data_ptr())
        for i, stage in enumerate(self.stages):
            numbers += self._sizes(stage)
            numbers += [blocks[i].data_ptr() if blocks else 0 for blocks in (weights, sums, offsets)]
        self._run((ctypes.c_int64 * len(numbers))(*numbers))
        if self.kind == KINDS["training"]:
            for place, value in self._unpacked(rows.weights, weights):
                place.copy_(value)
        for place, value in self._unpacked(rows.kept[0], sums) if sums else ():
            place.add_(value)

    def _channels(self, stage: Stage) -> int:
        """The channels of an image in memory."""
        return stage.image[0] if stage is self.stages[0] else self._padded(stage.image[0])

    def _padded(self, numbers: int) -> int:
        """Whole vectors."""
        return -(-numbers // self.lanes) * self.lanes

    def _sizes(self, stage: Stage) -> list[int]:
        """As in the C++, where a dense layer reads an image of one pixel."""
        channels, (_, height, width) = self._channels(stage), stage.image
        outputs, biased = self._padded(stage.outputs), int(stage.bias is not None)
        last = [stage.padding, int(stage.relu), stage.pool, biased]
        if stage.dense:
            return [1, 1, height * width * channels, outputs, 1, 1, *last]
        return [height, width, channels, outputs, *stage.kernel, *last]

    def _packed(self, parts: Parts) -> list[Tensor]:
        """For every stage, lines of outputs (rows, lines, outputs), the last of them its bias."""
        blocks = []
        for stage in self.stages if parts else ():
            lines = stage.kernel[0] * stage.kernel[1] * self._channels(stage) + 1
            weight = parts[stage.weight]
            block = weight.new_zeros(len(weight), lines, self._padded(stage.outputs))
            self._kernel(stage, block).copy_(weight.reshape(len(weight), *_shape(stage)))
            if stage.bias is not None:
                block[:, -1, : stage.outputs] = parts[stage.bias]
            blocks.append(block)
        return blocks

    def _unpacked(self, parts: Parts, blocks: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The parts, and their values in the blocks."""
        pairs = []
        for stage, block in zip(self.stages, blocks, strict=True):
            weight = parts[stage.weight]
            pairs.append((weight, self._kernel(stage, block).reshape(weight.shape)))
            if stage.bias is not None:
                pairs.append((parts[stage.bias], block[:, -1, : stage.outputs]))
        return pairs

    def _kernel(self, stage: Stage, block: Tensor) -> Tensor:
        """A block's kernel (rows, outputs, channels, *kernel)."""
        kernel = torch.unflatten(block[:, :-1], 1, (*stage.kernel, -1))
        return kernel[..., : stage.image[0], : stage.outputs].permute(0, 4, 3, 1, 2)


def _shape(stage: Stage) -> tuple[int, ...]:
    return stage.outputs, stage.image[0], *stage.kernel


def _network(model: StackedModel, inputs: Any, targets: Any) -> list[Stage]:
    """The stages of a small convolutional network for class labels; none of another model."""
    plain = model.loss.classifies and model.dtype in TYPES and model.compute == model.dtype
    if model.random or not plain or not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
        return []
    fit = inputs.dtype == model.dtype and targets.dtype == torch.int64
    small = model.layout.parameters * model.dtype.itemsize <= tuning.MAX_CONVOLUTIONS_BYTES
    if not (fit and small and inputs.is_contiguous() and targets.is_contiguous()):
        return []
    training, evaluating = (
        _stages(module, model.layout, inputs) for module in (model.training, model.evaluating)
    )
    return training if training == evaluating and training and not training[0].dense else []


def _stages(module: nn.Module, layout: Layout, inputs: Tensor) -> list[Stage]:
    """A module's stages, found by what its layers read and give for random numbers."""
    x, flat = trial(layout, inputs)
    values = layout.unflatten(flat)
    seen: list[tuple[str, Any, Tensor, Tensor]] = []
    hooks = []
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):

            def see(layer: nn.Module, given: Any, out: Tensor, name: str = name) -> None:
                seen.append((name, layer, given[0].clone(), out.clone()))

            hooks.append(layer.register_forward_hook(see))
    try:
        with torch.no_grad():
            found = functional_call(module, values, (x,))
    except Exception:  # whatever a user's module makes of such inputs
        return []
    finally:
        for hook in hooks:
            hook.remove()
    if not (seen and isinstance(found, Tensor) and _shows(seen[0][2], x)):
        return []
    stages: list[Stage] = []
    image: tuple[int, ...] = tuple(seen[0][2].shape[1:])
    for (name, layer, _, out), then in zip(
        seen, [*(given for _, _, given, _ in seen[1:]), found], strict=True
    ):
        stage = _stage(name, layer, layout, image, out, then)
        if stage is None:
            return []
        stages.append(stage)
        image = (out.shape[1], *(n // stage.pool for n in out.shape[2:]), *(1, 1)[out.ndim - 2 :])
    used = [part for stage in stages for part in (stage.weight, stage.bias) if part is not None]
    if sorted(used) != list(range(len(layout.shapes))) or stages[-1].relu:
        return []
    return stages if same(module, layout, inputs, partial(_outputs, stages)) else []


def _outputs(stages: Sequence[Stage], parts: Parts, x: Tensor) -> Tensor:
    """What stages make of samples."""
    x = x.reshape(len(x), *stages[0].image)
    for stage in stages:
        weight, bias = parts[stage.weight], None if stage.bias is None else parts[stage.bias]
        if stage.dense:
            x = F.linear(x.flatten(1), weight, bias)
        else:
            x = F.conv2d(x, weight, bias, padding=stage.padding)
        x = torch.relu(x) if stage.relu else x
        x = F.max_pool2d(x, stage.pool) if stage.pool > 1 else x
    return x.flatten(1)


def _shows(image: Tensor, x: Tensor) -> bool:
    """Whether these are the samples, as images."""
    return image.ndim == 4 and image.numel() == x.numel() and torch.equal(image.reshape(x.shape), x)


def _stage(
    name: str, layer: Any, layout: Layout, image: tuple[int, ...], out: Tensor, then: Tensor
) -> Stage | None:
    """A layer with what comes between its outputs and what is read `then`, if the C++ knows both."""
    indices = {names[0]: i for i, names in enumerate(layout.all_names) if len(names) == 1}
    weight, bias = indices.get(f"{name}.weight"), indices.get(f"{name}.bias")
    between, dense = _between(out, then), isinstance(layer, nn.Linear)
    if weight is None or (layer.bias is not None and bias is None) or between is None:
        return None
    padding = 0
    if not dense:
        simple = layer.groups == 1 and (*layer.stride, *layer.dilation) == (1, 1, 1, 1)
        if not simple or layer.padding not in ((0, 0), (1, 1), (2, 2)) or layer.padding_mode != "zeros":
            return None
        padding = layer.padding[0]
    channels, height, width = image
    kernel = (height, width) if dense else layer.kernel_size
    return Stage(weight, bias, (channels, height, width), out.shape[1], kernel, padding, dense, *between)


def _between(out: Tensor, then: Tensor) -> tuple[bool, int] | None:
    """Whether ReLU, and which pooling, lead from the one to the other; None if it is something else."""
    for pool in range(1, min(out.shape[2:], default=1) + 1):
        for relu in (False, True):
            value = torch.relu(out) if relu else out
            value = F.max_pool2d(value, pool) if pool > 1 else value
            value = value.flatten(1) if then.ndim == 2 else value
            if value.shape == then.shape and torch.equal(value, then):
                return relu, pool
    return None
