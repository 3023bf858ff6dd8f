"""What a client's step costs, and how much memory a round takes, as clients, stacked runs or parameters grow.

    python benchmarks/scale.py [--device cuda] [--figure docs/scale-cpu.svg] [--json numbers.json]

Each point is a process of its own, since a process's peak of memory cannot be taken back. Memory is the peak
beyond the data, from just before the simulation is built; chunks are bounded alike at all points.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairwind import Federation, Settings, Solver, algorithms
from fairwind.data.samples import tensors
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.models import linear, mlp
from fairwind.runs.environment import environment

SWEEPS = {
    "clients": [100, 300, 1000, 3000, 10_000, 30_000, 100_000],
    "runs": [1, 2, 4, 8, 16, 32, 64],
    "parameters": [1000, 10_000, 100_000, 1_000_000, 10_000_000],
}
TITLES = {
    "clients": "clients, linear 60×10, 1 run",
    "runs": "stacked runs of 100 clients, linear 60×10",
    "parameters": "parameters of an MLP, 20 clients, 1 run",
}
FEATURES, CLASSES = 60, 10


def data(clients: int) -> Federation:
    """Noise: 10 to 50 samples for each client."""
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(10, 51, (clients,), generator=g)
    owner = torch.repeat_interleave(sizes)
    inputs = torch.rand(len(owner), FEATURES, generator=g)
    targets = torch.randint(0, CLASSES, (len(owner),), generator=g)
    names = [str(client) for client in range(clients)]
    return Federation.from_owners(inputs, targets, owner, names=names, classes=CLASSES)


def point(sweep: str, size: int, device: str) -> dict[str, Any]:
    """Time of a client's step and peak memory at one point of a sweep."""
    federation = data({"clients": size, "runs": 100, "parameters": 20}[sweep])
    hidden = size // (FEATURES + CLASSES)

    def model() -> nn.Module:
        return mlp(FEATURES, hidden, CLASSES) if sweep == "parameters" else linear(FEATURES, CLASSES)

    algorithm = algorithms.adafedadam()
    runs = [Run("adafedadam", algorithm, seed) for seed in range(size if sweep == "runs" else 1)]
    settings = Settings(
        rounds=10**9,
        eval_every=10**9,
        solver=Solver(),
        device=device,
        compile="on",
        memory=1.0 if device.startswith("cuda") else None,
    )
    Simulation(model, data(20), runs[:1], settings).step()  # what compiling and the libraries take once
    before = _memory(device)
    simulation = Simulation(model, federation, runs, settings)
    for _ in range(3):
        simulation.step()
    steps, began = simulation.client_steps, time.perf_counter()
    while time.perf_counter() - began < 2:
        simulation.step()
        _wait()
    seconds = time.perf_counter() - began
    held = sum(t.nbytes for t in (*tensors(federation.inputs), *tensors(federation.targets)))
    # On a GPU the data is copied there; on a CPU it is used where it lies.
    beyond = _memory(device, peak=True) - before - (held if device.startswith("cuda") else 0)
    return {
        "sweep": sweep,
        "size": size,
        "us": 1e6 * seconds / (simulation.client_steps - steps),
        "beyond_mib": beyond / 2**20,
        "data_mib": held / 2**20,
    }


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _memory(device: str, *, peak: bool = False) -> int:
    """Bytes in use, or in use at most since last asked for what is in use."""
    if device.startswith("cuda"):
        if not peak:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_reserved() if peak else torch.cuda.memory_reserved()
    if not peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # Linux counts the peak from here
    lines = Path("/proc/self/status").read_text().splitlines()
    field = "VmHWM" if peak else "VmRSS"
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Time and memory of each sweep, side by side; the file's ending says in which format."""
    import altair as alt

    rows = []
    for sweep, title in TITLES.items():
        values = alt.Data(values=[p for p in points if p["sweep"] == sweep])  # type: ignore[no-untyped-call]
        axis = alt.Axis(tickCount=4, labelOverlap=True)
        x = alt.X("size:Q", scale=alt.Scale(type="log"), title=title, axis=axis)
        titles = {"us": "µs a client-step", "beyond_mib": "peak beyond the data (MiB)"}
        charts = [
            alt.Chart(values, width=300, height=160)
            .mark_line(point=True)
            .encode(x=x, y=alt.Y(f"{field}:Q", scale=alt.Scale(type="log"), title=name, axis=axis))
            for field, name in titles.items()
        ]
        rows.append(alt.hconcat(*charts))
    alt.vconcat(*rows).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweeps", nargs="*", help=f"of {', '.join(SWEEPS)}; all, if none is named")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--figure", type=Path, help="an .svg, .png or .html file to draw")
    parser.add_argument("--json", type=Path, help="where the numbers go as well")
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.point:
        print(json.dumps(point(o.point[0], int(o.point[1]), o.device)))
        return
    made_with = environment(o.device)
    print(", ".join(f"{k} {v}" for k, v in made_with.items() if v))
    points = []
    for sweep in o.sweeps or SWEEPS:
        print(f"\n{TITLES[sweep]}")
        for size in SWEEPS[sweep]:
            command = [sys.executable, __file__, "--device", o.device, "--point", sweep, str(size)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            points.append(found)
            print(
                f"  {size:>10,}: {found['us']:9.2f} µs a client-step, peak {found['beyond_mib']:7.1f} MiB "
                f"beyond {found['data_mib']:.1f} MiB of data",
                flush=True,
            )
    if o.json:
        o.json.write_text(json.dumps({"environment": made_with, "points": points}, indent=1))
    if o.figure:
        draw(points, o.figure)


if __name__ == "__main__":
    main()
