"""VGG11's local steps for many clients at once: as matrix products, as grouped convolutions, and in a loop.

    python benchmarks/convolution.py [--device cuda] [--rows 240 64 15] [--precision bf16] [--kernels]

Times of a client's step with batch size 32, and ratios to the plain loop, taken in turn in one process.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import nn

from engine import taken
from fairwind import Federation, Settings, Solver, algorithms
from fairwind.comparison import environment
from fairwind.engine.executor import Run
from fairwind.engine.precision import products
from fairwind.engine.simulation import Simulation
from fairwind.models import vgg11
from tasks import plain_vgg11

SOLVER = Solver(lr=0.01, batch_size=32)


def pictures(clients: int, steps: int) -> Federation:
    """Noise, with which every client takes so many steps."""
    g = torch.Generator().manual_seed(0)
    n = 32 * steps
    inputs = torch.randint(0, 256, (clients, n + 1, 3, 32, 32), generator=g, dtype=torch.uint8)
    targets = torch.randint(0, 10, (clients, n + 1), generator=g)
    return Federation.from_clients(list(zip(inputs, targets, strict=True)), train=n / (n + 1), classes=10)


def stacked(model: Callable[[], nn.Module], data: Federation, settings: Settings) -> Callable[[], None]:
    """Local training of all clients, once it has been compiled and recorded."""
    simulation = Simulation(model, data, [Run("fedavg", algorithms.fedavg(), 0)], settings)
    executor = simulation.executor
    executor.step_by_step()
    executor.prepare(0)
    models = simulation.cohort.laid(simulation.cohort.parts(simulation.x))
    cut = executor._cut("training", executor._rows("training"))
    chunks = [executor._chunk("training", rows) for rows in cut]

    def work() -> None:
        with torch.no_grad(), products(settings.precision, simulation.x.device):
            for chunk in chunks:
                executor._work("training", chunk, models)

    for _ in range(3):
        work()
    return work


def loop(data: Federation, settings: Settings) -> Callable[[], None]:
    """One client, with PyTorch's layers and optimiser."""
    device = torch.device(settings.device)
    model = plain_vgg11().to(device)
    optimizer = torch.optim.SGD(model.parameters(), SOLVER.lr)
    one = slice(int(data.train[0]))
    inputs, targets = data.inputs[one].to(device), data.targets[one].to(device)

    def work() -> None:
        with products(settings.precision, device):
            for x, y in zip(inputs.split(32), targets.split(32), strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    work()
    return work


def kernels(work: Callable[[], None], steps: int) -> None:
    """Where the time of a client's step goes on a GPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        taken(work)
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    whole = sum(event.self_device_time_total for event in events)
    print(f"    {whole / steps:8.2f} µs in all kernels")
    for event in events[:30]:
        print(f"    {event.self_device_time_total / steps:8.2f} µs  {event.count:5d}×  {event.key[:80]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[4])
    parser.add_argument("--steps", type=int, default=4, help="of a client; more hide what it takes to begin")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--fast", action="store_true", help="only matrix products, compiled, and the loop")
    parser.add_argument("--kernels", action="store_true", help="kernels of the fastest way as well")
    o = parser.parse_args()
    print(", ".join(f"{k} {v}" for k, v in environment(o.device).items() if v))
    ways = {"matrix products, compiled": (vgg11, "on")}
    if not o.fast:
        ways |= {
            "matrix products": (vgg11, "off"),
            "grouped convolutions": (plain_vgg11, "off"),
            "grouped convolutions, compiled": (plain_vgg11, "on"),
        }
    for rows in o.rows:
        data = pictures(rows, o.steps)
        print(f"VGG11, {rows} clients, batch size 32, {o.precision}")

        def settings(compile: str) -> Settings:
            return Settings(solver=SOLVER, device=o.device, precision=o.precision, compile=compile)  # type: ignore[arg-type]

        plain = loop(data, settings("off"))
        for name, (model, compile) in ways.items():
            work = stacked(model, data, settings(compile))
            pairs = [(taken(plain) / o.steps, taken(work) / o.steps / rows) for _ in range(5)]
            ratio = statistics.median(slow / fast for slow, fast in pairs)
            slow, fast = (1e3 * statistics.median(pair[i] for pair in pairs) for i in (0, 1))
            print(
                f"  {name:30s} {fast:9.4f} ms a client-step, {ratio:6.2f}× the loop's {slow:.3f}", flush=True
            )
            if o.kernels and o.device.startswith("cuda"):
                kernels(work, rows * o.steps)


if __name__ == "__main__":
    main()
