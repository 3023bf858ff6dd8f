"""Modules of the kinds that users bring, in real sizes; those of images are the tests' own."""

import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from zoo import ZOO, Specimen
from zoo.specimen import CLASSES, classes, clients, images
from zoo.vision import leaf_cnn, resnet18

__all__ = ["GPT2", "MIDDLE", "ZOO", "Encoder", "Lstm", "Specimen", "leaf_cnn", "resnet18", "small_cnn"]


def small_cnn(channels: int, first: int, second: int, pixels: int) -> nn.Module:
    """Two convolutions of 3×3, each with ReLU and max pooling, and a dense layer for ten classes."""
    left = ((pixels - 2) // 2 - 2) // 2
    return nn.Sequential(
        *(nn.Conv2d(channels, first, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(first, second, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(second * left * left, 10)),
    )


class Lstm(nn.Module):
    """A classifier of texts with PyTorch's LSTM."""

    def __init__(self, words: int = 5000, width: int = 64, hidden: int = 128, classes: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.dense = nn.Linear(hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:
        _, (last, _) = self.lstm(self.embedding(ids))
        out: Tensor = self.dense(last[-1])
        return out


class Encoder(nn.Module):
    """A classifier of texts with PyTorch's transformer encoder."""

    def __init__(self, words: int = 5000, width: int = 128, layers: int = 2, length: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.dense = nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.dense(self.encoder(self.embedding(ids) + self.places).mean(1))
        return out


class Lora(nn.Module):
    """A frozen linear layer with a trained low-rank part (Hu et al.: LoRA. 2021)."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inputs) / rank)
        self.b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        frozen: Tensor = self.base(x)
        return frozen + F.linear(F.linear(x, self.a), self.b)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, rank: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = Lora(width, 3 * width, rank), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = (self.heads, -1)
        q, k, v = (torch.unflatten(t, -1, heads).transpose(1, 2) for t in self._qkv(x))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out

    def _qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.attention(self.norm1(x)).chunk(3, dim=-1)  # type: ignore[no-any-return]


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019): 124 M frozen random weights, LoRA in its attention, and a classifier."""

    def __init__(self, layers: int = 12, width: int = 768, words: int = 50257, rank: int = 8):
        super().__init__()
        generator = torch.random.get_rng_state()
        torch.manual_seed(0)  # frozen weights are the same for every seed
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64, rank) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        torch.random.set_rng_state(generator)
        for name, parameter in self.named_parameters():
            if name.rpartition(".")[2] not in ("a", "b"):
                parameter.requires_grad_(False)
        self.dense = nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        out: Tensor = self.dense(self.norm(self.blocks(x))[:, -1])
        return out


def _texts(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(1, 20, (n, 16), generator=g), classes(n, g) % 2


TEXTS = clients(_texts)

# Between the zoo's sizes and real ones, where stacking may or may not pay on a CPU.
MIDDLE = {
    each.name: each
    for each in (
        Specimen("mlp of 256 units", lambda: _mlp(256, 256), images(256)),
        Specimen("mlp of eight layers", lambda: _mlp(*[128] * 9), images(128)),
        Specimen("leaf-cnn of 8 channels", lambda: leaf_cnn(16, (8, 16), 32, CLASSES), images(1, 16, 16)),
        Specimen("leaf-cnn for 28 pixels", lambda: leaf_cnn(28, (4, 8), 32, CLASSES), images(1, 28, 28)),
        Specimen("resnet18 for 16 pixels", lambda: resnet18(4, CLASSES), images(3, 16, 16)),
        Specimen("resnet18 of 8 channels", lambda: resnet18(8, CLASSES), images(3, 8, 8)),
        Specimen("lstm of 32 units", lambda: Lstm(20, 16, 32), TEXTS),
        Specimen("lstm of 64 units", lambda: Lstm(20, 32, 64), TEXTS),
        Specimen("encoder of 32 units", lambda: Encoder(20, 32, 2, 16), TEXTS),
        Specimen("encoder of 64 units", lambda: Encoder(20, 64, 1, 16), TEXTS),
    )
}


def _mlp(*widths: int) -> nn.Module:
    hidden = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], CLASSES))
