"""A reply that was sent before is refused, whatever it holds, and the round is that of the others."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conftest import make_federation
from exchanged import Exchange, task_of
from fairwind import Task
from fairwind.exchange import UNBOUNDED, Reply

SIZES = [12, 20, 45, 8]
OTHERS = (0, 1, 2)
KINDS = [("fedavg", "report"), ("adafedadam", "sums"), ("scaffold", "report"), ("mime", "report")]


def exchange_of(spec: str, sends: str) -> Exchange:
    return Exchange(task_of(make_federation(SIZES)), spec, sends=sends)


def replies(exchange: Exchange) -> list[Reply]:
    """Those of client 3 in a round, one in each phase; the others take part."""
    found, server = [exchange.reply(3)], exchange.server
    if server.phase == "gradient":
        for k in OTHERS:
            assert not server.accept(str(k), exchange.reply(k))
        assert not server.accept("3", found[0])
        server.turn()
        found.append(exchange.reply(3))
    for k in OTHERS:
        assert not server.accept(str(k), exchange.reply(k))
    assert not server.accept("3", found[-1])
    return found


@pytest.mark.parametrize(("spec", "sends"), KINDS)
def test_a_reply_of_an_earlier_round_is_refused(spec: str, sends: str) -> None:
    exchange, without = exchange_of(spec, sends), exchange_of(spec, sends)
    first = replies(exchange)
    exchange.server.finish()
    without.round()
    server = exchange.server
    for phase, old in enumerate(first):
        what = "gradients" if phase == 0 and len(first) == 2 else "training"
        said = f"it answers the {what} of round 1, and this is the {what} of round 2"
        assert server.accept("3", old) == said
        if phase == 0 and len(first) == 2:
            for k in OTHERS:
                assert not server.accept(str(k), exchange.reply(k))
            server.turn()
    for k in OTHERS:
        assert not server.accept(str(k), exchange.reply(k))
    assert set(server.finish().refused) == {"3"}
    without.round(OTHERS)
    assert torch.equal(server.x, without.server.x)


@pytest.mark.parametrize(("spec", "sends"), KINDS)
def test_a_reply_that_is_sent_twice_counts_once(spec: str, sends: str) -> None:
    exchange = exchange_of(spec, sends)
    last = replies(exchange)[-1]
    assert exchange.server.accept("3", last) == "it has replied to this round before"
    assert exchange.server.finish().used == 4


def test_a_reply_to_another_training_or_phase_is_refused() -> None:
    exchange, other = exchange_of("mime", "report"), exchange_of("mime", "report")
    gradient = exchange.reply(3)
    assert other.server.accept("3", gradient) == "it answers a request of another training"
    for k in OTHERS:
        assert not exchange.server.accept(str(k), exchange.reply(k))
    exchange.server.turn()
    assert exchange.server.accept("3", gradient) == (
        "it answers the gradients of round 1, and this is the training of round 1"
    )


# ---- on Flower ----

flower = pytest.importorskip("fairwind.flower", reason="Flower is not there", exc_type=ImportError)

from flwr.app import ConfigRecord, Message, RecordDict  # noqa: E402

from fairwind.flower import nodes  # noqa: E402
from fairwind.flower.records import CONFIG  # noqa: E402
from flower_grid import InProcessGrid  # noqa: E402


@pytest.fixture
def task() -> Task:
    return task_of(make_federation(SIZES, dtype=torch.float32), torch.float32)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "PAUSE", 0.01)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)


def sent_again(belongs: Callable[[Message], bool]) -> Callable[[Message], Message]:
    """A node that sends its first reply of a kind again and again."""
    first: list[RecordDict] = []

    def meddle(reply: Message) -> Message:
        if belongs(reply):
            first.append(reply.content)
            reply.content = first[0]
        return reply

    return meddle


def is_training(reply: Message) -> bool:
    return "arrays" in reply.content


def is_evaluation(reply: Message) -> bool:
    return "arrays" not in reply.content


@pytest.mark.parametrize(("spec", "sends"), KINDS)
def test_what_a_node_sends_again_is_left_out_and_logged(
    task: Task, spec: str, sends: Any, caplog: pytest.LogCaptureFixture
) -> None:
    faulty, without = (
        flower.AlgorithmStrategy(spec, task, bounds=UNBOUNDED, sends=sends, eval_every=9) for _ in range(2)
    )
    app = flower.client_app(task)
    grid, fewer = InProcessGrid(app, 4, {103: sent_again(is_training)}), InProcessGrid(app, 4)
    faulty.start(grid, num_rounds=2, timeout=5)
    without.start(fewer, num_rounds=1, timeout=5)
    if spec != "mime":  # there the first round has two kinds of replies, and the second is refused already
        del fewer.contexts[103]
        without.start(fewer, num_rounds=2, timeout=5)
        assert torch.equal(faulty.aggregator.x, without.aggregator.x)
    assert "node 103 is left out: it answers " in caplog.text


def test_an_evaluation_that_is_sent_again_is_not_counted(
    task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = flower.AlgorithmStrategy("fedavg", task, bounds=UNBOUNDED)
    grid = InProcessGrid(flower.client_app(task), 4, {103: sent_again(is_evaluation)})
    strategy.start(grid, num_rounds=2, timeout=5)
    assert [set(said) for said in strategy.evaluations.said] == [
        {"100", "101", "102", "103"},
        {"100", "101", "102"},
        {"100", "101", "102"},
    ]
    said = "it answers the evaluation after round 0, and this is the evaluation after round 1"
    assert f"round 1: node 103 is not evaluated: {said}" in caplog.text


@pytest.mark.parametrize("belongs", [is_training, is_evaluation])
def test_a_reply_that_does_not_say_what_it_answers_is_left_out(
    task: Task, belongs: Callable[[Message], bool], caplog: pytest.LogCaptureFixture
) -> None:
    def untagged(reply: Message) -> Message:
        if belongs(reply):
            reply.content[CONFIG] = ConfigRecord({"phase": "train"})
        return reply

    strategy = flower.AlgorithmStrategy("fedavg", task, bounds=UNBOUNDED)
    grid = InProcessGrid(flower.client_app(task), 4, {103: untagged})
    strategy.start(grid, num_rounds=1, timeout=5)
    assert "it does not say which request it answers" in caplog.text
    assert strategy.aggregator.last is not None
    assert strategy.aggregator.last.used == (3 if belongs is is_training else 4)


def test_a_masked_vector_of_an_earlier_round_is_kept_out_of_the_sum(
    task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    """Its masks are others: it would make noise of the whole sum."""

    def is_masked(reply: Message) -> bool:
        return any("masked_params" in record for record in reply.content.config_records.values())

    secure = flower.SecureStrategy("fedavg", task, eval_every=9)
    app = flower.secure_client_app(task)
    sent: list[RecordDict] = []

    def meddle(reply: Message) -> Message:
        if is_masked(reply):
            sent.append(reply.content)
            if len(sent) == 3:  # of the second round; before the first one, scales were asked for
                reply.content = sent[1]
        return reply

    secure.start(InProcessGrid(app, 4, {103: meddle}), num_rounds=2, timeout=5)
    plain = flower.AlgorithmStrategy("fedavg", task, bounds=UNBOUNDED, sends="sums", eval_every=9)
    fewer = InProcessGrid(flower.client_app(task), 4)
    plain.start(fewer, num_rounds=1, timeout=5)
    del fewer.contexts[103]
    plain.start(fewer, num_rounds=2, timeout=5)
    assert secure.aggregator.last is not None
    assert secure.aggregator.last.used == 3
    assert "node 103 is left out: it answers the training of round 1, and this is the training" in caplog.text
    torch.testing.assert_close(secure.aggregator.x, plain.aggregator.x, rtol=1e-3, atol=1e-5)
