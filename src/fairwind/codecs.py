"""Codecs: how updates are sent in fewer bytes, as pure functions of flat vectors.

What a codec leaves out of a client's update is added to that client's next one (error feedback: Seide et al.,
1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019). The server
computes with what it receives, also the norm of an update.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.contract import AnyAlgorithm, GradientAlgorithm, MemoryAlgorithm
from fairwind.errors import InputError
from fairwind.runs.spec import call, with_parameters

BLOCK = 256  # numbers that share a scale in int8
Parts = dict[str, Tensor]  # a coded vector, by the names of its parts


class Codec(NamedTuple):
    """A way to send a vector (P,). What is not finite does not become finite by it."""

    name: str
    encode: Callable[[Tensor], Parts]
    decode: Callable[[Mapping[str, Tensor], Tensor], None]
    """Writes the vector that parts stand for into one of zeros; a ValueError says what is wrong with them."""
    rounded: Callable[[Tensor], Tensor]  #: What arrives of each row (n, P), the same as decoded
    form: Callable[[int], dict[str, tuple[torch.dtype | None, int]]]
    """For P numbers, by part, its type (None is the vector's own) and its length."""

    def bytes(self, parameters: int, number_bytes: int = 4) -> int:
        """Of a vector of so many numbers."""
        sizes = self.form(parameters).values()
        return sum(length * (number_bytes if kind is None else kind.itemsize) for kind, length in sizes)


def bf16() -> Codec:
    """Rounded to 16 bits: the range of float32, and three digits."""

    def coded(v: Tensor) -> Tensor:
        most = torch.finfo(torch.bfloat16).max
        return torch.where(torch.isfinite(v), v.clamp(-most, most), v).to(torch.bfloat16)

    def decode(parts: Mapping[str, Tensor], into: Tensor) -> None:
        into.copy_(parts["bf16"].view(torch.bfloat16))

    return Codec(
        "bf16",
        lambda v: {"bf16": coded(v).view(torch.int16)},
        decode,
        lambda v: coded(v).to(v.dtype),
        lambda parameters: {"bf16": (torch.int16, parameters)},
    )


def int8() -> Codec:
    """Rounded to multiples of a scale, from −127 to 127: of the largest of each 256 numbers."""

    def coded(v: Tensor) -> tuple[Tensor, Tensor]:
        """Multiples (n, blocks, 256), and scales (n, blocks)."""
        blocks = torch.nn.functional.pad(v, (0, -v.shape[1] % BLOCK)).view(len(v), -1, BLOCK)
        scale = blocks.abs().amax(2) / 127
        steps = torch.where(scale > 0, scale, 1)[:, :, None]
        return (blocks / steps).nan_to_num(0.0).round_().clamp_(-127, 127).to(torch.int8), scale

    def restored(steps: Tensor, scale: Tensor, parameters: int) -> Tensor:
        most = torch.finfo(scale.dtype).max
        found = (steps.to(scale.dtype) * scale[:, :, None]).clamp(-most, most)
        return found.view(len(steps), -1)[:, :parameters]

    def encode(v: Tensor) -> Parts:
        steps, scale = coded(v[None])
        return {"int8": steps.view(-1)[: len(v)], "scales": scale[0]}

    def decode(parts: Mapping[str, Tensor], into: Tensor) -> None:
        if (parts["scales"] < 0).any():
            raise ValueError("it has negative scales")
        steps = torch.nn.functional.pad(parts["int8"], (0, -len(into) % BLOCK)).view(1, -1, BLOCK)
        into.copy_(restored(steps, parts["scales"][None], len(into))[0])

    return Codec(
        "int8",
        encode,
        decode,
        lambda v: restored(*coded(v), v.shape[1]),
        lambda parameters: {"int8": (torch.int8, parameters), "scales": (None, -(-parameters // BLOCK))},
    )


def topk(*, share: float = 0.01) -> Codec:
    """The largest numbers and their places; of equals the first."""
    if not 0 < share <= 1:
        raise InputError(f"share={share} is out of range: it is a share of the numbers, in (0, 1]")

    def count(parameters: int) -> int:
        return max(1, round(share * parameters))

    def largest(v: Tensor) -> Tensor:
        """Which numbers are sent (n, P)."""
        k, sizes = count(v.shape[1]), v.abs().nan_to_num(torch.inf)
        least = sizes.topk(k, dim=1, sorted=True).values[:, -1:]
        above, equal = sizes > least, sizes == least
        return above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))

    def encode(v: Tensor) -> Parts:
        places = largest(v[None])[0].nonzero()[:, 0]
        return {"places": places.to(torch.int32), "values": v[places]}

    def decode(parts: Mapping[str, Tensor], into: Tensor) -> None:
        places = parts["places"].long()
        if not (int(places[0]) >= 0 and int(places[-1]) < len(into) and (places[1:] > places[:-1]).all()):
            raise ValueError(f"its places are not in order, from 0 to {len(into) - 1}")
        into[places] = parts["values"]

    return Codec(
        with_parameters("topk", **({} if share == 0.01 else {"share": share})),
        encode,
        decode,
        lambda v: torch.where(largest(v), v, 0),
        lambda parameters: {"places": (torch.int32, count(parameters)), "values": (None, count(parameters))},
    )


CODECS: dict[str, Callable[..., Codec]] = {"bf16": bf16, "int8": int8, "topk": topk}


def codec_of(spec: str) -> Codec:
    """The codec of a spec: bf16, int8, or topk:share=0.01."""
    return call("codec", spec, CODECS)


def decoded(codec: Codec, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """The vector (P,) that parts stand for, of the type of another."""
    found = torch.zeros_like(like)
    codec.decode(parts, found)
    return found


def check_coded(algorithm: AnyAlgorithm) -> None:
    """Refuses algorithms whose clients send more than an update."""
    if isinstance(algorithm, MemoryAlgorithm | GradientAlgorithm):
        who = algorithm.name or type(algorithm).__name__
        what = "changes of memories" if isinstance(algorithm, MemoryAlgorithm) else "gradients"
        raise InputError(
            f"{who}'s clients also send {what}, which no codec may round: "
            "take an algorithm whose clients send their updates alone, or leave out codec"
        )
