"""What a real federation has beyond a simulation: spare nodes, some that evaluate, numbers for Prometheus."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

from conftest import make_federation
from exchanged import task_of
from fairwind import InputError, Task
from fairwind.data.counter import PARTICIPATE, draw, fold, mix
from fairwind.engine.schedule import Planner
from fairwind.exchange import UNBOUNDED, Privacy
from fairwind.exchange.monitoring import exposition
from fairwind.flower import AlgorithmStrategy, SecureStrategy, client_app, nodes
from fairwind.flower.nodes import select
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


# ---- which nodes train ----


@given(
    hashes=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    count=st.integers(1, 50),
    weights=st.one_of(st.none(), st.lists(st.floats(0, 1e6), min_size=40, max_size=40)),
)
def test_so_many_different_ones_are_drawn_in_order(
    hashes: list[int], count: int, weights: list[float] | None
) -> None:
    known = None if weights is None else torch.tensor(weights[: len(hashes)], dtype=torch.float64)
    drawn = draw(torch.tensor(hashes), count, known).tolist()
    assert drawn == sorted(set(drawn))
    assert len(drawn) == min(count, len(hashes))


def test_by_weights_the_first_is_drawn_in_proportion() -> None:
    weights, places = torch.tensor([1.0, 2.0, 5.0, 0.0], dtype=torch.float64), torch.arange(4)
    drawn = [draw(mix(fold(PARTICIPATE, 0, t), places), 1, weights).item() for t in range(4000)]
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    torch.testing.assert_close(shares, torch.tensor([1, 2, 5, 0]) / 8, rtol=0, atol=0.03)


@pytest.mark.parametrize("selection", ["uniform", "size"])
def test_nodes_are_drawn_as_the_simulators_clients(selection: Any) -> None:
    federation = make_federation(SIZES)
    planner = Planner(federation, task_of(federation).solver, clients_per_round=2, selection=selection)
    sizes = {str(k): float(n) for k, n in enumerate(federation.train)} if selection == "size" else None
    for t in range(20):
        assert planner.plan([7], t).client.tolist() == select(
            list(range(5)), 2, fold(PARTICIPATE, 7, t), sizes
        )


def test_a_node_of_unknown_size_is_drawn_as_an_average_one() -> None:
    drawn = [select([1, 2], 1, fold(PARTICIPATE, 0, t), {"1": 30.0}) for t in range(2000)]
    assert sum(each == [1] for each in drawn) / 2000 == pytest.approx(0.5, abs=0.04)


def test_large_nodes_train_more_often_and_a_lie_does_not_pay_without_end(task: Task) -> None:
    strategy = AlgorithmStrategy("fedavg", task, clients_per_round=2, selection="size")
    strategy.start(grid_of(task), num_rounds=2, timeout=5)
    assert strategy._sizes() == {str(100 + k): n for k, n in enumerate(task.federation.train.tolist())}
    liar = dict(strategy.evaluations.sizes) | {"102": (1, 2**52)}
    strategy.evaluations.sizes = liar
    strategy.aggregator.seen.numbers.clear()
    sizes = strategy._sizes()
    assert sizes is not None
    assert sizes["102"] <= 100 * max(n for node, n in sizes.items() if node != "102")


# ---- more nodes than are wanted ----


def test_a_round_ends_when_enough_have_replied_and_the_others_are_late(task: Task) -> None:
    grid = grid_of(task)
    strategy = AlgorithmStrategy("fedavg", task, bounds=UNBOUNDED, clients_per_round=3, over_selection=0.5)
    strategy.start(grid, num_rounds=1, timeout=60)
    done = strategy.aggregator.last
    assert done is not None
    assert done.used == 3
    assert len(done.refused) == 2  # of ⌈3 · 1.5⌉ = 5
    assert set(done.refused.values()) == {"it is late: 3 others have replied"}


def test_a_spare_node_takes_the_place_of_one_that_fails(task: Task) -> None:
    grid = grid_of(
        task, meddle={101: lambda reply: None if reply.metadata.message_type == "train" else reply}
    )
    strategy = AlgorithmStrategy("fedavg", task, bounds=UNBOUNDED, clients_per_round=4, over_selection=0.25)
    strategy.start(grid, num_rounds=1, timeout=60)
    done = strategy.aggregator.last
    assert done is not None
    assert done.used == 4
    assert list(done.refused) == ["101"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"over_selection": 0.5}, "needs clients_per_round"),
        ({"over_selection": -0.5, "clients_per_round": 2}, "over_selection=-0.5"),
        ({"over_selection": math.nan, "clients_per_round": 2}, "over_selection=nan"),
        ({"selection": "loss"}, "'loss' is not one of uniform, size"),
        ({"evaluate_share": 0}, "evaluate_share=0 is out of range"),
        ({"evaluate_share": 1.5}, "evaluate_share=1.5 is out of range"),
        ({"metrics": "here.txt"}, "end in .prom"),
        ({"metrics": "/nowhere/at/all.prom"}, "folder is not there"),
    ],
)
def test_options_that_mean_nothing_are_refused(task: Task, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        AlgorithmStrategy("fedavg", task, **options)


def test_privacy_refuses_what_depends_on_other_nodes(task: Task) -> None:
    privacy = Privacy(clip=1.0, weight=1.0, noise=0.0, delta=1e-3)
    for options in ({"over_selection": 0.5}, {"selection": "size"}):
        with pytest.raises(InputError, match="privacy"):
            AlgorithmStrategy("fedavg", task, privacy=privacy, clients_per_round=2, **options)
        with pytest.raises(InputError, match="SecAgg"):
            SecureStrategy("fedavg", task, clients_per_round=2, **options)


# ---- some that evaluate ----


def test_a_share_of_the_nodes_evaluates_others_in_each_round(task: Task) -> None:
    grid = grid_of(task)
    strategy = AlgorithmStrategy("fedavg", task, evaluate_share=0.4)
    strategy.start(grid, num_rounds=6, timeout=5)
    judged = [set(said) for said in strategy.evaluations.said]
    assert [len(each) for each in judged] == [2] * 7
    assert len(set.union(*judged)) > 2


# ---- Prometheus ----

LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-zA-Z_]\w*="(?:[^"\\]|\\.)*",?)*)\} (\S+)')


def read(text: str) -> dict[str, float]:
    """The numbers in Prometheus's text format, whose every line is checked."""
    found, declared = {}, set()
    for line in text.splitlines():
        if line.startswith("# "):
            assert re.fullmatch(r"# (HELP \w+ .+|TYPE \w+ (counter|gauge))", line)
            declared.add(line.split()[2])
        else:
            matched = LINE.fullmatch(line)
            assert matched, line
            assert matched[1] in declared
            assert matched[1] not in found
            found[matched[1]] = float(matched[3])
    assert text.endswith("\n")
    return found


def test_prometheus_finds_the_numbers_of_the_last_round(task: Task, tmp_path: Path) -> None:
    file = tmp_path / "fairwind.prom"
    strategy = AlgorithmStrategy("adafedadam", task, metrics=file, eval_every=2, out=tmp_path / "run")
    strategy.start(grid_of(task), num_rounds=3, timeout=5)
    found = read(file.read_text())
    assert found["fairwind_round"] == 3
    assert found["fairwind_evaluated_round"] == 3
    assert found["fairwind_last_round_used"] == 5
    assert found["fairwind_bytes_up_total"] == strategy.aggregator.bytes.up > 0
    assert found["fairwind_score_worst30"] == pytest.approx(strategy.evaluations.history[-1]["worst30"])
    assert 'algorithm="adafedadam",seed="0"' in file.read_text()
    assert [each.name for each in tmp_path.iterdir() if "prom" in each.name] == [file.name]


def test_labels_and_numbers_of_any_kind_are_written() -> None:
    text = exposition({"a/b-c": math.nan, "d": math.inf, "e_total": -1e-300}, {"name": 'a "b"\\\n'})
    assert read(text)["fairwind_d"] == math.inf
    assert math.isnan(read(text)["fairwind_a_b_c"])
    assert read(text)["fairwind_e_total"] == -1e-300
