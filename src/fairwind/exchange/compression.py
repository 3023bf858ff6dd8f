"""A client's updates in a codec's numbers, and what these leave out."""

import numpy as np
import torch

from fairwind.codecs import Codec, codec_of, decoded
from fairwind.exchange.message import Arrays, RefusedError, Reply


def compress(reply: Reply, codec: str | Codec, left_out: Arrays | None = None) -> tuple[Reply, Arrays]:
    """A reply whose update is sent by a codec, and what is left out of it: give that with the next reply.

    A client that has lost what was left out goes on without.
    """
    codec = codec_of(codec) if isinstance(codec, str) else codec
    names, shapes = list(reply.arrays), [array.shape for array in reply.arrays.values()]
    whole = np.concatenate([array.reshape(-1) for array in reply.arrays.values()])
    if left_out is not None:
        whole = whole + np.concatenate([left_out[name].reshape(-1) for name in names])
    if not np.isfinite(whole).all():
        raise RefusedError("its update is not finite")
    vector = torch.from_numpy(whole)
    parts = codec.encode(vector)
    missing = (vector - decoded(codec, parts, vector)).numpy()
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    kept = zip(names, shapes, np.split(missing, ends), strict=True)
    sent = {name: part.numpy() for name, part in parts.items()}
    return reply._replace(arrays=sent), {name: part.reshape(shape) for name, shape, part in kept}
