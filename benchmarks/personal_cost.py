"""What parts that stay with clients cost a round, and batch norm stacked against the loop.

    python benchmarks/personal_cost.py [--repeats 5] [--json FILE]

Each line is the cost of a client's local step of FedAvg, all of a round counted, in two ways: with and
without a personal part, or one client after another and stacked. Both are in one process and in turn; ratios
are medians over neighbouring measurements, above 1 where the second way is faster. On a CPU, uncompiled.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from engine import cost, taken
from fairwind import Federation, Settings, Solver, algorithms
from fairwind.engine.executor import Run
from fairwind.engine.layout import ALL_SHARED, Sharing
from fairwind.engine.settings import Engine
from fairwind.engine.simulation import Simulation
from fairwind.models import mlp
from fairwind.runs.environment import environment
from modules import Encoder, resnet18
from tasks import noise, texts, written

SECONDS = 1.0  # of a measurement, about


class Way(NamedTuple):
    sharing: Sharing
    engine: Engine = "auto"


class Comparison(NamedTuple):
    """One model and its data, trained in two ways."""

    name: str
    model: Callable[[], nn.Module]
    data: Federation
    one: Way
    other: Way


def batch_normed(width: int) -> nn.Module:
    """ResNet-18 as it was published, with batch norm."""

    def changed(module: nn.Module) -> nn.Module:
        for name, layer in module.named_children():
            if isinstance(layer, nn.GroupNorm):
                setattr(module, name, nn.BatchNorm2d(layer.num_channels))
            else:
                changed(layer)
        return module

    return changed(resnet18(width))


def comparisons() -> list[Comparison]:
    shared, local = Sharing(batch_norm="shared"), Sharing(batch_norm="local")
    images = noise((3, 32, 32), 10, 80, 160)(8)
    resnet = "ResNet-18, a quarter as wide"
    return [
        Comparison("FEMNIST's MLP, head personal", mlp, written(40), Way(Sharing("4.*")), Way(ALL_SHARED)),
        Comparison(
            "Transformer encoder, norms personal",
            Encoder,
            texts(5000, 32, 50, 150)(8),
            Way(Sharing(nn.LayerNorm)),
            Way(ALL_SHARED),
        ),
        *(
            Comparison(f"{resnet}, {how}", lambda: batch_normed(16), images, Way(each), Way(shared))
            for how, each in {"batch norm local": local, "group norm": Sharing(batch_norm="group")}.items()
        ),
        *(
            Comparison(
                f"{resnet}, batch norm {each.batch_norm}, loop against stacked",
                lambda: batch_normed(16),
                images,
                Way(each, "loop"),
                Way(each, "stacked"),
            )
            for each in (shared, local)
        ),
    ]


def measure(comparison: Comparison, repeats: int) -> dict[str, Any]:
    solver = Solver(lr=0.01, batch_size=10)
    made = []
    for way in comparison[3:]:
        settings = Settings(
            rounds=10**6, eval_every=10**6, solver=solver, engine=way.engine, compile="off", device="cpu"
        )
        runs = [Run("fedavg", algorithms.fedavg(), 0)]
        made.append(Simulation(comparison.model, comparison.data, runs, settings, sharing=way.sharing))
        made[-1].step()
    rounds = [max(1, round(SECONDS / taken(each.step))) for each in made]
    pairs = [[cost(each, n) for each, n in zip(made, rounds, strict=True)] for _ in range(repeats)]
    ratios = [one / other for one, other in pairs]
    return {
        "name": comparison.name,
        "executors": [each.plan.executor.value for each in made],
        "step_us": [1e6 * statistics.median(column) for column in zip(*pairs, strict=True)],
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    results = []
    for comparison in comparisons():
        found = measure(comparison, o.repeats)
        results.append(found)
        one, other = found["step_us"]
        print(
            f"{found['name']:70}{one:8.0f} → {other:8.0f} µs  {found['ratio']:5.2f} "
            f"({found['low']:.2f} to {found['high']:.2f})  {', '.join(found['executors'])}",
            flush=True,
        )
        if o.json:
            content = {"environment": environment("cpu"), "repeats": o.repeats, "results": results}
            o.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
