"""PyTorch's functions in forms that compile for any number of models.

Vectorised over models, the kernels that stand in their place fix the number of models in compiled code.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """As a sum of padded tensors."""
    tensors = [t for t in tensors if tuple(t.shape) != (0,)]  # which PyTorch passes over
    if len(tensors) < 2:
        return torch.stack(tensors).squeeze(0)
    axis, dtype = dim % tensors[0].dim(), _common([t.dtype for t in tensors])
    after, before, made = sum(t.shape[axis] for t in tensors), 0, []
    for t in tensors:
        after -= t.shape[axis]
        padding = [0, 0] * (t.dim() - 1 - axis) + [before, after]
        made.append(F.pad(t.to(torch.uint8 if dtype == torch.bool else dtype), padding))
        before += t.shape[axis]
    total = made[0]
    for more in made[1:]:
        total = total + more
    return total.to(dtype)


def _common(dtypes: list[torch.dtype]) -> torch.dtype:
    first = dtypes[0]
    for dtype in dtypes[1:]:
        first = torch.promote_types(first, dtype)
    return first


def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """By indexing."""
    axis = dim % input.dim()
    places: list[Tensor] = []
    for d, size in enumerate(index.shape):
        place = torch.arange(size, device=index.device)
        places.append(index if d == axis else place.view([-1 if d == e else 1 for e in range(index.dim())]))
    return input[tuple(places)]


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Of logarithms of probabilities, with the classes in their second dimension."""
    if target.is_floating_point():
        return NotImplemented
    axis = min(1, input.dim() - 1)
    counts = target != ignore_index
    at = torch.where(counts, target, 0)
    weights = counts.to(input.dtype) if weight is None else torch.where(counts, weight[at], 0)
    losses = -weights * gather(input, axis, at.unsqueeze(axis)).squeeze(axis)
    if label_smoothing:
        each = input if weight is None else input * weight.view(-1, *[1] * (input.dim() - axis - 1))
        smooth = torch.where(counts, -each.sum(axis), 0)
        losses = (1 - label_smoothing) * losses + label_smoothing / input.shape[axis] * smooth
    if reduction == "mean":
        return losses.sum() / weights.sum()
    return losses.sum() if reduction == "sum" else losses


def cross_entropy(input: Tensor, target: Tensor, *options: Any, **named: Any) -> Any:
    return nll_loss(F.log_softmax(input, min(1, input.dim() - 1)), target, *options, **named)


def huber_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
) -> Tensor:
    off = (input - target).abs()
    return _reduced(torch.where(off <= delta, 0.5 * off.square(), delta * (off - 0.5 * delta)), reduction)


def smooth_l1_loss(input: Tensor, target: Tensor, *, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    off = (input - target).abs()
    losses = torch.where(off < beta, 0.5 * off.square() / beta, off - 0.5 * beta) if beta else off
    return _reduced(losses, reduction)


def mse_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    return _reduced((input - target).square(), reduction)


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """By its running statistics."""
    if training or running_mean is None or running_var is None:
        return NotImplemented
    scale = (running_var + eps).rsqrt()
    return _affine((input - _channels(running_mean, input)) * _channels(scale, input), weight, bias)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if running_mean is not None or not use_input_stats:
        return NotImplemented
    axes = tuple(range(2, input.dim()))
    variance, mean = torch.var_mean(input, axes, correction=0, keepdim=True)
    return _affine((input - mean) * (variance + eps).rsqrt(), weight, bias)


def _channels(values: Tensor, input: Tensor) -> Tensor:
    return values.view(-1, *[1] * (input.dim() - 2))


def _affine(values: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    values = values if weight is None else values * _channels(weight, values)
    return values if bias is None else values + _channels(bias, values)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return product if bias is None else product + bias


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    return v * (g / v.square().sum(axes, keepdim=True).sqrt())


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """By indexing, if what is added are numbers of the input."""
    if mode == "constant":
        return NotImplemented
    for i in range(len(pad) // 2):
        axis, (before, after) = input.dim() - 1 - i, pad[2 * i : 2 * i + 2]
        size = input.shape[axis]
        at = torch.arange(-before, size + after, device=input.device)
        if mode == "reflect":
            at = size - 1 - (size - 1 - at.abs()).abs()
        else:
            at = at % size if mode == "circular" else at.clamp(0, size - 1)
        input = input[(slice(None),) * axis + (at,)]
    return input


COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cat: cat,
    torch.concat: cat,
    torch.concatenate: cat,
    torch.gather: gather,
    Tensor.gather: gather,
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    F.huber_loss: huber_loss,
    F.smooth_l1_loss: smooth_l1_loss,
    F.mse_loss: mse_loss,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    F.bilinear: bilinear,
    torch._weight_norm: weight_norm,
    F.pad: pad,
}


class CompiledForms(TorchFunctionMode):
    """While active, these functions have these forms, and PyTorch's own for arguments that forms lack."""

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        form = COMPILED.get(func)
        if form is not None:
            named = {name: value for name, value in (kwargs or {}).items() if value is not None}
            try:
                if (found := form(*args, **named)) is not NotImplemented:
                    return found
            except TypeError:  # deprecated arguments, for example
                pass
        return func(*args, **(kwargs or {}))
