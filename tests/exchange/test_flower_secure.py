"""Sums that are formed in secret: what they add up to, and what the server sees of a single client."""

import itertools
from collections.abc import Callable
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
from fairwind import InputError, Task, algorithms
from fairwind.engine.layout import Layout
from fairwind.exchange import UNBOUNDED, Bounds, LocalClient, Reply
from fairwind.exchange.message import Form, sums_form
from fairwind.exchange.secure import first_scales, next_scales, pack, pack_powers, unpack
from fairwind.flower import AlgorithmStrategy, SecureStrategy, client_app, nodes, secure, secure_client_app
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
        assert len(share) in (39 + 4 + 5 + 1, 25 * 5)  # a sum, or powers of 16
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


def masked(reply: Message) -> bool:
    """Whether a reply is that of the stage in which updates are sent."""
    return any("masked_params" in record for record in reply.content.config_records.values())


def loses(number: int) -> Callable[[Message], Message | None]:
    """Loses the masked vector that a node sends so many times after the first."""
    sent = itertools.count()

    def meddle(reply: Message) -> Message | None:
        return None if masked(reply) and next(sent) == number else reply

    return meddle


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("spec", ["adafedadam", "qfedavg"])
def test_no_two_sums_of_a_round_differ_by_a_node(
    task: Task, spec: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else their difference is what this node has sent: coef·δ, and its numbers."""
    released: list[torch.Tensor] = []

    def unpacking(*given: Any) -> Any:
        found = unpack(*given)
        released.append(found.total)
        return found

    monkeypatch.setattr(secure, "unpack", unpacking)
    victim = LocalClient(task, algorithms.build(spec), 3, sends="sums")
    strategy = SecureStrategy(spec, task, eval_every=9)
    own = victim.train(strategy.aggregator.weights(), 0).reply.arrays
    sent = victim.form.vector(own)[0].double()
    grid = InProcessGrid(secure_client_app(task), 10, {103: loses(number)})
    strategy.start(grid, num_rounds=1, timeout=0.2)
    seen = [
        abs(float(torch.cosine_similarity(one - other, sent, dim=0)))
        for one, other in itertools.combinations(released, 2)
    ]
    assert len(released) == 1
    assert max(seen, default=0.0) < 0.5


def test_bounds_on_clients_that_nobody_sees_are_refused(task: Task) -> None:
    with pytest.raises(InputError, match="bounds no client"):
        SecureStrategy("fedavg", task, bounds=Bounds())


@pytest.mark.parametrize("spec", ["scaffold", "mime", "ditto"])
def test_other_types_are_refused(task: Task, spec: str) -> None:
    with pytest.raises(InputError, match="replies of sums have no more"):
        SecureStrategy(spec, task)


# ---- packing ----


def reply_of(form: Any, update: np.ndarray, **numbers: float) -> Reply:
    return Reply(form.arrays(torch.from_numpy(update)), numbers)


def form_of(parameters: int = 4) -> Form:
    layout = Layout((("w",),), (torch.Size([parameters]),), ((1,),), torch.float32)
    return sums_form(layout, algorithms.fedavg())


def quantized(vector: np.ndarray) -> np.ndarray:
    return np.round(vector * 2**21) / 2**21


@given(st.one_of(st.just(0.0), st.floats(1e-9, 1e12)), st.integers(1, 20))
def test_scales_are_found_without_a_second_sum(size: float, clients: int) -> None:
    form, draw = form_of(), np.random.default_rng(0)
    replies = [
        reply_of(form, (size * draw.normal(size=4)).astype(np.float32), size=float(k + 1))
        for k in range(clients)
    ]
    scales = first_scales(np.sum([quantized(pack_powers(each, form)) for each in replies], axis=0))
    expected = np.sum([each.arrays["w"] for each in replies], axis=0)
    largest = max(float(np.abs(each.arrays["w"]).max()) for each in replies)
    assert largest <= scales[0] <= max(16 * largest, 16.0**-12)
    for _ in range(3):
        found = unpack(
            np.sum([quantized(pack(each, form, scales)) for each in replies], axis=0), form, scales
        )
        assert found.shortened == 0
        step = clients * scales[0] / 2**21
        assert np.abs(found.total.numpy() - expected).max() <= step
        assert found.numbers["size"] == pytest.approx(clients * (clients + 1) / 2, rel=1e-3)
        following = next_scales(found, scales)
        if not size:  # nothing is known of zeros: they are looked at again
            assert following is None
            return
        assert following is not None
        assert following == pytest.approx([2 * each for each in found.magnitudes])
        scales = following


def test_a_client_beyond_its_scale_keeps_its_direction_and_its_length_to_its_weight() -> None:
    form, scales = form_of(), (1.0, 10.0)
    update = np.array([4.0, -2.0, 1.0, 0.5], np.float32)
    found = unpack(pack(reply_of(form, update, size=8.0), form, scales), form, scales)
    assert found.shortened == 1
    np.testing.assert_allclose(found.total.numpy() / found.numbers["size"], update / 8.0)
    assert float(found.total.abs().max()) == 1.0
    assert next_scales(found, scales) is None


def test_a_sum_that_is_lost_in_the_steps_of_its_scale_is_measured_anew() -> None:
    form, scales = form_of(), (1e6, 10.0)
    found = unpack(pack(reply_of(form, np.ones(4, np.float32), size=8.0), form, scales), form, scales)
    assert next_scales(found, scales) is None
