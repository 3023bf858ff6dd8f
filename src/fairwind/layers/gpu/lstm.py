"""LSTM layers of stacked models on a GPU, with one kernel for all tokens.

Token by token, an LSTM is a small product and ten elementwise operations, each a kernel that reads and writes
memory. These kernels (`lstm_kernels`) keep a row's recurrent weights and states on the chip. They multiply
16-bit numbers (see `sixteen_bits`); sums are float32.

Below, R is rows, B batch, T time, H units.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fairwind.engine import tuning
from fairwind.layers.batching import models_first
from fairwind.layers.gpu.sixteen_bits import SMALLEST, half, may_be_half, packed


def fits(layer: nn.RNNBase) -> bool:
    """Whether these kernels can run such a layer, from zero."""
    return layer.mode == "LSTM" and not layer.proj_size and layer.hidden_size <= tuning.MAX_LSTM_UNITS


def takes(x: Tensor, units: int) -> bool:
    """Whether these kernels take inputs (B, T, ·)."""
    return may_be_half(x) and x.shape[0] * x.shape[1] * 5 * units < 1 << 31  # offsets have 32 bits


def _outputs(
    parts: Tensor, bias: Tensor | None, weight: Tensor, unit: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, batch, tokens, units = *parts.shape[:3], weight.shape[2]
    kept = parts.new_empty(rows, batch, tokens if keep else 0, 5, units)
    return parts.new_empty(rows, batch, tokens, units), kept, parts.new_empty(rows, batch, units)


@torch.library.custom_op("fairwind::lstm", mutates_args=())
def lstm(
    parts: Tensor, bias: Tensor | None, weight: Tensor, unit: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """States (R, B, T, H), what the backward pass needs (R, B, T, 5, H), and last cells (R, B, H).

    From the inputs' parts of the gates (R, B, T, 4H), biases (R, 4H) and weights (R, 4H, H) in 16 bits.
    """
    from fairwind.layers.gpu import lstm_kernels

    outputs = _outputs(parts, bias, weight, unit, keep)
    rows, batch, tokens, units = outputs[0].shape
    lstm_kernels.run[(rows * -(-batch // tuning.LSTM_SEQUENCES),)](
        *(parts, bias, weight, unit, *outputs, 0 if bias is None else bias.stride(0), weight.stride(0)),
        *(batch, tokens, units),
        **_tile(units, unit is not None, 8),
        BIASED=bias is not None,
        KEEP=keep,
    )
    return outputs


lstm.register_fake(_outputs)


@torch.library.custom_op("fairwind::lstm_back", mutates_args=())
def lstm_back(d_states: Tensor, d_last: Tensor, kept: Tensor, weight: Tensor, unit: Tensor | None) -> Tensor:
    """The gradient (R, B, T, 4H) with respect to the inputs' parts of the gates."""
    from fairwind.layers.gpu import lstm_kernels

    rows, batch, tokens, units = d_states.shape
    d_parts = d_states.new_empty(rows, batch, tokens, 4 * units)
    lstm_kernels.run_back[(rows * -(-batch // tuning.LSTM_SEQUENCES),)](
        *(d_states, d_last, kept, weight, unit, d_parts, weight.stride(0), batch, tokens, units, SMALLEST),
        **_tile(units, unit is not None, 16),
    )
    return d_parts


lstm_back.register_fake(lambda d_states, *_: d_states.new_empty(*d_states.shape[:3], 4 * d_states.shape[3]))


def _tile(units: int, scaled: bool, share: int) -> dict[str, Any]:
    """Sizes of a program; a warp has this share of the units."""
    width = max(16, 1 << (units - 1).bit_length())
    return {
        "B": tuning.LSTM_SEQUENCES,
        "H": width,
        "UNITS": scaled,
        "num_warps": max(4, width // share),
        "num_stages": 1,
    }


class Layer(torch.autograd.Function):
    """States (..., B, T, H) and last cells (..., B, H) of LSTM layers that start from zero.

    From the inputs' parts of the gates (..., B, T, 4H), biases (..., 4H) and weights (..., 4H, H). What else
    is returned is for the backward pass, if there will be one (`keep`).
    """

    @staticmethod
    def forward(parts: Tensor, bias: Tensor | None, weight: Tensor, keep: bool) -> tuple[Tensor, ...]:
        weights, unit = half(packed(_rows(weight, 2)))
        biases = None if bias is None else packed(_rows(bias, 1))
        states, kept, last = lstm(_rows(parts, 3).contiguous(), biases, weights, unit, keep)
        lead = parts.shape[:-3]
        found = states.view(*lead, *states.shape[1:]), last.view(*lead, *last.shape[1:]), kept
        return found if unit is None else (*found, weights, unit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.biased = inputs[1] is not None
        ctx.save_for_backward(output[0], output[2], *(output[3:] or (inputs[2],)))
        ctx.mark_non_differentiable(*output[2:])

    @staticmethod
    def backward(ctx: Any, d_states: Tensor, d_last: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        states, kept, weight, *unit = ctx.saved_tensors
        lead = states.shape[:-3]
        with torch.no_grad():  # there is no second derivative to prepare for
            weights = weight if unit else packed(_rows(weight, 2))
            d_rows = _rows(d_states, 3).contiguous(), _rows(d_last, 2).contiguous()
            d_parts = lstm_back(*d_rows, kept, weights, unit[0] if unit else None)
            before = nn.functional.pad(_rows(states, 3)[:, :, :-1], (0, 0, 1, 0))
            d_weight = d_parts.flatten(1, 2).mT @ before.flatten(1, 2)
            d_bias = d_parts.sum((1, 2)).view(*lead, -1) if ctx.biased else None
        return d_parts.view(*lead, *d_parts.shape[1:]), d_bias, d_weight.view(*lead, *weights.shape[1:]), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        """Stacked models are one more leading dimension."""
        stacked = models_first(info.batch_size, in_dims, inputs)
        found = Layer.apply(*stacked)  # type: ignore[no-untyped-call]
        # What is kept has all leading dimensions in one; it is used in the backward pass only.
        return found, (0, 0, *(None,) * (len(found) - 2))


def _rows(t: Tensor, own: int) -> Tensor:
    """All leading dimensions but the last so many as one."""
    return t.unsqueeze(0) if t.dim() == own else t.flatten(0, -1 - own)
