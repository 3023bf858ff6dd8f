"""Recorded rounds and steps are the rounds and steps."""

from typing import Any

import pytest
import torch

from conftest import DEVICE
from fairwind import Federation, algorithms
from fairwind.engine import tuning
from fairwind.engine.plan import Decision, Graphs
from fairwind.engine.simulation import Simulation
from replay import Replayer
from simulations import SOLVERS, assert_together, dropout_model, run_short, simulation, stacked_of


@pytest.fixture(autouse=True)
def _sorted_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "NUMPY_SORTS", False)


def recorded_pair(
    federation: Federation, names: list[str], **options: Any
) -> tuple[Simulation, Simulation, Replayer]:
    """The same simulation twice, one of which records its rounds."""
    plain = simulation(federation, names, [0, 1], workers=1, **options)
    recorded_as: Graphs = "rounds" if plain.planner.repeats else "steps"
    graphs = Decision(recorded_as, "replayed on a CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fairwind.engine.stacked.executor.Graphs", Replayer)
        plan = plain.plan._replace(graphs=graphs)
        recorded = simulation(federation, names, [0, 1], workers=1, plan=plan, **options)
    replayer: Any = stacked_of(recorded).round_graphs
    return plain, recorded, replayer


def test_a_recorded_round_drops_out_anew_and_can_be_restored(ragged: Federation) -> None:
    plain, recorded, replayer = recorded_pair(ragged, ["adafedadam", "fedavg"], model=dropout_model)
    assert_together(plain, recorded, rounds=3, tolerance=0)
    kept, before = recorded.checkpoint(), recorded.x.clone()
    assert_together(plain, recorded, rounds=2, tolerance=0)
    assert replayer.replays == 3
    assert torch.equal(kept.tensors["x"], before)  # not what it is two rounds later
    after = recorded.x.clone()
    recorded.restore(kept)
    for _ in range(2):
        recorded.step()
    assert torch.equal(recorded.x, after)
    assert replayer.replays == 5  # what was restored lies where it was recorded


@pytest.mark.parametrize("kind", ["gradient", "train"])
def test_a_round_that_ran_short_of_memory_is_not_the_one_recorded(
    ragged: Federation, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    plain, _, _ = recorded_pair(ragged, ["adafedadam", "qfedavg"])
    failures = run_short(monkeypatch, kind, 5)
    _, recorded, replayer = recorded_pair(ragged, ["adafedadam", "qfedavg"])
    assert_together(plain, recorded, rounds=6, tolerance=1e-12)
    assert failures
    assert replayer.replays >= 2


@pytest.mark.parametrize("counts", [3, 128])
def test_recorded_steps_are_the_steps(
    ragged: Federation, monkeypatch: pytest.MonkeyPatch, counts: int
) -> None:
    """Whoever takes part, and however long: a step is replayed for its number of rows, or rounded up."""
    monkeypatch.setattr(tuning, "MAX_GRAPH_ROW_COUNTS", counts)
    options = {"solver": SOLVERS["uneven"], "participation": 0.7, "model": dropout_model}
    plain, recorded, _ = recorded_pair(ragged, list(algorithms.PAPER), **options)
    replayer: Any = stacked_of(recorded).step_graphs
    assert_together(plain, recorded, rounds=5, tolerance=1e-12)
    assert replayer.replays > 10


@pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="needs a GPU")
def test_steps_recorded_once_rounds_are_not_share_their_memory(
    ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pools() -> set[tuple[int, int]]:
        return {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()}  # type: ignore[no-untyped-call]

    monkeypatch.setattr(tuning, "MAX_GRAPH_STEPS", 0)
    s = simulation(ragged, ["fedavg"], [0])
    before = pools()
    for _ in range(5):
        s.step()
    assert sum(graph is not None for graph in stacked_of(s).step_graphs.recorded.values()) > 1
    assert len(pools() - before) == 1
