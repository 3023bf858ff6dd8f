"""The numeric precision of local steps. Weights, updates, norms and sums keep the model's own type."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["auto", "float32", "tf32", "bf16"]


def compute_type(precision: Precision) -> torch.dtype | None:
    """The type of a local step's activations and gradients; None is the model's own."""
    return torch.bfloat16 if precision == "bf16" else None


@contextmanager
def products(precision: Precision, device: torch.device) -> Iterator[None]:
    """Allows TF32 products of float32 matrices on a GPU, unless the precision is float32."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
