"""Counter-based random numbers for functions that a forward pass calls: dropout, torch.rand and others."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fairwind.layers import dropout
from fairwind.layers.attention import Drop, attend
from fairwind.layers.draws import DRAWS, drawn

DROPOUTS: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    F.dropout: dropout.dropout,
    torch.dropout: dropout.dropout,
    F.dropout1d: dropout.dropout1d,
    F.dropout2d: dropout.dropout2d,
    F.dropout3d: dropout.dropout3d,
    F.alpha_dropout: dropout.alpha_dropout,
    F.feature_alpha_dropout: dropout.feature_alpha_dropout,
}


class CountedRandomness(TorchFunctionMode):
    """While active, the n-th call of a dropout function computes its mask from the key and n.

    So do torch.rand, randn, randint and bernoulli their numbers.

    `F.scaled_dot_product_attention` becomes plain products, because its CPU kernel has no batching rule.
    Afterwards, `needed` says whether any call was replaced: the mode slows down every call.
    """

    def __init__(self, key: Tensor):
        super().__init__()
        self.key = key
        self.calls, self.needed = 0, False

    def __enter__(self) -> Self:
        self.calls, self.needed = 0, False
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        if func in DRAWS:
            found = drawn(func, self.key, -1 - self.calls, args, kwargs)
            if found is not NotImplemented:
                self._number()
                return found
        if func is F.scaled_dot_product_attention:
            self.needed = True
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, func: Any, input: Tensor, p: float, training: bool = False, inplace: bool = False, **named: bool
    ) -> Tensor:
        if p == 0 or not named.get("train", training):  # torch.dropout's name for `training`
            return input
        return DROPOUTS[func](input, p, self.key, self._number())

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if is_causal:
            attn_mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # true where attention is allowed
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        drop: Drop | None = None
        if dropout_p > 0:
            number = self._number()

            def drop(weights: Tensor) -> Tensor:
                return dropout.dropout(weights, dropout_p, self.key, number)

        return attend(query, key, value, attn_mask, scale=scale, drop=drop)[0]

    def _number(self) -> int:
        """Negative, to differ from layers' indices."""
        self.calls, self.needed = self.calls + 1, True
        return -self.calls
