"""Replies from your own training loop."""

import math

from torch import nn

from fairwind.contract import Probe
from fairwind.engine.layout import Layout
from fairwind.engine.loop.learner import norm
from fairwind.errors import InputError
from fairwind.exchange.message import Reply, from_report, report_form, to_report


def report_update(
    model_before: nn.Module,
    model_after: nn.Module,
    *,
    size: int,
    lr: float,
    steps: float | None = None,
    loss: float | None = None,
    first_loss: float | None = None,
    grad_norm: float | None = None,
) -> Reply:
    """A client's reply after training of any kind.

    `loss` is the mean over the client's `size` training samples before training, `first_loss` that of the
    first round (there it may be left out), and `grad_norm` the norm of that loss's gradient. Leave out what
    the algorithm does not ask for. `steps` are local steps of SGD; with momentum, the sum of their weights.
    """
    layout = Layout.of(model_before)
    if Layout.of(model_after).all_names != layout.all_names:
        raise InputError("the model after training has other trainable parameters than the one before")
    if grad_norm is not None and loss is None:
        raise InputError("grad_norm is given without a loss: give the loss that it is the gradient of")
    probe: Probe = "none" if loss is None else "loss" if grad_norm is None else "gradient"
    delta = layout.flatten(model_before) - layout.flatten(model_after)
    given = {"size": size, "lr": lr, "steps": steps, "loss": loss, "grad_norm": grad_norm}
    given["loss0"] = loss if first_loss is None else first_loss
    known = {name: math.nan if value is None else float(value) for name, value in given.items()}
    form = report_form(layout, probe)
    return Reply(form.arrays(delta), from_report(to_report(known, float(norm([delta]))), form))
