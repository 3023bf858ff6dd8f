"""Samples that are kept on the host and brought over chunk by chunk: the same bits as on the device."""

from typing import Any

import pytest
import torch

from conftest import make_federation
from fairwind import Federation, Settings, algorithms
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from simulations import simulation

SIZES = [3, 40, 17, 8, 25, 60, 11, 5]


def both(federation: Federation, **options: Any) -> tuple[Simulation, Simulation]:
    found = []
    for where in ("device", "host"):
        made = simulation(federation, ["fedavg", "adafedadam"], [0, 1], data_on=where, **options)
        made.run()
        found.append(made)
    return found[0], found[1]


@pytest.mark.slow
def test_what_is_brought_is_bounded_by_the_budget() -> None:
    """A chunk's samples, not the federation's, take room beside the steps."""
    federation = make_federation([10] * 400)
    made = simulation(federation, ["adafedadam"], [0], data_on="host", memory=2e-5)
    made.run()
    workspaces = made.executor.workers.states[0]  # type: ignore[attr-defined]
    for kind in ("training", "gradient"):
        assert len(workspaces[kind].data[1]) < federation.samples / 8


def test_inputs_of_several_tensors_are_brought_too() -> None:
    plain = make_federation(SIZES)
    inputs = {"input": plain.inputs}
    federation = Federation(inputs, plain.targets, plain.start, plain.train, plain.test, plain.names)
    device, host = both(federation)
    torch.testing.assert_close(host.x, device.x, rtol=1e-12, atol=1e-12)


def test_small_federations_go_to_the_device() -> None:
    runs = [Run("fedavg", algorithms.fedavg(), 0)]
    federation = make_federation([12, 30], dtype=torch.float32)
    made = Simulation(torch.nn.Linear(5, 3), federation, runs, Settings(rounds=1, device="cpu"))
    assert made.federation.compute_device is None
