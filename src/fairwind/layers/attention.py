"""Attention as plain products and softmax: PyTorch's fused kernels cannot be vectorised over models.

Vaswani et al.: Attention Is All You Need. 2017.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairwind.layers.dropout import dropout
from fairwind.layers.linear import linear

Drop = Callable[[Tensor], Tensor]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None = None,
    drop: Drop | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries (..., L, E) over keys (..., S, E) and values (..., S, V): outputs and weights.

    The mask is added to the scores. A query whose mask is -inf everywhere gets zeros.
    """
    scores = (q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ k.mT
    if mask is None:
        weights = scores.softmax(-1)
    else:
        blocked = (mask == -math.inf).all(-1, keepdim=True)
        # Zeros before the softmax also keep NaN out of the gradients.
        weights = (scores + mask.masked_fill(blocked, 0)).softmax(-1).masked_fill(blocked, 0)
    if drop is not None:
        weights = drop(weights)
    return weights @ v, weights


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores: -inf where a Boolean mask is true."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


class MultiheadAttention(nn.MultiheadAttention):
    dropout_key: Tensor
    dropout_layer: int

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As PyTorch's; `is_causal` is a hint that `attn_mask` is causal, and has no effect here."""
        if is_causal and attn_mask is None:
            raise RuntimeError("need attn_mask if specifying the is_causal hint")
        batched = query.dim() == 3
        q, k, v = self._projected(query, key, value)
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        elif not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        mask = self._mask(attn_mask, key_padding_mask, q)
        if self.bias_k is not None and self.bias_v is not None:  # one more key and value
            # `pad`, not `cat`, whose batching rule makes the compiler fix the number of rows.
            before = (0, 0, k.shape[1], 0)
            k = F.pad(k, (0, 0, 0, 1)) + F.pad(self.bias_k, before)
            v = F.pad(v, (0, 0, 0, 1)) + F.pad(self.bias_v, before)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        if mask is not None:
            mask = F.pad(mask, (0, k.shape[1] - mask.shape[-1]))
        q, k, v = (torch.unflatten(x, -1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        drop = self._drop if self.training and self.dropout > 0 else None
        read, weights = attend(q, k, v, mask, drop=drop)  # (B, heads, L, ·)
        out = linear(read.transpose(1, 2).flatten(-2), self.out_proj.weight, self.out_proj.bias)  # (B, L, E)
        if average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            out, weights = out.squeeze(0), weights.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1).contiguous()
        return out, weights if need_weights else None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is not None and query is key and key is value:
            q, k, v = linear(query, weight, bias).chunk(3, dim=-1)  # one product
            return q, k, v
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if weight is None else weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = map(linear, (query, key, value), weights, biases)
        return q, k, v

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Both masks combined, broadcastable to (B, heads, L, S)."""
        mask = None
        if attn_mask is not None:
            mask = additive(attn_mask, q.dtype)
            if mask.dim() == 3:  # (B · heads, L, S)
                mask = torch.unflatten(mask, 0, (-1, self.num_heads))
        if padding is not None:  # (B, S), or (S) for one sequence
            padding = additive(padding, q.dtype).view(-1, 1, 1, padding.shape[-1])
            mask = padding if mask is None else mask + padding
        return mask

    def _drop(self, weights: Tensor) -> Tensor:
        return dropout(weights, self.dropout, self.dropout_key, self.dropout_layer)


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As PyTorch's, but without its fused kernel."""
        x = src
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), src_mask, src_key_padding_mask, is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._sa_block(x, src_mask, src_key_padding_mask, is_causal))
        out: Tensor = self.norm2(x + self._ff_block(x))
        return out


class TransformerEncoder(nn.TransformerEncoder):
    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As PyTorch's, but without nested tensors, and without testing whether the mask is causal."""
        for layer in self.layers:
            src = layer(
                src, src_mask=mask, is_causal=bool(is_causal), src_key_padding_mask=src_key_padding_mask
            )
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(nn.TransformerDecoder):
    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """As PyTorch's, but without testing whether the mask is causal, which breaks a compiled graph."""
        for layer in self.layers:
            tgt = layer(
                tgt,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=bool(tgt_is_causal),
                memory_is_causal=memory_is_causal,
            )
        return tgt if self.norm is None else self.norm(tgt)


STACKABLE: dict[type[nn.Module], type[nn.Module]] = {  # a TransformerDecoderLayer can be stacked unchanged
    nn.MultiheadAttention: MultiheadAttention,
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
    nn.TransformerEncoder: TransformerEncoder,
    nn.TransformerDecoder: TransformerDecoder,
}
