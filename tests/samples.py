"""A federation's samples, where a test knows of what kind they are."""

from typing import Any

from torch import Tensor

from fairwind.data.samples import Samples


def as_tensor(samples: Samples) -> Tensor:
    """Those that are one tensor."""
    assert isinstance(samples, Tensor)
    return samples


def as_dict(samples: Samples) -> dict[str, Any]:
    """Those that have names."""
    assert isinstance(samples, dict)
    return samples


def as_tuple(samples: Samples) -> tuple[Tensor, ...]:
    """Those that are several tensors."""
    assert isinstance(samples, tuple)
    return tuple(map(as_tensor, samples))
