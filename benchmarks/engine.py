"""How much faster the stacked engine is than a plain loop, doing the same work in the same process.

    python benchmarks/engine.py [--device cpu|cuda] [--repeats N] [--memory]

Ratios are taken between neighbouring measurements and their median is printed: machines are noisy, and
a ratio suffers less. Absolute times are for orientation only.
"""

import argparse
import ctypes
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fairwind import Federation, Settings, Solver, algorithms
from fairwind.comparison import environment
from fairwind.data.synthetic import synthetic
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.models import linear, mlp

SEEDS = (0, 1, 2)


def pixels(clients: int) -> Federation:
    """Images of noise in FEMNIST's shape, 100 to 300 for each client."""
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(100, 301, (clients,), generator=g).tolist()
    data = [(torch.rand(n, 784, generator=g), torch.randint(0, 62, (n,), generator=g)) for n in sizes]
    return Federation.from_clients(data, classes=62)


TASKS: dict[str, tuple[Callable[[], Federation], Callable[[], torch.nn.Module]]] = {
    "Synthetic, LEAF sizes, linear 60×10, 100 clients": (synthetic, lambda: linear(60, 10)),
    "MLP 784-128-62, 50 clients of 100–300 samples": (lambda: pixels(50), mlp),
}


def seconds_a_round(simulation: Simulation, rounds: int) -> float:
    synchronise(simulation)
    began = time.perf_counter()
    for _ in range(rounds):
        simulation.step()
    synchronise(simulation)
    return (time.perf_counter() - began) / rounds


def synchronise(simulation: Simulation) -> None:
    if simulation.settings.device.startswith("cuda"):
        torch.cuda.synchronize()


def shares(simulation: Simulation, rounds: int) -> dict[str, float]:
    """Where a round's time goes, by part of the engine, as shares of the whole."""
    executor = simulation.executor
    parts = {"local steps": "_train", "probes": "_probe", "sums": "_add"}
    spent = dict.fromkeys(parts, 0.0)

    def timed(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = method(*arguments)
            synchronise(simulation)
            spent[part] += time.perf_counter() - began
            return result

        return call

    for part, name in parts.items():
        setattr(executor, name, timed(part, getattr(executor, name)))
    whole = seconds_a_round(simulation, rounds) * rounds
    for name in parts.values():
        delattr(executor, name)  # the instance's wrapper; the method stays
    return {part: seconds / whole for part, seconds in spent.items()}


def cost_of_a_step(simulation: Simulation, rows: int) -> float:
    """Microseconds of one local step of so many rows."""
    executor = simulation.executor
    x = simulation.x.repeat_interleave(executor.schedule.participants, 0)[:rows]
    shape = rows, simulation.settings.solver.batch_size
    samples = torch.randint(0, len(executor.data[0]), shape, device=x.device)
    keys = torch.zeros(rows, dtype=torch.int64, device=x.device)
    times = []
    for _ in range(20):
        synchronise(simulation)
        began = time.perf_counter()
        for _ in range(5):
            executor.train_step(x, None, samples, keys, *executor.data)
        synchronise(simulation)
        times.append((time.perf_counter() - began) / 5)
    return 1e6 * statistics.median(times)


def speed(task: str, device: str, repeats: int) -> None:
    federation, model = TASKS[task]
    data = federation()
    settings = Settings(rounds=10**9, eval_every=10, solver=Solver(), device=device, compile="on")
    print(f"\n{task}")
    built = {name: algorithms.build(name) for name in algorithms.PAPER}
    cohorts = {
        "1 run (adafedadam)": [Run("adafedadam", built["adafedadam"], 0)],
        "15 runs (5 algorithms × 3 seeds)": [Run(n, a, s) for n, a in built.items() for s in SEEDS],
    }
    for title, runs in cohorts.items():
        stacked = Simulation(model, data, runs, settings)
        loop = Simulation(model, data, runs, replace(settings, engine="loop", eval_every=10**9))
        seconds_a_round(stacked, 3)  # compiles
        pairs = []
        for _ in range(repeats):
            pairs.append((seconds_a_round(loop, 1), seconds_a_round(stacked, 10)))
        ratio = statistics.median(slow / fast for slow, fast in pairs)
        slow, fast = (statistics.median(p[i] for p in pairs) / len(runs) for i in (0, 1))
        steps = stacked.client_steps / stacked.round / len(runs)
        print(
            f"  {title}: {ratio:.0f}× (loop {1e3 * slow:.1f} ms, stacked {1e3 * fast:.2f} ms a run-round; "
            f"{1e6 * slow / steps:.0f} and {1e6 * fast / steps:.2f} µs a client-step)"
        )
        plan = stacked.executor.schedule.plan([0], 0)
        longest = int(plan.steps.max())
        together = min(len(runs) * len(data), 4 * 2**20 // stacked.cohort.parameters)
        parts = ", ".join(f"{part} {share:.0%}" for part, share in shares(stacked, 10).items())
        print(
            f"    {parts}; {longest} steps one after another, {steps * len(runs) / longest:.0f} rows in "
            f"the mean; a step of 2 rows takes {cost_of_a_step(stacked, 2):.0f} µs, "
            f"of {together} rows {cost_of_a_step(stacked, together):.0f} µs"
        )


def budgets(device: str) -> None:
    """The same rounds in larger and larger chunks."""
    print("\nChunks: 15 runs of FedAvg on the MLP, ms a run-round by the chunk's budget")
    data = pixels(50)
    algorithm = algorithms.fedavg()
    runs = [Run("fedavg", algorithm, seed) for seed in range(15)]
    for mebibytes in (8, 32, 128, 512, 2048):
        settings = Settings(
            rounds=10**9, eval_every=10**9, device=device, compile="on", memory=mebibytes / 1024
        )
        simulation = Simulation(mlp, data, runs, settings)
        seconds_a_round(simulation, 1)
        taken = statistics.median(seconds_a_round(simulation, 1) for _ in range(3))
        print(f"  {mebibytes:>5} MiB: {1e3 * taken / len(runs):6.1f}")


def memory() -> None:
    """Peak memory beyond the data, in processes of their own, as clients grow."""
    print("\nMemory: linear 60×10, AdaFedAdam, chunks of 64 MiB")
    for clients in (100, 1000, 10_000, 40_000):
        command = [sys.executable, __file__, "--memory-of", str(clients)]
        print("  " + subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def memory_of(clients: int) -> None:
    settings = Settings(rounds=2, solver=Solver(), device="cpu", compile="off", memory=1 / 16)
    runs = [Run("adafedadam", algorithms.adafedadam(), 0)]
    Simulation(lambda: linear(60, 10), synthetic(clients=100), runs, settings).step()
    data = synthetic(clients=clients)
    held = data.inputs.nbytes + data.targets.nbytes
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what making the data left behind
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = resident("VmRSS")
    began = time.perf_counter()
    simulation = Simulation(lambda: linear(60, 10), data, runs, settings)
    simulation.step()
    taken, beyond = time.perf_counter() - began, resident("VmHWM") - before
    print(f"{clients:>6} clients: data {held / 2**20:6.1f} MiB, peak beyond {beyond:6.1f} MiB, {taken:.1f} s")


def resident(field: str) -> float:
    """MiB of this process, from Linux's own account."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="measure memory only")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        return memory_of(arguments.memory_of)
    print(", ".join(f"{k} {v}" for k, v in environment(arguments.device).items() if v))
    if not arguments.memory:
        for task in TASKS:
            speed(task, arguments.device, arguments.repeats)
        budgets(arguments.device)
    memory()
    return None


if __name__ == "__main__":
    main()
