"""Batch normalization of one model, or of stacked ones with padded batches.

Ioffe, Szegedy: Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift.
ICML 2015.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

MASK = "batch_mask"  # the name of a stacked layer's buffer


def is_batch_norm(layer: nn.Module) -> bool:
    """Whether a layer's statistics mix samples: of a batch, or in what it tracks, as an instance norm's."""
    if isinstance(layer, _BatchNorm):
        return True
    return isinstance(layer, _NormBase) and layer.track_running_stats


def trains(layer: nn.Module) -> bool:
    """Whether a layer with batch norm is not frozen, by layer.eval().requires_grad_(False)."""
    own = [p.requires_grad for p in layer.parameters(recurse=False)]
    return any(own) or (not own and layer.training)


class Masked(_BatchNorm):
    """A forward pass in which padding does not count, and which takes a batch with one value per channel.

    Such a batch has no variance. It is normalised by the running statistics, and does not move them.
    """

    batch_mask: Tensor  # (B,), a buffer where models are stacked
    moved: tuple[Tensor, ...] = ()  # by the last batch of stacked models: the buffers' new values

    def forward(self, input: Tensor) -> Tensor:
        if MASK in self._buffers:
            return self._stacked(input, self.batch_mask)
        by_batch = self.training or self.running_mean is None
        if not (by_batch and input.numel() == input.shape[1]):
            return _BatchNorm.forward(self, input)  # of SyncBatchNorm, too: clients' statistics do not mix
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if self.running_mean is None:
            return F.batch_norm(
                input, input.flatten(), torch.zeros_like(input.flatten()), self.weight, self.bias
            )
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )

    def _stacked(self, input: Tensor, mask: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        assert self.running_mean is not None
        assert self.running_var is not None
        shape = [1, -1, *[1] * (input.dim() - 2)]
        wide = input if input.dtype.itemsize >= 4 else input.float()
        mean, var = self.running_mean, self.running_var
        if self.training:
            over = [0, *range(2, input.dim())]
            counts = mask.view(-1, *[1] * (input.dim() - 1))
            n = mask.sum().to(wide.dtype) * input.shape[2:].numel()
            several, divisor = n > 1, n.clamp(min=1)
            centre = torch.where(counts, wide, 0).sum(over) / divisor
            spread = torch.where(counts, wide - centre.view(shape), 0).square().sum(over) / divisor
            self.moved = self._moved(
                centre.detach(), spread.detach() * (divisor / (n - 1).clamp(min=1)), several
            )
            mean, var = torch.where(several, centre, mean), torch.where(several, spread, var)
        y = (wide - mean.view(shape)) * (var + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            y = y * self.weight.view(shape)
        if self.bias is not None:
            y = y + self.bias.view(shape)
        return y.to(input.dtype)

    def new_buffers(self, name: str) -> list[tuple[str, Tensor]]:
        """The buffers' new values, with their names, given the layer's; nothing in evaluation."""
        names = "running_mean", "running_var", "num_batches_tracked"
        moved = zip(names, self.moved, strict=bool(self.moved))
        return [(f"{name}.{buffer}" if name else buffer, value) for buffer, value in moved]

    def _moved(self, mean: Tensor, var: Tensor, several: Tensor) -> tuple[Tensor, ...]:
        """The buffers after a batch with this mean and unbiased variance."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        count = self.num_batches_tracked + several
        share = 1 / count.clamp(min=1).to(mean.dtype) if self.momentum is None else self.momentum
        pairs = (self.running_mean, mean), (self.running_var, var)
        moved = (torch.where(several, old + share * (new - old), old) for old, new in pairs)
        return (*moved, count)


class BatchNorm1d(Masked, nn.BatchNorm1d): ...


class BatchNorm2d(Masked, nn.BatchNorm2d): ...


class BatchNorm3d(Masked, nn.BatchNorm3d): ...


class SyncBatchNorm(Masked, nn.SyncBatchNorm): ...


STACKABLE: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNorm,
}
