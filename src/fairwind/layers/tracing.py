"""Whether layers are being traced for the compiler, for which some need other forms."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from fairwind.layers.functions import CompiledForms


@dataclass
class _Tracing:
    active: bool = False
    contiguous: bool = True


_now = _Tracing()


@contextmanager
def tracing(*, contiguous: bool) -> Iterator[None]:
    """While active, layers and functions use the forms that compile for any number of rows.

    Only if `contiguous`, convolutions return tensors in the memory layout that a user's `view` expects: this
    costs a copy of all activations.
    """
    before = _now.active, _now.contiguous
    _now.active, _now.contiguous = True, contiguous
    try:
        with CompiledForms():
            yield
    finally:
        _now.active, _now.contiguous = before


def is_traced() -> bool:
    return _now.active


def must_be_contiguous() -> bool:
    return _now.contiguous


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else PyTorch imports its compiler for the first operation, which takes a second of a core."""
        return False


class OperationCounter(_Mode):
    """Counts the operations that PyTorch launches while it is active; convolutions and recurrent layers also
    by themselves."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = self.convolutions = self.recurrent = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        self.operations += 1
        self.convolutions += "convolution" in name
        self.recurrent += "rnn" in name or "lstm" in name or "gru" in name
        return func(*args, **(kwargs or {}))


class FlopCounter(_Mode):
    """Counts floating-point operations as PyTorch's `FlopCounterMode` does, without its compiler.

    Also those of `more`, operators by a formula of their arguments, in which tensors are shapes.
    """

    def __init__(self, more: Mapping[Any, Callable[..., int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.more, self.flops = more, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # what an operator is made of
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        found, operator = func(*args, **kwargs), func.overloadpacket
        if operator in self.more:
            shapes = tree_map(lambda each: each.shape if isinstance(each, Tensor) else each, (args, kwargs))
            self.flops += self.more[operator](*shapes[0], **shapes[1])
        elif operator in flop_registry:
            self.flops += flop_registry[operator](*args, **kwargs, out_val=found)
        return found
