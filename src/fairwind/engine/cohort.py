"""A model as a function of one flat vector, so that a cohort of clients is a matrix (rows, P)."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fairwind.counter import MASK, mix
from fairwind.data.federation import Federation, kind
from fairwind.engine.factors import Factors
from fairwind.errors import InputError, first_line

Loss = Callable[[Tensor, Tensor], Tensor]  # outputs (B, ...), targets (B, ...) -> (B,)
Parts = tuple[Tensor, ...]  # a model's parameters, one by one; or those of many rows, (rows, *shape) each
Held = dict[int, Tensor]  # for parts, by their numbers, whose gradients are left as factors
Gradients = tuple[Tensor | Factors, ...]  # by the parts of many rows


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each sample's cross-entropy, from outputs (B, C) and class labels (B,).

    Written without a gather, whose batching rule makes the compiler fix the number of rows.
    """
    classes = torch.arange(outputs.shape[1], device=outputs.device)
    return outputs.logsumexp(1) - torch.where(targets[:, None] == classes, outputs, 0).sum(1)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest output is the target's; outputs that are not finite predict nothing."""
    predicted = (outputs.argmax(-1) == targets) & torch.isfinite(outputs).all(-1)
    return predicted.to(outputs.dtype)


class Cohort:
    """A module's trainable parameters as a flat vector, and its losses and gradients for many such vectors.

    Parameters with `requires_grad=False` and all buffers are shared by every row, not copied.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss = cross_entropy,
        score: Loss = accuracy,
        *,
        compute: torch.dtype | None = None,
    ):
        """Local steps are computed in the type `compute`, if it is given, instead of the model's own."""
        _refuse_batch_norm(model)
        self.loss, self.score = loss, score
        self.training = _count_dropout(copy.deepcopy(model).train())
        self.evaluating = copy.deepcopy(model).eval()
        # A parameter may belong to several modules, and a module have several names.
        names: dict[nn.Parameter, list[str]] = {}
        for prefix, module in model.named_modules():
            for name, p in module.named_parameters(prefix, recurse=False):
                if p.requires_grad:
                    names.setdefault(p, []).append(name)
        trainable = {all_names[0]: p for p, all_names in names.items()}
        self.all_names = list(names.values())
        if not trainable:
            raise InputError("the model has no trainable parameters")
        if len({p.dtype for p in trainable.values()}) > 1:
            raise InputError("the model mixes parameter types; convert it with model.float()")
        self.names = list(trainable)
        self.shapes = [p.shape for p in trainable.values()]
        self.strides = [torch.empty_like(p).stride() for p in trainable.values()]  # of a row; see `check`
        self.sizes = [p.numel() for p in trainable.values()]
        self.dtype = next(iter(trainable.values())).dtype
        self.compute = compute or self.dtype
        self.probing = self.evaluating
        if self.compute != self.dtype:
            self.training.to(self.compute)
            self.probing = copy.deepcopy(self.evaluating).to(self.compute)
        self.parameters = sum(self.sizes)  # P
        self.per_row = self.per_sample = 0  # numbers of a row beside its parameters; see `check`
        self.keys = [n for n, _ in self.training.named_buffers() if n.endswith("dropout_key")]
        self.factored: dict[int, str] = {}  # parts whose gradients are left as factors, and their layers
        # Rows are independent: the gradient of their sum holds each row's own. With `grad` outside, the
        # backward pass runs on whole matrices, and compiles for any number of rows.
        self._gradients = grad(self._total(self._mean_loss), has_aux=True)
        self._probes = grad(self._total(self._summed_loss), has_aux=True)
        # (runs, P) × (B, ...) -> (runs, B), (runs, B): each sample's loss and score under each model
        self.scores = vmap(self._scores, in_dims=(0, None, None))

    def to(self, device: torch.device | str) -> "Cohort":
        """Moves what all rows share."""
        for module in (self.training, self.evaluating, self.probing):
            module.to(device)
        return self

    def measure(self, inputs: Tensor) -> int:
        """How many numbers a batch becomes on its way through the model until the way back, about."""
        given = [*self.training.parameters(), *self.training.buffers()]
        shared = {t.untyped_storage().data_ptr() for t in given}
        if inputs.is_floating_point():
            inputs = inputs.to(self.compute)
        kept: dict[int, int] = {}

        def keep(value: Tensor) -> Tensor:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            outputs: Tensor = self.training(inputs)
        kept_bytes = sum(n for at, n in kept.items() if at not in shared)
        size = torch.empty((), dtype=self.dtype).element_size()
        return inputs.numel() + kept_bytes // size + outputs.numel()

    def flatten(self, model: nn.Module) -> Tensor:
        """A model's trainable parameters as one vector (P,)."""
        found = dict(model.named_parameters())
        return torch.cat([found[n].detach().reshape(-1) for n in self.names])

    def parts(self, flat: Tensor) -> Parts:
        """Views of flat vectors (..., P), parameter by parameter: (..., *shape) each."""
        split = torch.split(flat, self.sizes, dim=-1)
        return tuple(p.view(p.shape[:-1] + s) for p, s in zip(split, self.shapes, strict=True))

    def empty(self, rows: int, dtype: torch.dtype, device: torch.device) -> Parts:
        """Room for the parts of rows."""
        layouts = zip(self.shapes, self.strides, strict=True)
        return tuple(
            torch.empty_strided((rows, *shape), (shape.numel(), *stride), dtype=dtype, device=device)
            for shape, stride in layouts
        )

    def laid(self, parts: Parts) -> list[Tensor]:
        """The parts of rows as matrices (rows, n), in the order in which a row's numbers lie in memory."""
        orders = map(_order, self.strides)
        return [
            part.permute(0, *order).reshape(len(part), -1) for part, order in zip(parts, orders, strict=True)
        ]

    def unlaid(self, matrices: list[Tensor]) -> Tensor:
        """The flat vectors (rows, P) of matrices in that order."""
        flat = []
        for matrix, shape, stride in zip(matrices, self.shapes, self.strides, strict=True):
            order = _order(stride)
            part = matrix.view(len(matrix), *(shape[d - 1] for d in order))
            flat.append(
                part.permute(0, *(order.index(d) + 1 for d in sorted(order))).reshape(len(matrix), -1)
            )
        return torch.cat(flat, dim=1)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector under the parameters' names."""
        return dict(zip(self.names, self.parts(flat), strict=True))

    def state_dict(self, flat: Tensor) -> dict[str, Tensor]:
        """A complete state dict of the model with these parameters."""
        model = copy.deepcopy(self.evaluating)  # where tied parameters are one under several names
        with torch.no_grad():
            for name, value in self.unflatten(flat).items():
                model.get_parameter(name).copy_(value)
        return dict(model.state_dict())

    def gradients(
        self, parts: Parts, inputs: Tensor, targets: Tensor, mask: Tensor, key: Tensor
    ) -> Gradients:
        """Each row's gradient of its mean loss over a batch (rows, B, ...)."""
        found, (_, seen) = self._gradients(*self._leaves(parts, inputs), inputs, targets, mask, key)
        return _with_factors(found, seen)

    def probes(self, parts: Parts, inputs: Tensor, targets: Tensor, mask: Tensor) -> tuple[Gradients, Tensor]:
        """Each row's gradient of its summed loss over a batch, without dropout; and the sums (rows,)."""
        found, (losses, seen) = self._probes(*self._leaves(parts, inputs), inputs, targets, mask)
        return _with_factors(found, seen), losses

    def losses(self, parts: Parts, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        """Each row's summed loss over a batch, without dropout (rows,)."""
        summed: Tensor = vmap(self._summed_loss)(parts, {}, inputs, targets, mask)[0]
        return summed

    def outputs(self, parts: Parts, inputs: Tensor, key: Tensor) -> Tensor:
        """The model's outputs while training, in its own type; `key` decides which units drop out."""
        return self._call(self.training, parts, {}, inputs, dict.fromkeys(self.keys, key))[0]

    def _leaves(self, parts: Parts, inputs: Tensor) -> tuple[Parts, Held]:
        """What is differentiated by: parts, or zeros for their layers to add; and those parts."""
        held = {i: parts[i] for i in self.factored}
        zeros = {i: p.new_zeros(()).expand(*inputs.shape[:2], p.shape[1]) for i, p in held.items()}
        return tuple(zeros.get(i, p) for i, p in enumerate(parts)), held

    def _call(
        self,
        module: nn.Module,
        leaves: Parts,
        held: Held,
        inputs: Tensor,
        others: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Held]:
        """A module's outputs, in the model's type, whichever its parts are in; and what its layers saw."""
        if inputs.is_floating_point():
            inputs = inputs.to(leaves[0].dtype)
        values = others or {}
        for i, (names, leaf) in enumerate(zip(self.all_names, leaves, strict=True)):
            if i in held:
                values[f"{self.factored[i]}.zero"] = leaf
            values |= dict.fromkeys(names, held.get(i, leaf))
        layers: dict[int, Any] = {i: module.get_submodule(self.factored[i]) for i in held}
        try:
            outputs: Tensor = functional_call(module, values, (inputs,), tie_weights=False)
            return outputs.to(self.dtype), {i: layer.seen for i, layer in layers.items()}
        finally:
            for layer in layers.values():
                layer.seen = None

    def _mean_loss(
        self, leaves: Parts, held: Held, inputs: Tensor, targets: Tensor, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, Held]:
        others = dict.fromkeys(self.keys, key)
        outputs, seen = self._call(self.training, leaves, held, inputs, others)
        losses = self.loss(outputs, targets)
        return torch.where(mask, losses, 0).sum() / mask.sum().clamp(min=1), seen

    def _summed_loss(
        self, leaves: Parts, held: Held, inputs: Tensor, targets: Tensor, mask: Tensor
    ) -> tuple[Tensor, Held]:
        module = self.evaluating if leaves[0].dtype == self.dtype else self.probing
        outputs, seen = self._call(module, leaves, held, inputs)
        return torch.where(mask, self.loss(outputs, targets), 0).sum(), seen

    def _total(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """All rows' losses, summed; and the losses themselves and what layers saw."""

        def total(*rows: Any) -> tuple[Tensor, tuple[Tensor, Held]]:
            losses, seen = vmap(loss)(*rows)
            return losses.sum(), (losses, seen)

        return total

    def _scores(self, flat: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs, _ = self._call(self.evaluating, self.parts(flat), {}, inputs)
        return self.loss(outputs, targets), self.score(outputs, targets)


def _with_factors(found: Parts, seen: Held) -> Gradients:
    return tuple(Factors(g, seen[i]) if i in seen else g for i, g in enumerate(found))


def _order(stride: tuple[int, ...]) -> list[int]:
    """The dimensions (from 1) of a row's part, the one with the longest stride first."""
    return sorted(range(1, len(stride) + 1), key=lambda d: -stride[d - 1])


class CountedDropout(nn.Module):
    """Dropout by a hash of key, layer and place: the same in any stacking, if samples come first."""

    dropout_key: Tensor

    def __init__(self, p: float, layer: int):
        super().__init__()
        self.p, self.layer = p, layer
        self.register_buffer("dropout_key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.numel(), device=x.device).view(x.shape)
        drawn: Tensor = mix(mix(self.dropout_key, self.layer), place)
        return torch.where(drawn >= self.p * MASK, x / (1 - self.p), 0)


def _count_dropout(module: nn.Module) -> nn.Module:
    """Replaces every `nn.Dropout` by one whose mask is counted."""
    for layer, (name, child) in enumerate(list(module.named_modules(remove_duplicate=False))):
        if type(child) is nn.Dropout and name and child.p > 0:
            module.set_submodule(name, CountedDropout(child.p, layer))
    return module


def _refuse_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        tracks: Any = getattr(module, "track_running_stats", False)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or tracks:
            raise InputError(
                f"layer {name or 'model'!r} is {type(module).__name__}, whose statistics mix a batch's "
                "samples and differ between clients; use nn.GroupNorm or nn.LayerNorm instead"
            )


def check(cohort: Cohort, model: nn.Module, federation: Federation) -> None:
    """Refuses, before the first round, labels without an output and a model that cannot be stacked."""
    inputs, targets = federation.inputs[:1], federation.targets[:1]
    device = inputs.device
    flat = cohort.flatten(model).to(device).expand(2, -1)
    parts = tuple(part.to(cohort.compute) for part in cohort.parts(flat))
    key = torch.zeros(2, dtype=torch.int64, device=device)
    mask = torch.ones(2, 1, dtype=torch.bool, device=device)
    try:
        one, two = cohort.measure(inputs.clone()), cohort.measure(torch.cat([inputs, inputs]))
        cohort.per_row, cohort.per_sample = 2 * one - two, two - one
        outputs = cohort.outputs(tuple(part[0] for part in parts), inputs, key[0])
        if cohort.loss is cross_entropy:
            _check_labels(federation, outputs.shape[-1])
        stacked = inputs.expand(2, *inputs.shape).clone(), targets.expand(2, *targets.shape).clone()
        gradients = cohort.gradients(parts, *stacked, mask, key)
        # Weights lie in memory as their gradients come: a dense layer's are transposed, for example.
        cohort.strides = [torch.empty_like(g[0]).stride() for g in gradients if isinstance(g, Tensor)]
        losses, scores = cohort.scores(flat, inputs, targets)
    except InputError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        reason = first_line(error)
        hint = "; for randomness use the module nn.Dropout" if "random" in reason else ""
        if cohort.compute != cohort.dtype and "dtype" in reason:
            hint = f"; with precision=float32 it need not compute in {str(cohort.compute)[6:]}"
        given = f"inputs ({kind(inputs)}) and targets ({kind(targets)})"
        raise InputError(f"the model cannot train, stacked, on {given}: {reason}{hint}") from error
    for what, value in (("loss", losses), ("score", scores)):
        if value.shape != (2, 1):
            raise InputError(f"the {what} is not one number per sample but {tuple(value.shape[1:])}")


def _check_labels(federation: Federation, classes: int) -> None:
    labels = federation.targets
    if labels.is_floating_point():
        raise InputError("targets are not integers; cross-entropy needs class labels (or give another loss)")
    wrong = ((labels < 0) | (labels >= classes)).nonzero()
    if len(wrong):
        at = int(wrong[0, 0])
        client = federation.names[int((federation.start <= at).sum()) - 1]
        raise InputError(
            f"client {client!r} has label {int(labels[at])}, but the model has {classes} outputs: "
            f"labels must be 0 to {classes - 1}"
        )
