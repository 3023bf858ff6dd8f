"""Whether any module of the zoo (tests/zoo) trains slower than in a plain loop.

    python benchmarks/zoo_speed.py [--clients larger] [--compile on] [--json numbers.json] [names …]

The same comparison as benchmarks/engine.py, for small modules of every kind and some of middle size, with
one run of AdaFedAdam and 60 clients. These have 2 to 6 training samples and batches of 3; or, if `larger`,
ten times as many and batches of 10. By default steps are not compiled, as in a short run.
"""

import argparse
import json
import statistics
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from engine import Loop, cost, taken
from fairwind import Federation, InputError, Settings, Solver, algorithms
from fairwind.data.samples import mapped, take
from fairwind.engine.executor import Run
from fairwind.engine.losses.loss import cross_entropy
from fairwind.engine.modules import call, read
from fairwind.engine.simulation import Simulation
from fairwind.runs.environment import environment
from fairwind.scores import accuracy
from fairwind.scores.reading import first_output
from modules import MIDDLE, ZOO, Specimen
from tasks import Task

SECONDS = 0.3  # of one measurement
TIMES = {"small": 1, "larger": 10}  # how often every sample occurs
BATCH_SIZE = {"small": 3, "larger": 10}


def torch_cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """PyTorch's own, of the first output, with the classes in its last dimension."""
    logits = first_output(read(outputs))
    return functional.cross_entropy(logits if logits.dim() == 2 else logits.movedim(-1, 1), targets)


class ZooLoop(Loop):
    """The plain loop, for any structure of inputs and any loss.

    What it probes at once is as much as Fairwind does: batches of local steps, if the outputs depend on that.
    """

    def __init__(self, specimen: Specimen, data: Federation, settings: Settings, probed: int | None):
        self.loss = specimen.loss or torch_cross_entropy
        self.probed = probed or self.probed
        task = Task(specimen.name, lambda _: data, 0, 0, specimen.model, settings.solver)
        super().__init__(task, data, settings)

    def losses(self, samples: Tensor) -> Tensor:
        inputs, targets = take(self.data.inputs, samples), take(self.data.targets, samples)
        return self.loss(call(self.model, inputs), targets).mean()


def measure(
    specimen: Specimen, clients: str, copies: int, compile: Literal["on", "off"], repeats: int
) -> dict[str, Any]:
    times = TIMES[clients]
    samples = mapped(lambda value: torch.cat([value] * times), specimen.clients())
    data = Federation.from_clients(samples * copies, train=0.7)
    solver = Solver(lr=0.01, batch_size=BATCH_SIZE[clients])
    settings = Settings(
        rounds=10**9, eval_every=10**9, solver=solver, compile=compile, device="cpu", precision="float32"
    )
    given = {"loss": specimen.loss or cross_entropy, "score": specimen.score or accuracy}
    runs = [Run("adafedadam", algorithms.adafedadam(), 0)]
    ours = Simulation(specimen.model, data, runs, settings, sharing=specimen.sharing, **given)  # type: ignore[arg-type]
    loop = ZooLoop(specimen, data, settings, ours.plain.probe_batch)
    ours.step()
    rounds = max(1, int(SECONDS / taken(ours.step)))
    pairs = [(loop.cost(["gradient"]), cost(ours, rounds)) for _ in range(repeats)]
    return {
        "module": specimen.name,
        "engine": ours.plan.order,
        "ratio": statistics.median(slow / fast for slow, fast in pairs),
        "low": min(slow / fast for slow, fast in pairs),
        "loop_us": 1e6 * statistics.median(slow for slow, _ in pairs),
        "ours_us": 1e6 * statistics.median(fast for _, fast in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="all, if none is named")
    parser.add_argument("--clients", default="small", choices=list(TIMES))
    parser.add_argument("--copies", type=int, default=20, help="of the three clients that each module has")
    parser.add_argument("--compile", default="off", choices=["on", "off"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    warnings.simplefilter("ignore")
    results = []
    modules = ZOO | MIDDLE
    for name in o.names or modules:
        specimen = modules[name]
        absent = [package for package in specimen.needs if find_spec(package) is None]
        if absent:
            print(f"{name:32}needs {', '.join(absent)}")
            continue
        torch.manual_seed(0)
        try:
            found = measure(specimen, o.clients, o.copies, o.compile, o.repeats)
        except InputError as error:
            print(f"{name:32}refused: {error}")
            continue
        results.append(found)
        print(
            f"{name:32}{found['ratio']:6.2f}× ({found['low']:.2f} at least; {found['loop_us']:.0f} → "
            f"{found['ours_us']:.0f} µs a client-step)  {found['engine'].partition(':')[0]}",
            flush=True,
        )
        if o.json:
            content = {
                "environment": environment("cpu"),
                "clients": o.clients,
                "copies": o.copies,
                "compile": o.compile,
                "results": results,
            }
            o.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
