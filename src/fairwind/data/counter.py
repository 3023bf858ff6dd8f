"""Counter-based random numbers: each is a hash of its purpose, seed, round, client and so on.

There is no generator state, so a number does not depend on other draws: not on the runs stacked with
it, not on the chunks, not on interruptions. Works on Python integers, int64 tensors and NumPy's 32-bit
integers.
"""

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fairwind.engine import tuning

Number = TypeVar("Number", int, Tensor)

MASK = 0xFFFFFFFF

# The purpose of a draw: the first key of every hash.
SPLIT, ORDER, PARTICIPATE, EPOCHS, DROPOUT, VALIDATION, HELD_OUT, LIARS, NOISE, EVALUATE = range(1, 11)


def scramble(h: Number) -> Number:
    """A bijection of 32-bit integers in which each input bit flips each output bit about half the time.

    Multipliers are below 2³¹, so that no product of 32-bit numbers overflows int64.
    """
    h = (h ^ (h >> 16)) * 0x21F0AAAD & MASK
    h = (h ^ (h >> 15)) * 0x735A2D97 & MASK
    return h ^ (h >> 15)


def mix(h: Number | int, key: Number | int) -> Number:
    """The hash `h` (32 bits) continued by one more key."""
    return scramble(h + key + 0x9E3779B9 & MASK)  # type: ignore[type-var,return-value]


def fold(*keys: int) -> int:
    """The hash of a few integers."""
    h = 0
    for key in keys:
        h = mix(h, key)
    return h


def draw(hashes: Tensor, count: int, weights: Tensor | None = None) -> Tensor:
    """So many places of those with the given hashes (n,), in order, drawn without replacement.

    By weights (n,), each draw takes one of the rest with a probability that is proportional to its weight
    (Efraimidis and Spirakis: Weighted random sampling with a reservoir. 2006).
    """
    keys = hashes
    if weights is not None:
        keys = (-torch.log((hashes.double() + 1) / 2**32) / weights).nan_to_num(torch.inf)
    return torch.argsort(keys, stable=True)[:count].sort().values


def segments(size: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """For segments of the given sizes laid end to end: each element's segment, and its place in it.

    If the total of the sizes is given, a GPU need not be synchronised to compute it.
    """
    segment = torch.repeat_interleave(size, output_size=total)
    return segment, torch.arange(len(segment), device=size.device) - (size.cumsum(0) - size)[segment]


def shuffle(segment: Tensor, place: Tensor, keys: Tensor, longest: int) -> Tensor:
    """Each segment's places, shuffled by the hash of its key and the place; none is longer than `longest`."""
    bits = longest.bit_length()
    if 32 + len(keys).bit_length() + bits > 63:
        drawn = segment << 32 | mix(keys[segment], place)
        return place[torch.argsort(drawn, stable=True)]
    # One sort of plain numbers, of which no two are equal
    known = segment << 32 + bits | place
    if tuning.NUMPY_SORTS and segment.is_cpu:
        begun: Any = keys.numpy().astype(np.uint32)[segment.numpy()]  # hashes have 32 bits
        hashes: Any = mix(begun, place.numpy().astype(np.uint32))
        ordered = torch.from_numpy(np.sort(known.numpy() | hashes.astype(np.int64) << bits))
    else:
        ordered = torch.sort(known | mix(keys[segment], place) << bits).values
    return ordered & (1 << bits) - 1
