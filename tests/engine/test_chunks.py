"""How many clients are handled at once, in either executor; results do not depend on it."""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from conftest import CLASSES, DEVICE, FEATURES, make_federation
from fairwind import Federation, algorithms
from fairwind.engine import tuning
from fairwind.engine.ranks import ALONE
from fairwind.layers import OperationCounter
from samples import as_tensor
from simulations import loop_of, simulation, stacked_model, stacked_of

CPU = pytest.mark.skipif(DEVICE != "cpu", reason="chunks of a GPU are cut by its memory")


def deep_model() -> nn.Module:
    """Of few numbers and many operations."""
    layers = chain(*((nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(40)))
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES)).double()


def test_operations_are_counted() -> None:
    x = torch.ones(3)
    with OperationCounter() as counter:
        (x + 1).mul(2)
    assert counter.operations == 2


@CPU
def test_uncompiled_chunks_hold_more_the_more_operations_a_step_has(ragged: Federation) -> None:
    deep: dict[str, Any] = {"names": ["adafedadam"], "seeds": [0], "model": deep_model}
    uncompiled = simulation(ragged, **deep, compile="off")
    operations = stacked_model(uncompiled).operations
    assert operations > 40 * 10  # several for each layer, forward and backward
    assert stacked_of(uncompiled).cutter.budget == operations * tuning.MIN_NUMBERS_PER_LAUNCH
    assert uncompiled.settings.memory == operations * tuning.MIN_NUMBERS_PER_LAUNCH * 8 / 2**30
    assert simulation(ragged, **deep, compile="on").settings.memory == 1 / 32
    assert simulation(ragged, **deep, compile="off", memory=1 / 64).settings.memory == 1 / 64
    assert simulation(ragged, ["adafedadam"], [0], compile="off").settings.memory == 1 / 32  # few operations
    # What the recipe records gives the same chunks again.
    again = simulation(ragged, **deep, compile="off", memory=uncompiled.settings.memory)
    assert stacked_of(again).cutter.budget == stacked_of(uncompiled).cutter.budget
    assert again.settings == uncompiled.settings


@CPU
def test_workers_do_not_share_rows_whose_operations_mostly_take_launching(
    ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "MIN_SHARED_NUMBERS", 1)
    cutter = stacked_of(simulation(ragged, ["adafedadam"], [0], model=deep_model, workers=2)).cutter
    cutter.begin(0, ALONE)
    rows = cutter.rows("training")
    assert [len(part) for part in cutter.cut("training", rows)] == [len(ragged)]
    cutter.launched = 0  # as with compiled steps
    assert [len(part) for part in cutter.cut("training", rows)] == [len(ragged) // 2] * 2


@pytest.mark.parametrize(("largest", "probed"), [(5, 4), (200, 32)])
def test_probes_are_not_padded_beyond_the_largest_client(largest: int, probed: int) -> None:
    federation = make_federation([2, 3, 3, 3, largest])
    cutter = stacked_of(simulation(federation, ["adafedadam"], [0])).cutter
    assert cutter.batch_sizes["gradient"] == probed


@pytest.mark.parametrize("name", algorithms.REGISTRY)
def test_the_loop_leaves_clients_out_of_groups_of_any_size(ragged: Federation, name: str) -> None:
    bad = replace(ragged, inputs=as_tensor(ragged.inputs).clone())
    as_tensor(bad.inputs)[int(ragged.start[3])] = torch.nan
    one, three = (simulation(bad, [name], [0], engine="loop") for _ in range(2))
    loop_of(one).together, loop_of(three).together = 1, 3
    one.step()
    three.step()
    assert one.left_out.tolist() == three.left_out.tolist() == [1]
    torch.testing.assert_close(one.x, three.x, rtol=1e-9, atol=1e-10)
