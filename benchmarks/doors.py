"""Bytes of a round's messages with a model that is mostly frozen, through every door of a real federation.

    python benchmarks/doors.py [--frozen 300_000_000] [--rank 8] [--json FILE]

The model is made up: frozen layers without a nonlinearity, and a trained update of low rank beside each. One
client trains one step. What is counted is what the framework sends: Flower's serialized messages, and the
serialized parameters and numbers of NVFLARE's. Without a framework, these are the reply's arrays.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fairwind
from fairwind import algorithms
from fairwind.engine.layout import Layout
from fairwind.exchange import Aggregator, Kept, LocalClient, report_update
from fairwind.exchange.message import Arrays
from fairwind.runs.environment import environment

LAYERS = 12
Bytes = dict[str, int]  # of a message to a node, and of its reply


class LowRank(nn.Module):
    """A frozen layer and a trained update of low rank (Hu et al.: LoRA. 2021)."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        nn.init.eye_(self.frozen.weight)
        self.a = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.b = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + x @ self.a.T @ self.b.T
        return out


def task_of(frozen: int, rank: int) -> fairwind.Task:
    """A single client with a few samples, and a model of about so many frozen parameters."""
    width = round((frozen / LAYERS) ** 0.5)
    model = nn.Sequential(*(LowRank(width, rank) for _ in range(LAYERS)))
    samples = torch.randn(4, width), torch.randn(4, width)
    federation = fairwind.Federation.from_clients([samples])
    solver = fairwind.Solver(lr=0.1, batch_size=4)
    return fairwind.Task(model, federation, loss=nn.MSELoss(), solver=solver)


def arrays_bytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())


def own_loop(task: fairwind.Task) -> Bytes:
    """`report_update` and `Aggregator`, which leave the sending to others."""
    model = task.model
    assert isinstance(model, nn.Module)
    layout = Layout.of(model)
    server = Aggregator(algorithms.fedavg(), layout, layout.flatten(model))
    reply = report_update(model, model, size=3, lr=0.1, steps=1.0)
    assert not server.accept("one", reply)
    return {
        "to": arrays_bytes(server.requests(["one"])["one"].vectors["weights"]),
        "from": arrays_bytes(reply.arrays),
    }


def flower(task: fairwind.Task, weights: bool) -> Bytes | None:
    try:
        from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
        from flwr.common.serde import message_to_proto
        from flwr.supercore.task_identity import TaskIdentity

        from fairwind.flower import AlgorithmStrategy, WeightsStrategy
        from fairwind.flower.records import request_of, to_content
    except ImportError:
        return None
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    strategy = (WeightsStrategy if weights else AlgorithmStrategy)("fedavg", task)
    strategy.aggregator.begin()
    (sent,) = strategy._asking([7], 1, ConfigRecord())
    if weights:
        content = RecordDict(
            {
                "arrays": ArrayRecord(sent.content.array_records["arrays"].to_torch_state_dict()),
                "metrics": MetricRecord({"num-examples": 3}),
            }
        )
    else:
        client = LocalClient(task, algorithms.fedavg())
        content = to_content(client.reply(request_of(sent.content, "train"), Kept())[0])
    reply = Message(content, reply_to=sent)
    assert not strategy.aggregator.accept("7", strategy._read(7, reply.content))
    return {"to": message_to_proto(sent).ByteSize(), "from": message_to_proto(reply).ByteSize()}


def nvflare(task: fairwind.Task) -> Bytes | None:
    try:
        from nvflare.app_common.decomposers import numpy_decomposers
        from nvflare.app_common.utils.fl_model_utils import FLModelUtils
        from nvflare.fuel.utils import fobs

        from fairwind.nvflare import AlgorithmAggregator, as_model
        from fairwind.nvflare.models import request_of
    except ImportError:
        return None
    numpy_decomposers.register()
    aggregator = AlgorithmAggregator(task, "fedavg")
    aggregator.reset_stats()
    sent = aggregator.model()
    reply, _ = LocalClient(task, algorithms.fedavg()).reply(request_of(sent, "one", "train"), Kept())
    back = as_model(reply)
    both = {"to": sent, "from": back}
    return {way: len(fobs.dumps(FLModelUtils.to_shareable(model))) for way, model in both.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--frozen", type=int, default=300_000_000)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    task = task_of(given.frozen, given.rank)
    assert isinstance(task.model, nn.Module)
    trained = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in task.model.parameters())
    doors: dict[str, Callable[[], Bytes | None]] = {
        "own loop": lambda: own_loop(task),
        "Flower, AlgorithmStrategy": lambda: flower(task, weights=False),
        "Flower, WeightsStrategy": lambda: flower(task, weights=True),
        "NVFLARE": lambda: nvflare(task),
    }
    found: dict[str, Any] = {}
    for door, measure in doors.items():
        if (measured := measure()) is not None:
            found[door] = measured
            print(door, measured, flush=True)
    about: dict[str, Any] = {"environment": environment("cpu"), "frozen": whole - trained, "trained": trained}
    about["bytes_of_trained"], about["bytes_of_all"], about["doors"] = 4 * trained, 4 * whole, found
    print({name: about[name] for name in ("frozen", "trained", "bytes_of_trained", "bytes_of_all")})
    if given.json:
        before = json.loads(given.json.read_text())["doors"] if given.json.exists() else {}
        about["doors"] = before | found  # NVFLARE has an environment of its own
        given.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
