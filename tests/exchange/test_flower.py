"""Fairwind's algorithms on Flower: the simulator's model, whatever some nodes do."""

import io
import json
import logging
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flowers

from command import refused, succeeded
from conftest import FEATURES, make_federation, make_model
from exchanged import Exchange, simulated, task_of
from fairwind import Federation, InputError, Solver, Task, algorithms, load, scores, simulate
from fairwind.exchange import UNBOUNDED, Bounds, Evaluations, FederatedRun, Privacy, StalledError
from fairwind.exchange.results import owner_of
from fairwind.flower import (
    AlgorithmStrategy,
    SecureStrategy,
    WeightsStrategy,
    client_app,
    nodes,
    server,
    server_app,
)
from fairwind.flower.records import config_of
from flower_grid import InProcessGrid

SIZES = [12, 20, 45, 8, 26]


@pytest.fixture
def task() -> Task:
    return task_of(make_federation(SIZES, dtype=torch.float32), torch.float32)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "PAUSE", 0.01)


def grid_of(task: Task, **options: Any) -> InProcessGrid:
    return InProcessGrid(client_app(task), len(task.federation), **options)


def strategy_of(task: Task, spec: str = "adafedadam:warmup=2", **options: Any) -> AlgorithmStrategy:
    return AlgorithmStrategy(spec, task, **{"bounds": UNBOUNDED} | options)


@pytest.mark.parametrize("sends", ["report", "sums"])
@pytest.mark.parametrize("spec", ["fedavg", "adafedadam:warmup=2", "qfedavg", "fednova", "fedprox"])
def test_the_model_is_the_simulators(task: Task, spec: str, sends: str) -> None:
    strategy = strategy_of(task, spec, seed=5, sends=sends)
    result = strategy.start(grid_of(task), num_rounds=4, timeout=5)
    simulation = simulated(task, spec, seed=5)
    for _ in range(4):
        simulation.step()
    torch.testing.assert_close(strategy.aggregator.x, simulation.x[0], rtol=1e-4, atol=1e-5)
    expected = simulation.state_dict(0)
    for name, array in result.arrays.items():
        torch.testing.assert_close(torch.tensor(array.numpy()), expected[name], rtol=1e-4, atol=1e-5)


def test_sites_with_columns_in_another_order_train_as_if_all_had_one(tmp_path: Path) -> None:
    draw, names = np.random.RandomState(0), ["age", "weight", "height"]
    frames = [pd.DataFrame(draw.randn(12, 3).astype(np.float32), columns=names) for _ in range(3)]
    labels = [draw.randint(0, 2, 12) for _ in frames]

    def split(frame: pd.DataFrame, k: int) -> dict[str, Any]:
        return {"train": (frame[:8], labels[k][:8]), "test": (frame[8:], labels[k][8:])}

    clients = [split(frame, k) for k, frame in enumerate(frames)]
    together = Task(lambda: torch.nn.Linear(3, 2), Federation.from_clients(clients))

    def site(context: Context) -> Task:
        k = int(context.node_config["partition-id"])
        frame = frames[k][names[k:] + names[:k]] if k < 3 else frames[0].rename(columns={"age": "size"})
        return replace(together, federation=Federation.from_clients([split(frame, k % 3)]))

    ends: list[Any] = []
    for app in (client_app(together), client_app(site)):
        strategy = strategy_of(together, "fedavg", out=tmp_path / str(len(ends)), min_nodes=3)
        strategy.start(InProcessGrid(app, 3 + len(ends)), num_rounds=1, timeout=5)
        ends.append(strategy.aggregator)
    torch.testing.assert_close(ends[1].x, ends[0].x)
    (why,) = ends[1].last.refused.values()
    assert "the inputs have other columns than the server's (missing: age; not there: size)" in why
    assert ends[1].counts()["refused"] == 1
    model = torch.nn.Linear(3, 2)
    for columns, refused_ones in (({"inputs": names}, 0), (None, 3)):  # a server that is given no task
        alone = AlgorithmStrategy("fedavg", model, columns=columns, min_nodes=3, max_stalled=1)
        with suppress(StalledError):
            alone.start(InProcessGrid(client_app(site), 3), num_rounds=1, timeout=5)
        assert alone.aggregator.counts()["refused"] == refused_ones
    trained = load(tmp_path / "1", task=site(InProcessGrid.context(1)))["fedavg"]
    wanted = trained.predict(frames[0].to_numpy())
    assert torch.equal(trained.predict(frames[0][names[::-1]]), wanted)


def test_evaluation_gives_the_simulators_metrics_in_every_round(task: Task) -> None:
    strategy = strategy_of(task)
    result = strategy.start(grid_of(task), num_rounds=3, timeout=5)
    simulation = simulated(task, "adafedadam:warmup=2", eval_every=1)
    for _ in range(3):
        simulation.step()
    assert sorted(result.evaluate_metrics_clientapp) == [0, 1, 2, 3]
    for line in simulation.history:
        found = result.evaluate_metrics_clientapp[line["round"]]
        for name in ("avg", "std", "worst30", "loss_avg"):
            assert found[name] == pytest.approx(line[name], rel=1e-4), name
    assert result.train_metrics_clientapp[3]["used"] == 5


def test_nodes_remember_their_first_losses(task: Task) -> None:
    grid, strategy = grid_of(task), strategy_of(task)
    strategy.start(grid, num_rounds=2, timeout=5)
    remembered = {str(n): c.state["fairwind"]["first-loss"] for n, c in grid.contexts.items()}
    assert remembered == pytest.approx(strategy.aggregator.first_losses)


def test_a_node_that_joins_late_gets_the_mean_first_loss(task: Task) -> None:
    grid, strategy = grid_of(task), strategy_of(task)
    late = grid.contexts.pop(104)
    strategy.start(grid, num_rounds=1, timeout=5)
    known = list(strategy.aggregator.first_losses.values())
    grid.contexts[104] = late
    strategy.start(grid, num_rounds=2, timeout=5)
    assert len(known) == 4
    assert late.state["fairwind"]["first-loss"] == pytest.approx(sum(known) / 4)
    assert strategy.aggregator.last is not None
    assert strategy.aggregator.last.used == 5


def test_stopped_after_any_round_it_ends_as_if_it_had_not_been(task: Task, tmp_path: Path) -> None:
    straight = strategy_of(task)
    straight.start(grid_of(task), num_rounds=4, timeout=5)
    for rounds in (1, 2, 4):
        strategy = strategy_of(task, out=tmp_path / "run")
        grid = grid_of(task)  # a new run of Flower's: nodes have forgotten everything
        strategy.start(grid, num_rounds=rounds, timeout=5)
        assert strategy.aggregator.round == rounds
    assert torch.equal(strategy.aggregator.x, straight.aggregator.x)
    assert strategy.evaluations.history == straight.evaluations.history


def test_a_tracker_shows_every_round_once_whenever_it_was_stopped(task: Task, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for rounds in (1, 2, 4):
        strategy = strategy_of(task, out=tmp_path / "run", track=f"tensorboard:{tmp_path / 'shown'}")
        strategy.start(grid_of(task), num_rounds=rounds, timeout=5)
    events = EventAccumulator(str(tmp_path / "shown" / "run" / "adafedadam:warmup=2" / "0"))
    events.Reload()
    found: list[tuple[int, Any]] = [
        (entry.step, pytest.approx(entry.value)) for entry in events.Scalars("worst30")
    ]
    assert [(line["round"], line["worst30"]) for line in strategy.evaluations.history] == found
    assert (tmp_path / "shown" / "run" / "report.html").exists()


def test_results_and_page_are_a_comparisons(task: Task, tmp_path: Path) -> None:
    strategy = strategy_of(task, out=tmp_path / "run")
    strategy.start(grid_of(task), num_rounds=3, timeout=5)
    simulation = simulated(task, "adafedadam:warmup=2", eval_every=1)
    for _ in range(3):
        simulation.step()
    found = load(tmp_path / "run")
    assert found.clients == ["100", "101", "102", "103", "104"]
    run = found["adafedadam:warmup=2"]
    assert run.rounds == [0, 1, 2, 3]
    torch.testing.assert_close(run.score.double(), simulation.score[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run.curve, simulation.curves.tensor()[:, 0])
    assert run.metrics["worst30"] == pytest.approx(simulation.history[-1]["worst30"])
    assert set(run.state_dict) == set(make_model().state_dict())
    page = (tmp_path / "run" / "report.html").read_text()
    assert "AdaFedAdam" in page
    assert "5" in page


def test_another_training_is_not_continued(task: Task, tmp_path: Path) -> None:
    strategy_of(task, out=tmp_path / "run").start(grid_of(task), num_rounds=1, timeout=5)
    with pytest.raises(InputError, match="holds another training"):
        strategy_of(task, seed=1, out=tmp_path / "run").start(grid_of(task), num_rounds=1, timeout=5)


def test_nor_is_one_of_another_algorithm_with_the_same_name(task: Task, tmp_path: Path) -> None:
    def begun(spec: str) -> None:
        server = Exchange(task, spec).server
        evaluations = Evaluations([scores.accuracy], "mine", 0, server.algorithm)
        owner = owner_of(server, evaluations, task="hospitals", clients_per_round=None)
        FederatedRun(tmp_path, owner, server, evaluations).close()

    begun("fedavg")
    begun("fedavg")
    with pytest.raises(InputError, match="holds another training"):
        begun("fedavg:lr=0.5")


def test_nor_is_one_that_starts_with_another_model_or_has_other_scores_or_columns(
    task: Task, tmp_path: Path
) -> None:
    server = Exchange(task, "fedavg").server

    def begun(x: torch.Tensor, score: Any = scores.accuracy, columns: Any = None) -> None:
        server.begin_from(x)
        evaluations = Evaluations([score], "mine", 0, server.algorithm)
        given: dict[str, Any] = {"task": "hospitals", "clients_per_round": None, "columns": columns}
        FederatedRun(tmp_path, owner_of(server, evaluations, **given), server, evaluations).close()

    x = server.x.clone()
    others: list[tuple[Any, ...]] = [
        (x + 0.01,),
        (x, scores.f1),
        (x, scores.accuracy, {"inputs": ("age", "weight")}),
    ]
    for same in (x, x * (1 + 1e-7)):  # other machines round otherwise
        begun(same)
    for other in others:
        with pytest.raises(InputError, match="holds another training"):
            begun(*other)


@pytest.mark.slow
def test_commands_say_how_to_go_on_with_a_federations_directory(task: Task, tmp_path: Path) -> None:
    def stop(number: int, arrays: ArrayRecord) -> None:
        if number == 2:
            raise RuntimeError("stopped")

    out = tmp_path / "run"
    with pytest.raises(RuntimeError, match="stopped"):
        strategy_of(task, out=out).start(grid_of(task), num_rounds=3, timeout=5, evaluate_fn=stop)
    assert "not finished: give the same 'flwr run' again" in refused("resume", out)
    said = succeeded("report", out)
    assert "Stopped at round 1" in said.stderr
    assert "AdaFedAdam" in (out / "interim.html").read_text()
    strategy = strategy_of(task, out=out)
    strategy.start(grid_of(task), num_rounds=3, timeout=5)
    assert f"finished: 'fairwind report {out}' shows it" in refused("resume", out)
    (out / "report.html").unlink()
    assert "AdaFedAdam" in succeeded("report", out).stdout
    assert (out / "report.html").exists()


# ---- algorithms that need more than a sum ----

OF_EACH_TYPE = ["scaffold", "mimelite", "mime", "ditto", "local", "afl", "fedfv"]


@pytest.mark.parametrize("spec", OF_EACH_TYPE)
def test_each_type_trains_and_evaluates_as_in_the_simulator(task: Task, spec: str, tmp_path: Path) -> None:
    out = tmp_path / "run" if spec in ("ditto", "local", "afl") else None  # with a further or another model
    strategy = strategy_of(task, spec, out=out)
    strategy.start(grid_of(task), num_rounds=3, timeout=5)
    simulation = simulated(task, spec, eval_every=1)
    for _ in range(3):
        simulation.step()
    torch.testing.assert_close(strategy.aggregator.x, simulation.x[0], rtol=1e-4, atol=1e-5)
    names = ("algorithm", "round", "avg", "worst30", "loss_avg")
    found, expected = (
        [[line[name] for name in names] for line in history]  # type: ignore[literal-required]
        for history in (strategy.evaluations.history, simulation.history)
    )
    for one, other in zip(found, expected, strict=True):
        assert one[:2] == other[:2]
        assert one[2:] == pytest.approx(other[2:], rel=1e-4)
    if out is None:
        return
    loaded = load(out)
    assert [run.algorithm for run in loaded] == [view.label for view in simulation.views]
    for i, (run, view) in enumerate(zip(loaded, simulation.views, strict=True)):
        torch.testing.assert_close(run.loss.double(), simulation.loss[i], rtol=1e-4, atol=1e-5)
        state = {} if view.model == "personal" else simulation.state_dict(i)  # personal ones stay at nodes
        assert set(run.state_dict) == set(state)
        for name, value in state.items():
            torch.testing.assert_close(run.state_dict[name], value, rtol=1e-4, atol=1e-5)


def test_what_nodes_keep_in_a_folder_outlasts_flowers_run(task: Task, tmp_path: Path) -> None:
    spec = "ditto"
    straight = strategy_of(task, spec)
    straight.start(grid_of(task), num_rounds=3, timeout=5)
    for rounds in (2, 3):
        resumed, grid = strategy_of(task, spec, out=tmp_path / "run"), grid_of(task)
        for context in grid.contexts.values():
            context.node_config["state"] = str(tmp_path / "nodes")
        resumed.start(grid, num_rounds=rounds, timeout=5)
    assert torch.equal(resumed.aggregator.x, straight.aggregator.x)
    assert resumed.evaluations.history == straight.evaluations.history
    assert len(list((tmp_path / "nodes").iterdir())) == len(SIZES)


def test_without_a_folder_it_is_lost_and_logged(
    task: Task, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    for rounds in (1, 2):
        strategy = strategy_of(task, "scaffold", out=tmp_path / "run", eval_every=9)
        strategy.start(grid_of(task), num_rounds=rounds, timeout=5)
    lost = [line for line in caplog.text.splitlines() if "has lost what it kept of round 1" in line]
    assert len(lost) == len(SIZES)


def test_a_node_that_fails_in_the_first_phase_is_not_waited_for_in_the_second(task: Task) -> None:
    strategy = strategy_of(task, "mime")
    grid = grid_of(task, meddle={102: lost})
    strategy.start(grid, num_rounds=1, timeout=0.2)
    assert strategy.aggregator.last is not None
    assert strategy.aggregator.last.used == 4
    assert strategy.aggregator.last.refused == {"102": "it did not reply in time"}
    evaluations, gradients, trainings = 10, 5, 4
    assert grid.sent == evaluations + gradients + trainings


def test_weights_alone_are_not_enough_for_algorithms_with_a_second_vector(task: Task) -> None:
    for spec in ("scaffold", "mime", "ditto"):
        with pytest.raises(InputError, match="replies of weights have no such vector"):
            WeightsStrategy(spec, task)


# ---- faults ----


def changed(**numbers: Any) -> Callable[[Message], Message]:
    def meddle(reply: Message) -> Message:
        if "arrays" in reply.content:
            reply.content["metrics"] = MetricRecord({**reply.content.metric_records["metrics"], **numbers})
        return reply

    return meddle


def arrays(change: Callable[[np.ndarray], Any]) -> Callable[[Message], Message]:
    def meddle(reply: Message) -> Message:
        if "arrays" in reply.content:
            found = {n: Array(change(a.numpy())) for n, a in reply.content.array_records["arrays"].items()}
            reply.content["arrays"] = ArrayRecord(found)
        return reply

    return meddle


def lost(reply: Message) -> None:
    return None


def failed(reply: Message) -> Message:
    answered = Message(Error(code=1, reason="<class 'OSError'>:<'no data\nhere'>"), reply_to=reply)
    answered.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    return answered


def empty(reply: Message) -> Message:
    reply.content = RecordDict()
    return reply


def garbage(reply: Message) -> Message:
    if "arrays" in reply.content:
        for array in reply.content["arrays"].values():
            array.__dict__["data"] = b"\x93NUMPY\x01\x00 not at all"
    return reply


FAULTS: dict[str, tuple[Callable[[Message], Message | None], str]] = {
    "lost": (lost, "did not reply in time"),
    "failed": (failed, "it failed: OSError"),
    "empty": (empty, "it has no ArrayRecord 'arrays', but nothing"),
    "garbage": (garbage, "cannot be read"),
    "NaN": (arrays(lambda a: a * np.nan), "not finite"),
    "Inf": (arrays(lambda a: a + np.float32(np.inf)), "not finite"),
    "shapes": (arrays(lambda a: a.reshape(-1)), "is of shape"),
    "types": (arrays(lambda a: a.astype(np.float64)), "is of type float64"),
    "size 0": (changed(size=0.0), "its size is 0"),
    "size -1": (changed(size=-1.0), "its size is -1"),
    "loss NaN": (changed(loss=float("nan")), "its loss is nan"),
    "numbers": (changed(loss=[1.0, 2.0]), "its loss is no number"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_node_is_named_counted_and_left_out(
    task: Task, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    meddle, why = FAULTS[name]
    faulty, without = strategy_of(task), strategy_of(task)
    result = faulty.start(grid_of(task, meddle={102: meddle}), num_rounds=2, timeout=0.2)
    fewer = grid_of(task)
    del fewer.contexts[102]
    without.start(fewer, num_rounds=2, timeout=5)
    assert torch.equal(faulty.aggregator.x, without.aggregator.x)
    assert result.train_metrics_clientapp[1]["refused"] == 1
    assert result.train_metrics_clientapp[1]["used"] == 4
    assert any("102 is left out" in line and why in line for line in caplog.text.splitlines())


def test_a_client_that_fails_sends_the_type_of_its_error_and_logs_the_rest(
    task: Task, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exceptions quote what they fail at, which may be a patient's row."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    sent: list[Message] = []

    def listen(reply: Message) -> Message:
        sent.append(reply)
        return reply

    def patients(context: Context) -> Task:
        if context.node_id == 102:
            float("Mustermann, Erika")
        return task

    strategy = strategy_of(task)
    strategy.start(InProcessGrid(client_app(patients), 5, {102: listen}), num_rounds=1, timeout=5)
    assert [reply.error.reason for reply in sent] == ["ValueError"] * 3
    assert strategy.aggregator.last is not None
    assert strategy.aggregator.last.refused == {"102": "it failed: ValueError"}
    quoting = {record.funcName for record in caplog.records if "Mustermann" in str(record.exc_info)}
    assert quoting == {"discreet"}
    assert not any("Mustermann" in record.getMessage() for record in caplog.records)


def test_what_flower_sends_of_an_app_of_ones_own_is_not_shown(
    task: Task, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    app = ClientApp()

    @app.train()
    @app.evaluate()
    def fail(message: Message, context: Context) -> Message:
        raise ValueError("Mustermann, Erika")

    with pytest.raises(StalledError, match="100: it failed: ValueError"):
        WeightsStrategy("fedavg", task, max_stalled=1).start(InProcessGrid(app, 5), num_rounds=1, timeout=5)
    assert "node 100 is not evaluated: it failed: ValueError" in caplog.text
    assert "Mustermann" not in caplog.text


EVIL = "\x1b[2J\x1b]0;all is well\x07\nINFO: round 9\u202e" * 1000


def evil_error(reply: Message) -> Message:
    answered = Message(Error(code=2, reason=EVIL), reply_to=reply)
    answered.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    return answered


def evil_metrics(reply: Message) -> Message:
    reply.content["metrics"] = MetricRecord({EVIL: [1.0]})
    return reply


def evil_scores(reply: Message) -> Message:
    if "arrays" not in reply.content:
        reply.content["metrics"] = MetricRecord({**reply.content.metric_records["metrics"], EVIL: 1.0})
    return reply


def evil_records(reply: Message) -> Message:
    reply.content = RecordDict({EVIL + str(k): MetricRecord({}) for k in range(9)})
    return reply


def evil_tag(reply: Message) -> Message:
    reply.content["config"] = ConfigRecord({**config_of(reply.content), "training": EVIL, "round": 2**62})
    return reply


@pytest.mark.parametrize("meddle", [evil_error, evil_metrics, evil_scores, evil_records, evil_tag])
def test_whatever_a_node_writes_logs_and_files_are_short_lines_of_text(
    task: Task,
    meddle: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    strategy = strategy_of(task, out=tmp_path / "run")
    strategy.start(grid_of(task, meddle={102: meddle}), num_rounds=1, timeout=5)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert bool(lines) == (meddle is not evil_scores)
    assert all(line.isprintable() and len(line) < 600 for line in lines)
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file() and file.suffix in (".json", ".jsonl", ".html"):
            assert "all is well" not in file.read_text()


def test_a_node_cannot_reply_for_another(task: Task) -> None:
    def forged(reply: Message) -> Message:
        reply.metadata.__dict__["_src_node_id"] = 101
        return arrays(lambda a: a * np.nan)(reply)

    strategy = strategy_of(task)
    strategy.start(grid_of(task, meddle={102: forged}), num_rounds=1, timeout=0.2)
    assert strategy.aggregator.last is not None
    assert set(strategy.aggregator.last.refused) == {"102"}


def all_of(value: float) -> Any:
    return arrays(lambda a: a * 0 + value)


def test_a_robust_sum_takes_the_place_of_the_sum(task: Task) -> None:
    """Of five clients one lies without measure: a median does not notice by how much."""
    defended = [AlgorithmStrategy("fedavg", task, bounds=UNBOUNDED, defence="median") for _ in range(2)]
    for strategy, factor in zip(defended, (1e3, 1e6), strict=True):
        strategy.start(grid_of(task, meddle={102: all_of(factor)}), num_rounds=2, timeout=5)
    assert torch.equal(defended[0].aggregator.x, defended[1].aggregator.x)
    plain = strategy_of(task)
    plain.start(grid_of(task), num_rounds=2, timeout=5)
    assert not torch.equal(defended[0].aggregator.x, plain.aggregator.x)


def test_lies_are_capped_by_default(task: Task) -> None:
    liar = {102: changed(loss0=1e-30, size=1e30)}
    strategy = AlgorithmStrategy("adafedadam", task)
    assert strategy.aggregator.bounds == Bounds()
    result = strategy.start(grid_of(task, meddle=liar), num_rounds=3, timeout=5)
    capped: Any = result.train_metrics_clientapp[1]["capped"]
    assert capped >= 1
    assert result.train_metrics_clientapp[3]["bounded"] == 1
    assert torch.isfinite(strategy.aggregator.x).all()


def test_a_node_that_claims_all_samples_does_not_have_the_weighted_average(
    task: Task, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    claim = {"num-examples": 2**50, "train-examples": 2**50, "score-accuracy": 100.0}

    def lie(reply: Message) -> Message:
        if "arrays" not in reply.content:
            metrics = reply.content.metric_records["metrics"]
            reply.content["metrics"] = MetricRecord({**metrics, **claim})
        return reply

    weighted: dict[str, Any] = {}
    for name, bounds in (("bounded", None), ("unbounded", UNBOUNDED)):
        strategy = AlgorithmStrategy("fedavg", task, bounds=bounds, out=tmp_path / name)
        result = strategy.start(grid_of(task, meddle={102: lie}), num_rounds=1, timeout=5)
        weighted[name] = result.evaluate_metrics_clientapp[1]["avg_weighted"]
    others = [each.scores["accuracy"] for node, each in strategy.evaluations.last.items() if node != "102"]
    assert weighted["unbounded"] == pytest.approx(100)
    assert weighted["bounded"] <= 0.6 * max(others) + 0.4 * 100 + 1  # twice an equal share, in whole samples
    assert weighted["bounded"] < 99
    assert "node 102 is not believed: a number of test samples of 1.13e+15 taken as" in caplog.text
    facts = json.loads((tmp_path / "bounded" / "results.json").read_text())["federation"]
    assert facts["test_samples"] < 100


# ---- apps of one's own ----


def ordinary_app(task: Task) -> ClientApp:
    """What a user of Flower's FedAvg has: full state dicts, a loop of their own, and a few metrics."""
    app = ClientApp()
    federation: Federation = task.federation

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = make_model().float()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        k = int(context.node_config["partition-id"])
        begin = int(federation.start[k])
        inputs, targets = federation.at(slice(begin, begin + int(federation.train[k])))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        torch.autograd.backward(loss)
        norm = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).norm()
        optimizer.step()
        metrics = {"num-examples": len(inputs), "loss": loss.item(), "grad-norm": norm.item()}
        metrics |= {"lr": 0.1, "steps": 1, "something-else": 3.0}
        content: dict[str, Any] = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord(metrics),
        }
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 3, "loss": 1.0, "accuracy": 50.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


@pytest.mark.parametrize("spec", ["fedavg", "adafedadam:warmup=0", "qfedavg", "afl", "fedmgda"])
def test_ordinary_replies_are_turned_into_contributions_by_the_server(spec: str) -> None:
    from fairwind import Solver

    solver = Solver(lr=0.1, batch_size=1000)
    task = task_of(make_federation(SIZES, dtype=torch.float32), torch.float32, solver=solver)
    strategy = WeightsStrategy(spec, task, bounds=UNBOUNDED)
    strategy.start(InProcessGrid(ordinary_app(task), len(SIZES)), num_rounds=3, timeout=5)
    simulation = simulated(task, spec)
    for _ in range(3):
        simulation.step()
    torch.testing.assert_close(strategy.aggregator.x, simulation.x[0], rtol=1e-4, atol=1e-5)


def test_replies_of_flowers_quickstart_are_enough_for_algorithms_that_ask_for_no_more(task: Task) -> None:
    def plain(reply: Message) -> Message:
        if "arrays" in reply.content:
            kept = {
                k: v
                for k, v in reply.content.metric_records["metrics"].items()
                if k in ("num-examples", "loss")
            }
            reply.content["metrics"] = MetricRecord(kept)
        return reply

    def used(spec: str, **options: Any) -> int:
        strategy = WeightsStrategy(spec, task, **options)
        grid = InProcessGrid(ordinary_app(task), len(SIZES), dict.fromkeys(range(100, 105), plain))
        strategy.start(grid, num_rounds=1, timeout=5)
        assert strategy.aggregator.last is not None
        return strategy.aggregator.last.used

    assert used("fedavg") == used("fedadam") == 5
    for spec, why in (("qfedavg", "'lr' missing"), ("fednova", "is not finite")):
        with pytest.raises(StalledError, match=why):
            used(spec)
    assert used("qfedavg", lr=0.1) == used("fednova", steps=1) == 5


def test_clients_without_test_samples_train_and_are_not_judged(ragged: Federation) -> None:
    task = task_of(ragged)
    strategy = strategy_of(task)
    result = strategy.start(grid_of(task), num_rounds=2, timeout=5)
    simulation = simulated(task, "adafedadam:warmup=2")
    for _ in range(2):
        simulation.step()
    simulation.evaluate()
    torch.testing.assert_close(strategy.aggregator.x, simulation.x[0], rtol=1e-9, atol=1e-10)
    found, expected = result.evaluate_metrics_clientapp[2], simulation.history[-1]
    assert found["worst30"] == pytest.approx(expected["worst30"])
    assert strategy.evaluations.sizes["100"] == (0, 1)


def test_fedavg_is_flowers_own(task: Task) -> None:
    """Beside Flower's implementation, on the same ordinary app."""
    ours = WeightsStrategy("fedavg", task, bounds=UNBOUNDED)
    ours.start(InProcessGrid(ordinary_app(task), len(SIZES)), num_rounds=3, timeout=5)
    theirs = flowers.FedAvg(fraction_evaluate=0.0)
    first = WeightsStrategy("fedavg", task).aggregator.weights()
    start = ArrayRecord({name: Array(value) for name, value in first.items()})
    result = theirs.start(InProcessGrid(ordinary_app(task), len(SIZES)), start, num_rounds=3, timeout=5)
    for name, value in ours.aggregator.weights().items():
        np.testing.assert_allclose(value, result.arrays[name].numpy(), rtol=1e-4, atol=1e-6)


def test_a_server_app_reads_its_run_config(task: Task, tmp_path: Path) -> None:
    said: dict[str, Any] = {"algorithm": "adafedadam", "alpha": 2.0, "num-server-rounds": 2, "seed": 3}
    context = Context(1, 0, {}, RecordDict(), {**said, "out": str(tmp_path / "o")})
    server_app(task)(grid_of(task), context)
    results = json.loads((tmp_path / "o" / "results.json").read_text())
    assert results["runs"][0]["algorithm"] == "adafedadam:alpha=2"
    assert results["runs"][0]["seed"] == 3
    assert results["runs"][0]["rounds"] == 2


def test_own_algorithms_need_a_client_app_that_has_them(task: Task) -> None:
    mine = algorithms.fedavg()._replace(name="mine")
    strategy = AlgorithmStrategy(mine, task)
    strategy.start(InProcessGrid(client_app(task, mine), len(SIZES)), num_rounds=1, timeout=5)
    assert strategy.aggregator.last is not None
    assert strategy.aggregator.last.used == 5


# ---- the example ----

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-app"


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's
def test_neither_keys_nor_results_travel_to_the_nodes(tmp_path: Path) -> None:
    """Flower sends an app's folder to all nodes, JSON too; a checkpoint tells every node's losses."""
    from flwr.cli.build import build_fab_from_disk

    app = tmp_path / "app"
    shutil.copytree(EXAMPLE, app, ignore=shutil.ignore_patterns("*secrets", "runs", "server", "state.db*"))
    before = set(zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))).namelist())
    for place in ("secrets", "compose-secrets", "runs/first/checkpoints", "server/first"):
        (app / place).mkdir(parents=True)
        (app / place / "some.json").write_text("{}")
    assert set(zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))).namelist()) == before
    assert "fairwind_app/client.py" in before


def test_the_example_has_every_setting_of_a_run() -> None:
    """Flower refuses to override what an app's config does not have."""
    config = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    private = {f"{server.PRIVACY}{field.name}" for field in fields(Privacy) if field.name != "draw"}
    others = {"algorithm", "alpha", "num-server-rounds", "share", "timeout", "secure-aggregation"}
    assert {*server.STRATEGY, *private, *others} == set(config)
    page = (EXAMPLE.parents[1] / "docs" / "federation.md").read_text()
    assert all(f"`{name}`" in page for name in config)


def test_the_compose_file_has_options_that_flower_has_and_files_that_are_made(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    said = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())
    make = [sys.executable, str(EXAMPLE / "credentials.py"), str(tmp_path / "compose-secrets"), "superlink"]
    subprocess.run(make, check=True, capture_output=True)
    other = subprocess.run([*make[:-1], "example.org"], check=False, capture_output=True, text=True)
    assert "is there, and not for example.org" in other.stderr
    for secret in said["secrets"].values():
        assert (tmp_path / secret["file"]).exists()
    known = {}
    for name, service in said["services"].items():
        program, *options = service["command"]
        if program not in known:
            asked = [str(Path(sys.executable).with_name(program)), "--help"]
            known[program] = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
        for option in options:
            assert re.search(rf"^  {option.split('=')[0]}\b", known[program], re.M), option
        given = [each if isinstance(each, str) else each["source"] for each in service["secrets"]]
        assert set(given) <= set(said["secrets"])
        if name != "superlink":
            assert given == ["ca.crt", f"{name}.key"]


# ---- evaluation ----


def _without_bytes(history: list[Any]) -> list[Any]:
    return [{name: value for name, value in line.items() if name != "bytes_down"} for line in history]


@pytest.mark.parametrize("spec", ["adafedadam:warmup=2", "mime", "ditto", "afl"])
def test_evaluated_in_training_the_history_is_the_same_with_half_the_messages(spec: str) -> None:
    task = task_of(make_federation(SIZES, dtype=torch.float32), torch.float32)
    grids = grid_of(task), grid_of(task)
    apart, together = strategy_of(task, spec), strategy_of(task, spec, evaluate_in_training=True)
    results = [
        each.start(grid, num_rounds=3, timeout=5) for each, grid in zip((apart, together), grids, strict=True)
    ]
    histories = [
        _without_bytes(each.evaluations.history) for each in (apart, together)
    ]  # AFL sends two models
    assert histories[0] == histories[1]
    assert sorted(results[1].evaluate_metrics_clientapp) == [0, 1, 2, 3]
    assert torch.equal(together.aggregator.x, apart.aggregator.x)
    assert grids[0].sent - grids[1].sent == 3 * len(SIZES)


def test_evaluated_in_training_and_stopped_after_a_round_no_round_is_missing(
    task: Task, tmp_path: Path
) -> None:
    straight = strategy_of(task)
    straight.start(grid_of(task), num_rounds=4, timeout=5)

    class KilledError(Exception):
        """What ends the server in the midst of a round."""

    class Deadly(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            if self.sent >= 2 * len(SIZES):
                raise KilledError
            return super().pull_messages(message_ids)

    for rounds, grid in ((4, Deadly), (3, InProcessGrid), (4, InProcessGrid)):
        strategy = strategy_of(task, out=tmp_path / "run", evaluate_in_training=True)
        with suppress(KilledError):
            strategy.start(grid(client_app(task), len(SIZES)), num_rounds=rounds, timeout=5)
    assert strategy.evaluations.history == straight.evaluations.history


def assert_final_is_of_the_saved_model(out: Path, task: Task, rounds: int) -> None:
    """Metrics, scores and the end of the history, as the simulator has them after so many rounds."""
    spec = "adafedadam:warmup=2"
    expected = simulate(
        task, spec, rounds=rounds, compile="off", device="cpu", workers=1, progress=False, eval_every=99
    )
    found = load(out)[spec]
    assert found.rounds[-1] == rounds
    assert found.metrics["loss_avg"] == pytest.approx(expected.metrics["loss_avg"], rel=1e-4)
    torch.testing.assert_close(found.loss.double(), expected.loss, rtol=1e-4, atol=1e-5)
    for name, value in expected.state_dict.items():
        torch.testing.assert_close(found.state_dict[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("together", [False, True])
def test_the_last_model_is_evaluated_however_rarely_others_are(
    task: Task, tmp_path: Path, together: bool
) -> None:
    strategy = strategy_of(task, out=tmp_path / "run", eval_every=2, evaluate_in_training=together)
    strategy.start(grid_of(task), num_rounds=3, timeout=5)
    assert strategy.evaluations.rounds == [0, 2, 3]
    assert_final_is_of_the_saved_model(tmp_path / "run", task, 3)
    told = strategy_of(task, out=tmp_path / "run", eval_every=2, evaluate_in_training=together)
    told.start(grid := grid_of(task), num_rounds=3, timeout=5)
    assert grid.sent == 0
    told.start(grid, num_rounds=4, timeout=5)
    assert told.evaluations.rounds == [0, 2, 3, 4]


@pytest.mark.parametrize("together", [False, True])
def test_so_it_is_after_a_kill_before_its_evaluation(task: Task, tmp_path: Path, together: bool) -> None:
    class Killed(AlgorithmStrategy):
        def configure_evaluate(self, server_round: int, *given: Any) -> Any:
            if server_round == 2:
                self._save()
                raise KeyboardInterrupt
            return super().configure_evaluate(server_round, *given)

    own: dict[str, Any] = {"eval_every": 99, "out": tmp_path / "run", "evaluate_in_training": together}
    spec = "adafedadam:warmup=2"
    with pytest.raises(KeyboardInterrupt):
        Killed(spec, task, bounds=UNBOUNDED, **own).start(grid_of(task), num_rounds=2, timeout=5)
    strategy_of(task, **own).start(grid_of(task), num_rounds=2, timeout=5)
    assert_final_is_of_the_saved_model(tmp_path / "run", task, 2)


def test_so_it_is_where_training_stops_early(task: Task, tmp_path: Path) -> None:
    trained = 0

    def dies(reply: Message) -> Message | None:
        nonlocal trained
        trained += "arrays" in reply.content
        return None if "arrays" in reply.content and trained > len(SIZES) else reply

    everyone = dict.fromkeys(range(100, 105), dies)
    strategy = strategy_of(task, out=tmp_path / "run", eval_every=99, max_stalled=1)
    with pytest.raises(StalledError):
        strategy.start(grid_of(task, meddle=everyone), num_rounds=9, timeout=0.2)
    assert_final_is_of_the_saved_model(tmp_path / "run", task, 1)


def test_a_last_model_that_nobody_evaluates_has_no_metrics_of_another(task: Task, tmp_path: Path) -> None:
    strategy = strategy_of(task, out=tmp_path / "run", eval_every=99)
    deaf = {
        node: (lambda reply: reply if strategy.aggregator.round == 0 or "arrays" in reply.content else None)
        for node in range(100, 105)
    }
    strategy.start(grid_of(task, meddle=deaf), num_rounds=1, timeout=0.2)
    found = load(tmp_path / "run")["adafedadam:warmup=2"]
    assert found.rounds == [0, 1]
    assert set(found.metrics.values()) == {None}
    assert found.score.isnan().all()
    assert not torch.equal(found.state_dict["0.weight"], make_model().float().state_dict()["0.weight"])
    assert (tmp_path / "run" / "report.html").exists()


def test_an_evaluation_that_is_refused_does_not_cost_the_update(task: Task) -> None:
    def lie(reply: Message) -> Message:
        if "judged" in reply.content:
            reply.content["judged"] = MetricRecord({"num-examples": 3, "loss": 1.0, "accuracy": 200.0})
        return reply

    strategy = strategy_of(task, evaluate_in_training=True)
    strategy.start(grid_of(task, meddle={101: lie}), num_rounds=1, timeout=5)
    assert strategy.aggregator.last is not None
    assert strategy.aggregator.last.used == 5
    first = strategy.evaluations.said[0]
    assert sorted(first) == ["100", "102", "103", "104"]


def distance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets[:, None]).square().sum(1)


def named(name: str) -> scores.Score:
    """A score of one's own with a name that means something else in messages."""
    return scores.Score(name, lambda outputs, targets: -(outputs[:, 0] - targets).abs(), "higher")


OF_LOSSES: dict[str, dict[str, Any]] = {
    "Poisson": {"loss": torch.nn.PoissonNLLLoss()},
    "own loss": {"loss": distance},
    "score=loss": {"loss": distance, "score": "loss"},
    **{f"called {name}": {"loss": distance, "score": named(name)} for name in ("loss", "num-examples")},
    "called further-loss": {"loss": distance, "score": [named("further-loss"), named("score-loss")]},
}


def regression(**options: Any) -> Task:
    federation = make_federation(SIZES, dtype=torch.float32)
    assert isinstance(federation.targets, torch.Tensor)
    numbers = replace(federation, targets=federation.targets.float(), classes=None)
    solver = Solver(lr=0.01, batch_size=10)
    return Task(lambda: torch.nn.Linear(FEATURES, 1), numbers, solver=solver, **options)


@pytest.mark.parametrize(
    ("name", "together"), [*((name, False) for name in OF_LOSSES), ("own loss", True), ("score=loss", True)]
)
def test_every_score_and_loss_is_evaluated_as_in_the_simulator(name: str, together: bool) -> None:
    task = regression(**OF_LOSSES[name])
    spec = "ditto" if "further" in name else "fedavg"
    strategy = strategy_of(task, spec, evaluate_in_training=together)
    strategy.start(grid_of(task), num_rounds=1, timeout=5)
    expected = simulate(
        task, spec, rounds=1, eval_every=1, compile="off", device="cpu", workers=1, progress=False
    )
    found = [line for line in strategy.evaluations.history if line["algorithm"] == spec]
    for metric in ("avg", "worst30", "loss_avg"):
        assert [line[metric] for line in found] == pytest.approx(  # type: ignore[literal-required]
            [line[metric] for line in expected.history],  # type: ignore[literal-required]
            rel=1e-4,
        )


def test_an_app_of_ones_own_tells_its_loss_for_a_score_that_is_the_loss(tmp_path: Path) -> None:
    task = task_of(make_federation(SIZES, dtype=torch.float32), torch.float32, score="loss")
    strategy = WeightsStrategy("fedavg", task, out=tmp_path / "run")
    strategy.start(InProcessGrid(ordinary_app(task), len(SIZES)), num_rounds=1, timeout=5)
    assert load(tmp_path / "run")["fedavg"].metrics["avg"] == 1.0


@pytest.mark.parametrize("kind", [WeightsStrategy, SecureStrategy])
def test_other_doors_refuse_to_evaluate_in_training(task: Task, kind: Any) -> None:
    with pytest.raises(InputError, match="leave out evaluate_in_training"):
        kind("fedavg", task, evaluate_in_training=True)
