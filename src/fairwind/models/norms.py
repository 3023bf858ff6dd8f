"""Batch norm, frozen or replaced by group norm.

Wu, He: Group Normalization. ECCV 2018.
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import nn

from fairwind.errors import InputError, whole
from fairwind.layers.batch_norm import is_batch_norm

LEAST_CHANNELS = 8  # of a group, where a layer has as many


def to_group_norm(model: nn.Module, *, groups: int = 32) -> nn.Module:
    """A copy of a model with group norm in place of batch norm; the weights stay, the statistics go.

    A layer gets the largest number of groups, up to `groups`, that divides its channels into equal groups of
    at least eight; one group, if it has fewer than sixteen. An instance norm stays one, without statistics.
    """
    whole(1, groups=groups)
    made = copy.deepcopy(model)
    if is_batch_norm(made):
        return _grouped(made, groups)
    for layer in made.modules():
        for name, child in layer.named_children():
            if is_batch_norm(child):
                setattr(layer, name, _grouped(child, groups))
    return made


def _grouped(layer: Any, groups: int) -> nn.Module:
    """Group norm with the weights of a layer with batch norm."""
    channels, instance = layer.num_features, not isinstance(layer, nn.modules.batchnorm._BatchNorm)
    allowed = [n for n in range(1, groups + 1) if channels % n == 0 and channels // n >= LEAST_CHANNELS]
    made = nn.GroupNorm(channels if instance else max(allowed, default=1), channels, layer.eps, layer.affine)
    if layer.affine:
        made.weight, made.bias = layer.weight, layer.bias
    return made.train(layer.training)


def frozen(model: nn.Module) -> nn.Module:
    """A copy of a model whose batch norm does not train, and keeps its statistics."""
    made = copy.deepcopy(model)
    for name, layer in made.named_modules():
        if not is_batch_norm(layer):
            continue
        if not layer.track_running_stats:
            raise InputError(
                f"layer {name or 'model'!r} is {type(layer).__name__} without running statistics, which "
                'cannot be frozen: take batch_norm="local", "shared" or "group"'
            )
        layer.eval().requires_grad_(False)
    return made


def converted(
    model: nn.Module | Callable[[], nn.Module], how: Literal["frozen", "group"]
) -> nn.Module | Callable[[], nn.Module]:
    """A task's model, or the function that makes it, with batch norm that is frozen or replaced."""
    return _convert(model, how) if isinstance(model, nn.Module) else partial(_made, model, how)


def _made(make: Callable[[], nn.Module], how: Literal["frozen", "group"]) -> nn.Module:
    return _convert(make(), how)


def _convert(model: nn.Module, how: Literal["frozen", "group"]) -> nn.Module:
    if how == "frozen":
        return frozen(model)
    layers = [name or "model" for name, layer in model.named_modules() if is_batch_norm(layer)]
    if layers:
        shown = ", ".join(layers[:4]) + (", …" if len(layers) > 4 else "")
        warnings.warn(f'batch_norm="group": group norm takes the place of batch norm ({shown})', stacklevel=4)
    return to_group_norm(model)
