"""How fast other simulators run one and the same task, beside ours.

    python benchmarks/peers.py [--peers NAME ...] [--repeats N] [--rounds N] [--venvs DIR] [--json FILE]

FedAvg on Synthetic: 100 clients of LEAF's sizes, all in every round, a linear model 60×10 that starts at
zero, SGD with rate 0.01 and batch size 10, one local epoch, two cores. Each peer runs in an environment of
its own, made on first use. Ours is timed right before and right after each, and a ratio is to the mean of
these two: machines are noisy. A measurement that other processes disturbed is taken again. The loss after
so many rounds, over all training samples, shows that the same work was done: it differs by the order of
batches. A peer that cannot be installed or run is left out, with the reason.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fairwind import Federation, Settings, algorithms
from fairwind.data.samples import take
from fairwind.data.synthetic import synthetic
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.models import linear
from fairwind.runs.environment import environment

HERE = Path(__file__).parent
CORES = 2
BURST = 15  # rounds of ours between two peers
LIMIT = 600  # seconds that a peer may take
QUIET, TRIES = 0.1, 3  # measured again where other processes took more of the cores just before or after


class Peer(NamedTuple):
    title: str
    worker: tuple[str, ...]  # a file in peers/, and its variant
    venv: str = ""  # "" is the environment that this script runs in
    pins: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


DRJAX = "drjax==0.2.1", "jax==0.10.2", "jaxlib==0.10.2", "numpy==2.4.6"
FLOWER = "flwr[simulation]==1.41.0", "ray==2.55.1", "torch==2.13.0", "numpy==2.4.6"
SILENT = {  # nothing is sent home, and Ray listens on the loopback alone, as it does where firewalls ask
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
PEERS = {
    "pytorch": Peer("plain PyTorch loop", ("plain.py", "pytorch")),
    "numpy": Peer("NumPy loop, gradient by hand", ("plain.py", "numpy")),
    "flower": Peer("Flower, PyTorch client", ("flower.py", "pytorch"), "flower", FLOWER, SILENT),
    "flower-numpy": Peer(
        "Flower, NumPy client, gradient by hand", ("flower.py", "numpy"), "flower", FLOWER, SILENT
    ),
    "pfl": Peer(
        "pfl-research, 2 processes",
        ("pfl_research.py",),
        "pfl",
        ("pfl[pytorch]==0.6.0", "torch==2.13.0", "numpy==2.4.6"),
    ),
    "fedjax": Peer(
        "FedJAX",
        ("fedjax_peer.py",),
        "fedjax",
        # The newest jax that still has what fedjax imports is older than 0.6.
        ("fedjax==0.0.17", "jax==0.5.3", "jaxlib==0.5.3", "dm-haiku==0.0.17", "optax==0.2.8", "numpy==2.4.6"),
    ),
    "drjax-padded": Peer("DrJAX, clients padded to the longest", ("drjax_peer.py", "padded"), "drjax", DRJAX),
    "drjax-bucketed": Peer(
        "DrJAX, clients in 12 padded buckets", ("drjax_peer.py", "bucketed"), "drjax", DRJAX
    ),
}
OURS = "1 run", "15 runs"


class PeerError(Exception):
    """A peer could not be installed or run; the message is one line."""


def call(*command: str | Path, **variables: str) -> str:
    """What a command prints; where it fails, an error with its first line that says ERROR, else its last."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        command,
        env=inherited | variables,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed, errors = process.communicate(timeout=LIMIT)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        if isinstance(error, subprocess.TimeoutExpired):
            raise PeerError(f"took longer than {LIMIT} s") from None
        raise
    if process.returncode:
        lines = errors.strip().splitlines() or [f"exit status {process.returncode}"]
        said = (line for line in lines if line.startswith("ERROR") and "Ignored the following" not in line)
        raise PeerError(next(said, lines[-1]))
    return printed


def python(peer: Peer, venvs: Path) -> Path:
    """The interpreter of a peer's environment, which is made if its pins are not the ones installed."""
    if not peer.venv:
        return Path(sys.executable)
    folder = venvs / peer.venv
    interpreter, ready = folder / "bin" / "python", folder / "pins"
    if not ready.exists() or ready.read_text().split() != list(peer.pins):
        print(f"installing {' '.join(peer.pins)}", file=sys.stderr)
        call(sys.executable, "-m", "venv", "--clear", folder)
        call(interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.pins)
        ready.write_text("\n".join(peer.pins))
    return interpreter


def measure(peer: Peer, venvs: Path, data: Path, rounds: int) -> dict[str, Any]:
    """One process of a peer: its version, median seconds a round, and loss after so many rounds."""
    file, *variant = peer.worker
    printed = call(
        python(peer, venvs), HERE / "peers" / file, data, str(rounds), *variant, **peer.environment
    )
    result: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return result


def export(federation: Federation, path: Path) -> None:
    """Training samples, client after client."""
    ranges = zip(federation.start.tolist(), federation.train.tolist(), strict=True)
    kept = torch.cat([torch.arange(start, start + size) for start, size in ranges])
    np.savez(
        path,
        inputs=take(federation.inputs, kept).numpy(),
        targets=take(federation.targets, kept).numpy(),
        sizes=federation.train.numpy(),
    )


def simulation(federation: Federation, runs: int) -> Simulation:
    model = linear(60, 10)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    settings = Settings(rounds=10**9, eval_every=10**9, device="cpu", compile="on")
    fedavg = algorithms.fedavg()
    return Simulation(model, federation, [Run("fedavg", fedavg, s) for s in range(runs)], settings)


def loss(ours: Simulation, data: Path) -> float:
    samples = np.load(data)
    weights = ours.layout.unflatten(ours.x[0])
    outputs = torch.from_numpy(samples["inputs"]) @ weights["weight"].T + weights["bias"]
    return float(nn.functional.cross_entropy(outputs, torch.from_numpy(samples["targets"])))


def seconds(ours: Simulation) -> float:
    """Median seconds of one run's round."""
    taken = []
    for _ in range(BURST):
        began = time.perf_counter()
        ours.step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) / len(ours.runs)


def burst(cohorts: Sequence[Simulation]) -> list[float]:
    """Seconds of ours for each cohort, and the share of all cores that other processes took meanwhile."""

    def ticks() -> tuple[float, float]:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        own = time.process_time() * os.sysconf("SC_CLK_TCK")
        return sum(fields), sum(fields) - fields[3] - fields[4] - own  # less idle, and waiting for disks

    before = ticks()
    times = [seconds(ours) for ours in cohorts]
    total, others = (b - a for a, b in zip(before, ticks(), strict=True))
    return [*times, others / total]


def compare(peers: Sequence[str], repeats: int, rounds: int, venvs: Path) -> dict[str, Any]:
    """All that was measured: each peer's repeats, ours just before and just after each, and the ratios."""
    federation = synthetic()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    left_out: dict[str, str] = {}

    def ours() -> dict[str, float]:
        return dict(zip((*OURS, "others"), burst(cohorts), strict=True))

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "synthetic.npz"
        export(federation, data)
        cohorts = [simulation(federation, 1), simulation(federation, 15)]
        for cohort in cohorts:
            for _ in range(rounds):
                cohort.step()
        losses = [loss(cohort, data) for cohort in cohorts]
        after = ours()
        for _ in range(repeats):
            for name in list(results):
                try:
                    for _ in range(TRIES):
                        before, result = after, measure(PEERS[name], venvs, data, rounds)
                        after = ours()
                        mean = {title: (before[title] + after[title]) / 2 for title in after}
                        figures = ", ".join(f"{title} {mean[title]:.4f} s" for title in OURS)
                        others = f"others took {mean['others']:.0%}"
                        print(f"{name}: {result['seconds']:.4f} s, ours {figures}; {others}", file=sys.stderr)
                        if max(before["others"], after["others"]) < QUIET:
                            break
                except PeerError as reason:
                    print(f"{PEERS[name].title}: left out: {reason}", flush=True)
                    left_out[name] = str(reason)
                    del results[name]
                else:
                    ratios = {title: result["seconds"] / mean[title] for title in OURS}
                    results[name].append(
                        {**result, "before": before, "after": after, "mean": mean, "ratios": ratios}
                    )
    return {
        "environment": environment("cpu"),
        "rounds": rounds,
        "client_steps": cohorts[0].client_steps / cohorts[0].round,  # of one run, in a round
        "losses": dict(zip(OURS, losses, strict=True)),
        "left_out": left_out,
        "results": [
            {
                "peer": name,
                "title": PEERS[name].title,
                "ratios": {title: spread([r["ratios"][title] for r in measured]) for title in OURS},
                "repeats": measured,
            }
            for name, measured in results.items()
        ],
        "last": after,
    }


def show(found: Mapping[str, Any]) -> None:
    """The table in Markdown."""
    made_with, steps = found["environment"], found["client_steps"]
    print(", ".join(f"{k} {v}" for k, v in made_with.items() if v) + "\n")
    print("| | version | ms a round | client-steps a second | loss | ours, 1 run, is faster | 15 stacked |")
    print("|---|---|---|---|---|---|---|")
    for peer in found["results"]:
        taken, last = [repeat["seconds"] for repeat in peer["repeats"]], peer["repeats"][-1]
        ratios = (ratio(**peer["ratios"][title]) for title in OURS)
        row(peer["title"], last["version"], taken, steps, last["loss"], *ratios)
    beside = [repeat["mean"] for peer in found["results"] for repeat in peer["repeats"]] or [found["last"]]
    for title, cell in zip(OURS, ("1 run", "15 runs, each"), strict=True):
        taken = [ours[title] for ours in beside]
        row(f"Fairwind, {cell}", made_with["fairwind"], taken, steps, found["losses"][title], "", "")
    others = [ours["others"] for ours in beside]
    print(f"\nOther processes took {statistics.median(others):.0%} of the cores, at most {max(others):.0%}.")


def row(title: str, version: str, times: Sequence[float], steps: float, loss: float, *ratios: str) -> None:
    taken = statistics.median(times)
    cells = title, version, f"{1e3 * taken:.1f}", f"{steps / taken:,.0f}", f"{loss:.3f}", *ratios
    print(f"| {' | '.join(cells)} |")


def spread(ratios: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def ratio(median: float, low: float, high: float) -> str:
    middle, least, most = (f"{r:.{int(r < 10)}f}" for r in (median, low, high))
    return f"{middle}× ({least}–{most})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--venvs", type=Path, default=HERE / ".venvs")
    parser.add_argument("--json", type=argparse.FileType("w"), help="where the numbers go as well")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # which peers inherit
    torch.set_num_threads(CORES)
    found = compare(arguments.peers, arguments.repeats, arguments.rounds, arguments.venvs.absolute())
    show(found)
    if arguments.json:
        json.dump(found, arguments.json, indent=1)


if __name__ == "__main__":
    main()
