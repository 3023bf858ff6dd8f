"""Single steps of LSTM, GRU and RNN layers, forward and backward, and PyTorch's cells made of them.

Hochreiter, Schmidhuber: Long Short-Term Memory. 1997; Gers, Schmidhuber, Cummins: Learning to Forget. 2000;
Cho et al.: Learning Phrase Representations using RNN Encoder–Decoder. 2014.

A step takes the input's and the recurrent part of the gates, (..., G·H) each, and the states (..., H). It
returns the new states, and the tensors to save for the backward pass. The backward pass takes these, the
previous state h and the gradients of the new states. It returns the gradients of both parts, and the part of
the previous states' gradients that does not pass through the gates.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fairwind.layers.linear import linear

sigmoid_backward, tanh_backward = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward
Tensors = tuple[Tensor, ...]


def lstm_step(part: Tensor, recurrent: Tensor, h: Tensor, c: Tensor) -> tuple[Tensors, Tensors]:
    gates = part + recurrent
    i, f, _, o = torch.sigmoid(gates).chunk(4, dim=-1)
    g = torch.tanh(gates.chunk(4, dim=-1)[2])
    new = torch.addcmul(f * c, i, g)
    return (o * torch.tanh(new), new), (i, f, g, o, c)


def lstm_back(kept: Tensors, h: Tensor, dh: Tensor, dc: Tensor) -> tuple[Tensor, Tensor, Any]:
    i, f, g, o, c = kept
    tanh = torch.tanh(torch.addcmul(f * c, i, g))
    dc = dc + tanh_backward(dh * o, tanh)
    d_gates = (
        sigmoid_backward(dc * g, i),
        sigmoid_backward(dc * c, f),
        tanh_backward(dc * i, g),
        sigmoid_backward(dh * tanh, o),
    )
    d_part = torch.stack(d_gates, dim=-2).flatten(-2)
    return d_part, d_part, (0, dc * f)


def gru_step(part: Tensor, recurrent: Tensor, h: Tensor) -> tuple[Tensors, Tensors]:
    (part_r, part_z, part_n), (r, z, hidden) = part.chunk(3, dim=-1), recurrent.chunk(3, dim=-1)
    r, z = torch.sigmoid(part_r + r), torch.sigmoid(part_z + z)
    n = torch.tanh(torch.addcmul(part_n, r, hidden))
    return (torch.addcmul(n, z, h - n),), (r, z, n, hidden)


def gru_back(kept: Tensors, h: Tensor, dh: Tensor) -> tuple[Tensor, Tensor, Any]:
    r, z, n, hidden = kept
    dn = tanh_backward(dh * (1 - z), n)
    dr, dz = sigmoid_backward(dn * hidden, r), sigmoid_backward(dh * (h - n), z)
    d_part, d_recurrent = torch.stack((dr, dz, dn), dim=-2), torch.stack((dr, dz, dn * r), dim=-2)
    return d_part.flatten(-2), d_recurrent.flatten(-2), (dh * z,)


def tanh_step(part: Tensor, recurrent: Tensor, h: Tensor) -> tuple[Tensors, Tensors]:
    new = torch.tanh(part + recurrent)
    return (new,), (new,)


def tanh_back(kept: Tensors, h: Tensor, dh: Tensor) -> tuple[Tensor, Tensor, Any]:
    d_part = tanh_backward(dh, kept[0])
    return d_part, d_part, (0,)


def relu_step(part: Tensor, recurrent: Tensor, h: Tensor) -> tuple[Tensors, Tensors]:
    new = torch.relu(part + recurrent)
    return (new,), (new,)


def relu_back(kept: Tensors, h: Tensor, dh: Tensor) -> tuple[Tensor, Tensor, Any]:
    d_part = torch.where(kept[0] > 0, dh, 0)
    return d_part, d_part, (0,)


CELLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # by nn.RNNBase.mode
    "LSTM": (lstm_step, lstm_back),
    "GRU": (gru_step, gru_back),
    "RNN_TANH": (tanh_step, tanh_back),
    "RNN_RELU": (relu_step, relu_back),
}


class LSTMCell(nn.LSTMCell):
    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
        h, c = _step(self, "LSTM", input, (zeros, zeros) if hx is None else hx)
        return h, c


class GRUCell(nn.GRUCell):
    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
        return _step(self, "GRU", input, (zeros if hx is None else hx,))[0]


class RNNCell(nn.RNNCell):
    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
        mode = f"RNN_{self.nonlinearity.upper()}"
        return _step(self, mode, input, (zeros if hx is None else hx,))[0]


def _step(cell: nn.RNNCellBase, mode: str, x: Tensor, states: Tensors) -> Tensors:
    part = linear(x, cell.weight_ih, cell.bias_ih)
    recurrent = linear(states[0], cell.weight_hh, cell.bias_hh)
    new: Tensors = CELLS[mode][0](part, recurrent, *states)[0]
    return new


STACKABLE: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
    nn.RNNCell: RNNCell,
}
