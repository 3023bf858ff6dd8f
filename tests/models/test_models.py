"""The models against PyTorch's own layers: the same weights give the same outputs and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.flop_counter import FlopCounterMode

from conftest import DEVICE
from fairwind import Federation, InputError, Task, algorithms, compare, models, setups, simulate
from fairwind.engine.layout import Layout
from fairwind.engine.modules import activations, forward_operations
from fairwind.engine.solver import Solver
from fairwind.layers import stackable

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}


def gradients(outputs: Tensor, module: nn.Module) -> list[Tensor]:
    weights = [p for p in module.parameters() if p.requires_grad]
    return list(torch.autograd.grad(outputs.square().sum(), weights))


def pixels(n: int, *shape: int) -> Tensor:
    g = torch.Generator().manual_seed(n)
    return torch.randint(0, 256, (n, *shape), generator=g, dtype=torch.uint8)


def test_vgg11_is_eight_convolutions_and_a_dense_layer() -> None:
    model = models.vgg11()
    kinds = [type(layer).__name__ for layer in model.children() if list(layer.parameters())]
    assert kinds == ["Conv2d"] * 8 + ["Linear"]
    assert model(pixels(3, 3, 32, 32)).shape == (3, 10)
    assert sum(isinstance(layer, nn.MaxPool2d) for layer in model.children()) == 5


@pytest.mark.parametrize("init", ["pytorch", "he"])
def test_initial_weights_are_drawn_as_asked(init: Any) -> None:
    torch.manual_seed(0)
    *_, last = models.vgg11(init=init).requires_grad_(False).children()
    assert isinstance(last, nn.Linear)
    if init == "he":
        assert not last.bias.any()
        assert abs(float(last.weight.std()) - (2 / 512) ** 0.5) < 0.01
    else:
        assert float(last.weight.abs().max()) <= 512**-0.5


class PlainText(nn.Module):
    """The text model with PyTorch's LSTM, which skips padding by packing."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.embedding = embedding
        self.lstm = nn.LSTM(embedding.embedding_dim, 100, num_layers=2, batch_first=True)
        self.dense = nn.Linear(100, 2)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids != 0).sum(1)
        packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        out: Tensor = self.dense(last[-1])
        return out


@pytest.mark.parametrize("frozen", [True, False])
def test_the_lstm_is_pytorchs(frozen: bool) -> None:
    vectors = torch.randn(30, 100, dtype=torch.float64)
    ours: Any = (models.lstm(vectors=vectors) if frozen else models.lstm(30)).double()
    theirs = PlainText(nn.Embedding(30, 100).double().requires_grad_(not frozen)).double()
    theirs.embedding.weight.data.copy_(ours.embedding.weight.data)
    theirs.dense.load_state_dict(ours.dense.state_dict())
    theirs.lstm.load_state_dict(ours.lstm.state_dict())
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 30, (6, 25), generator=g)
    for row, length in enumerate((25, 1, 7, 24, 13, 2)):
        ids[row, length:] = 0
    a, b = ours(ids), theirs(ids)
    torch.testing.assert_close(a, b, **CLOSE)
    torch.testing.assert_close(gradients(a, ours), gradients(b, theirs), **CLOSE)


def test_padding_is_not_read() -> None:
    model: Any = models.lstm(10).double()
    ids = torch.tensor([[3, 4, 0, 0]])
    short = model(ids[:, :2])
    torch.testing.assert_close(model(ids), short)
    model.embedding.weight.data[0] += 100
    torch.testing.assert_close(model(ids), short)
    nothing = model(torch.zeros(1, 4, dtype=torch.int64))  # a tweet of nothing but names and links
    torch.testing.assert_close(nothing, model.dense.bias[None])


def test_the_mlp_is_pytorchs() -> None:
    ours = models.mlp().double()
    theirs = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 62)).double()
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    x = pixels(5, 28, 28)
    a, b = ours(x), theirs(x.double().flatten(1) / 255)
    torch.testing.assert_close(a, b, **CLOSE)
    torch.testing.assert_close(gradients(a, ours), gradients(b, theirs), **CLOSE)


@pytest.mark.parametrize(
    ("shape", "channels", "becomes"),
    [
        ((8, 9), "auto", (1, 8, 9)),
        ((8, 9, 3), "auto", (3, 8, 9)),
        ((8, 9, 1), "auto", (1, 8, 9)),
        ((8, 9, 4), "auto", (4, 8, 9)),
        ((3, 8, 9), "auto", (3, 8, 9)),
        ((8, 9, 2), "last", (2, 8, 9)),
        ((4, 9, 3), "last", (3, 4, 9)),
        ((4, 9, 3), "first", (4, 9, 3)),
        ((8, 9, 3), None, (8, 9, 3)),
        ((8, 9), None, (8, 9)),
        ((7,), "auto", (7,)),
    ],
)
def test_pixels_come_with_their_channels_in_front(
    shape: tuple[Any, ...], channels: Any, becomes: tuple[Any, ...]
) -> None:
    x = pixels(5, *shape)
    found = models.Pixels(channels=channels)(x)
    assert found.shape == (5, *becomes)
    moved = x.permute(0, 3, 1, 2) if len(shape) == 3 and becomes != shape else x
    assert torch.equal(found, (moved.float() / 255).reshape(5, *becomes))
    assert found.is_contiguous()
    assert models.Pixels(channels=channels)(x.float()).shape == x.shape


def test_pixels_refuse_images_whose_channels_may_be_anywhere() -> None:
    for shape, found in (((4, 9, 3), "both first and last"), ((8, 9, 2), "neither first nor last")):
        with pytest.raises(InputError, match=rf"{found}; say where they are, with Pixels\(channels='first'"):
            models.Pixels()(pixels(5, *shape))
    with pytest.raises(InputError, match="channels='front' is not one of auto, first, last, or None"):
        models.Pixels(channels="front")  # type: ignore[arg-type]


SMALL = {
    "mlp": (lambda: models.mlp(36, 8, 5), lambda n: pixels(n, 6, 6), 5),
    "vgg": (
        lambda: nn.Sequential(
            *(models.Pixels(), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 5, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 5, 4)),
        ),
        lambda n: pixels(n, 3, 8, 8),
        4,
    ),
    "lstm": (
        lambda: models.lstm(vectors=torch.linspace(-1, 1, 60, dtype=torch.float64).view(20, 3), hidden=6),
        lambda n: torch.randint(0, 20, (n, 5), generator=torch.Generator().manual_seed(n), dtype=torch.int32),
        2,
    ),
    "lstm, trained vectors": (
        lambda: models.lstm(20, width=3, hidden=6),
        lambda n: torch.randint(0, 20, (n, 5), generator=torch.Generator().manual_seed(n), dtype=torch.int32),
        2,
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_stacked_clients_train_as_if_alone(name: str) -> None:
    """Every model, on bytes or token ids: the stacked engine gives the plain loop's weights."""
    build, draw, classes = SMALL[name]
    clients = [(draw(n), torch.arange(n) % classes) for n in (3, 9, 5)]  # type: ignore[no-untyped-call]
    federation = Federation.from_clients(clients, classes=classes)
    runs: dict[str, Any] = {"mean": algorithms.fedavg(), "fair": algorithms.adafedadam()}
    given: dict[str, Any] = {
        "rounds": 2,
        "solver": Solver(lr=0.05, batch_size=4),
        "device": DEVICE,
        "compile": "off",
    }
    results = {
        engine: compare(Task(lambda: build().double(), federation), runs, engine=engine, **given)  # type: ignore[no-untyped-call]
        for engine in ("stacked", "loop")
    }
    for a, b in zip(results["stacked"], results["loop"], strict=True):
        torch.testing.assert_close(a.state_dict, b.state_dict, rtol=1e-9, atol=1e-11)


def test_frozen_vectors_are_shared_and_stay() -> None:
    vectors = torch.randn(1000, 100)
    model: Any = models.lstm(vectors=vectors)
    assert model.embedding.weight.data_ptr() == vectors.data_ptr()
    layout = Layout.of(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert layout.parameters == trained < vectors.numel() * 2
    assert "embedding.weight" not in layout.names
    ids = torch.randint(0, 1000, (12, 25))
    federation = Federation.from_clients([(ids, torch.arange(12) % 2)])
    result = simulate(Task(model, federation), "fedavg", rounds=1, device=DEVICE)
    assert torch.equal(result.state_dict["embedding.weight"], vectors)


def test_rows_are_counted_by_what_samples_become() -> None:
    """VGG11's activations, not its inputs, decide how many clients train at once."""
    model, x = stackable(models.vgg11()), pixels(2, 3, 32, 32)
    one, two = (activations(model, x[:n], torch.float32, torch.float32) for n in (1, 2))
    windows = sum(
        9 * c * s * s for c, s in ((3, 32), (64, 16), (128, 8), (256, 8), (256, 4), (512, 4), (512, 2))
    )
    assert windows < two - one < 4 * windows


def test_the_setups_have_the_papers_models() -> None:
    images = Federation.from_clients([(pixels(5, 28, 28), torch.arange(5))], classes=62)
    sizes = {
        name: sum(p.numel() for p in setups.SETUPS[name].model(images).parameters())
        for name in ("femnist", "cifar10")
    }
    assert sizes == {"femnist": 784 * 128 + 128 + 128 * 62 + 62, "cifar10": 9_225_610}
    assert [setups.SETUPS[n].rounds for n in ("femnist", "cifar10", "sent140", "synthetic")] == [
        500,
        200,
        1000,
        1000,
    ]
    solver = setups.SETUPS["cifar10"].solver
    assert (solver.lr, solver.batch_size, solver.epochs) == (0.01, 32, 2)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_operations_of_recurrent_layers_are_counted(kind: type[nn.Module], gates: int) -> None:
    """PyTorch's own counter passes over them; on a CPU their number decides whether a model is stacked."""
    layer, x = kind(30, 20, batch_first=True), torch.randn(2, 7, 30)
    assert forward_operations(layer, x) == 2 * 2 * 7 * gates * 20 * (30 + 20)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 3)), (4, 30)),
        (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)), (2, 3, 9, 9)),
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
    ],
)
def test_operations_are_counted_as_pytorch_counts_them(module: nn.Module, shape: tuple[int, ...]) -> None:
    x, counter = torch.randn(shape), FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        module.requires_grad_(False)(x)
    assert forward_operations(module, x) == counter.get_total_flops() > 0
