"""Our kernels for convolutions and LSTM layers: on a GPU, or (TRITON_INTERPRET=1) interpreted."""

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fairwind.layers import stackable
from fairwind.layers.gpu import sixteen_bits


class LSTM(nn.Module):
    """All that the layer returns, in one tensor."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__()
        self.layer = nn.LSTM(*args, **options)

    def forward(self, x: Tensor) -> Tensor:
        y, (h, c) = self.layer(x)
        return torch.cat([y.flatten(), h.flatten(), c.flatten()])


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "3×3": (nn.Conv2d(16, 20, 3, padding=1), (2, 16, 8, 7), 3),
    "few channels": (nn.Conv2d(3, 5, 3, padding=1, bias=False), (2, 3, 7, 9), 1),
    "stride": (nn.Conv2d(32, 20, 3, 2, 1), (2, 32, 9, 8), 7),
    "1×1 with stride": (nn.Conv2d(16, 8, 1, 2), (1, 16, 6, 5), 2),
    "5×5": (nn.Conv2d(4, 6, 5, padding=2), (1, 4, 7, 7), 2),
    "7×7 with stride": (nn.Conv2d(3, 16, 7, 2, 3), (2, 3, 11, 12), 2),
    "dilation": (nn.Conv2d(16, 4, 3, dilation=2, padding=(1, 0)), (1, 16, 9, 8), 2),
    "uneven": (nn.Conv2d(5, 4, (3, 2), (2, 3), (0, 2), (2, 1)), (2, 5, 10, 9), 2),
    "stride and dilation": (nn.Conv2d(16, 16, (4, 3), (3, 2), (2, 1), (2, 4)), (1, 16, 12, 12), 2),
    "same": (nn.Conv2d(3, 4, (4, 3), padding="same", dilation=(1, 2)), (2, 3, 6, 5), 2),
    "unseen pixels": (nn.Conv2d(3, 4, 2, 3), (2, 3, 5, 5), 2),
    "one image": (nn.Conv2d(16, 4, 3, padding=1), (16, 6, 5), 2),
    "LSTM": (LSTM(5, 20, batch_first=True), (3, 4, 5), 3),
    "two tokens": (LSTM(5, 16), (2, 3, 5), 2),
    "LSTM without bias": (LSTM(3, 7, bias=False), (4, 18, 3), 2),
    "two layers in two directions": (LSTM(6, 33, 2, bidirectional=True, batch_first=True), (17, 3, 6), 2),
}
LARGE: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "64 channels": (nn.Conv2d(64, 64, 3, padding=1), (32, 64, 32, 32), 3),
    "64 to 128": (nn.Conv2d(64, 128, 3, 2, 1), (32, 64, 32, 32), 2),
    "256 channels": (nn.Conv2d(256, 256, 3, padding=1), (32, 256, 8, 8), 3),
    "512 channels": (nn.Conv2d(512, 512, 3, padding=1), (32, 512, 4, 4), 3),
    "a first layer": (nn.Conv2d(3, 64, 3, padding=1), (32, 3, 32, 32), 5),
    "LSTM of 100 units": (LSTM(100, 100, 2, batch_first=True), (10, 25, 100), 5),
    "LSTM of 128 units": (LSTM(30, 128), (20, 33, 30), 3),
}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
odd = pytest.mark.filterwarnings("ignore:Using padding='same' with even")


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Float32 factors may be rounded."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, rounding: None) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    pytest.importorskip("triton")
    monkeypatch.setattr(sixteen_bits, "DEVICES", ("cpu",))


def stacked(layer: nn.Module, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """Outputs, and the gradients of their squares' sum with respect to inputs and weights."""
    module = stackable(copy.deepcopy(layer)).to(x.device, x.dtype)

    def total(weights: dict[str, Tensor], x: Tensor) -> Any:
        y = vmap(lambda w, x: functional_call(module, w, (x,)))(weights, x)
        return y.double().square().sum() / 1000, y

    (d_weights, d_x), y = grad(total, argnums=(0, 1), has_aux=True)(weights, x)
    return y, d_x, *d_weights.values()


def error(layer: nn.Module, shape: tuple[int, ...], rows: int, dtype: torch.dtype, device: str) -> float:
    """How far outputs and gradients are from PyTorch's in float64, at most, relative to their norms."""
    g = torch.Generator().manual_seed(0)
    normal = {
        name: torch.randn(rows, *p.shape, generator=g) / p[0].numel() ** 0.5
        for name, p in layer.named_parameters()
    }
    weights = {name: p.to(device, dtype) for name, p in normal.items()}
    x = torch.randn(rows, *shape, generator=g).to(device, dtype)
    found = stacked(layer, weights, x)
    plain = copy.deepcopy(layer).to(device, torch.float64)
    worst = 0.0
    for row in range(rows):
        inputs = x[row].double().requires_grad_()
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p.copy_(weights[name][row])
        y = plain(inputs)
        leaves = [inputs, *plain.parameters()]
        exact = y, *torch.autograd.grad(y.square().sum() / 1000, leaves)
        for a, b in zip(found, exact, strict=True):
            worst = max(worst, float(((a[row].double() - b).norm() / b.norm()).detach()))
    return worst


@odd
@pytest.mark.parametrize(("layer", "shape", "rows"), LAYERS.values(), ids=LAYERS)
def test_interpreted_kernels_give_pytorchs_gradients(
    layer: nn.Module, shape: tuple[int, ...], rows: int, interpreted: None
) -> None:
    assert 1e-6 < error(layer, shape, rows, torch.float32, "cpu") < 2e-3  # TF32 has ten bits


@odd
@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("layer", "shape", "rows"), [*LAYERS.values(), *LARGE.values()], ids=[*LAYERS, *LARGE]
)
def test_kernels_give_pytorchs_gradients(
    layer: nn.Module, shape: tuple[int, ...], rows: int, dtype: torch.dtype, rounding: None
) -> None:
    assert 1e-6 < error(layer, shape, rows, dtype, "cuda") < (2e-3 if dtype == torch.float32 else 2e-2)


@gpu
def test_float32_stays_exact_where_it_must() -> None:
    layer, shape, rows = LAYERS["stride"]
    assert torch.get_float32_matmul_precision() == "highest"
    assert error(layer, shape, rows, torch.float32, "cuda") < 1e-5


@gpu
@pytest.mark.parametrize("name", ["64 channels", "LSTM of 100 units"])
def test_bits_repeat(name: str, rounding: None) -> None:
    layer, shape, rows = LARGE[name]
    weights = {name: torch.randn(rows, *p.shape, device="cuda") for name, p in layer.named_parameters()}
    x = torch.randn(rows, *shape, device="cuda")
    for a, b in zip(stacked(layer, weights, x), stacked(layer, weights, x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("scale", [0, 1e-42, 1e-30, 1e30])
def test_any_finite_number_is_scaled(scale: float) -> None:
    x = torch.randn(2, 1, 3, 3, 4) * torch.tensor([scale, 1]).view(2, 1, 1, 1, 1)
    half, unit = sixteen_bits.half(x)
    assert unit is not None
    assert (half.float() * unit.view(2, 1, 1, 1, 1) - x).abs().max() <= 2**-10 * x.abs().max()
    assert torch.equal(unit.log2(), unit.log2().round())


def test_infinite_numbers_stay_so() -> None:
    half, unit = sixteen_bits.half(torch.full((1, 1, 1, 1, 1), torch.inf))
    assert unit is not None
    assert not (half.float() * unit).isfinite().any()
