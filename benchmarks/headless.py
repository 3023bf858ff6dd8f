"""A comparison on a machine that has only torch, numpy and safetensors: no terminal, no charts.

    python benchmarks/headless.py femnist OUT --rounds 500 --cache CACHE [--seeds 0 1 2] [--precision bf16]

It is `fairwind compare` on data that was prepared elsewhere. Started again with the same OUT it goes on; made
into a page it is by `fairwind report OUT` where the other packages are.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from fairwind import Settings, algorithms, setups
from fairwind.comparison import Recipe, RunDirectory
from fairwind.setups import Where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setup")
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", default=list(algorithms.PAPER))
    parser.add_argument("--epochs", type=int, nargs="+", help="local epochs; two numbers are drawn between")
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop, and save, after so long")
    parser.add_argument("--precision", default="auto")
    o = parser.parse_args()
    began, where, setup = time.monotonic(), Where(cache=o.cache), setups.find(o.setup)
    solver = setup.solver
    if o.epochs:
        solver = replace(solver, epochs=o.epochs[0] if len(o.epochs) == 1 else tuple(o.epochs))
    settings = Settings(
        rounds=o.rounds or setup.rounds,
        solver=solver,
        eval_every=o.eval_every,
        compile=o.compile,
        precision=o.precision,
    )
    if (o.out / "recipe.json").exists():
        directory = RunDirectory.open(o.out)
        simulation = directory.recipe.build(directory.federation(o.cache))
        directory.restore(simulation)
    else:
        federation = setups.federation(o.setup, where)
        recipe = Recipe(o.setup, tuple(o.algorithms), tuple(o.seeds), settings)
        simulation = recipe.build(federation)
        recipe = replace(recipe, settings=simulation.settings, data=federation.origin.get("digest"))
        directory = RunDirectory.create(o.out, recipe, where)
    while not simulation.done and time.monotonic() - began < o.seconds:
        simulation.step()
        if simulation.round % o.eval_every == 0 or simulation.done:
            averages = [f"{line['avg']:.1f}" for line in simulation.history[-len(simulation.runs) :]]
            print(f"round {simulation.round}, {simulation.seconds:.1f} s: {' '.join(averages)}", flush=True)
    directory.save(simulation)
    directory.write_history(simulation)
    if simulation.done:
        directory.write_results(simulation)


if __name__ == "__main__":
    main()
