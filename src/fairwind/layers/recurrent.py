"""LSTM, GRU and RNN layers that can be vectorised over models, unlike PyTorch's own.

Below, B is batch, T time, G gates of H units each.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fairwind.layers.batching import models_first
from fairwind.layers.cells import CELLS, Tensors
from fairwind.layers.dropout import dropout
from fairwind.layers.gpu import lstm


def unroll(
    mode: str,
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    start: Tensors,
    projection: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensors]:
    """States h (..., B, T, H), saved tensors of each step (..., B, T, ·, H), and last states.

    The inputs' parts of the gates are `projected` (..., B, T, G·H); `bias` is added to the recurrent parts.
    """
    step = CELLS[mode][0]
    states, outputs, kept = start, [], []
    for part in projected.unbind(-2):
        recurrent = states[0] @ weight.mT
        states, values = step(part, recurrent if bias is None else recurrent + bias.unsqueeze(-2), *states)
        if projection is not None:
            states = (states[0] @ projection.mT, *states[1:])
        outputs.append(states[0])
        kept.append(torch.stack(values, dim=-2))
    return torch.stack(outputs, dim=-2), torch.stack(kept, dim=-3), states


class Recurrence(torch.autograd.Function):
    """`unroll` with a hand-written backward pass.

    Autograd would compute the recurrent weight's gradient token by token and add these up, which for stacked
    models is most of the memory traffic. Here it is one product over all tokens.
    """

    @staticmethod
    def forward(
        mode: str, projected: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, ...]:
        """States h, tensors saved for the backward pass, and an LSTM's last cells; starts from h and c."""
        states, kept, last = unroll(mode, projected, weight, bias, (h,) if c is None else (h, c))
        return states, kept, *last[1:]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mode, _, weight, bias, h, _ = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(weight, h, *output[:2])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, d_states: Tensor, _: Tensor, *d_last: Tensor) -> tuple[Tensor | None, ...]:
        weight, h, states, kept = ctx.saved_tensors
        back = CELLS[ctx.mode][1]
        with torch.no_grad():  # there is no second derivative to prepare for
            before = (h, *states.unbind(-2)[:-1])
            d_now: tuple[Tensor, ...] = (torch.zeros_like(h), *d_last)
            d_parts, d_recurrents = [], []
            steps = list(zip(d_states.unbind(-2), kept.unbind(-3), before, strict=True))
            for d_out, values, h in reversed(steps):
                d_part, d_recurrent, (d_h, *d_rest) = back(values.unbind(-2), h, d_now[0] + d_out, *d_now[1:])
                d_now = (d_recurrent @ weight + d_h, *d_rest)
                d_parts.append(d_part)
                d_recurrents.append(d_recurrent)
            d_projected = torch.stack(d_parts[::-1], dim=-2)
            same = d_parts[0] is d_recurrents[0]
            d_gates = d_projected if same else torch.stack(d_recurrents[::-1], dim=-2)
            d_weight = d_gates.flatten(-3, -2).mT @ torch.stack(before, dim=-2).flatten(-3, -2)
            d_bias = d_gates.sum((-3, -2)) if ctx.biased else None
        d_h, d_c = d_now if len(d_now) == 2 else (d_now[0], None)
        return None, d_projected, d_weight, d_bias, d_h, d_c

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        """Stacked models are one more leading dimension."""
        stacked = models_first(info.batch_size, in_dims, inputs)
        outputs = Recurrence.apply(*stacked)  # type: ignore[no-untyped-call]
        return outputs, (0,) * len(outputs)


class Recurrent(nn.RNNBase):
    """The forward pass of a recurrent layer of any kind."""

    dropout_key: Tensor
    dropout_layer: int

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """As PyTorch's, except for packed sequences, whose lengths would have to be the same in every row."""
        if isinstance(input, PackedSequence):
            raise NotImplementedError(
                "packed sequences cannot be stacked; give padded ones and mask the outputs"
            )
        if input.dim() not in (2, 3):
            raise ValueError(f"expected 2-D or 3-D input, got {input.dim()}-D")
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(1 - self.batch_first)
        x = x if self.batch_first else x.transpose(0, 1)
        last = []
        fused = hx is None and lstm.fits(self) and lstm.takes(x, self.hidden_size)
        for layer, start in enumerate(self._starts(x, hx, batched)):
            if layer > 0 and self.dropout > 0 and self.training:
                x = dropout(x, self.dropout, self.dropout_key, self.dropout_layer, layer)
            x, end = self._layer(layer, x, None if fused else start)
            last.append(end)
        ends = [torch.stack(states) for states in zip(*last, strict=True)]
        if self.bidirectional:
            ends = [state.flatten(0, 1) for state in ends]
        if not batched:
            x, ends = x.squeeze(0), [state.squeeze(1) for state in ends]
        elif not self.batch_first:
            x = x.transpose(0, 1).contiguous()  # as a user's `view` expects it
        return x, tuple(ends) if self.mode == "LSTM" else ends[0]

    def _starts(self, x: Tensor, hx: Any, batched: bool) -> list[Tensors]:
        """Each layer's initial states, (B, H), or (2, B, H) in two directions."""
        directions = 2 if self.bidirectional else 1
        widths = [self.proj_size or self.hidden_size]
        if self.mode == "LSTM":
            widths.append(self.hidden_size)
        sizes = [(self.num_layers * directions, x.shape[0], width) for width in widths]
        if hx is None:
            states = [x.new_zeros(size) for size in sizes]
        else:
            given = hx if self.mode == "LSTM" else (hx,)
            states = [state if batched else state.unsqueeze(1) for state in given]
            for state, size in zip(states, sizes, strict=True):
                self.check_hidden_size(state, size)
        if self.bidirectional:
            states = [torch.unflatten(state, 0, (-1, 2)) for state in states]
        return list(zip(*(state.unbind() for state in states), strict=True))

    def _layer(self, layer: int, x: Tensor, start: Tensors | None) -> tuple[Tensor, Tensors]:
        """A layer's outputs (B, T, H), or (B, T, 2H), for inputs (B, T, ·), and its last states.

        It starts from zero, in one kernel, if there is no `start`.
        """
        suffixes = [f"_l{layer}", f"_l{layer}_reverse"] if self.bidirectional else [f"_l{layer}"]
        projected, biases = [], []
        for reverse, suffix in enumerate(suffixes):
            part = (x.flip(1) if reverse else x) @ getattr(self, "weight_ih" + suffix).mT
            if self.bias:
                bias, recurrent = getattr(self, "bias_ih" + suffix), getattr(self, "bias_hh" + suffix)
                if start is None:  # added by the kernel
                    biases.append(bias + recurrent)
                elif self.mode == "GRU":  # where the reset gate multiplies the recurrent bias
                    biases.append(recurrent)
                    part = part + bias
                else:
                    part = part + (bias + recurrent)
            projected.append(part)
        weight = _stacked([getattr(self, "weight_hh" + suffix) for suffix in suffixes])
        parts, bias = _stacked(projected), _stacked(biases) if biases else None
        inputs = self.mode, parts, weight, bias
        if start is None:
            states, cell, *_ = lstm.Layer.apply(  # type: ignore[no-untyped-call]
                parts, bias, weight, torch.is_grad_enabled()
            )
            last: Tensors = states[..., -1, :], cell
        elif self.proj_size:
            states, _, last = unroll(
                *inputs, start, _stacked([getattr(self, "weight_hr" + suffix) for suffix in suffixes])
            )
        else:
            h, c = start if len(start) == 2 else (start[0], None)
            states, _, *cells = Recurrence.apply(*inputs, h, c)  # type: ignore[no-untyped-call]
            last = (states[..., -1, :], *cells)
        if not self.bidirectional:
            return states, last
        return torch.stack((states[0], states[1].flip(1)), dim=-2).flatten(-2), last


def _stacked(tensors: list[Tensor]) -> Tensor:
    """The tensors of both directions along a new dimension, or the tensor of the only one."""
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0]


class LSTM(Recurrent, nn.LSTM):  # type: ignore[misc]
    pass


class GRU(Recurrent, nn.GRU):  # type: ignore[misc]
    pass


class RNN(Recurrent, nn.RNN):  # type: ignore[misc]
    pass


STACKABLE: dict[type[nn.Module], type[nn.Module]] = {nn.LSTM: LSTM, nn.GRU: GRU, nn.RNN: RNN}
