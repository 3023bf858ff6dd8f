"""Sums that are formed in secret: what they add up to, and what the server sees of a single client."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.common import bytes_to_ndarray

from conftest import make_federation
from exchanged import simulated, task_of
from fairwind import InputError, Task
from fairwind.exchange import UNBOUNDED, Bounds, Reply
from fairwind.exchange.message import sums_form
from fairwind.exchange.secure import first_scales, fits, fitted, pack, unpack
from fairwind.flower import AlgorithmStrategy, SecureStrategy, client_app, nodes, secure_client_app
from flower_grid import InProcessGrid

SIZES = [12, 20, 45, 8, 26, 30, 9, 14, 22, 17]


@pytest.fixture
def task() -> Task:
    return task_of(make_federation(SIZES, dtype=torch.float32), torch.float32)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "PAUSE", 0.01)


SUMMED = ["fedavg", "fedadam", "fednova", "qfedavg", "adafedadam:warmup=1", "fedprox"]


@pytest.mark.parametrize("spec", SUMMED)
def test_secure_sums_train_the_model_of_plain_sums(
    task: Task, spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    secure = SecureStrategy(spec, task)
    secure.start(InProcessGrid(secure_client_app(task), 10), num_rounds=3, timeout=5)
    plain = AlgorithmStrategy(spec, task, bounds=UNBOUNDED, sends="sums")
    plain.start(InProcessGrid(client_app(task), 10), num_rounds=3, timeout=5)
    simulation = simulated(task, spec)
    start = simulation.x[0].clone()
    for _ in range(3):
        simulation.step()
    moved = (plain.aggregator.x - start).abs().max()
    error = float((secure.aggregator.x - plain.aggregator.x).abs().max() / moved)
    with capsys.disabled():
        print(f"{spec}: 10 nodes, 3 rounds: off by {error:.2e} of the largest change")
    assert secure.aggregator.last is not None
    assert secure.aggregator.last.used == 10
    assert error < 5e-3
    assert float((plain.aggregator.x - simulation.x[0]).abs().max()) < 1e-5


def test_what_a_single_client_sends_is_masked(task: Task) -> None:
    """What leaves a client looks drawn at random, and is another each time; nothing else of it is beside."""
    seen: list[Message] = []

    def listen(reply: Message) -> Message:
        if "masked_params" in str(list(reply.content.config_records.values())) or reply.content.array_records:
            seen.append(reply)
        return reply

    for _ in range(2):
        strategy = SecureStrategy("adafedadam", task)
        grid = InProcessGrid(secure_client_app(task), 10, {103: listen})
        strategy.start(grid, num_rounds=1, timeout=5)
    vectors = []
    for reply in seen:
        for record in reply.content.config_records.values():
            masked: Any = record.get("masked_params", [])
            vectors += [bytes_to_ndarray(each) for each in masked][-1:]
        assert all(not array for array in reply.content.array_records.values())
        numbers = {k: v for record in reply.content.metric_records.values() for k, v in record.items()}
        assert set(numbers.values()) <= {0, 1}
    assert len(vectors) >= 2
    for vector in vectors:
        share = np.asarray(vector, dtype=np.float64) / 2**32
        assert len(share) == 39 + 4 + 5
        assert 0.3 < share.mean() < 0.7
        assert share.std() > 0.2
    assert not np.array_equal(vectors[0], vectors[-1])


def test_a_node_that_drops_out_is_not_in_the_sum(task: Task) -> None:
    def lost(reply: Message) -> Message | None:
        masked = any("masked_params" in record for record in reply.content.config_records.values())
        return None if masked else reply

    secure = SecureStrategy("fedavg", task)
    secure.start(InProcessGrid(secure_client_app(task), 10, {103: lost}), num_rounds=2, timeout=0.2)
    plain = AlgorithmStrategy("fedavg", task, bounds=UNBOUNDED, sends="sums")
    fewer = InProcessGrid(client_app(task), 10)
    del fewer.contexts[103]
    plain.start(fewer, num_rounds=2, timeout=5)
    assert secure.aggregator.last is not None
    assert secure.aggregator.last.used == 9
    torch.testing.assert_close(secure.aggregator.x, plain.aggregator.x, rtol=1e-3, atol=1e-5)


def test_bounds_on_clients_that_nobody_sees_are_refused(task: Task) -> None:
    with pytest.raises(InputError, match="bounds no client"):
        SecureStrategy("fedavg", task, bounds=Bounds())
    with pytest.raises(InputError, match="no defence="):
        SecureStrategy("fedavg", task, defence="median")


@pytest.mark.parametrize("spec", ["scaffold", "mime", "ditto"])
def test_other_types_are_refused(task: Task, spec: str) -> None:
    with pytest.raises(InputError, match="replies of sums have no more"):
        SecureStrategy(spec, task)


# ---- packing ----


def reply_of(form: Any, update: np.ndarray, **numbers: float) -> Reply:
    return Reply(form.arrays(torch.from_numpy(update)), numbers)


@given(st.one_of(st.just(0.0), st.floats(1e-6, 1e8)), st.integers(1, 20))
def test_scales_find_their_size_in_a_few_rounds(size: float, clients: int) -> None:
    from fairwind import algorithms
    from fairwind.engine.layout import Layout

    layout = Layout((("w",),), (torch.Size([4]),), ((1,),), torch.float32)
    form = sums_form(layout, algorithms.fedavg())
    draw = np.random.default_rng(0)
    replies = [
        reply_of(form, (size * draw.normal(size=4)).astype(np.float32), size=float(k + 1))
        for k in range(clients)
    ]
    scales = first_scales(form)
    for _ in range(8):
        summed = np.sum([np.round(pack(each, form, scales) * 2**21) / 2**21 for each in replies], axis=0)
        found = unpack(summed, form, scales)
        if fits(found, clients, scales):
            break
        scales = fitted(found, clients, scales)
    else:
        raise AssertionError("scales did not settle")
    expected = np.sum([each.arrays["w"] for each in replies], axis=0)
    step = clients * scales[0] / 2**21
    assert np.abs(found.total.numpy() - expected).max() <= step
    assert found.numbers["size"] == pytest.approx(clients * (clients + 1) / 2, rel=1e-2)
    assert fits(found, clients, scales)
