"""Forms of functions that compile for any number of models are PyTorch's functions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairwind.layers import tracing
from fairwind.layers.functions import COMPILED, CompiledForms

G = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=G, dtype=torch.float64)


X, Y, IMAGE, LABELS = normal(4, 3), normal(4, 3), normal(2, 3, 5, 6), torch.tensor([0, 2, -100, 1])
WEIGHT, SOFT = torch.tensor([0.2, 1.0, 3.0]).double(), normal(4, 3).softmax(1)
MEAN, VAR, SCALE, SHIFT = normal(3), normal(3).exp(), normal(3), normal(3)
KNOWN, PIXELS, PRODUCT = LABELS.clamp(min=0), normal(1, 1, 5), normal(2, 3, 3)
INDEX = torch.tensor([[2, 0], [1, 1], [0, 2]])
CASES: dict[str, Callable[[Tensor], Any]] = {
    "cat": lambda x: torch.cat([x, Y[:2], x], 0),
    "cat, last, of one": lambda x: torch.cat((x,), dim=-1),
    "cat, second, with an empty one": lambda x: torch.concat([torch.empty(0).double(), x, Y], 1),
    "cat, of types": lambda x: torch.cat([x, torch.ones(4, 2, dtype=torch.int32)], 1),
    "cat, of truths": lambda x: torch.cat([x > 0, Y > 0]).double() * x.sum(),
    "gather": lambda x: torch.gather(x, 1, INDEX),
    "gather, first, fewer": lambda x: x.gather(0, INDEX),
    "gather, keywords": lambda x: x.gather(dim=-1, index=INDEX[:2]),
    "cross-entropy": lambda x: F.cross_entropy(x, LABELS),
    "cross-entropy, none": lambda x: F.cross_entropy(x, LABELS, reduction="none"),
    "cross-entropy, weights": lambda x: F.cross_entropy(x, LABELS, WEIGHT, label_smoothing=0.2),
    "cross-entropy, sum": lambda x: F.cross_entropy(x, KNOWN, ignore_index=2, reduction="sum"),
    "cross-entropy, smooth": lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.3, reduction="none"),
    "cross-entropy, probabilities": lambda x: F.cross_entropy(x, SOFT),
    "cross-entropy, pixels": lambda x: F.cross_entropy(
        x[:, :, None] * PIXELS, KNOWN[:, None].expand(4, 5), WEIGHT
    ),
    "cross-entropy, one sample": lambda x: F.cross_entropy(x[0], LABELS[1]),
    "cross-entropy, deprecated": lambda x: F.nll_loss(x, LABELS, None, None, -100, None, "sum"),
    "likelihood": lambda x: F.nll_loss(x.log_softmax(1), LABELS, weight=WEIGHT),
    "huber": lambda x: F.huber_loss(x, Y, delta=0.4),
    "huber, positional": lambda x: F.huber_loss(x, Y, "sum", 0.7),
    "huber, weights": lambda x: F.huber_loss(x, Y, weight=Y.exp()),  # type: ignore[call-arg]
    "smooth": lambda x: F.smooth_l1_loss(x, Y, beta=0.5),
    "smooth, 0": lambda x: F.smooth_l1_loss(x, Y, reduction="none", beta=0.0),
    "squares": lambda x: F.mse_loss(x, Y, reduction="sum"),
    "squares, module": lambda x: nn.MSELoss()(x, Y),
    "batch norm, frozen": lambda x: F.batch_norm(IMAGE * x.sum(), MEAN, VAR, SCALE, SHIFT, eps=0.1),
    "batch norm, plain": lambda x: F.batch_norm(x, MEAN, VAR),
    "batch norm, trained": lambda x: F.batch_norm(x, None, None, SCALE, SHIFT, training=True),
    "instance norm": lambda x: F.instance_norm(IMAGE * x[0, 0], weight=SCALE, bias=SHIFT, eps=0.1),
    "instance norm, plain": lambda x: F.instance_norm(IMAGE[..., 0] * x[0, 0]),
    "bilinear": lambda x: F.bilinear(x, Y, PRODUCT, SHIFT[:2]),
    "weight norm": lambda x: torch._weight_norm(x, Y[:, :1], 0),
    "weight norm, last": lambda x: torch._weight_norm(x, Y[:1], 1),
    "pad": lambda x: F.pad(x, (1, 2), value=0.5),
    "pad, reflect": lambda x: F.pad(IMAGE * x[0, 0], (2, 1, 3, 0), mode="reflect"),
    "pad, replicate": lambda x: F.pad(IMAGE * x[0, 0], (2, 1, 3, 0), mode="replicate"),
    "pad, circular": lambda x: F.pad(IMAGE * x[0, 0], (2, 1, 3, 0), mode="circular"),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize("name", CASES)
def test_a_form_has_the_functions_values_and_gradients(name: str) -> None:
    found = []
    for form in (False, True):
        x = X.clone().requires_grad_()
        if form:
            with tracing(contiguous=False):
                out = CASES[name](x)
        else:
            out = CASES[name](x)
        weights = torch.arange(out.numel(), dtype=torch.float64).cos().view(out.shape)
        (gradient,) = torch.autograd.grad((out * weights).sum(), x)
        found.append((out.detach(), gradient))
    assert found[0][0].dtype == found[1][0].dtype
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_every_form_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()

    def noted(form: Callable[..., Any], *given: Any, **named: Any) -> Any:
        used.add(form)
        return form(*given, **named)

    forms = set(COMPILED.values())
    for function, form in COMPILED.items():
        monkeypatch.setitem(COMPILED, function, partial(noted, form))
    for case in CASES.values():
        with CompiledForms():
            case(X)
    assert used == forms
