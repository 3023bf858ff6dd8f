"""Whether a module computes what C++ of its own would, found by trying it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fairwind.engine.layout import Layout, Parts

SAMPLES = 3
SCALES = (0.01, 1.0, 100.0)  # of the numbers: a limit such as ReLU6's shows at large ones alone


def trial(layout: Layout, inputs: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Random samples like the inputs, and random parameters as a flat vector."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, *inputs.shape[1:], generator=draw, dtype=inputs.dtype)
    flat = torch.randn(layout.parameters, generator=draw, dtype=inputs.dtype)
    return scale * x, scale * flat


def same(
    module: nn.Module, layout: Layout, inputs: Tensor, expected: Callable[[Parts, Tensor], Tensor]
) -> bool:
    """Whether a module's outputs are those expected from the parts of its parameters and samples, and their
    gradients too: a module may detach a tensor."""
    for scale in SCALES:
        x, flat = trial(layout, inputs, scale)
        flat.requires_grad_()
        with torch.enable_grad():
            try:
                found = functional_call(module, layout.unflatten(flat), (x,))
            except Exception:  # whatever a user's module makes of such inputs
                return False
            right = expected(layout.parts(flat), x)
            if not (isinstance(found, Tensor) and found.requires_grad and _close(found, right)):
                return False
            mixed = torch.linspace(-1, 1, right.numel(), dtype=right.dtype).view_as(right)
            gradients = [torch.autograd.grad((each * mixed).sum(), flat)[0] for each in (found, right)]
        if not _close(*gradients):
            return False
    return True


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(other.detach().abs().max())))
