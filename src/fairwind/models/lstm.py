"""A two-layer LSTM over token ids, which stacks: PyTorch's own cannot be vectorised over models.

Hochreiter, Schmidhuber: Long Short-Term Memory. 1997; Gers, Schmidhuber, Cummins: Learning to Forget. 2000.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn


class LSTM(nn.Module):
    """One layer, batch first; parameters, their names and their initial values are those of nn.LSTM."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.hidden = hidden
        bound = 1 / math.sqrt(hidden)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))

        self.weight_ih_l0, self.weight_hh_l0 = drawn(4 * hidden, inputs), drawn(4 * hidden, hidden)
        self.bias_ih_l0, self.bias_hh_l0 = drawn(4 * hidden), drawn(4 * hidden)

    def forward(self, x: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (B, T, H) and the last state (B, H); where `inside` (B, T) is false the state stays."""
        projected = x @ self.weight_ih_l0.T + (self.bias_ih_l0 + self.bias_hh_l0)  # (B, T, 4H), one product
        h = c = torch.zeros_like(projected[:, 0, : self.hidden])
        outputs = []
        for gates_in, here in zip(projected.unbind(1), inside.unbind(1), strict=True):
            i, f, g, o = (gates_in + h @ self.weight_hh_l0.T).chunk(4, dim=-1)
            new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            c = torch.where(here[:, None], new, c)
            h = torch.where(here[:, None], torch.sigmoid(o) * torch.tanh(new), h)
            outputs.append(h)
        return torch.stack(outputs, dim=1), h


class Text(nn.Module):
    """Embedding, LSTM layers, and a dense layer on the state after the last word; id 0 is padding."""

    def __init__(self, embedding: nn.Embedding, hidden: int, layers: int, classes: int):
        super().__init__()
        self.embedding = embedding
        widths = [embedding.embedding_dim] + [hidden] * layers
        self.layers = nn.ModuleList(LSTM(a, b) for a, b in pairwise(widths))
        self.dense = nn.Linear(hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:
        inside = ids != 0
        x: Tensor = self.embedding(ids)
        for layer in self.layers:
            x, last = layer(x, inside)
        out: Tensor = self.dense(last)
        return out


def lstm(
    words: int | None = None,
    vectors: Tensor | None = None,
    *,
    width: int = 100,
    hidden: int = 100,
    layers: int = 2,
    classes: int = 2,
) -> nn.Module:
    """Two LSTM layers of 100 over frozen `vectors` (words, width), or trainable ones for so many `words`."""
    if vectors is not None:
        embedding = nn.Embedding(len(vectors), vectors.shape[1], _weight=vectors, _freeze=True)
    elif words is not None:
        embedding = nn.Embedding(words, width)
    else:
        raise ValueError("give the number of words, or their vectors")
    return Text(embedding, hidden, layers, classes)
