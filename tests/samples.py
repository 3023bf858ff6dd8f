"""A federation's samples, where a test knows of what kind they are."""

from torch import Tensor

from fairwind.data.samples import Samples


def as_tensor(samples: Samples) -> Tensor:
    """Those that are one tensor."""
    assert isinstance(samples, Tensor)
    return samples


def as_dict(samples: Samples) -> dict[str, Tensor]:
    """Those that are tensors by name."""
    assert isinstance(samples, dict)
    return {name: as_tensor(value) for name, value in samples.items()}
