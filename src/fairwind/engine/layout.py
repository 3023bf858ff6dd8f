"""The layout of a model's trainable parameters: one flat vector (P,), and its named parts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fairwind.errors import InputError

Parts = tuple[Tensor, ...]  # a model's parameters, one by one; or those of many rows, (rows, *shape) each


@dataclass(frozen=True)
class Layout:
    """Names, shapes and order of the trainable parameters."""

    all_names: tuple[tuple[str, ...], ...]  # of each part; several where modules share a parameter
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]  # of one row's part in memory
    dtype: torch.dtype

    @classmethod
    def of(cls, model: nn.Module) -> "Layout":
        """The layout of a model with PyTorch's default strides."""
        for name, p in model.named_parameters():
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise InputError(
                    f"the parameter {name!r} has no shape yet: call the model on a batch before it is given"
                )
            if p.requires_grad and not p.is_floating_point():
                raise InputError(
                    f"the parameter {name!r} is {str(p.dtype)[6:]}: only real numbers can be trained; keep "
                    "real and imaginary parts as two parameters, and join them with torch.complex"
                )
        names: dict[nn.Parameter, list[str]] = {}  # a parameter may belong to several modules
        for prefix, module in model.named_modules():
            for name, p in module.named_parameters(prefix, recurse=False):
                if p.requires_grad:
                    names.setdefault(p, []).append(name)
        if not names:
            raise InputError("the model has no trainable parameters")
        if len({p.dtype for p in names}) > 1:
            raise InputError("the model mixes parameter types; convert it with model.float()")
        shapes = tuple(p.shape for p in names)
        strides = tuple(torch.empty_like(p).stride() for p in names)
        return cls(tuple(map(tuple, names.values())), shapes, strides, next(iter(names)).dtype)

    def with_strides(self, strides: Sequence[tuple[int, ...]]) -> "Layout":
        """The same with other strides."""
        return replace(self, strides=tuple(strides))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(names[0] for names in self.all_names)

    @cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @cached_property
    def _orders(self) -> list[list[int]]:
        """The dimensions (from 1) of each row's part, the one with the longest stride first."""
        longest_first = (sorted(enumerate(stride, 1), key=lambda pair: -pair[1]) for stride in self.strides)
        return [[dim for dim, _ in order] for order in longest_first]

    @property
    def parameters(self) -> int:
        """P."""
        return sum(self.sizes)

    def flatten(self, model: nn.Module) -> Tensor:
        """A model's trainable parameters as one vector (P,)."""
        return torch.cat([weight.detach().reshape(-1) for weight in self.weights(model)])

    def parts(self, flat: Tensor) -> Parts:
        """Views of flat vectors (..., P), parameter by parameter: (..., *shape) each."""
        split = flat.split_with_sizes(self.sizes, dim=-1)
        return tuple(p.view(p.shape[:-1] + s) for p, s in zip(split, self.shapes, strict=True))

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector under the parameters' names."""
        return dict(zip(self.names, self.parts(flat), strict=True))

    def weights(self, model: nn.Module) -> list[nn.Parameter]:
        """A model's trainable parameters, in the order of the flat vector."""
        named = dict(model.named_parameters(remove_duplicate=False))
        return [named[name] for name in self.names]

    def load(self, flat: Tensor, model: nn.Module) -> None:
        """Copies a flat vector into a model."""
        copy_into(self.weights(model), self.parts(flat))

    def empty(self, rows: int, dtype: torch.dtype, device: torch.device) -> Parts:
        """Uninitialised parts for this many rows."""
        return tuple(
            torch.empty_strided((rows, *shape), (shape.numel(), *stride), dtype=dtype, device=device)
            for shape, stride in zip(self.shapes, self.strides, strict=True)
        )

    def as_matrices(self, parts: Parts) -> list[Tensor]:
        """The parts of rows as matrices (rows, n), a row's numbers in the order of memory."""
        return [
            p.permute(0, *order).reshape(len(p), -1) for p, order in zip(parts, self._orders, strict=True)
        ]

    def from_matrices(self, matrices: list[Tensor]) -> Tensor:
        """The flat vectors (rows, P) of such matrices."""
        flat = []
        for matrix, shape, order in zip(matrices, self.shapes, self._orders, strict=True):
            part = matrix.view(len(matrix), *(shape[d - 1] for d in order))
            back = (order.index(d) + 1 for d in sorted(order))
            flat.append(part.permute(0, *back).reshape(len(matrix), -1))
        return torch.cat(flat, dim=1)


@torch.no_grad()
def copy_into(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies values into a model's weights, one by one."""
    torch._foreach_copy_(list(weights), list(values))
