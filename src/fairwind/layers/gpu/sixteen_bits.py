"""Factors of 16 bits, for kernels of our own on a GPU.

If float32 factors may be rounded to TF32, each row's are scaled by a power of two and rounded to float16,
which has TF32's ten mantissa bits: only numbers 2²⁸ times smaller than the row's largest lose precision.
"""

import math
from importlib.util import find_spec

import torch
from torch import Tensor

from fairwind.engine import tuning

DEVICES = ("cuda",) if find_spec("triton") else ()
HALF = (torch.bfloat16, torch.float16)
SMALLEST = 2.0**-100  # number that a row is scaled by


def tf32_allowed() -> bool:
    """Whether float32 factors may be rounded; in compiled code, as it was when that was compiled."""
    return torch.get_float32_matmul_precision() != "highest"


def has_shared_memory() -> bool:
    """Whether the GPU has the shared memory that the kernels need."""
    if not torch.cuda.is_available():  # interpreted
        return True
    return (
        torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_multiprocessor
        >= tuning.MIN_SHARED_MEMORY_BYTES
    )


def may_be_half(x: Tensor) -> bool:
    """Whether a tensor's device has such kernels, and its numbers have 16 bits or may be rounded."""
    small = x.dtype in HALF or (x.dtype == torch.float32 and tf32_allowed())
    return x.device.type in DEVICES and small and has_shared_memory()


def half(t: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows of 16-bit numbers, and each row's unit (rows,) if they were scaled."""
    if t.dtype in HALF:
        return t, None
    shared = t.stride(0) == 0
    one = t[:1] if shared else t
    largest = torch.linalg.vector_norm(one, math.inf, tuple(range(1, t.dim())))
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)  # of two, not above it
    unit = power.clamp(min=SMALLEST) * 2.0**-14
    scaled = (one * (1 / unit).view(-1, *(1,) * (t.dim() - 1))).half()
    return (scaled.expand_as(t), unit.expand(t.shape[0]).clone()) if shared else (scaled, unit)


def packed(t: Tensor) -> Tensor:
    """Rows of contiguous numbers, at any offset."""
    return t[:1].contiguous().expand_as(t) if t.stride(0) == 0 else t.contiguous()
