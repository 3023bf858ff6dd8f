"""A trained model as a module of its task, and its outputs for samples, in batches."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fairwind.data.federation import Federation
from fairwind.data.padding import as_samples
from fairwind.data.samples import Samples, kind, mapped, named, narrowed, take, tensors
from fairwind.data.values import ColumnNames, ColumnOrder
from fairwind.engine.checks import build
from fairwind.engine.layout import Layout
from fairwind.engine.machine import find_machine, matmul_precision
from fairwind.engine.modules import call, duplicate, read
from fairwind.engine.settings import Settings
from fairwind.errors import InputError, first_line, whole
from fairwind.runs.schema import Part
from fairwind.task import Task


def trained(task: Task, seed: int, state: Mapping[str, Tensor], own: int | None = None) -> nn.Module:
    """The task's module with trained weights, on the CPU, in evaluation mode.

    Where each client has a model, what is its own is (K, …) in `state`; that of the client `own` is taken.
    """
    module = duplicate(build(task.model, seed)).cpu()
    before = module.state_dict()
    missing = set(Layout.of(module).names) - state.keys() if own is not None else before.keys() - state.keys()
    if own is not None:  # a parameter's further names, and what was not written with them, stay the module's
        theirs = {n for n, value in state.items() if n in before and value.ndim > before[n].ndim}
        state = {**before, **{n: value[own] if n in theirs else value for n, value in state.items()}}
    try:
        if missing:
            raise RuntimeError(f"{min(missing)!r} was not trained")
        module.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(
            f"the task's model is not the one that was trained ({_reason(error)}): give the same task"
        ) from None
    return module.eval()


def _reason(error: RuntimeError) -> str:
    """PyTorch's first reason, which follows a headline."""
    return str(error).strip().splitlines()[-1].strip() if str(error).strip() else first_line(error)


def dtype_of(module: nn.Module) -> torch.dtype:
    """The type that a module's floating-point inputs must have."""
    values = chain(module.parameters(), module.buffers())
    return next((value.dtype for value in values if value.is_floating_point()), torch.float32)


def placed(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a module on a device, in evaluation mode."""
    made = duplicate(module).to(device).eval()
    for layer in made.modules():
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()  # cuDNN wants one block of memory, which a copy is not
    return made


def samples_of(federation: Federation, k: int, part: Part = "test") -> Samples:
    """The inputs of a client's samples of a part."""
    start, sizes = federation.part(part)
    inputs: Samples = federation.at(slice(int(start[k]), int(start[k] + sizes[k])))[0]
    return inputs


def read_inputs(given: Any, like: Samples, columns: ColumnNames) -> Samples:
    """A user's inputs as samples, refused if they are not built as the task's, which have these columns."""
    samples = as_samples(given, ColumnOrder.of(columns, "those of training"))
    mine, theirs = dict(named(samples)), dict(named(like))
    same = mine.keys() == theirs.keys() and all(mine[path].ndim == theirs[path].ndim for path in mine)
    if not same:
        raise InputError(
            f"the inputs are {kind(samples)}, the task's {kind(like)}: give a batch of such samples"
        )
    if len({len(value) for value in mine.values()}) > 1:
        lengths = ", ".join(f"{path}: {len(value)}" for path, value in mine.items())
        raise InputError(f"the inputs differ in their number of samples ({lengths}): give as many of each")
    for path, value in mine.items():
        if value.dtype == torch.uint8 and theirs[path].is_floating_point():
            raise InputError(
                f"the inputs{path and ' ' + path} are bytes, the task's floating-point numbers: convert them "
                "as the task's were"
            )
    real = {path for path in mine if theirs[path].is_floating_point() > mine[path].is_floating_point()}
    return _as_real(samples, real)


def _as_real(samples: Samples, real: set[str], path: str = "") -> Samples:
    """The same with floating-point numbers at these paths."""
    if isinstance(samples, dict):
        return {n: _as_real(part, real, f"{path}.{n}" if path else str(n)) for n, part in samples.items()}
    if isinstance(samples, tuple):
        return tuple(_as_real(part, real, f"{path}[{i}]") for i, part in enumerate(samples))
    return samples.double() if path in real else samples


@torch.no_grad()
def outputs_of(
    module: nn.Module, inputs: Samples, like: Samples, *, batch_size: int = 256, device: str = "auto"
) -> Any:
    """A module's outputs for samples, in their order, on the CPU; `like` are samples that it can take."""
    whole(1, batch_size=batch_size)
    place, count = torch.device(find_machine(Settings(device=device)).device), len(tensors(inputs)[0])
    values = chain(module.parameters(), module.buffers())
    if any(m.training for m in module.modules()) or any(value.device != place for value in values):
        module = placed(module, place)
    given = narrowed(inputs if count else take(like, slice(0, 1)), dtype_of(module), whole_only=True)
    parts = []
    with matmul_precision("float32", place):
        for begin in range(0, max(count, 1), batch_size):
            batch = mapped(lambda t: t.to(place), take(given, slice(begin, begin + batch_size)))
            try:
                outputs = read(call(module, batch))
            except Exception as error:  # whatever a user's module raises
                raise InputError(
                    f"the model cannot take the inputs ({kind(batch)}): {type(error).__name__}: "
                    f"{first_line(error)}"
                ) from error
            parts.append(_on_cpu(outputs, len(tensors(batch)[0])))
    return _joined(parts) if count else take(parts[0], slice(0, 0))


def _on_cpu(outputs: Any, samples: int) -> Any:
    """The outputs of a batch, which must be tensors with a row for each sample."""
    shapes = {path: tuple(value.shape) for path, value in named(outputs)}
    wrong = [shape for shape in shapes.values() if not shape or shape[0] != samples]
    if wrong or not shapes:
        what = f"tensors of shape {wrong[0]}" if wrong else f"a {type(outputs).__name__} without tensors"
        raise InputError(
            f"the model returns {what} for {samples} samples: take result.model, and call it yourself"
        )
    return mapped(Tensor.cpu, outputs)


def _joined(parts: list[Any]) -> Any:
    """The outputs of all batches in one structure."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple | list):
        joined = [_joined(list(each)) for each in zip(*parts, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return first
