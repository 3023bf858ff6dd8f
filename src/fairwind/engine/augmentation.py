"""Augmentation: functions that change a batch's inputs at random, before the model, at every local step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from fairwind.data.samples import kind, mapped, tensors
from fairwind.engine.machine import seed_generators
from fairwind.errors import InputError, first_line
from fairwind.layers import CountedRandomness

TRIES = 16  # with the same seed: one that is not seeded gives the same every time with probability 2⁻¹⁵


class Augmentation:
    """Some functions of a batch of inputs, one after another, or none."""

    def __init__(self, given: Any = None):
        """A function, several, or None, as users give them."""
        several = given if isinstance(given, Sequence) else () if given is None else (given,)
        if not all(callable(each) and not isinstance(each, type) for each in several):
            raise InputError(
                f"augment={given!r} is not a function of a batch of inputs (B, …), nor several: give one, "
                "such as fairwind.augment.flip"
            )
        self.functions: tuple[Callable[[Any], Any], ...] = tuple(several)

    @property
    def name(self) -> str:
        return ", ".join(getattr(each, "__name__", type(each).__name__) for each in self.functions)

    def __call__(self, inputs: Any) -> Any:
        for function in self.functions:
            inputs = function(inputs)
        return inputs

    def attach(self, module: nn.Module) -> nn.Module:
        """Lets a module change its inputs first, in training mode.

        As a part of its forward pass: what holds for a module's random numbers then holds for these.
        """

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not module.training:
                return None
            changed = self(kwargs or (args[0] if len(args) == 1 else args))
            if isinstance(changed, dict):
                return (), changed
            return changed if isinstance(changed, tuple) else (changed,), {}

        if self.functions:
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        return module

    def check(self, inputs: Any) -> None:
        """Refuses functions that fail, lose samples, or draw numbers that no seed decides."""
        if not self.functions:
            return
        device = tensors(inputs)[0].device
        found = []
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            for _ in range(TRIES):
                seed_generators(device, 0)
                try:
                    found.append(self(mapped(torch.clone, inputs)))
                except InputError:
                    raise
                except Exception as error:  # whatever a user's function raises
                    raise InputError(
                        f"augment={self.name} cannot take inputs ({kind(inputs)}): "
                        f"{type(error).__name__}: {first_line(error)}"
                    ) from error
        for each in found:
            self._compare(inputs, found[0], each)

    def _compare(self, inputs: Any, first: Any, found: Any) -> None:
        given, lengths = tensors(inputs), [len(t) if t.dim() else 0 for t in tensors(found)]
        if type(found) is not type(inputs) or lengths != [len(t) for t in given]:
            raise InputError(
                f"augment={self.name} returns {kind(found) or type(found).__name__} for inputs "
                f"({kind(inputs)}): it must return as many samples, in the same structure"
            )
        if not all(map(_same, tensors(first), tensors(found))):
            raise InputError(
                f"augment={self.name} draws numbers that the seed of a run does not decide: draw with "
                "torch's functions, such as torch.rand, and without a generator of its own"
            )

    def cannot_stack(self, inputs: Any) -> str:
        """Why it cannot run for several models at once, each with its own random numbers; empty if it can."""
        if not self.functions:
            return ""

        def of_row(inputs: Any, key: Tensor) -> Any:
            with CountedRandomness(key):
                return self(inputs)

        rows = mapped(lambda t: t.expand(2, *t.shape).clone(), inputs)
        try:
            vmap(of_row)(rows, torch.tensor([3, 4], device=tensors(inputs)[0].device))
        except Exception as error:  # whatever a user's function makes of vectorised tensors
            return f"its augmentation ({self.name}): {type(error).__name__}: {first_line(error)}"
        return ""


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
