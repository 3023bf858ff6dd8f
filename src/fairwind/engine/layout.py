"""The layout of a model's tensors: a flat vector (P,) of what is averaged, and of what clients keep."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from fairwind.errors import InputError, shown, unknown
from fairwind.layers.batch_norm import is_batch_norm, trains

Parts = tuple[Tensor, ...]  # a model's parameters, one by one; or those of many rows, (rows, *shape) each
BatchNorm = Literal["local", "shared", "recomputed", "frozen", "group"]


@dataclass(frozen=True)
class Layout:
    """Names, shapes and order of the trainable parameters, or of some of a model's tensors."""

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

    def some(self, chosen: Callable[[tuple[str, ...]], bool]) -> "Layout":
        """The layout of some of the parts, by their names."""
        parts = [
            part for part in zip(self.all_names, self.shapes, self.strides, strict=True) if chosen(part[0])
        ]
        names, shapes, strides = zip(*parts, strict=True) if parts else ((), (), ())
        return Layout(names, shapes, strides, self.dtype)

    def part(self, which: slice) -> "Layout":
        """The layout of consecutive parts."""
        return Layout(self.all_names[which], self.shapes[which], self.strides[which], self.dtype)

    def followed_by(self, other: "Layout") -> "Layout":
        """The layout of both, one after the other."""
        return Layout(
            self.all_names + other.all_names,
            self.shapes + other.shapes,
            self.strides + other.strides,
            self.dtype,
        )

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
        return flattened(self.weights(model), torch.empty(0, dtype=self.dtype))

    def parts(self, flat: Tensor) -> Parts:
        """Views of flat vectors (..., P), parameter by parameter: (..., *shape) each."""
        split = flat.split_with_sizes(self.sizes, dim=-1)
        return tuple(p.view(p.shape[:-1] + s) for p, s in zip(split, self.shapes, strict=True))

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector under the parameters' names."""
        return dict(zip(self.names, self.parts(flat), strict=True))

    def weights(self, model: nn.Module) -> list[Any]:
        """A model's trainable parameters, in the order of the flat vector."""
        named = _named(model)
        return [named[name] for name in self.names]

    def load(self, flat: Tensor, model: nn.Module) -> None:
        """Copies a flat vector into a model."""
        if self.names:
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


@dataclass(frozen=True)
class Sharing:
    """Which of a model's tensors are averaged, and which stay with each client; as users say it."""

    personal: Any = None
    """What stays with each client: a pattern of names such as "head.*", a type of module, a function of name
    and tensor, or several of these."""
    batch_norm: BatchNorm | None = None
    """What is done with batch norm; None refuses it."""

    def __post_init__(self) -> None:
        if self.batch_norm is not None and self.batch_norm not in get_args(BatchNorm):
            raise unknown("batch_norm", str(self.batch_norm), get_args(BatchNorm))
        for rule in self.rules:
            module = isinstance(rule, type) and issubclass(rule, nn.Module)
            if not (isinstance(rule, str) or module or (callable(rule) and not isinstance(rule, type))):
                raise InputError(
                    f"personal={shown(rule)} is no pattern of names, type of module or function of name and "
                    'parameter: give "head.*" or torch.nn.BatchNorm2d, say'
                )

    @property
    def rules(self) -> tuple[Any, ...]:
        several = isinstance(self.personal, list | tuple | set)
        return () if self.personal is None else tuple(self.personal) if several else (self.personal,)

    def chosen(self, model: nn.Module) -> set[str]:
        """The names of the parameters and buffers that stay with each client by `personal`."""
        named, found = _named(model), set()
        for rule in self.rules:
            if isinstance(rule, str):
                mine = {name for name in named if fnmatchcase(name, rule)}
            elif isinstance(rule, type):
                mine = _tensors_of(model, lambda layer, rule=rule: isinstance(layer, rule))  # type: ignore[misc]
            else:
                mine = {name for name, value in named.items() if rule(name, value)}
            if not mine:
                some = ", ".join(map(repr, list(named)[:4]))
                raise InputError(
                    f"personal={shown(rule)} is none of the model's tensors, which are {some}"
                    f"{', …' if len(named) > 4 else ''}"
                )
            found |= mine
        return found


ALL_SHARED = Sharing()


class Division(NamedTuple):
    """How a model's tensors are divided.

    A client's whole model is one vector: what algorithms average, what the client keeps, and what is averaged
    by sample counts. The last two are its own part.
    """

    shared: Layout  # parameters (P), the vector that algorithms see
    own: Layout  # personal parameters, personal buffers, and statistics that are averaged
    trained: int  # how many parts of `own` are parameters
    kept: int  # how many parts of `own` stay with each client; the others are averaged
    recomputes: bool = False  # whether the averaged ones are computed after training instead

    @classmethod
    def of(cls, model: nn.Module, sharing: Sharing) -> "Division":
        """By what a user says; refuses batch norm about which nothing is said."""
        parameters, named = Layout.of(model), _named(model)
        chosen, norms = sharing.chosen(model), _trained_norms(model)
        mixing = {
            f"{prefix}{name}" for prefix, layer in norms for name, _ in layer.named_buffers(recurse=False)
        }
        _check_norms(norms, chosen, sharing)
        if sharing.batch_norm == "local":
            chosen |= {f"{prefix}{name}" for prefix, layer in norms for name in _own(layer)}
        shared = parameters.some(lambda names: not chosen.intersection(names))
        if not shared.names:
            raise InputError('all parameters stay with the clients: share some, or train alone, with "local"')
        personal = parameters.some(lambda names: bool(chosen.intersection(names)))
        buffers = {name: value for name, value in model.named_buffers() if value is not None}
        kept = [n for n, b in buffers.items() if n in chosen and (b.is_floating_point() or n in mixing)]
        averaged = [n for n in buffers if n in mixing and n not in chosen]
        own = personal.followed_by(_layout_of(named, [*kept, *averaged], parameters.dtype))
        trained = len(personal.names)
        return cls(shared, own, trained, trained + len(kept), sharing.batch_norm == "recomputed")

    @property
    def whole(self) -> Layout:
        """The layout of a client's whole model."""
        return self.shared.followed_by(self.own) if self.own.names else self.shared

    @property
    def kept_names(self) -> tuple[str, ...]:
        """The tensors that stay with each client."""
        return self.own.names[: self.kept]

    @property
    def kept_part(self) -> Layout:
        """The layout of what stays with each client."""
        return self.own.part(slice(0, self.kept))

    @property
    def averaged_part(self) -> Layout:
        """The layout of what is averaged by sample counts: nothing where that is recomputed."""
        return self.own.part(slice(0, 0) if self.recomputes else slice(self.kept, None))

    @property
    def kept_numbers(self) -> int:
        return sum(self.own.sizes[: self.kept])


def _named(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, by all their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def _layout_of(named: dict[str, Tensor], names: Sequence[str], dtype: torch.dtype) -> Layout:
    tensors = [named[name] for name in names]
    strides = tuple(torch.empty_like(t).stride() for t in tensors)
    return Layout(tuple((name,) for name in names), tuple(t.shape for t in tensors), strides, dtype)


def _tensors_of(model: nn.Module, of: Callable[[nn.Module], bool]) -> set[str]:
    """The names of the tensors of some of its modules."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        if of(module)
        for name in _named(module)
    }


def _trained_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers with batch norm that train, with the beginning of their tensors' names."""
    layers = model.named_modules()
    return [
        (f"{name}." if name else "", layer)
        for name, layer in layers
        if is_batch_norm(layer) and trains(layer)
    ]


def _own(layer: nn.Module) -> list[str]:
    """The names of a layer's own parameters and buffers."""
    return [name for name, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))]


def _check_norms(norms: list[tuple[str, nn.Module]], chosen: set[str], sharing: Sharing) -> None:
    """Refuses layers with batch norm of which it is not said whether their statistics are averaged."""
    if sharing.batch_norm in ("local", "shared", "recomputed") and not norms:
        raise InputError(
            f"batch_norm={sharing.batch_norm!r}: the model has no batch norm that trains; leave it out"
        )
    for prefix, layer in norms:
        own = {f"{prefix}{name}" for name in _own(layer)}
        if sharing.batch_norm is None and not (own and own <= chosen):
            raise InputError(
                f"layer {prefix[:-1] or 'model'!r} is {type(layer).__name__}, whose statistics mix a batch's "
                "samples and differ between clients: say what is done with them, with "
                'Task(…, batch_norm="local", "shared", "recomputed", "frozen" or "group")'
            )


def flattened(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Tensors as one vector, of the type of another, and on its device if there are none."""
    flat = [tensor.detach().reshape(-1).to(like.dtype) for tensor in tensors]
    return torch.cat(flat) if flat else like.new_empty(0)


@torch.no_grad()
def copy_into(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies values into a model's weights, one by one."""
    torch._foreach_copy_(list(weights), list(values))
