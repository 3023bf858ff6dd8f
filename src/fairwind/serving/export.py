"""A trained model as a file: its state dict, or an ONNX graph that runs without PyTorch."""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fairwind.data.federation import Federation
from fairwind.data.samples import Samples, cast, mapped, named, take, tensors
from fairwind.data.values import ColumnNames
from fairwind.engine.modules import call, read
from fairwind.errors import InputError, first_line, needs_extra
from fairwind.runs.files import write_atomic
from fairwind.serving.model import dtype_of, placed

ONNX = ".onnx"
FORMATS = (".safetensors", ".pt", ".pth", ONNX)
SAMPLES = "samples"  # the name of the dimension that may have any length


def check_format(to: Path) -> None:
    """Refuses a file whose name does not tell a format, or a folder that is not there."""
    if to.suffix not in FORMATS:
        raise InputError(f"{to} ends in none of {', '.join(FORMATS)}: the end of its name says the format")
    if not to.parent.is_dir():
        raise InputError(f"there is no folder {to.parent}: make it, or name another file")


def write_state(state: Mapping[str, Tensor], to: Path) -> Path:
    """Writes a state dict."""
    whole = {name: value.detach().cpu().clone().contiguous() for name, value in state.items()}
    if to.suffix == ".safetensors":
        return write_atomic(to, save(whole))
    data = io.BytesIO()
    torch.save(whole, data)
    return write_atomic(to, data.getvalue())


def write_model(module: nn.Module, to: Path, federation: Federation) -> Path:
    """Writes a module, which takes the federation's inputs."""
    if to.suffix != ONNX:
        return write_state(module.state_dict(), to)
    return write_atomic(to, as_onnx(module, federation.inputs, federation.columns))


def _reading(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward pass that returns only what is compared with targets, and not an object with `logits`."""

    @wraps(forward)  # the exporter looks for the names of its arguments
    def read_forward(*inputs: Any, **named_inputs: Any) -> Any:
        return read(forward(*inputs, **named_inputs))

    return read_forward


def as_onnx(module: nn.Module, inputs: Samples, columns: ColumnNames | None = None) -> bytes:
    """A module as an ONNX graph for any number of samples; checked against the module on a few inputs.

    Names of columns are in its metadata, as JSON under `columns`.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(package) is None:
            raise needs_extra("an ONNX file", package, "onnx")
    module = placed(module, torch.device("cpu")).requires_grad_(False)
    few = torch.arange(3) % len(tensors(inputs)[0])
    given = cast(mapped(Tensor.cpu, take(inputs, few)), dtype_of(module))
    module.forward = _reading(module.forward)
    dynamic = mapped(lambda value: {0: torch.export.Dim(SAMPLES)}, given)
    arguments: dict[str, Any] = {"args": given if isinstance(given, tuple) else (given,)}
    if isinstance(given, dict):
        arguments = {"args": (), "kwargs": given}
    shapes = dynamic if isinstance(given, dict | tuple) else (dynamic,)
    try:
        with _quiet():
            program = torch.onnx.export(
                module, **arguments, dynamic_shapes=shapes, dynamo=True, verbose=False
            )
            assert program is not None
            proto = program.model_proto
            if columns:
                names = json.dumps({place: list(each) for place, each in columns.items()})
                proto.metadata_props.add(key="columns", value=names)
            data: bytes = proto.SerializeToString()
    except Exception as error:  # whatever the exporter raises at a user's module
        raise _impossible(first_line(error.__cause__ or error)) from error
    _check(data, module, given)
    return data


def _impossible(why: str) -> InputError:
    return InputError(
        f"the model cannot be written as ONNX: {why}; its state dict can, as .safetensors or .pt"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says of itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _check(data: bytes, module: nn.Module, given: Samples) -> None:
    """Refuses a graph that does not compute what the module does, for one sample and for several."""
    import onnxruntime

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    for few in (slice(0, 1), slice(0, None)):
        part = take(given, few)
        try:
            feed = {name: value.numpy() for name, (_, value) in zip(names, named(part), strict=True)}
            with torch.no_grad():
                outputs = tensors(call(module, part))
            computed = [torch.as_tensor(value) for value in session.run(None, feed)]
            for mine, theirs in zip(outputs, computed, strict=True):
                torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-4)
        except Exception as error:  # of the runtime's own kinds, or where numbers differ
            raise _impossible(f"the graph computes something else ({first_line(error)})") from error
