"""Copies, calls and inspects users' modules."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fairwind.data.samples import cast, mapped, tensors
from fairwind.data.values import ColumnNames
from fairwind.errors import InputError, first_line
from fairwind.layers.batch_norm import is_batch_norm, trains
from fairwind.layers.tracing import FlopCounter

COLUMNS = "fairwind_columns"  # a trained module's attribute: names of columns and classes it was trained on


def columns_of(module: nn.Module) -> ColumnNames:
    """What a trained module, or one that has trained ones inside, knows of its columns and classes."""
    given = filter(None, (getattr(each, COLUMNS, None) for each in module.modules()))
    known = [{place: tuple(names) for place, names in each.items()} for each in given]
    if any(each != known[0] for each in known):
        raise InputError(
            "the model has parts that were trained on columns in several orders, or on others: train all on "
            "the same"
        )
    return known[0] if known else {}


class _DetachedCopies(TorchFunctionMode):
    """While active, deep copies of activations are without their computation.

    Vectorised activations, which have no memory of their own, become empty.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        copying = func is Tensor.__deepcopy__
        if copying and not args[0].is_leaf:
            return args[0].detach().clone()
        try:
            return func(*args, **(kwargs or {}))
        except NotImplementedError:
            if not copying:
                raise
            return torch.empty(0)


def duplicate(module: nn.Module) -> nn.Module:
    """A deep copy, also of a module that keeps activations of its last forward pass as attributes."""
    with _DetachedCopies():
        return copy.deepcopy(module)


def copied(model: nn.Module, *, training: bool) -> nn.Module:
    """A deep copy of a module in training or evaluation mode; frozen batch norm stays in the latter."""
    if any(isinstance(layer, torch.jit.ScriptModule) for layer in model.modules()):
        raise InputError("copies of TorchScript modules do not train: give the one before torch.jit.script")
    try:
        module = duplicate(model).train(training)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise InputError(f"the model cannot be copied (copy.deepcopy): {first_line(error)}") from error
    for name, layer in module.named_modules():
        if is_batch_norm(layer) and not trains(model.get_submodule(name)):
            layer.eval()
    return module


def call(module: nn.Module, inputs: Any) -> Any:
    """A module's outputs: inputs are one tensor, a tuple of arguments, or a dict of named arguments."""
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def read(outputs: Any) -> Any:
    """What is compared with targets: an output's `logits`, if it has them, else the output."""
    return outputs.logits if hasattr(outputs, "logits") else outputs


def restore_buffers(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Restores buffers that forward passes assigned or changed in place."""
    for name, value in buffers.items():
        owner, _, own = name.rpartition(".")
        layer = module.get_submodule(owner)
        now = layer._buffers.get(own)
        if now is None or now.shape != value.shape or now.dtype != value.dtype:
            layer._buffers[own] = value.clone()
        elif own != "dropout_key":
            now.detach_().copy_(value)


def draws(module: nn.Module, inputs: Any) -> bool:
    """Whether a forward pass uses PyTorch's random generators."""

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]

    with torch.random.fork_rng(range(torch.cuda.device_count())), torch.no_grad():
        before = states()
        call(module, inputs)
        return not all(map(torch.equal, before, states()))


def changed_buffers(module: nn.Module, inputs: Any) -> list[str]:
    """The names of the buffers that a forward pass changes."""
    before = {name: (b, b.clone()) for name, b in module.named_buffers()}
    with torch.random.fork_rng(range(torch.cuda.device_count())), torch.no_grad():
        call(module, inputs)
    now = dict(module.named_buffers())
    return [
        name
        for name, (buffer, value) in before.items()
        if now.get(name) is not buffer or not torch.equal(now[name], value)
    ]


def _recurrent_operations(
    x: Sequence[int], weight: Sequence[int], recurrent: Sequence[int], *_: Any, **__: Any
) -> int:
    """Those of a recurrent layer, from the shapes of inputs (T, B, ·) and weights."""
    return 2 * x[0] * x[1] * (math.prod(weight) + math.prod(recurrent))


RECURRENT = {torch.ops.aten.mkldnn_rnn_layer: _recurrent_operations}  # PyTorch counts only products


def forward_operations(module: nn.Module, inputs: Any) -> int:
    """Floating-point operations of a forward pass, in products and convolutions."""
    counter = FlopCounter(RECURRENT)
    devices = range(torch.cuda.device_count())
    # Frozen, else the counter looks for gradients that a module may not have.
    frozen = duplicate(module).requires_grad_(False)
    for layer in frozen.modules():
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()  # else cuDNN warns of a copy's weights
    with torch.random.fork_rng(devices), torch.no_grad(), counter:
        call(frozen, inputs)
    return counter.flops


def activations(module: nn.Module, inputs: Any, dtype: torch.dtype, compute: torch.dtype) -> int:
    """Approximately how many numbers of a type autograd saves for the backward pass of a batch."""
    given = [*module.parameters(), *module.buffers()]
    shared = {t.untyped_storage().data_ptr() for t in given}
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    inputs = cast(mapped(torch.clone, inputs), compute)
    kept_here = torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value)
    with torch.random.fork_rng(range(torch.cuda.device_count())), torch.enable_grad(), kept_here:
        outputs = read(call(module, inputs))
    kept_bytes = sum(n for at, n in kept.items() if at not in shared)
    held = sum(t.numel() for t in (*tensors(inputs), *tensors(outputs)))
    return held + kept_bytes // torch.empty((), dtype=dtype).element_size()
