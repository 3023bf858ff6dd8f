"""Rounds with too few replies are tried again; after several training stops, and the model is written."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import make_federation
from exchanged import Exchange, task_of
from fairwind import InputError, Task, load
from fairwind.exchange import UNBOUNDED, Aggregator, StalledError

SIZES = [12, 20, 45, 8, 26]
SPECS = ["fedavg", "adafedadam", "scaffold", "mime", "ditto", "afl"]


@pytest.mark.parametrize("spec", SPECS)
def test_a_round_with_too_few_replies_is_as_if_it_had_not_been(spec: str) -> None:
    task = task_of(make_federation(SIZES))
    tried, straight = Exchange(task, spec), Exchange(task, spec)
    tried.server.min_replies = 3
    for _ in range(2):
        done = tried.round([0, 1])
        assert (done.stalled, done.moved, done.used, done.number) == (True, False, 2, tried.server.round)
        assert "usable replies: 2, and at least 3 must be" in done.lines()[-1]
        assert tried.round().moved
        straight.round()
    assert tried.server.round == straight.server.round == 2
    assert tried.server.stalled == 2
    assert torch.equal(tried.server.x, straight.server.x)
    assert all(map(torch.equal, tried.server.state, straight.server.state))


def test_several_in_a_row_stop_a_training_and_say_why() -> None:
    server = Exchange(task_of(make_federation(SIZES)), "fedavg").server
    server.min_replies, server.max_stalled = 2, 3
    for number in range(3):
        assert server.stopped == ""
        for k in range(6):
            server.refuse(f"node {k}", "it did not reply in time")
        server.finish()
        assert server.stalled_in_a_row == number + 1
    assert server.stopped.startswith(
        "training stops in round 1, which was tried 3 times: usable replies: 0, "
    )
    assert "at least 2 must be (node 0: it did not reply in time; node 1: " in server.stopped
    assert server.stopped.endswith("; …)")


def test_a_noisy_sum_of_too_few_is_not_released() -> None:
    pytest.importorskip("dp_accounting")
    from fairwind.exchange import Privacy

    privacy = Privacy(clip=1.0, weight=20.0, noise=1.0, delta=1e-3)
    exchange = Exchange(task_of(make_federation(SIZES)), "fedavg", bounds=None, privacy=privacy)
    exchange.server.min_replies = 3
    exchange.round([0, 1])
    assert exchange.server.spent()["epsilon"] == 0
    exchange.round([0, 1, 2])
    assert exchange.server.spent()["epsilon"] > 0


@pytest.mark.parametrize("wrong", [{"min_replies": 0}, {"max_stalled": 0}, {"min_replies": 1.5}])
def test_wrong_numbers_are_refused(wrong: dict[str, Any]) -> None:
    client = Exchange(task_of(make_federation([20])), "fedavg").clients[0]
    with pytest.raises(InputError, match=next(iter(wrong))):
        Aggregator(client.algorithm, client.layout, client.start(), **wrong)


# ---- on Flower ----

flower = pytest.importorskip("fairwind.flower", reason="Flower is not there", exc_type=ImportError)

from flwr.app import Context, Message, RecordDict  # noqa: E402

from fairwind.flower import nodes  # noqa: E402
from flower_grid import InProcessGrid  # noqa: E402


@pytest.fixture
def task() -> Task:
    return task_of(make_federation(SIZES, dtype=torch.float32), torch.float32)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "PAUSE", 0.01)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)


def lost(reply: Message) -> None:
    return None


def lost_while(missing: Callable[[int], bool]) -> Callable[[Message], Message | None]:
    """Loses a node's replies to training, by how many came before."""
    count = 0

    def meddle(reply: Message) -> Message | None:
        nonlocal count
        if "arrays" not in reply.content:
            return reply
        count += 1
        return None if missing(count - 1) else reply

    return meddle


def grid_of(task: Task, meddle: Any) -> InProcessGrid:
    return InProcessGrid(flower.client_app(task), len(SIZES), meddle)


def strategy_of(task: Task, **options: Any) -> Any:
    return flower.AlgorithmStrategy("fedavg", task, **{"bounds": UNBOUNDED} | options)


def test_a_training_without_any_reply_fails_and_leaves_the_model(task: Task, tmp_path: Path) -> None:
    strategy = strategy_of(task, out=tmp_path / "run")
    everyone = dict.fromkeys(range(100, 105), lost)
    with pytest.raises(StalledError) as error:
        strategy.start(grid_of(task, everyone), num_rounds=3, timeout=0.1)
    said = str(error.value)
    assert "training stops in round 1, which was tried 3 times" in said
    assert "100: it did not reply in time" in said
    assert said.endswith(f"the model after 0 rounds is in {tmp_path / 'run'}")
    with pytest.raises(StalledError):
        strategy.start(grid_of(task, everyone), num_rounds=3, timeout=0.1)
    assert strategy.aggregator.stalled == 6  # three tries again
    trained = load_file(tmp_path / "run" / "models.safetensors")
    assert {name.removeprefix("fedavg/0/") for name in trained} == set(strategy.module.state_dict())
    with pytest.raises(InputError, match="the same 'flwr run' again"):
        load(tmp_path / "run")


def test_so_does_the_server_app(task: Task) -> None:
    context = Context(1, 0, {}, RecordDict(), {"timeout": 0.1, "max-stalled": 1, "min-replies": 2})
    everyone = dict.fromkeys(range(100, 105), lost)
    with pytest.raises(StalledError, match="at least 2 must be"):
        flower.server_app(task)(grid_of(task, everyone), context)


def test_one_that_stops_later_leaves_results_of_what_it_has(task: Task, tmp_path: Path) -> None:
    dying = {100 + k: lost_while(lambda count: count >= 2) for k in range(5)}
    strategy = strategy_of(task, out=tmp_path / "run", max_stalled=2)
    with pytest.raises(StalledError, match="training stops in round 3, which was tried 2 times"):
        strategy.start(grid_of(task, dying), num_rounds=9, timeout=0.1)
    found = load(tmp_path / "run")["fedavg"]
    assert found.rounds == [0, 1, 2]
    straight = strategy_of(task)
    straight.start(grid_of(task, {}), num_rounds=2, timeout=5)
    for name, value in straight.aggregator.weights().items():
        torch.testing.assert_close(found.state_dict[name], torch.tensor(value))
    assert (tmp_path / "run" / "report.html").exists()
    again = strategy_of(task, out=tmp_path / "run")
    again.start(grid_of(task, {}), num_rounds=3, timeout=5)
    assert load(tmp_path / "run")["fedavg"].rounds == [0, 1, 2, 3]


def test_a_round_that_stalled_does_not_use_up_a_round(
    task: Task, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flaky = {100 + k: lost_while(lambda count: count in (1, 3)) for k in range(5)}
    strategy, straight = strategy_of(task, out=tmp_path / "run"), strategy_of(task)
    strategy.start(grid_of(task, flaky), num_rounds=3, timeout=0.1)
    straight.start(grid_of(task, {}), num_rounds=3, timeout=5)
    assert torch.equal(strategy.aggregator.x, straight.aggregator.x)
    found = load(tmp_path / "run")["fedavg"]
    assert found.rounds == [0, 1, 2, 3]
    assert strategy.aggregator.stalled == 2
    assert "round 2: the model stays as it was: usable replies: 0, and at least 1 must be" in caplog.text


def test_a_further_try_draws_other_nodes(task: Task) -> None:
    drawn = []

    def noting(node: int) -> Callable[[Message], Message | None]:
        def meddle(reply: Message) -> Message | None:
            if "arrays" not in reply.content:
                return reply
            drawn.append(node)
            return None

        return meddle

    strategy = strategy_of(task, clients_per_round=2, max_stalled=4, eval_every=9)
    with pytest.raises(StalledError):
        strategy.start(grid_of(task, {n: noting(n) for n in range(100, 105)}), num_rounds=1, timeout=0.1)
    assert len({frozenset(drawn[k : k + 2]) for k in range(0, 8, 2)}) > 1
    assert drawn[:2] == strategy_of(task, clients_per_round=2).nodes.sample(grid_of(task, {}), 1)


def test_where_nobody_was_evaluated_the_model_is_written_all_the_same(task: Task, tmp_path: Path) -> None:
    def unjudged(reply: Message) -> Message | None:
        return reply if "arrays" in reply.content else None

    strategy = strategy_of(task, out=tmp_path / "run", eval_every=9)
    strategy.start(grid_of(task, dict.fromkeys(range(100, 105), unjudged)), num_rounds=2, timeout=0.1)
    trained = load_file(tmp_path / "run" / "models.safetensors")
    for name, value in strategy.aggregator.weights().items():
        torch.testing.assert_close(trained[f"fedavg/0/{name}"], torch.tensor(value))
    assert not (tmp_path / "run" / "results.json").exists()


def test_lines_about_nodes_name_them_and_those_about_the_model_do_not(
    task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = strategy_of(task, max_stalled=1)
    with pytest.raises(StalledError):
        strategy.start(grid_of(task, dict.fromkeys(range(100, 105), lost)), num_rounds=1, timeout=0.1)
    assert "round 1: node 100 is left out: it did not reply in time" in caplog.text
    assert "round 1: the model stays as it was" in caplog.text
    assert "node the model" not in caplog.text
