"""How often 95 % intervals hold the true difference between two algorithms, in simulated comparisons.

    python benchmarks/coverage.py     # writes benchmarks/results/coverage.json, in minutes on two cores

Clients differ in how hard they are, in which algorithm serves them better, and from seed to seed; algorithms
also have better and worse seeds. The true difference is the mean over 4,000 comparisons of as many clients
and seeds. Beside the intervals of fairwind.intervals stand those of a percentile bootstrap of both.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fairwind.intervals import paired_differences
from fairwind.runs.environment import environment
from fairwind.runs.files import write_json

Floats = NDArray[np.float64]
OUT = Path(__file__).parent / "results" / "coverage.json"
WORLDS = ("bell", "two groups", "ten test samples")
KEYS = ("avg", "std", "worst30")


def draw_scores(draw: np.random.Generator, world: str, seeds: int, clients: int, apart: float) -> Floats:
    """Accuracies (2, seeds, K) of two algorithms; `apart` is the spread of an algorithm's seeds."""
    if world == "two groups":  # as on Synthetic: most clients are served well, a fifth are not
        hard = draw.random(clients) < 0.2
        level = np.where(hard, draw.uniform(0, 80, clients), 100 * draw.beta(12, 1, clients))
    else:
        level = draw.normal(70, 12, clients)
    own = draw.normal(0, 4, (2, 1, clients)) + np.array([2.0, 0.0])[:, None, None]
    noise = draw.normal(0, apart, (2, seeds, 1)) + draw.normal(0, 3, (2, seeds, clients))
    score = np.clip(level + own + noise, 0, 100)
    measured: Floats = draw.binomial(10, score / 100) * 10.0 if world == "ten test samples" else score
    return measured


def measured(score: Floats) -> Floats:
    """Average, STD and worst 30 % over the last axis, as means over the one before: (…, 3)."""
    tail = int(np.ceil(0.3 * score.shape[-1] - 1e-9))
    worst = np.partition(score, tail - 1, axis=-1)[..., :tail].mean(axis=-1)
    found: Floats = np.stack([score.mean(axis=-1), score.std(axis=-1), worst], axis=-1).mean(axis=-2)
    return found


def bootstrap(draw: np.random.Generator, score: Floats, draws: int = 200) -> Floats:
    """Ends (2, 3) of the percentile bootstrap over seeds and clients, the same ones for both algorithms."""
    _, seeds, clients = score.shape
    found = []
    for _ in range(draws):
        s, k = draw.integers(seeds, size=seeds), draw.integers(clients, size=clients)
        values = measured(score[:, s][:, :, k])
        found.append(values[0] - values[1])
    ends: Floats = np.percentile(found, (2.5, 97.5), axis=0)
    return ends


def coverage(world: str, seeds: int, clients: int, apart: float, times: int, boot: int) -> dict[str, object]:
    """The share of comparisons, in percent, whose intervals hold the truth."""
    draw = np.random.default_rng([seeds, clients, int(10 * apart), WORLDS.index(world)])
    many = [measured(draw_scores(draw, world, seeds, clients, apart)) for _ in range(4000)]
    truth = np.mean([values[0] - values[1] for values in many], axis=0)
    held, old, widths = np.zeros(3), np.zeros(3), np.zeros(3)
    for i in range(times):
        score = draw_scores(draw, world, seeds, clients, apart)
        found = paired_differences(score[0], score[1])
        low, high = (np.array([getattr(found[key], end) for key in KEYS]) for end in ("low", "high"))
        held += (low <= truth) & (truth <= high)
        widths += high - low
        if i < boot:
            ends = bootstrap(draw, score)
            old += (ends[0] <= truth) & (truth <= ends[1])
    row: dict[str, object] = {"world": world, "seeds": seeds, "clients": clients, "apart": apart}
    row["covered"] = dict(zip(KEYS, (100 * held / times).round(1).tolist(), strict=True))
    row["width"] = dict(zip(KEYS, (widths / times).round(2).tolist(), strict=True))
    if boot:
        row["bootstrap"] = dict(zip(KEYS, (100 * old / boot).round(1).tolist(), strict=True))
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=1000, help="simulated comparisons of each kind")
    times = parser.parse_args().times
    rows = [
        coverage(world, seeds, clients, apart, times, times // 5)
        for world in WORLDS
        for seeds in (2, 3, 5)
        for clients in (16, 100)
        for apart in (0.0, 1.0, 3.0)
    ]
    for row in rows:
        print(json.dumps(row))
    write_json(OUT, {"times": times, "environment": environment("cpu"), "rows": rows}, indent=1)
