"""Modules of the kinds that users bring, in real sizes; those of images are the tests' own."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from zoo import ZOO, Specimen
from zoo.vision import leaf_cnn, resnet18

__all__ = ["GPT2", "ZOO", "Encoder", "Lstm", "Specimen", "leaf_cnn", "resnet18"]


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
