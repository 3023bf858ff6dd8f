"""A module vectorised over models: losses and gradients for many rows of parameters at once."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fairwind.data.federation import Federation
from fairwind.data.samples import cast, mapped, take
from fairwind.engine import tuning
from fairwind.engine.layout import Layout, Parts
from fairwind.engine.machine import matmul_precision, waits
from fairwind.engine.modules import activations, copied, duplicate, read
from fairwind.engine.plain import TOLERANCE, PlainModel, agree, judged
from fairwind.engine.stacked.gradients import Dense, Factored, Gradient, is_linear, watch
from fairwind.errors import first_line
from fairwind.layers import CountedRandomness, OperationCounter, key_names, stackable
from fairwind.layers.batch_norm import MASK, Masked

Seen = dict[int, Tensor]  # by the indices of parts
# Names for types, because PyTorch's compiler cannot read such an annotation inside a function.
Total = tuple[Tensor, tuple[Tensor, Seen]]
Found = tuple[Parts, Tensor, Seen]


INFLUENCE = (
    "its gradients, stacked and padded, are not those of a plain backward pass "
    "(do samples of a batch influence each other?)"
)


class CannotStackError(Exception):
    """A module cannot be vectorised over models; the message says why."""


class StackedModel:
    """A module's loss and gradient for rows of parameters, each with its own batch.

    The parts of a row are its trained parameters and its statistics of batch norm. Parameters with
    `requires_grad=False` and all other buffers are shared by every row, not copied.
    """

    stacks = True

    per_row: int  # numbers that a row's local step holds, besides
    per_sample: int  # those of each sample
    operations: int  # that a local step launches
    waits: bool  # whether the host waits for a GPU within a local step

    def __init__(
        self, model: nn.Module, plain: PlainModel, device: torch.device, compute: torch.dtype | None = None
    ):
        """Local steps are computed in the type `compute`, if given. Use `stack`, which tries it."""
        self.loss, self.judges = replace(plain.loss, kernel=None), plain.judges
        self.sample_weights, self.evaluated_numbers = plain.sample_weights, plain.evaluated_numbers
        self.dtype, division = plain.dtype, plain.division
        self.probe_batch = plain.probe_batch
        trained = len(division.shared.names) + division.trained
        self.layout = plain.whole.part(slice(0, trained))  # the trained parameters: shared ones first
        self.states = plain.whole.part(slice(trained, None))  # the statistics
        self._shared_parts = len(division.shared.names)
        self._lay_out()
        self.compute = compute or self.dtype
        self.training = plain.augmentation.attach(stackable(copied(model, training=True)).to(device))
        self.evaluating = stackable(copied(model, training=False)).to(device)
        self.probing = self.evaluating
        if self.compute != self.dtype:
            self.training.to(self.compute)
            self.probing = stackable(copied(model, training=False)).to(device).to(self.compute)
        self.norms = _with_masks(self.training, self.states)
        for module in (self.evaluating, self.probing):
            _with_masks(module, self.states)
        if division.recomputes:  # probes normalise by the batch
            self.probing = duplicate(self.evaluating)
            for name in self.norms:
                self.probing.get_submodule(name).train()
        self.by_batch = division.recomputes
        self.keys = key_names(self.training)
        self.replaces = plain.replaces  # functions that its forward pass calls, such as attention
        # Parts whose gradients could be left as factors, and their layers; and those whose gradients are.
        self.factorable: dict[int, str] = {}
        self.factored: dict[int, str] = {}

    def _lay_out(self) -> None:
        """What follows from the layout of the trained parameters."""
        self.shared = self.layout.part(slice(0, self._shared_parts))  # what algorithms see
        self.whole = self.layout.followed_by(self.states)

    @property
    def random(self) -> bool:
        """Whether training steps use their random keys."""
        return bool(self.keys) or self.replaces

    @property
    def batch(self) -> int | None:
        """How many samples of one client are scored together, if what is computed depends on that."""
        return self.loss.batch_size if self.loss.batched else None

    def another(self) -> "StackedModel":
        """A copy for another thread."""
        other = copy.copy(self)
        for name in ("training", "evaluating", "probing"):
            setattr(other, name, duplicate(getattr(self, name)))
        return other

    def gradients(
        self, parts: Parts, inputs: Any, targets: Any, mask: Tensor, key: Tensor
    ) -> tuple[list[Gradient], Tensor, list[Tensor]]:
        """Each row's gradient of its mean loss over a batch (rows, B, ...), that loss, new statistics."""
        leaves, held = self._leaves(parts, mask)
        found, losses, seen = _gradients_of(self._mean_loss)(leaves, held, inputs, targets, mask, key)
        return _gradients(found, seen), losses, [seen[i] for i in range(len(leaves), len(parts))]

    def probes(self, parts: Parts, inputs: Any, targets: Any, mask: Tensor) -> tuple[list[Gradient], Tensor]:
        """Each row's gradient of its summed loss over a batch, without dropout; and the sums (rows,)."""
        leaves, held = self._leaves(parts, mask)
        found, losses, seen = _gradients_of(self._summed_loss)(leaves, held, inputs, targets, mask)
        return _gradients(found, seen), losses

    def losses(self, parts: Parts, inputs: Any, targets: Any, mask: Tensor) -> Tensor:
        """Each row's summed loss over a batch, without dropout (rows,)."""
        leaves, states = self._split(parts)
        summed: Tensor = vmap(self._summed_loss)(leaves, states, inputs, targets, mask)[0]
        return summed

    def scores(self, x: Tensor, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
        """Each sample's loss, and the numbers of each score, (R, B) or (R, B, S) under models x (R, ·)."""
        scores_of = vmap(self._scores, in_dims=(0, None, None))
        found: tuple[Tensor, ...] = scores_of(self.whole.parts(x), inputs, targets)
        return found

    def own_scores(self, x: Tensor, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
        """The same where each model x (R, ·) has samples of its own, (R, B, …)."""
        return tuple(vmap(self._scores)(self.whole.parts(x), inputs, targets))

    def _leaves(self, parts: Parts, mask: Tensor) -> tuple[Parts, Seen]:
        """The variables to differentiate by: parts, or zeros that their layers add; and the other parts."""
        trained, states = self._split(parts)
        held = {i: parts[i] for i in self.factored}
        zeros = {i: p.new_zeros(()).expand(*mask.shape, p.shape[1]) for i, p in held.items()}
        return tuple(zeros.get(i, p) for i, p in enumerate(trained)), held | states

    def _split(self, parts: Parts) -> tuple[Parts, Seen]:
        """The trained parameters, and the statistics."""
        trained = len(self.layout.names)
        return parts[:trained], dict(enumerate(parts[trained:], trained))

    def _call(
        self,
        module: nn.Module,
        leaves: Parts,
        held: Seen,
        inputs: Any,
        mask: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Any, Seen]:
        """A module's outputs in the model's type, the inputs of its factored layers, and new statistics."""
        inputs = cast(inputs, leaves[0].dtype)
        values: dict[str, Tensor] = {} if key is None else dict.fromkeys(self.keys, key)
        for i, (names, leaf) in enumerate(zip(self.layout.all_names, leaves, strict=True)):
            if i in held:
                values[f"{self.factored[i]}.zero"] = leaf
            values |= dict.fromkeys(names, held.get(i, leaf))
        values |= {name: held[i] for i, name in enumerate(self.states.names, len(leaves))}
        if mask is not None:
            values |= {f"{norm}.{MASK}" if norm else MASK: mask for norm in self.norms}
        layers: dict[int, Any] = {i: module.get_submodule(self.factored[i]) for i in held if i < len(leaves)}
        norms: list[Any] = [module.get_submodule(norm) for norm in self.norms]
        positional = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
        named = inputs if isinstance(inputs, dict) else {}
        mode: AbstractContextManager[Any] = nullcontext()
        if self.replaces:
            mode = CountedRandomness(
                torch.zeros((), dtype=torch.int64, device=leaves[0].device) if key is None else key
            )
        try:
            with mode:
                outputs = read(functional_call(module, values, positional, named, tie_weights=False))
            moved = {
                n: new
                for name, norm in zip(self.norms, norms, strict=True)
                for n, new in norm.new_buffers(name)
            }
            new = {i: moved[name] for i, name in enumerate(self.states.names, len(leaves)) if name in moved}
            return cast(outputs, self.dtype), {i: layer.seen for i, layer in layers.items()} | new
        finally:
            for layer in layers.values():
                layer.seen = None
            for norm in norms:
                norm.moved = ()

    def _mean_loss(
        self, leaves: Parts, held: Seen, inputs: Any, targets: Any, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, Seen]:
        outputs, seen = self._call(self.training, leaves, held, inputs, mask, key)
        return self.loss.of_batch(outputs, targets, mask), seen

    def _summed_loss(
        self, leaves: Parts, held: Seen, inputs: Any, targets: Any, mask: Tensor
    ) -> tuple[Tensor, Seen]:
        same = leaves[0].dtype == self.dtype and not self.by_batch
        outputs, seen = self._call(self.evaluating if same else self.probing, leaves, held, inputs, mask)
        return self.loss.part(outputs, targets, mask), seen

    def _scores(self, parts: Parts, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
        outputs, _ = self._call(self.evaluating, *self._split(parts), inputs)
        return judged(self.loss, self.judges, outputs, targets)

    def _try(self, plain: PlainModel, federation: Federation) -> None:
        """Trains, probes and scores two rows, and compares their gradients with a plain backward pass.

        The third sample of a batch is padding, which reveals samples that influence each other.
        """
        device, second = federation.device, min(1, federation.samples - 1)
        at = torch.tensor([0, second, 0], device=device)
        inputs, targets = federation.at(at)
        one, two = (
            activations(self.training, take(inputs, slice(0, n)), self.dtype, self.compute) for n in (1, 2)
        )
        self.per_row, self.per_sample = max(0, 2 * one - two), max(1, two - one)  # numbers
        flat = torch.stack([plain.first, plain.first * 1.01])
        trained, states = self._split(self.whole.parts(flat))
        parts = (*(part.to(self.compute) for part in trained), *states.values())
        batch = (mapped(lambda t: t.expand(2, *t.shape).clone(), part) for part in (inputs, targets))
        mask = torch.tensor([[True, True, False]] * 2, device=device)
        stacked_inputs, stacked_targets = batch
        given = stacked_inputs, stacked_targets, mask
        key = torch.tensor([3, 4], device=device)
        with OperationCounter() as counter:
            gradients, *_ = self.gradients(parts, *given, key)
        self.operations = counter.operations
        self.waits = waits(lambda: self.gradients(parts, *given, key), device)
        found = [g.value for g in gradients if isinstance(g, Dense)]
        self.probes(parts, *given)
        self.losses(parts, *given)
        self.scores(flat, inputs, targets)
        # Weights get the strides of their gradients: a dense layer's are transposed, for example.
        self.layout = self.layout.with_strides([torch.empty_like(g[0]).stride() for g in found])
        self._lay_out()
        if self.compute == self.dtype:
            self._compare(plain, flat, inputs, targets)

    def _compare(self, plain: PlainModel, flat: Tensor, inputs: Any, targets: Any) -> None:
        """Refuses gradients, stacked and padded, that are not those of a plain backward pass.

        Those that are not finite, or zero, reveal nothing: others are then compared, of random numbers.
        """
        finite, revealing = self._agree(plain, flat, inputs, targets)
        if finite and revealing:
            return
        draw = torch.Generator().manual_seed(0)

        def drawn(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t
            return torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t)

        try:
            again = flat + 0.1 * drawn(flat), mapped(drawn, inputs)
            finite |= self._agree(plain, *again, targets)[0]
        except CannotStackError:
            raise
        except Exception:  # whatever a user's module makes of such numbers
            if not finite:
                raise
        if not finite:
            raise CannotStackError("its gradients are not finite, and cannot be compared with a plain loop's")

    def _agree(self, plain: PlainModel, flat: Tensor, inputs: Any, targets: Any) -> tuple[bool, bool]:
        """Whether gradients of two rows (2, ·) are finite, and none is zero; refused if not plain's."""
        mask = torch.tensor([[True, True, False]] * 2, device=flat.device)
        rows = [mapped(lambda t: t.expand(2, *t.shape).clone(), part) for part in (inputs, targets)]
        keys = torch.tensor([3, 4], device=flat.device)
        gradients, _, moved = self.gradients(self.whole.parts(flat), rows[0], rows[1], mask, keys)
        found = [g.value for g in gradients if isinstance(g, Dense)]
        plainly = take(inputs, slice(0, 2)), take(targets, slice(0, 2))
        finite, revealing = True, True
        # Other padding changes nothing: to the bit, but for kernels that choose by values.
        other = torch.tensor([0, 1, 1], device=flat.device)
        padded, *_ = self.gradients(
            self.whole.parts(flat), _at(rows[0], other), _at(rows[1], other), mask, keys
        )
        if not agree([g.value for g in padded if isinstance(g, Dense)], found, 1e-5):
            raise CannotStackError(INFLUENCE)
        for row, x in enumerate(flat):
            plain.load(self.whole.parts(x))
            plain.train()
            with torch.enable_grad():
                exact = plain.gradients([plain.training_loss(*plainly, int(keys[row]))])
            revealing &= all(g is not None and bool(g.to_dense().any()) for g in exact)
            exact += plain.tensors[len(exact) :]
            finite &= all(g is None or bool(g.to_dense().isfinite().all()) for g in exact)
            if not agree([each[row] for each in (*found, *moved)], exact, TOLERANCE.get(self.dtype, 0.1)):
                raise CannotStackError(INFLUENCE)
        return finite, revealing

    def factor(self) -> None:
        """Leaves gradients as factors from now on, where they can be."""
        for i, layer in self.factorable.items():
            for module in (self.training, self.evaluating):
                watch(module.get_submodule(layer))
            self.factored[i] = layer
            contiguous = torch.empty(self.layout.shapes[i]).stride()
            strides = self.layout.strides
            self.layout = self.layout.with_strides([*strides[:i], contiguous, *strides[i + 1 :]])
        self._lay_out()

    def _factorable(self, start: Tensor, federation: Federation) -> dict[int, str]:
        """Large dense layers whose factored gradients equal autograd's on a few samples.

        They differ if a layer is used twice or on several inputs per sample, or if its weight is shared.
        """
        least = tuning.MIN_FACTORED_NUMBERS
        candidates = {
            i: names[0].rpartition(".")[0]
            for i, names in enumerate(self.layout.all_names)
            if len(names) == 1 and self.layout.sizes[i] >= least and is_linear(self.training, names[0])
        }
        if not candidates or self.dtype not in (torch.float32, torch.float64):
            return {}
        draw = torch.Generator().manual_seed(0)
        noise = torch.randn(2, self.layout.parameters, generator=draw, dtype=start.dtype)
        trained, states = start[: noise.shape[1]], start[noise.shape[1] :]
        parts = self.layout.parts(trained + 0.1 * noise)  # gradients may start at 0
        parts += self.states.parts(states.expand(2, -1))
        at = torch.randint(federation.samples, (2, 8), generator=draw)
        batch = (*federation.at(at), torch.ones_like(at, dtype=torch.bool))
        keys = torch.zeros(2, dtype=torch.int64)

        def found() -> tuple[list[Gradient], list[Gradient]]:
            return self.gradients(parts, *batch, keys)[0], self.probes(parts, *batch)[0]

        exact, ends = found(), []
        for i, layer in candidates.items():
            mine = [watch(module.get_submodule(layer)) for module in (self.training, self.evaluating)]
            self.factored[i] = layer
            try:
                same = all(_formed(f[i], e[i]) for f, e in zip(found(), exact, strict=True))
            except Exception:  # whatever a user's module makes of such an input
                same = False
            if same:
                ends += mine
            else:
                del self.factored[i]
                for end in mine:
                    end()
        for end in ends:
            end()
        factorable, self.factored = self.factored, {}
        return factorable


def stack(
    model: nn.Module,
    plain: PlainModel,
    federation: Federation,
    *,
    compute: torch.dtype | None = None,
    factored: bool = False,
) -> StackedModel:
    """The module vectorised over models, after a trial; a CannotStackError says why it cannot be.

    With `factored`, it is also tried which gradients can be left as factors.
    """
    if why := plain.cannot_stack(federation):
        raise CannotStackError(why)
    if compute not in (None, plain.dtype):  # whose rounding would hide what differs
        stack(model, plain, federation)
    stacked = StackedModel(model, plain, federation.device, compute)
    try:
        with matmul_precision("float32", federation.device):
            stacked._try(plain, federation)
            if factored:
                stacked.factorable = stacked._factorable(plain.first, federation)
    except CannotStackError:
        raise
    except Exception as error:  # whatever a user's module makes of vectorised tensors
        hint = ""
        if stacked.compute != stacked.dtype and "dtype" in str(error):
            hint = f" (in {str(stacked.compute)[6:]}; precision=float32 avoids that)"
        raise CannotStackError(f"{type(error).__name__}: {first_line(error)}{hint}") from error
    return stacked


def _at(samples: Any, index: Tensor) -> Any:
    """Of rows of samples (rows, B, …), those at an index in each row."""
    return mapped(lambda t: t[:, index], samples)


def _gradients_of(loss: Callable[..., Any]) -> Callable[..., Found]:
    """A row's loss, vectorised over rows: their gradients, losses, and inputs of factored layers."""

    def total(*rows: Any) -> Total:
        losses, seen = vmap(loss)(*rows)
        return losses.sum(), (losses, seen)

    def found(*rows: Any) -> Found:
        # Rows are independent: the gradient of their summed loss contains each row's own. With `grad`
        # outside, the backward pass runs on whole matrices, and compiles for any number of rows.
        gradients, (losses, seen) = grad(total, has_aux=True)(*rows)
        return gradients, losses, seen

    return found


def _gradients(found: Parts, seen: Seen) -> list[Gradient]:
    return [Factored(g, seen[i]) if i in seen else Dense(g) for i, g in enumerate(found)]


def _with_masks(module: nn.Module, states: Layout) -> list[str]:
    """Lets the layers with these statistics leave out padding; returns their names."""
    found = [name for name, layer in module.named_modules() if isinstance(layer, Masked)]
    mine = [norm for norm in found if any(name.rpartition(".")[0] == norm for name in states.names)]
    for norm in mine:
        mask = torch.ones((), dtype=torch.bool, device=next(module.buffers()).device)
        module.get_submodule(norm).register_buffer(MASK, mask, persistent=False)
    return mine


def _formed(factors: Gradient, exact: Gradient) -> bool:
    """Whether the product of factors is that gradient, and not zero."""
    if not (isinstance(factors, Factored) and isinstance(exact, Dense)):
        return False
    formed, size = torch.zeros_like(exact.value), exact.value.norm()
    product = factors.add_to(formed, None, None)
    assert product is not None
    product.add_to(formed)
    error = (formed - exact.value).norm()
    return bool(size > 0 and error <= 1000 * torch.finfo(formed.dtype).eps * size)
