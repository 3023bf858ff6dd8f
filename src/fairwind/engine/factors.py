"""Gradients left as factors.

The gradient of a dense layer's weight is a product: of what comes back to the layer, and what came into it.
Formed, it is as large as the weight, and is written only to be read once. Left as two factors, it is added to
where it is wanted by the product itself.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fairwind.data.federation import Federation

if TYPE_CHECKING:
    from fairwind.engine.cohort import Cohort

LARGE = 1 << 14  # numbers of a weight from which on it is worth to leave its gradient as factors


class Factors(NamedTuple):
    """Rows' gradients backᵀ·seen (rows, out, in)."""

    back: Tensor  # (rows, B, out)
    seen: Tensor  # (rows, B, in)

    def add_to(self, sums: Tensor) -> None:
        sums.baddbmm_(self.back.mT, self.seen)

    def give(self, gradient: Tensor) -> bool:
        """Whether their product is that gradient, and says something by it."""
        formed, size = torch.zeros_like(gradient), gradient.norm()
        self.add_to(formed)
        error = (formed - gradient).norm()
        return bool(size > 0 and error <= 1000 * torch.finfo(gradient.dtype).eps * size)


def factor(cohort: "Cohort", model: nn.Module, federation: Federation) -> None:
    """Leaves the gradients of large dense layers as factors, where these give the gradients of a few samples.

    They do not where a layer is used twice, or on more than one input for each sample, or a weight by others.
    """
    candidates = dict(_large_dense(cohort))
    if not candidates:
        return
    draw = torch.Generator().manual_seed(0)
    flat = cohort.flatten(model)
    flat = flat + 0.1 * torch.randn(
        2, len(flat), generator=draw, dtype=flat.dtype
    )  # gradients may start at 0
    at = torch.randint(len(federation.targets), (2, 8), generator=draw)
    batch = federation.inputs[at], federation.targets[at], torch.ones_like(at, dtype=torch.bool)
    parts, keys = cohort.parts(flat), torch.zeros(2, dtype=torch.int64)

    def found() -> tuple[Any, Any]:
        return cohort.gradients(parts, *batch, keys), cohort.probes(parts, *batch)[0]

    try:
        exact = found()
    except Exception:  # a model that can train may not be one that can be probed
        return
    for i, layer in candidates.items():
        ends = [_watch(module.get_submodule(layer)) for module in (cohort.training, cohort.evaluating)]
        cohort.factored[i] = layer
        try:
            same = all(factors[i].give(g[i]) for factors, g in zip(found(), exact, strict=True))
        except Exception:  # whatever a user's module makes of such an input
            same = False
        if same:
            cohort.strides[i] = torch.empty(cohort.shapes[i]).stride()
        else:
            del cohort.factored[i]
            for end in ends:
                end()


def _large_dense(cohort: "Cohort") -> Iterator[tuple[int, str]]:
    """The numbers of large weights that belong to one linear layer, and that layer's name."""
    for i, (name, *other_names) in enumerate(cohort.all_names):
        layer, _, own = name.rpartition(".")
        alone = layer and own == "weight" and not other_names
        if alone and cohort.sizes[i] >= LARGE and type(cohort.training.get_submodule(layer)) is nn.Linear:
            yield i, layer


def _watch(layer: Any) -> Callable[[], None]:
    """Makes a layer keep what comes in, as `seen`, whenever there is a `zero` to add to what it gives.

    By the zero one finds what comes back. Ends when the function that is returned is called.
    """
    layer.register_buffer("zero", None, persistent=False)
    layer.seen = None
    hook = layer.register_forward_hook(_see, prepend=True)  # before those that change what the layer gives

    def end() -> None:
        hook.remove()
        del layer.zero, layer.seen

    return end


def _see(layer: Any, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
    if layer.zero is None:
        return out
    if layer.seen is not None:
        raise RuntimeError("the layer is used twice")
    (layer.seen,) = given
    found: Tensor = out + layer.zero
    return found
