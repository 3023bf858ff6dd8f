"""Sums that are formed in secret: what they add up to, and what the server sees of a single client."""

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

from flwr.app import Context, Error, Message, RecordDict
from flwr.common import bytes_to_ndarray, ndarray_to_bytes

from conftest import make_federation
from exchanged import simulated, task_of
from fairwind import InputError, Task, algorithms
from fairwind.engine.layout import Layout
from fairwind.exchange import UNBOUNDED, Bounds, LocalClient, Reply, StalledError
from fairwind.exchange.message import Form, sums_form
from fairwind.exchange.secure import SecretSum, first_scales, next_scales, pack, pack_powers, unpack
from fairwind.flower import (
    AlgorithmStrategy,
    SecureStrategy,
    client_app,
    nodes,
    secure,
    secure_client_app,
    server_app,
)
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
        assert len(share) in (39 + 4 + 5 + 1 + 1, 25 * 5 + 1)  # a sum, or powers of 16
        assert 0.3 < share.mean() < 0.7
        assert share.std() > 0.2
    assert not np.array_equal(vectors[0], vectors[-1])


STAGES = {"setup": "pk1", "share_keys": "dsts", "collect_masked_vectors": "masked_params", "unmask": "shares"}


def spoil(reply: Message, name: str, value: Any) -> Message:
    reply.content.config_records["secaggplus_configs"][name] = value
    return reply


def at(stage: str, meddle: Callable[[Message], Message | None]) -> Callable[[Message], Message | None]:
    """Meddles with a node's replies in a stage of SecAgg+."""

    def changed(reply: Message) -> Message | None:
        here = any(STAGES[stage] in record for record in reply.content.config_records.values())
        return meddle(reply) if here else reply

    return changed


def lost(reply: Message) -> None:
    return None


def failed(reply: Message) -> Message:
    answered = Message(Error(code=2, reason="<class 'OSError'>:<'no data'>"), reply_to=reply)
    answered.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    answered.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
    return answered


def empty(reply: Message) -> Message:
    reply.content = RecordDict()
    return reply


def assert_sums_without(meddle: dict[int, Any], absent: set[int], nodes: int = 6, **options: Any) -> Any:
    """The model is that of plain sums of all others."""
    task = task_of(make_federation(SIZES[:nodes], dtype=torch.float32), torch.float32)
    secure = SecureStrategy("fedavg", task, eval_every=9, max_stalled=1, **options)
    secure.start(InProcessGrid(secure_client_app(task), nodes, meddle), num_rounds=1, timeout=0.2)
    plain = AlgorithmStrategy("fedavg", task, bounds=UNBOUNDED, sends="sums", eval_every=9)
    start, fewer = plain.aggregator.x.clone(), InProcessGrid(client_app(task), nodes)
    for node in absent:
        del fewer.contexts[node]
    plain.start(fewer, num_rounds=1, timeout=5)
    assert secure.aggregator.last is not None
    assert secure.aggregator.last.used == nodes - len(absent)
    assert set(secure.aggregator.last.refused) == set(map(str, absent))
    moved = (plain.aggregator.x - start).abs().max()
    assert float((secure.aggregator.x - plain.aggregator.x).abs().max() / moved) < 1e-4
    return secure.aggregator.last


@pytest.mark.parametrize("meddle", [lost, failed])
@pytest.mark.parametrize("stage", STAGES)
def test_a_node_that_drops_out_in_any_stage_is_not_in_the_sum(stage: str, meddle: Any) -> None:
    """But in the last, where its vector has been added already."""
    absent = set() if stage == "unmask" else {103}
    assert_sums_without({103: at(stage, meddle)}, absent)


@pytest.mark.parametrize("shares", [1.0, 0.7])
def test_nodes_may_drop_out_in_all_stages_of_a_round(shares: float) -> None:
    meddle = {103 + k: at(stage, failed) for k, stage in enumerate(STAGES)}
    assert_sums_without(meddle, {103, 104, 105}, nodes=10, shares=shares, threshold=0.4)


def swapped(reply: Message) -> Message:
    record = reply.content.config_records["secaggplus_configs"]
    return spoil(reply, "pk2", record["pk1"])


def forged(reply: Message) -> Message:
    reply.metadata.__dict__["_src_node_id"] = 107
    return reply


HARMFUL: dict[str, tuple[str, Callable[[Message], Message]]] = {
    "nothing": ("setup", empty),
    "no key": ("setup", lambda reply: spoil(reply, "pk1", b"no key")),
    "one key twice": ("setup", swapped),
    "for another": ("setup", forged),
    "for nobody": ("share_keys", lambda reply: spoil(reply, "dsts", [1])),
    "for few": ("share_keys", lambda reply: spoil(reply, "ctxts", [b"one"])),
    "numbers": ("share_keys", lambda reply: spoil(reply, "ctxts", [1] * 5)),
    "no array": ("collect_masked_vectors", lambda reply: spoil(reply, "masked_params", [b"a", b"b"])),
    "short": (
        "collect_masked_vectors",
        lambda reply: spoil(reply, "masked_params", [ndarray_to_bytes(np.zeros(1, int))] * 2),
    ),
    "parts of others": ("unmask", lambda reply: spoil(reply, "nids", [1] * 6)),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_reply_at_which_others_would_fail_is_refused(name: str) -> None:
    stage, meddle = HARMFUL[name]
    absent = set() if stage == "unmask" else {103}
    done = assert_sums_without({103: at(stage, meddle)}, absent)
    why = (
        "it replies for another node" if name == "for another" else f"cannot be used, in the stage '{stage}'"
    )
    assert all(why in said for said in done.refused.values())


def test_parts_of_keys_that_do_not_fit_together_stall_a_round(task: Task) -> None:
    strategy = strategy_of(task, max_stalled=1)
    meddle = at("unmask", lambda reply: spoil(reply, "shares", [bytes(20)] * 10))
    with pytest.raises(StalledError):
        strategy.start(InProcessGrid(secure_client_app(task), 10, {103: meddle}), num_rounds=1, timeout=5)


def flipped(reply: Message) -> Message:
    """Another bit in one of the parts of keys that a node sends."""
    shares = reply.content.config_records["secaggplus_configs"]["shares"]
    assert isinstance(shares, list)
    first = bytearray(bytes(shares[0]))  # type: ignore[arg-type]
    first[6] ^= 1
    return spoil(reply, "shares", [bytes(first), *shares[1:]])


def test_a_sum_with_one_wrong_bit_in_a_part_of_a_key_is_not_used(
    task: Task, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    strategy = strategy_of(task, max_stalled=1)
    with pytest.raises(StalledError):
        strategy.start(
            InProcessGrid(secure_client_app(task), 10, {103: at("unmask", flipped)}), num_rounds=1, timeout=5
        )
    assert "round 1: the sum is not used, because parts of keys that nodes sent do not fit" in caplog.text
    torch.testing.assert_close(strategy.aggregator.x, strategy_of(task).aggregator.x)


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
    assert strategy.aggregator.last is not None
    without = number == 1  # the first masked vector is of the scales
    assert set(strategy.aggregator.last.refused) == ({"103"} if without else set())
    assert strategy.aggregator.last.used == 10 - without
    seen = [
        abs(float(torch.cosine_similarity(one - other, sent, dim=0)))
        for one, other in itertools.combinations(released, 2)
    ]
    assert len(released) == 1
    assert max(seen, default=0.0) < 0.5


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


# ---- no sum that another set of nodes' was before ----


class Unmasked:
    """Sums as the server learns them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.found: list[SecretSum] = []
        monkeypatch.setattr(secure, "unpack", self._unpack)

    def _unpack(self, *given: Any) -> SecretSum:
        self.found.append(unpack(*given))
        return self.found[-1]


def strategy_of(task: Task, out: Path | None = None, **options: Any) -> SecureStrategy:
    return SecureStrategy("fedavg", task, out=out, eval_every=9, **options)


def grid_of(task: Task, *absent: int) -> InProcessGrid:
    grid = InProcessGrid(secure_client_app(task), 10)
    for node in absent:
        del grid.contexts[node]
    return grid


def test_a_server_killed_with_a_sum_in_hands_is_told_it_again_by_the_same_nodes_alone(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    sums = Unmasked(monkeypatch)
    first = strategy_of(task, tmp_path / "run")
    first.start(grid_of(task), num_rounds=1, timeout=5)
    killed = strategy_of(task, tmp_path / "run")

    def kill() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(killed, "_save", kill)
    with pytest.raises(KeyboardInterrupt):
        killed.start(grid_of(task), num_rounds=3, timeout=5)
    assert len(sums.found) == 2
    fewer = strategy_of(task, tmp_path / "run")
    with pytest.raises(StalledError, match="training stops in round 2, which was tried 3 times"):
        fewer.start(grid_of(task, 103), num_rounds=3, timeout=5)
    assert len(sums.found) == 2
    assert "the secure sum of 10 nodes was released in this round before" in caplog.text
    again = strategy_of(task, tmp_path / "run")
    again.start(grid_of(task), num_rounds=3, timeout=5)
    assert len(sums.found) == 4
    step = 10 * 2**-21 * max(map(abs, sums.found[1].magnitudes))
    torch.testing.assert_close(sums.found[2].total, sums.found[1].total, rtol=0, atol=2 * step)
    straight = strategy_of(task)
    straight.start(grid_of(task), num_rounds=3, timeout=5)
    torch.testing.assert_close(again.aggregator.x, straight.aggregator.x, rtol=1e-3, atol=1e-5)


def test_scales_are_in_the_checkpoint(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So what tells them is released once, however often the server is killed."""
    for rounds in (1, 2, 3):
        strategy = strategy_of(task, tmp_path / "run")
        strategy.start(grid_of(task), num_rounds=rounds, timeout=5)
    made = [(each.what, each.round) for each in strategy.aggregator.releases.made]
    assert made == [("magnitudes", 0), ("secure sum", 0), ("secure sum", 1), ("secure sum", 2)]
    assert strategy.aggregator.checkpoint().record["scales"] == list(strategy.aggregator.scales or ())


def test_a_sum_of_fewer_nodes_than_asked_for_is_not_unmasked(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = Unmasked(monkeypatch)
    strategy = strategy_of(task, min_replies=10, max_stalled=2)
    grid = InProcessGrid(secure_client_app(task), 10, {103: lambda reply: None if masked(reply) else reply})
    with pytest.raises(StalledError, match="103: it did not reply in time"):
        strategy.start(grid, num_rounds=1, timeout=0.2)
    assert sums.found == []


def test_the_sum_of_a_single_node_is_not_unmasked(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = Unmasked(monkeypatch)
    only = {100 + k: (lambda reply: None if masked(reply) else reply) for k in range(1, 3)}
    strategy = strategy_of(task, max_stalled=1, threshold=0.1)
    grid = InProcessGrid(secure_client_app(task), 3, only)
    with pytest.raises(StalledError):
        strategy.start(grid, num_rounds=1, timeout=0.2)
    assert sums.found == []


# ---- by the run config ----


def run(task: Task, grid: InProcessGrid, **said: Any) -> None:
    config = {"algorithm": "fedavg", "num-server-rounds": 2, "eval-every": 2, **said}
    for context in grid.contexts.values():
        context.run_config = config
    server_app(task)(grid, Context(1, 0, {}, RecordDict(), config))


def test_a_run_config_switches_it_on_at_server_and_clients(task: Task, tmp_path: Path) -> None:
    seen = 0

    def count(reply: Message) -> Message:
        nonlocal seen
        seen += masked(reply)
        assert "arrays" not in reply.content
        return reply

    grid = InProcessGrid(client_app(task), 10, {103: count})
    said = {"secure-aggregation": True, "share": 1.0, "sends": "report"}  # what the example's config says
    run(task, grid, **said, out=str(tmp_path / "run"))
    assert seen == 3
    config = json.loads((tmp_path / "run" / "results.json").read_text())["config"]
    assert config["sends"] == "sums"


def test_a_masked_client_answers_no_server_that_asks_for_more(task: Task) -> None:
    grid = InProcessGrid(client_app(task), 10)
    for context in grid.contexts.values():
        context.run_config = {"secure-aggregation": True}
    with pytest.raises(StalledError, match="it failed"):
        AlgorithmStrategy("fedavg", task, max_stalled=1, eval_every=9).start(grid, num_rounds=1, timeout=5)


def test_wrong_settings_are_named(task: Task) -> None:
    grid = InProcessGrid(client_app(task), 10)
    with pytest.raises(InputError, match=r"whom secure aggregation hides: give share=1\.0"):
        run(task, grid, **{"secure-aggregation": True, "share": 0.1})
    with pytest.raises(InputError, match="secure-aggregation='yes' is neither true nor false"):
        run(task, grid, **{"secure-aggregation": "yes"})
