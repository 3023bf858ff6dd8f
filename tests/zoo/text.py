"""Models of texts: recurrent layers, attention, embeddings."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from zoo.specimen import (
    CLASSES,
    LENGTH,
    WORDS,
    Specimen,
    classes,
    clients,
    padded,
    padded_texts,
    texts,
    token_accuracy,
    token_cross_entropy,
    words,
)

WIDTH = 8


class Recurrent(nn.Module):
    """Classifies the mean state."""

    def __init__(self, kind: Callable[..., nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = kind(WIDTH, 5, batch_first=True, **options)
        width = self.layers.proj_size or self.layers.hidden_size
        self.head = nn.Linear(width * (1 + self.layers.bidirectional), CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.layers(self.embedding(ids))
        out: Tensor = self.head(states.mean(1))
        return out


class PackedLSTM(Recurrent):
    """Classifies the state after the last word that is not padding."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        packed = pack_padded_sequence(
            self.embedding(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (last, _) = self.layers(packed)
        out: Tensor = self.head(last[-1])
        return out


class Cells(nn.Module):
    """An LSTM cell, applied word by word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.LSTMCell(WIDTH, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        state: Any = None
        for word in self.embedding(ids).unbind(1):
            state = self.cell(word, state)
        out: Tensor = self.head(state[0])
        return out


class NextWord(nn.Module):
    """Predicts every next word, by an output layer that is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embedding(ids))[0])
        return out


class MeanEmbedding(nn.Module):
    """Classifies the mean embedding of the words that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(ids).sum(1) / (ids != 0).sum(1, keepdim=True))
        return out


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(WORDS, WIDTH, mode="mean", padding_idx=0)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(ids))
        return out


class SparseEmbedding(nn.Module):
    """Has gradients of only those words that occur."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(ids).mean(1))
        return out


class TextCNN(nn.Module):
    """Kim: Convolutional Neural Networks for Sentence Classification. 2014."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, 4, size) for size in (2, 3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).transpose(1, 2)
        out: Tensor = self.head(torch.cat([conv(x).relu().amax(2) for conv in self.convs], 1))
        return out


class Attention(nn.Module):
    def __init__(self, **options: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        out: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))
        return out


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=12, batch_first=True, **options)


class EncoderLayer(nn.Module):
    def __init__(self, **options: bool | float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layer = encoder_layer(**options)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embedding(ids)).mean(1))
        return out


class Encoder(nn.Module):
    """Classifies the mean state of the words that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 3)
        self.layers = nn.TransformerEncoder(encoder_layer(dropout=0.1), 2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.layers(self.embedding(ids) + self.positions, src_key_padding_mask=~mask)
        states = states * mask.unsqueeze(-1)
        out: Tensor = self.head(states.sum(1) / mask.sum(1, keepdim=True))
        return out


class Translator(nn.Module):
    """Predicts every next word of a text from the words before it and another text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Transformer(
            WIDTH, 2, 1, 1, dim_feedforward=12, dropout=0.1, activation="gelu", batch_first=True
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        states = self.layers(self.embedding(source), self.embedding(target), tgt_mask=causal)
        out: Tensor = self.head(states)
        return out


def packed(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    ids, mask = padded(n, g)
    return (ids, mask.sum(1)), classes(n, g)


def masked(n: int, g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    ids, mask = padded(n, g)
    return {"ids": ids, "mask": mask}, classes(n, g)


def next_words(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = words(n, g)
    return ids[:, :-1], ids[:, 1:]


def translations(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    before, after = next_words(n, g)
    return (words(n, g), before), after


SPECIMENS = [
    Specimen("lstm", partial(Recurrent, nn.LSTM), texts),
    Specimen("lstm-two-layers", partial(Recurrent, nn.LSTM, num_layers=2), texts),
    Specimen("lstm-bidirectional", partial(Recurrent, nn.LSTM, bidirectional=True), texts),
    Specimen("lstm-dropout", partial(Recurrent, nn.LSTM, num_layers=2, dropout=0.2), texts),
    Specimen("lstm-projected", partial(Recurrent, nn.LSTM, proj_size=3), texts),
    Specimen("lstm-cell", Cells, texts),
    Specimen(
        "lstm-packed",
        partial(PackedLSTM, nn.LSTM),
        clients(packed),
        executor="loop",
        note="packed sequences",
    ),
    Specimen("gru", partial(Recurrent, nn.GRU), texts),
    Specimen("rnn", partial(Recurrent, nn.RNN), texts),
    Specimen("rnn-relu", partial(Recurrent, nn.RNN, nonlinearity="relu", bias=False), texts),
    Specimen("tied-weights", NextWord, clients(next_words), token_cross_entropy, token_accuracy),
    Specimen("embedding-mean", MeanEmbedding, padded_texts),
    Specimen("embedding-sparse", SparseEmbedding, texts, executor="loop", note="sparse gradients"),
    Specimen("embedding-bag", Bag, padded_texts),
    Specimen("text-cnn", TextCNN, texts),
    Specimen("attention", Attention, texts),
    Specimen("attention-dropout", partial(Attention, dropout=0.2), texts),
    Specimen("encoder-layer", partial(EncoderLayer, dropout=0.0), texts),
    Specimen("encoder-layer-norm-first", partial(EncoderLayer, norm_first=True), texts),
    Specimen("encoder-padded", Encoder, clients(masked)),
    Specimen("translator", Translator, clients(translations), token_cross_entropy, token_accuracy),
]
