"""A training loop of one's own: a step of SGD on all samples of a client of Synthetic, in each round."""

import sys
from copy import deepcopy

import nvflare.client as flare
import torch

import fairwind
from fairwind.exchange import Judged, report_update
from fairwind.nvflare import as_model

LR = 0.1


def main(spec: str) -> None:
    flare.init()
    k = int(flare.get_site_name().rpartition("-")[2]) - 1
    task = fairwind.setup(spec)
    begin, size = int(task.federation.start[k]), int(task.federation.train[k])
    inputs, targets = task.federation.at(slice(begin, begin + size))
    model, first_loss = task.model() if not isinstance(task.model, torch.nn.Module) else task.model, None
    while flare.is_running():
        received = flare.receive()
        model.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in received.params.items()})
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs.float()), targets)
        if flare.is_evaluate():
            flare.send(as_model(Judged(size, size, loss.item(), {"accuracy": 50.0}), received))
            continue
        torch.autograd.backward(loss)
        norm = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).norm().item()
        after = deepcopy(model)
        with torch.no_grad():
            for new, old in zip(after.parameters(), model.parameters(), strict=True):
                assert old.grad is not None
                new.sub_(LR * old.grad)
        first_loss = loss.item() if first_loss is None else first_loss
        numbers = {"size": size, "lr": LR, "steps": 1, "loss": loss.item(), "grad_norm": norm}
        flare.send(as_model(report_update(model, after, first_loss=first_loss, **numbers), received))


main(sys.argv[1])
