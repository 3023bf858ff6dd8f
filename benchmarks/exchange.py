"""What a real federation's server and wire cost: bytes of a reply, and time and memory to aggregate many.

    python benchmarks/exchange.py [--replies 1000] [--parameters 10_000_000] [--json FILE]

Replies come one at a time and are forgotten, as from a network. Where flwr is installed, its own FedAvg is
timed beside, on as many replies as fit: it is given all of them at once. CPU time is what counts where other
processes share the machine: everything here is in one thread.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairwind import algorithms
from fairwind.engine.layout import Layout
from fairwind.engine.workers import keep_memory
from fairwind.exchange import Aggregator, Reply
from fairwind.exchange.capping import CappedSum
from fairwind.runs.environment import environment

AT_ONCE = 20  # replies that Flower's strategy is given


def layout_of(parameters: int) -> Layout:
    """A model of ten layers."""
    layers = [torch.Size([parameters // 10])] * 10
    return Layout(tuple((f"layer{i}",) for i in range(10)), tuple(layers), ((1,),) * 10, torch.float32)


def replies(layout: Layout, count: int) -> Iterator[Reply]:
    """Made-up ones, all of the same update."""
    draw = np.random.default_rng(0)
    arrays = {
        name: draw.normal(size=shape).astype(np.float32)
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    }
    for k in range(count):
        numbers = {
            "size": 50 + k % 100,
            "steps": 10.0,
            "lr": 0.1,
            "loss": 1 + k % 7,
            "loss0": 3.0,
            "grad_norm": 4.0,
        }
        yield Reply(arrays, numbers)


def memory() -> float:
    """GiB that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def ours(spec: str, layout: Layout, count: int) -> dict[str, Any]:
    server = Aggregator(algorithms.build(spec), layout, torch.zeros(layout.parameters))
    asked = set(server.form.numbers) | set(server.form.optional)
    read = reader()
    before, held, after_100 = memory(), 0, 0.0
    began, cpu_began = time.perf_counter(), time.process_time()
    for k, reply in enumerate(replies(layout, count)):
        numbers = {name: value for name, value in reply.numbers.items() if name in asked}
        why = server.accept(str(k), read(reply)._replace(numbers=numbers))
        assert not why, why
        assert isinstance(server.sum, CappedSum)
        held = max(held, len(server.sum.held))
        if k == min(99, count - 1):
            after_100 = memory()
    after_all = memory()
    server.finish()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return {
        "algorithm": spec,
        "replies": count,
        "seconds": seconds,
        "ms_per_reply": 1e3 * seconds / count,
        "cpu_ms_per_reply": 1e3 * cpu / count,
        "gib_before": before,
        "gib_after_100": after_100,
        "gib_after_all": after_all,
        "replies_held_at_most": held,
    }


def reader() -> Callable[[Reply], Reply]:
    """Reads a reply from Flower's records, where flwr is installed, as a server must."""
    try:
        from fairwind.flower.records import from_content, to_content
    except ImportError:
        return lambda reply: reply
    kept: list[Any] = []

    def read(reply: Reply) -> Reply:
        if not kept:  # all are of the same arrays
            kept.append(to_content(reply))
        return from_content(kept[0])

    return read


def flowers(layout: Layout, count: int) -> dict[str, Any] | None:
    try:
        from flwr.app import Message, RecordDict
        from flwr.serverapp.strategy import FedAvg
        from flwr.supercore.task_identity import TaskIdentity

        from fairwind.flower.records import to_content
    except ImportError:
        return None
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    messages = []
    for k, reply in enumerate(replies(layout, count)):
        content: RecordDict = to_content(Reply(reply.arrays, {"num-examples": reply.numbers["size"]}))
        asked = Message(RecordDict(), k + 1, "train")
        messages.append(Message(content, reply_to=asked))
    size = sum(len(array.data) for array in messages[0].content.array_records["arrays"].values())
    began, cpu_began = time.perf_counter(), time.process_time()
    FedAvg().aggregate_train(1, messages)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return {
        "algorithm": "Flower's FedAvg",
        "replies": count,
        "seconds": seconds,
        "ms_per_reply": 1e3 * seconds / count,
        "cpu_ms_per_reply": 1e3 * cpu / count,
        "bytes_of_a_reply": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--replies", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    layout = layout_of(given.parameters)
    found = [ours(spec, layout, given.replies) for spec in ("fedavg", "adafedadam")]
    beside = flowers(layout, min(given.replies, AT_ONCE))
    for line in [*found, *([beside] if beside else [])]:
        print({name: round(v, 3) if isinstance(v, float) else v for name, v in line.items()}, flush=True)
    if given.json:
        about: dict[str, Any] = {"environment": environment("cpu"), "parameters": given.parameters}
        about["runs"] = [*found, *([beside] if beside else [])]
        given.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
