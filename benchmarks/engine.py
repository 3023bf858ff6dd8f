"""How much faster the engine is than a plain loop, on the setups and on modules that users bring.

    python benchmarks/engine.py [synthetic femnist …] [--device cuda] [--precision bf16] [--runs 1]

The loop lets a few clients probe and train one after another, with PyTorch's own layers and optimiser, and
with as many threads as suit it best; it does nothing else. The engine, as `engine="auto"` chooses it, does
whole rounds, with sums and the server's steps. Both run in one process and in turn. Ratios are of the cost of
a client's local step, medians over neighbouring measurements.

To compile takes minutes. Several such programs on one machine may build at the same time, and are then timed
one after another: give each `--turn FOLDER`, the same empty folder, and `--of` their number.

What falls back to a slow path (steps that cannot be compiled, rounds that cannot be recorded) ends it.
"""

import argparse
import fcntl
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fairwind import Federation, Settings, algorithms
from fairwind.contract import Probe
from fairwind.data.samples import mapped, take
from fairwind.engine.executor import Run
from fairwind.engine.machine import matmul_precision
from fairwind.engine.modules import forward_operations
from fairwind.engine.simulation import Simulation
from fairwind.errors import SlowPathWarning
from fairwind.runs.environment import environment
from tasks import TASKS, Task

SEEDS = (0, 1, 2)
STEPS = 400  # of the loop in one measurement, about


def cohorts() -> dict[str, list[Run]]:
    built = {name: algorithms.build(name) for name in algorithms.PAPER}
    return {
        "1 run": [Run("adafedadam", built["adafedadam"], 0)],
        "15 runs": [Run(n, a, s) for n, a in built.items() for s in SEEDS],
    }


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "process": time.process_time}


def taken(work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Seconds; of the processor, by the clock "process"."""
    wait()
    began = clock()
    work()
    wait()
    return clock() - began


def cost(simulation: Simulation, rounds: int, clock: Clock = time.perf_counter) -> float:
    """Seconds of a client's local step, all of a round counted."""
    before = simulation.client_steps

    def work() -> None:
        for _ in range(rounds):
            simulation.step()

    seconds = taken(work, clock)
    return seconds / (simulation.client_steps - before)


class Loop:
    """Clients that train one after another, as everyone would write it."""

    optimizer: Callable[..., torch.optim.Optimizer] = staticmethod(torch.optim.SGD)
    probed = 512  # samples at once

    def __init__(self, task: Task, data: Federation, settings: Settings, clock: Clock = time.perf_counter):
        self.clock = clock
        self.data, self.solver, self.precision = data.to(settings.device), settings.solver, settings.precision
        self.device = torch.device(settings.device)
        self.model = task.model().to(self.device)
        self.start = [p.detach().clone() for p in self.model.parameters()]
        steps = -(-data.train // self.solver.batch_size)
        self.clients = [k for k in range(len(data)) if steps[: k + 1].sum() < STEPS] or [0]
        self.threads = min({1, torch.get_num_threads()}, key=self._try)

    def _try(self, threads: int) -> float:
        self.threads = threads
        self.cost(["none"])
        return min(self.cost(["none"]) for _ in range(3))

    def losses(self, samples: Tensor) -> Tensor:
        inputs, targets = take(self.data.inputs, samples), take(self.data.targets, samples)
        return cross_entropy(self.model(inputs), targets)

    def round(self, probe: Probe) -> int:
        """One epoch of every client, after what an algorithm wants to know; how many steps that took."""
        steps = 0
        for k in self.clients:
            with torch.no_grad():
                for p, value in zip(self.model.parameters(), self.start, strict=True):
                    p.copy_(value)
            trainable = [p for p in self.model.parameters() if p.requires_grad]
            optimizer = self.optimizer(trainable, self.solver.lr)
            begin, size = int(self.data.start[k]), int(self.data.train[k])
            order = begin + torch.randperm(size, device=self.device)
            with torch.set_grad_enabled(probe == "gradient"):
                if probe != "none":
                    parts = torch.split(order, self.probed)
                    loss = torch.stack([self.losses(part) * len(part) for part in parts]).sum() / size
                if probe == "gradient":
                    torch.autograd.backward(loss)
            for batch in torch.split(order, self.solver.batch_size):
                optimizer.zero_grad()
                torch.autograd.backward(self.losses(batch))
                optimizer.step()
                steps += 1
        return steps

    def cost(self, probes: list[Probe]) -> float:
        """Seconds of a client's step, in the mean of such algorithms, with the threads that suit it best."""
        steps, all_threads = 0, torch.get_num_threads()

        def work() -> None:
            nonlocal steps
            steps = sum(map(self.round, probes))

        torch.set_num_threads(self.threads)
        with matmul_precision(self.precision, self.device):
            seconds = taken(work, self.clock)
        torch.set_num_threads(all_threads)
        return seconds / steps


class Floor:
    """What the device can do, measured: floating-point operations and bytes a second, and how soon a kernel
    follows the one before."""

    def __init__(self, device: str, precision: str):
        on_gpu = device.startswith("cuda")
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        n = 8192 if on_gpu else 1024
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        numbers = torch.zeros(1 << (30 if on_gpu else 26), device=device)
        with matmul_precision("tf32" if precision == "bf16" else precision, torch.device(device)):  # type: ignore[arg-type]
            self.flops = 2 * n**3 / _best(lambda: a @ b)
        self.bytes = 2 * 4 * len(numbers) / _best(lambda: numbers.add_(1))
        self.kernel = _best(_replayed(device)) / KERNELS if on_gpu else 0.0

    def of(self, simulation: Simulation, task: Task) -> tuple[float, float, float]:
        """Seconds of arithmetic, of memory and of launches that a client's step cannot do without.

        Forward and both backward products; weights read by the forward pass, read and written by the update;
        one kernel after another for the steps of the client that takes most.
        """
        batch = simulation.settings.solver.batch_size
        inputs = mapped(torch.Tensor.cpu, take(simulation.federation.inputs, slice(0, batch)))
        operations = 3 * forward_operations(task.model(), inputs)
        parameters = simulation.layout.parameters
        steps = simulation.client_steps / simulation.round
        launches = int(-(-simulation.federation.train.max() // batch)) * self.kernel / steps
        return operations / self.flops, 3 * 4 * parameters / self.bytes, launches


KERNELS = 1000  # in a CUDA graph


def _replayed(device: str) -> Callable[[], object]:
    """Replays a CUDA graph of small kernels, each of which needs the result of the one before."""
    number, graph = torch.zeros(8, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(KERNELS):
            number.add_(1)
    return graph.replay


def _best(work: Callable[[], object]) -> float:
    return min(taken(work) for _ in range(30))


@contextmanager
def turn(folder: Path | None, programs: int, seconds: float = 240) -> Iterator[None]:
    """Within, no other program of the folder is timed. It waits until all have been built, or for so long."""
    if folder is None:
        yield
        return
    (folder / f"built-{os.getpid()}").touch()
    end = time.monotonic() + seconds
    while len(list(folder.glob("built-*"))) < programs and time.monotonic() < end:
        time.sleep(0.2)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def measure(task: Task, settings: Settings, o: argparse.Namespace) -> list[dict[str, Any]]:
    on_gpu = settings.device.startswith("cuda")
    clients = task.clients if on_gpu else task.few
    data = task.data(clients)
    few = data if clients == task.few else task.data(task.few)
    print(f"\n{task.title}, {clients} clients, {settings.precision}", flush=True)
    found = []
    for title, runs in cohorts().items():
        if (len(runs) > 1 and task.user) or (o.runs and len(runs) != o.runs):
            continue
        began = time.perf_counter()
        ours = Simulation(task.model, data, runs, settings)
        for _ in range(3 if on_gpu else 1):  # compiles, records
            ours.step()
        wait()
        built = time.perf_counter() - began
        loop = Loop(task, few, settings)
        probes = [run.algorithm.probe for run in runs if run.seed == 0]
        training = None
        if not o.quick:
            plain = [run._replace(algorithm=algorithms.fedavg()) for run in runs]
            training = Simulation(task.model, data, plain, ours.settings)
            for _ in range(3 if on_gpu else 1):
                training.step()
        if on_gpu:  # others may be building
            torch.cuda.empty_cache()
        with turn(o.turn, o.of):
            floor = Floor(settings.device, settings.precision)
            print(f"  {floor.flops / 1e12:.1f} TFLOP/s in products, {floor.bytes / 1e9:.0f} GB/s of memory")
            rounds = max(1, min(20, int(2 / taken(ours.step))))
            pairs = [(loop.cost(probes), cost(ours, rounds)) for _ in range(o.repeats)]
            alone = cost(training, rounds) if training else float("nan")
            evaluation = min(taken(ours.evaluate) for _ in range(2))
            if o.profile:
                profile(ours)
        ratio = statistics.median(slow / fast for slow, fast in pairs)
        slow, fast = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        steps = ours.client_steps / ours.round  # of all runs, in a round
        arithmetic, memory, launches = floor.of(ours, task)
        least = max(arithmetic, memory, launches)
        result = {
            "task": task.title,
            "clients": clients,
            "runs": len(runs),
            "engine": ours.plan.order,
            "steps": ours.plan.steps.value,
            "graphs": ours.plan.graphs.value,
            "precision": settings.precision,
            "compile": ours.settings.compile,
            "ratio": ratio,
            "loop_us": 1e6 * slow,
            "loop_threads": loop.threads,
            "stacked_us": 1e6 * fast,
            "training_us": 1e6 * alone if training else None,
            "round_ms": 1e3 * fast * steps,
            "run_round_ms": 1e3 * fast * steps / len(runs),
            "evaluation_ms": 1e3 * evaluation,
            "building_s": built,
            "arithmetic_us": 1e6 * arithmetic,
            "memory_us": 1e6 * memory,
            "launches_us": 1e6 * launches,
            "of_floor": least / alone if training else None,
            "round_of_floor": least / fast,
            "floor": {"flops": floor.flops, "bytes": floor.bytes, "kernel_us": 1e6 * floor.kernel},
            "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None,
        }
        found.append(result)
        print(
            f"  {title}: {ratio:.2f}× the loop ({1e6 * slow:.0f} → {1e6 * fast:.2f} µs a client-step, "
            + (f"without probes {1e6 * alone:.2f}; " if training else "")
            + f"{result['run_round_ms']:.2f} ms a round and run)\n"
            f"    {ours.plan.order}\n"
            f"    evaluation {1e3 * evaluation:.0f} ms; building and first rounds {built:.1f} s\n"
            f"    floor: arithmetic {1e6 * arithmetic:.2f} µs, memory {1e6 * memory:.2f} µs, launches "
            f"{1e6 * launches:.2f} µs; a round is at {least / fast:.0%} of it"
            + (f", training at {least / alone:.0%}" if training else ""),
            flush=True,
        )
        alone_is_enough = ours.stacked is None  # more runs only take longer
        del ours, loop, training
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if alone_is_enough:
            break
    return found


def profile(simulation: Simulation) -> None:
    """Where a round's time goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    on_gpu = simulation.settings.device.startswith("cuda")
    with profiler(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        simulation.step()
        wait()
    by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=90))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", help="all, if none is named")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--compile", default="on")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--runs", type=int, choices=[1, 15], help="only so many at once")
    parser.add_argument("--quick", action="store_true", help="leave out what training takes without probes")
    parser.add_argument("--profile", action="store_true", help="a round's kernels as well")
    parser.add_argument("--turn", type=Path, metavar="FOLDER", help="where programs wait for their turn")
    parser.add_argument("--of", type=int, default=1, help="how many programs wait there")
    parser.add_argument("--json", type=Path, help="where the numbers go as well, task by task")
    o = parser.parse_args()
    warnings.simplefilter("error", SlowPathWarning)
    made_with = environment(o.device)
    print(", ".join(f"{k} {v}" for k, v in made_with.items() if v))
    names = o.tasks or list(TASKS)
    precision = o.precision if o.precision != "auto" else "tf32" if o.device.startswith("cuda") else "float32"
    results = []
    for name in names:
        task = TASKS[name]
        settings = Settings(
            rounds=10**9,
            eval_every=10**9,
            solver=task.solver,
            device=o.device,
            compile=o.compile,
            precision=precision,  # type: ignore[arg-type]
            engine=o.engine,
        )
        results += measure(task, settings, o)
        if o.json:
            o.json.write_text(json.dumps({"environment": made_with, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
