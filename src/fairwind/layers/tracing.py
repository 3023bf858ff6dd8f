"""Whether layers are being traced for the compiler, for which some need other forms."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class _Tracing:
    active: bool = False
    contiguous: bool = True


_now = _Tracing()


@contextmanager
def tracing(*, contiguous: bool) -> Iterator[None]:
    """While active, layers use the forms that compile for any number of rows.

    Only if `contiguous`, convolutions return tensors in the memory layout that a user's `view` expects: this
    costs a copy of all activations.
    """
    before = _now.active, _now.contiguous
    _now.active, _now.contiguous = True, contiguous
    try:
        yield
    finally:
        _now.active, _now.contiguous = before


def is_traced() -> bool:
    return _now.active or torch.compiler.is_compiling()


def must_be_contiguous() -> bool:
    return _now.contiguous
