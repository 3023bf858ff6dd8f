"""Counter-based random numbers in place of torch.rand and others of its kind.

Each is a hash of a key, the number of the call and the position. So it does not depend on the other models in
the stack; nor on the batch size, if samples come first.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairwind.data.counter import mix

Hashes = Callable[[tuple[int, ...], Any], Tensor]  # of a shape, on a device: 32 bits each
NAMED = {"size", "dtype", "device", "low", "high", "input", "p"}  # arguments that are known here
WIDEST = 1 << 31  # range of integers to which a hash is scaled without overflow


def rand(hashes: Hashes, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """Uniform in [0, 1), with as many random bits as the type holds, 32 at most."""
    dtype = dtype or torch.get_default_dtype()
    bits = min(32, 1 - int(math.log2(torch.finfo(dtype).eps)))
    return (hashes(_shape(size), device) >> 32 - bits).to(dtype) * 2.0**-bits


def randn(hashes: Hashes, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """Normal, as the inverse of its distribution function."""
    uniform = (hashes(_shape(size), device).double() + 0.5) * 2.0**-31 - 1  # in (−1, 1), and never the ends
    return (math.sqrt(2) * torch.erfinv(uniform)).to(dtype or torch.get_default_dtype())


def rand_like(
    hashes: Hashes, input: Tensor, *, dtype: torch.dtype | None = None, device: Any = None
) -> Tensor:
    return rand(hashes, input.shape, dtype=dtype or input.dtype, device=device or input.device)


def randn_like(
    hashes: Hashes, input: Tensor, *, dtype: torch.dtype | None = None, device: Any = None
) -> Tensor:
    return randn(hashes, input.shape, dtype=dtype or input.dtype, device=device or input.device)


def randint(
    hashes: Hashes,
    *given: Any,
    low: int = 0,
    high: int | None = None,
    dtype: torch.dtype = torch.int64,
    device: Any = None,
) -> Any:
    """Whole numbers from `low` to `high`, itself excluded; given are (high, size) or (low, high, size).

    A range that is too wide for a hash is left to the generator.
    """
    *bounds, shape = given
    if len(bounds) == 2:
        low, high = bounds
    elif bounds:
        (high,) = bounds
    if high is None or not 0 < high - low <= WIDEST:
        return NotImplemented
    return (low + (hashes(_shape((shape,)), device) * (high - low) >> 32)).to(dtype)


def bernoulli(hashes: Hashes, input: Tensor, p: float | None = None) -> Tensor:
    """1 with the probabilities that are the input, or with probability p, else 0."""
    drawn = rand(hashes, input.shape, dtype=torch.float64, device=input.device)
    return (drawn < (input if p is None else p)).to(input.dtype)


DRAWS: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    torch.rand: rand,
    torch.rand_like: rand_like,
    torch.randn: randn,
    torch.randn_like: randn_like,
    torch.randint: randint,
    torch.bernoulli: bernoulli,
    Tensor.bernoulli: bernoulli,
}


def drawn(func: Any, key: Tensor, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of DRAWS is to return; NotImplemented for arguments unknown here, as a generator."""
    named = {name: value for name, value in kwargs.items() if value is not None}
    if not named.keys() <= NAMED:
        return NotImplemented
    if "size" in named:
        args = (*args, named.pop("size"))

    def hashes(shape: tuple[int, ...], device: Any) -> Tensor:
        of_call = mix(key.to(device or key.device), number)
        place = torch.arange(math.prod(shape), device=of_call.device).view(shape)
        return mix(of_call, place)

    return DRAWS[func](hashes, *args, **named)


def _shape(size: Any) -> tuple[int, ...]:
    """A size given as numbers, or as one tuple of them."""
    return tuple(size) if not size or isinstance(size[0], int) else tuple(size[0])
