"""Embeddings with their own batching rule.

PyTorch's rule makes the compiler fix the number of rows. And in `grad` of `vmap` it zeroes the gradient of
the padding vector in the first row only.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        rare = self.max_norm is not None or self.scale_grad_by_freq or self.sparse
        if rare:
            return super().forward(input)
        weight, ids = self.weight.unsqueeze(0), input.flatten().unsqueeze(0)
        out: Tensor = Lookup.apply(weight, ids, self.padding_idx)  # type: ignore[no-untyped-call]
        return out.view(*input.shape, -1)


class Lookup(torch.autograd.Function):
    """Vectors (tables, n, width) for ids (tables, n), from as many tables (tables, words, width)."""

    @staticmethod
    def forward(weight: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        return F.embedding(_places(weight, ids), weight.flatten(0, 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int | None], output: Tensor) -> None:
        weight, ids, ctx.padding = inputs
        ctx.save_for_backward(weight, ids)

    @staticmethod
    def backward(ctx: Any, d_vectors: Tensor) -> tuple[Tensor, None, None]:
        weight, ids = ctx.saved_tensors
        if ctx.padding is not None:
            d_vectors = torch.where((ids == ctx.padding).unsqueeze(-1), 0, d_vectors)
        rows = weight.shape[0] * weight.shape[1]
        d_weight = torch.ops.aten.embedding_dense_backward(d_vectors, _places(weight, ids), rows, -1, False)
        return d_weight.view(weight.shape), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], weight: Tensor, ids: Tensor, padding: int | None
    ) -> tuple[Tensor, int]:
        """Stacked models add tables; if they share one table, they add ids."""
        size = info.batch_size
        ids = ids.expand(size, *ids.shape) if in_dims[1] is None else ids.movedim(in_dims[1], 0)
        if in_dims[0] is None:
            out = Lookup.apply(weight, ids.movedim(0, 1).flatten(1), padding)  # type: ignore[no-untyped-call]
            return torch.unflatten(out, 1, (size, -1)), 1
        weight = weight.movedim(in_dims[0], 0)
        out = Lookup.apply(weight.flatten(0, 1), ids.flatten(0, 1), padding)  # type: ignore[no-untyped-call]
        return torch.unflatten(out, 0, (size, -1)), 0


def _places(weight: Tensor, ids: Tensor) -> Tensor:
    """Ids within all tables, one after the other."""
    return ids + weight.shape[1] * torch.arange(weight.shape[0], device=ids.device).unsqueeze(1)


STACKABLE: dict[type[nn.Module], type[nn.Module]] = {nn.Embedding: Embedding}
