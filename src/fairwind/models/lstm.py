"""A two-layer LSTM over token ids, which stacks: PyTorch's own cannot be vectorised over models.

Hochreiter, Schmidhuber: Long Short-Term Memory. 1997; Gers, Schmidhuber, Cummins: Learning to Forget. 2000.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

sigmoid_backward, tanh_backward = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward


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

    def forward(self, x: Tensor) -> Tensor:
        """The states (B, T, H) after each of the inputs (B, T, I)."""
        projected = x @ self.weight_ih_l0.T + (self.bias_ih_l0 + self.bias_hh_l0)  # (B, T, 4H), one product
        states, *_ = Recurrence.apply(projected, self.weight_hh_l0)  # type: ignore[no-untyped-call]
        out: Tensor = states
        return out


class Recurrence(torch.autograd.Function):
    """What an LSTM makes of its inputs' part of the gates, with a way back of its own.

    Autograd would form the recurrent weight's gradient token by token and add these up, which for a cohort is
    most of the memory traffic. Here the gates' gradients of all tokens go into one product.
    """

    @staticmethod
    def forward(projected: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States, cells and activated gates of (..., B, T, 4H) with weights (..., 4H, H)."""
        h = c = torch.zeros_like(projected[..., 0, : weight.shape[-1]])
        kept = []
        for part in projected.unbind(-2):
            gates = part + h @ weight.mT
            i, f, _, o = torch.sigmoid(gates).chunk(4, dim=-1)
            g = torch.tanh(gates.chunk(4, dim=-1)[2])
            c = torch.addcmul(f * c, i, g)
            h = o * torch.tanh(c)
            kept.append((h, c, torch.stack((i, f, g, o), dim=-2)))
        h_all, c_all, gates_all = zip(*kept, strict=True)
        return torch.stack(h_all, dim=-2), torch.stack(c_all, dim=-2), torch.stack(gates_all, dim=-3)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[1], *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, d_states: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        weight, states, cells, gates = ctx.saved_tensors
        with torch.no_grad():  # there is no second derivative to prepare for
            h, c = states.unbind(-2), cells.unbind(-2)
            start = dh = dc = torch.zeros_like(h[0])
            before_h, before_c = (start, *h[:-1]), (start, *c[:-1])
            back = []
            steps = zip(d_states.unbind(-2), before_c, c, gates.unbind(-3), strict=True)
            for d_out, before, now, gate in reversed(list(steps)):
                i, f, g, o = gate.unbind(-2)
                dh, tanh = d_out + dh, torch.tanh(now)
                dc = dc + tanh_backward(dh * o, tanh)
                parts = (
                    sigmoid_backward(dc * g, i),
                    sigmoid_backward(dc * before, f),
                    tanh_backward(dc * i, g),
                    sigmoid_backward(dh * tanh, o),
                )
                d_gates = torch.stack(parts, dim=-2).flatten(-2)
                dh, dc = d_gates @ weight, dc * f
                back.append(d_gates)
            d_projected = torch.stack(back[::-1], dim=-2)
            d_weight = d_projected.flatten(-3, -2).mT @ torch.stack(before_h, dim=-2).flatten(-3, -2)
        return d_projected, d_weight

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Tensor) -> tuple[Any, tuple[int, int, int]]:
        """Stacked models are one more leading dimension."""
        stacked = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(inputs, in_dims[: len(inputs)], strict=True)
        ]
        return Recurrence.apply(*stacked), (0, 0, 0)  # type: ignore[no-untyped-call]


class Text(nn.Module):
    """Embedding, LSTM layers, and a dense layer on the state after the last word; ids 0 at the end pad."""

    def __init__(self, embedding: nn.Embedding, hidden: int, layers: int, classes: int):
        super().__init__()
        self.embedding = embedding
        widths = [embedding.embedding_dim] + [hidden] * layers
        self.layers = nn.ModuleList(LSTM(a, b) for a, b in pairwise(widths))
        self.dense = nn.Linear(hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        inside = (ids != 0).flip(1).cumsum(1).flip(1)  # how many words from here on
        last = (inside == 1) & (ids != 0)  # (B, T), at most one in each row
        out: Tensor = self.dense(torch.where(last[..., None], x, 0).sum(1))
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
