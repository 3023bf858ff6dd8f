"""What travels: trainable parameters alone, whole or in a codec's numbers."""

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairwind import Federation, Solver, Task, algorithms
from fairwind.engine.layout import Layout
from fairwind.exchange import Aggregator, report_update

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
