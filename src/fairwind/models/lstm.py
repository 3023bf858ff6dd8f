"""A two-layer LSTM over token ids.

Hochreiter, Schmidhuber: Long Short-Term Memory. 1997; Gers, Schmidhuber, Cummins: Learning to Forget. 2000.
"""

import torch
from torch import Tensor, nn


class Text(nn.Module):
    """Embedding, LSTM layers, and a dense layer on the last word's state; trailing ids 0 are padding."""

    def __init__(self, embedding: nn.Embedding, hidden: int, layers: int, classes: int):
        super().__init__()
        self.embedding = embedding
        self.lstm = nn.LSTM(embedding.embedding_dim, hidden, layers, batch_first=True)
        self.dense = nn.Linear(hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(ids))
        inside = (ids != 0).flip(1).cumsum(1).flip(1)  # number of words from this position on
        last = (inside == 1) & (ids != 0)  # (B, T), at most one in each row
        out: Tensor = self.dense(torch.where(last[..., None], states, 0).sum(1))
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
    """Two LSTM layers of 100 over frozen `vectors` (words, width), or trainable ones of `words` words."""
    if vectors is not None:
        embedding = nn.Embedding(len(vectors), vectors.shape[1], _weight=vectors, _freeze=True)
    elif words is not None:
        embedding = nn.Embedding(words, width)
    else:
        raise ValueError("give the number of words, or their vectors")
    return Text(embedding, hidden, layers, classes)
