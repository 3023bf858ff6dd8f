"""What travels: trainable parameters alone, whole or in a codec's numbers."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import make_federation, make_model
from exchanged import Exchange, simulated, task_of
from fairwind import Federation, InputError, Settings, Solver, Task, algorithms
from fairwind.codecs import codec_of
from fairwind.engine.layout import Layout
from fairwind.exchange import UNBOUNDED, Aggregator, Kept, LocalClient, Privacy, compress, report_update
from fairwind.exchange.kept import load_kept, save_kept
from fairwind.runs.cost import round_cost

WIDTH, RANK = 256, 2


class LowRank(nn.Module):
    """A frozen layer with a buffer, and a trained update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.a = nn.Parameter(torch.randn(RANK, WIDTH) / 16)
        self.b = nn.Parameter(torch.zeros(3, RANK))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.frozen(x) - self.mean) @ self.a.T @ self.b.T
        return out


TRAINED = 4 * (WIDTH * RANK + 3 * RANK)  # bytes
ROOM = 2000  # bytes of names and numbers beside vectors


@pytest.fixture
def frozen() -> Task:
    torch.manual_seed(0)
    clients = [(torch.randn(12, WIDTH), torch.randint(0, 3, (12,))) for _ in range(3)]
    return Task(LowRank(), Federation.from_clients(clients, classes=3), solver=Solver(lr=0.1))


def test_ones_own_loop_sends_what_is_trained_alone(frozen: Task) -> None:
    assert isinstance(frozen.model, nn.Module)
    layout = Layout.of(frozen.model)
    server = Aggregator(algorithms.fedavg(), layout, layout.flatten(frozen.model))
    reply = report_update(frozen.model, frozen.model, size=3, lr=0.1)
    for arrays in (reply.arrays, server.requests(["one"])["one"].vectors["weights"]):
        assert sum(array.nbytes for array in arrays.values()) == TRAINED
    assert not server.accept("one", reply)


@pytest.mark.parametrize("door", ["AlgorithmStrategy", "WeightsStrategy"])
def test_flowers_messages_hold_what_is_trained_alone(frozen: Task, door: str) -> None:
    pytest.importorskip("flwr")
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.common.serde import message_to_proto

    from fairwind import flower
    from flower_grid import InProcessGrid

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = LowRank()
        missing = model.load_state_dict(
            message.content.array_records["arrays"].to_torch_state_dict(), strict=False
        )
        assert not missing.unexpected_keys
        model.b.data += 1.0
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        content: dict[str, Any] = {
            "arrays": ArrayRecord(trained),
            "metrics": MetricRecord({"num-examples": 3}),
        }
        return Message(RecordDict(content), reply_to=message)

    sizes: list[int] = []

    class Counting(InProcessGrid):
        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            sizes.extend(message_to_proto(each).ByteSize() for each in messages)
            return super().push_messages(messages)

    own = door == "WeightsStrategy"
    grid = Counting(app if own else flower.client_app(frozen), 3)
    strategy = getattr(flower, door)("fedavg", frozen, eval_every=2)
    strategy.nodes.fewest = 3
    asked = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    strategy.aggregate_train(1, strategy.nodes.replies(grid, asked, 5))
    assert strategy.aggregator.last.used == 3
    assert len(sizes) == 3
    assert all(TRAINED < size < TRAINED + ROOM for size in sizes)
    assert 3 * TRAINED < grid.bytes < 3 * (TRAINED + ROOM)
    if own:
        layout = strategy.layout
        moved = layout.unflatten(strategy.aggregator.x)["b"]
        torch.testing.assert_close(moved, torch.ones_like(moved))


def test_flower_sends_arrays_of_any_size_in_parts() -> None:
    """A message is no single protobuf: gRPC's limit is no limit of a model's size."""
    pytest.importorskip("flwr")
    import numpy as np
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.task_identity import TaskIdentity

    from fairwind.flower.records import ARRAYS, CONFIG, to_record

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    array = np.zeros(1 << 23, np.float32) + np.arange(1 << 23, dtype=np.float32)  # 32 MiB
    content = RecordDict({ARRAYS: to_record({"layer": array}), CONFIG: ConfigRecord()})
    parts = [part.deflate() for part in get_all_nested_objects(Message(content, 7, "train")).values()]
    assert sum(map(len, parts)) > array.nbytes
    assert max(map(len, parts)) < 6 * 2**20


def test_a_client_answers_without_pytorchs_compiler() -> None:
    """Where every message is a process of its own, importing it would take a second of a core each."""
    program = """
        import sys, fairwind
        from fairwind.exchange import Kept, LocalClient, Request
        client = LocalClient(fairwind.setup("synthetic:clients=2"), fairwind.algorithms.adafedadam(), 0)
        weights = client.form.arrays(client.start())
        reply, kept = client.reply(Request("train", 0, "t", {"weights": weights}), Kept())
        client.judge(Request("evaluate", 0, "t", {"weights": weights}), kept)
        print(reply.numbers["size"], sorted({"torch._dynamo", "sympy", "rich", "plotly"} & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[1:] == ["[]"]


# ---- codecs ----

SIZES = [12, 20, 45, 8, 26]


def small(dtype: torch.dtype = torch.float64) -> Task:
    return task_of(make_federation(SIZES, dtype=dtype), dtype)


@pytest.mark.parametrize("codec", ["bf16", "int8", "topk:share=0.3"])
@pytest.mark.parametrize("spec", ["fedavg", "adafedadam:warmup=2", "fedprox", "ditto", "afl", "fedmgda"])
def test_messages_in_a_codec_give_the_simulators_model(spec: str, codec: str) -> None:
    task = small()
    exchange = Exchange(task, spec, codec=codec)
    simulation = simulated(task, spec, codec=codec, engine="loop")
    for _ in range(4):
        exchange.round()
        simulation.step()
        torch.testing.assert_close(exchange.server.x, simulation.x[0], rtol=1e-9, atol=1e-10)
    left_out = [kept.left_out[3] for kept in exchange.kept]
    vectors = torch.stack([exchange.clients[0].form.vector(each)[0] for each in left_out])
    torch.testing.assert_close(vectors, simulation.left_out_of_updates[0], rtol=1e-9, atol=1e-10)
    assert vectors.any()


def test_what_a_reply_that_does_not_count_left_out_is_forgotten() -> None:
    """The next round goes on from what the last one that counted left out, in memory and in a file."""
    task = small()
    exchange = Exchange(task, "fedavg", codec="int8")
    exchange.round()
    before = exchange.kept[2]
    exchange.reply(2)  # in round 2, which is lost on the way
    assert set(exchange.kept[2].left_out) == {0, 1}
    exchange.round([0, 1, 3, 4])
    exchange.reply(2)
    found = exchange.kept[2]
    assert set(found.left_out) == {0, 2}
    for name, array in before.left_out[0].items():
        np.testing.assert_array_equal(found.left_out[0][name], array)


def test_a_node_that_has_lost_what_was_left_out_goes_on_without_and_is_named() -> None:
    exchange = Exchange(small(), "fedavg", codec="topk:share=0.3")
    exchange.round()
    exchange.kept[1] = Kept()
    done = exchange.round()
    assert done.lost == {"1": 0}
    assert done.used == len(SIZES)


def test_a_file_keeps_it(tmp_path: Path) -> None:
    exchange = Exchange(small(), "ditto", codec="int8")
    exchange.round()
    kept, file = exchange.kept[0], tmp_path / "client-0.safetensors"
    save_kept(file, kept)
    found = load_kept(file)
    for one, other in ((kept.vectors, found.vectors), (kept.left_out, found.left_out)):
        assert set(one) == set(other) == {0}
        for name, array in one[0].items():
            np.testing.assert_array_equal(other[0][name], array)


def test_on_flower_it_is_the_same_and_a_fraction_of_the_bytes(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from fairwind.flower import AlgorithmStrategy, client_app
    from flower_grid import InProcessGrid

    task = small()
    grid = InProcessGrid(client_app(task), len(SIZES))
    for rounds in (2, 4):  # stopped, while the nodes' state stays
        strategy = AlgorithmStrategy("fedavg", task, bounds=UNBOUNDED, codec="int8", out=tmp_path / "run")
        strategy.start(grid, num_rounds=rounds, timeout=5)
    simulation = simulated(task, "fedavg", codec="int8", engine="loop")
    for _ in range(4):
        simulation.step()
    torch.testing.assert_close(strategy.aggregator.x, simulation.x[0], rtol=1e-9, atol=1e-10)
    parameters, clients = strategy.layout.parameters, len(SIZES)
    up, down = codec_of("int8").bytes(parameters, 8), 8 * parameters
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["config"]["codec"] == "int8"
    assert results["runs"][0]["cost"] == {
        "bytes_up": 4 * clients * up,
        "bytes_down": 4 * clients * down,
        "bytes_evaluation": 5 * clients * down,
    }
    page = (tmp_path / "run" / "report.html").read_text()
    assert '<th scope="col">bytes</th>' in page
    assert '<th scope="col">sample gradients</th>' not in page
    assert strategy.evaluations.history[2]["bytes_up"] == 2 * clients * up  # type: ignore[typeddict-item]


@pytest.mark.parametrize("codec", [None, "bf16", "int8", "topk:share=0.1"])
def test_a_real_round_costs_the_bytes_that_the_simulator_counts(codec: str | None) -> None:
    task = small(torch.float32)
    exchange = Exchange(task, "fedcm", codec=codec)
    server = exchange.server
    server.sent(server.requests(map(str, range(len(SIZES)))).values())
    exchange.round()
    settings = Settings(solver=task.solver, codec=codec)
    expected = round_cost(server.algorithm, task.federation.train, settings, server.layout.parameters)
    assert (server.bytes.up, server.bytes.down) == expected[1:]


def test_the_bytes_of_secret_sums_are_not_claimed_to_be_none() -> None:
    exchange = Exchange(small(), "fedavg", sends="sums")
    server = exchange.server
    server.take_sum(
        torch.zeros(server.layout.parameters).double(), dict.fromkeys(server.form.numbers, 3.0), 2
    )
    server.finish()
    assert "used" in server.counts()
    assert "bytes_up" not in server.counts()


def test_ones_own_loop_compresses_its_replies() -> None:
    model = make_model().float()
    layout = Layout.of(model)
    x = layout.flatten(model)
    server = Aggregator(algorithms.fedavg(), layout, x, bounds=UNBOUNDED, codec="topk:share=0.2")
    after = make_model().float()
    plain = report_update(model, after, size=3, lr=0.1)
    reply, left_out = compress(plain, "topk:share=0.2")
    again, _ = compress(plain, "topk:share=0.2", left_out)
    whole = layout.flatten(model) - layout.flatten(after)
    sent = server.form.update(reply.arrays)[0]
    missing = torch.cat([torch.from_numpy(array).reshape(-1) for array in left_out.values()])
    assert torch.equal(sent + missing, whole)
    assert int((server.form.update(again.arrays)[0] != sent).sum()) > 0
    assert not server.accept("one", reply)
    assert "its arrays are not the codec's" in server.accept("two", plain)


LIES: dict[str, tuple[Any, str]] = {
    "type": (lambda a: a | {"scales": a["scales"].astype(np.float16)}, "'scales' is of type float16"),
    "shape": (lambda a: a | {"int8": a["int8"][:-1]}, "'int8' is of shape"),
    "no array": (lambda a: a | {"int8": "much"}, "'int8' is no array but a str"),
    "missing": (lambda a: {"int8": a["int8"]}, "'scales' missing"),
    "negative": (lambda a: a | {"scales": -a["scales"]}, "it has negative scales"),
    "not finite": (
        lambda a: a | {"scales": a["scales"] * np.nan},
        "an update has numbers that are",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_in_a_codecs_numbers_is_refused_with_its_reason(lie: str) -> None:
    exchange = Exchange(small(torch.float32), "fedavg", codec="int8")
    change, why = LIES[lie]
    reply = exchange.reply(0)
    assert why in exchange.server.accept("0", reply._replace(arrays=change(reply.arrays)))


def test_where_a_codec_cannot_be_is_said_by_type() -> None:
    task = small()
    model = make_model()
    layout = Layout.of(model)

    def server(spec: str = "fedavg", **options: Any) -> Aggregator:
        own: dict[str, Any] = {"clients": 5, "codec": "int8"}
        return Aggregator(algorithms.build(spec), layout, layout.flatten(model), **own | options)

    for spec, what in (("scaffold", "changes of memories"), ("mime", "gradients"), ("mimelite", "gradients")):
        with pytest.raises(InputError, match=f"{spec}'s clients also send {what}"):
            server(spec)
        with pytest.raises(InputError, match="leave out codec"):
            LocalClient(task, algorithms.build(spec), 0, codec="int8")
        with pytest.raises(InputError, match="leave out codec"):
            simulated(task, spec, codec="int8")
    with pytest.raises(InputError, match="not for sums"):
        server(sends="sums")
    with pytest.raises(InputError, match="keep nothing between rounds"):
        server(privacy=Privacy(clip=1.0, weight=1.0, noise=0.0, delta=1e-3))
    with pytest.raises(InputError, match="the server's choice"):
        LocalClient(task, algorithms.fedavg(), 0, settings=Settings(codec="int8"))


@pytest.mark.parametrize("door", ["WeightsStrategy", "SecureStrategy"])
def test_doors_without_updates_refuse_a_codec(door: str) -> None:
    pytest.importorskip("flwr")
    from fairwind import flower

    with pytest.raises(InputError, match="leave out codec"):
        getattr(flower, door)("fedavg", small(), codec="int8")
