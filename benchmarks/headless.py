"""Studies on a machine that has only torch, numpy and safetensors: no terminal, no charts.

    python benchmarks/headless.py resources --out OUT --cache CACHE [--seeds 0] [--seconds 500]

It trains what `fairwind paper` or, given a file, `fairwind sweep` would, on data that was prepared elsewhere.
Started again with the same OUT it goes on. The pages are made where the other packages are: copy OUT/runs
there, and `fairwind paper STUDY --out OUT`.
"""

import argparse
import signal
import threading
from pathlib import Path

from fairwind.errors import InputError
from fairwind.paper.studies import STUDIES, scaled
from fairwind.runs.training import Plain
from fairwind.setups import Where
from fairwind.study import missing, narrowed, read_runs, read_study, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="+", help="names of the paper's studies, or TOML files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--scale", default="full", choices=["smoke", "reduced", "full"])
    parser.add_argument("--setups", nargs="+", default=(), help="only these setups")
    parser.add_argument("--seeds", type=int, nargs="+", default=(), help="only these seeds")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--checkpoint-every", type=float, default=120, help="seconds between checkpoints")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop, and save, after so long")
    o = parser.parse_args()
    if o.seconds < float("inf"):  # as if Ctrl-C was pressed then: it stops after a round, and saves
        timer = threading.Timer(o.seconds, signal.raise_signal, [signal.SIGINT])
        timer.daemon = True
        timer.start()
    known = [scaled(STUDIES[s], o.scale) if s in STUDIES else read_study(Path(s)) for s in o.studies]
    panels = [p for study in known for p in narrowed(study.panels, o.setups, tuple(o.seeds))]
    options = {"device": o.device, "compile": o.compile, "precision": o.precision}
    for job in missing(panels, read_runs(o.out)[0], lambda setup: Where(cache=o.cache), **options):
        print(job.recipe.setup, *job.recipe.algorithms, "seeds", *job.recipe.seeds, flush=True)
        try:
            run(job, o.out, print, Plain(), every=o.checkpoint_every)
        except KeyboardInterrupt:
            print("out of time; what was trained is saved", flush=True)
            return
        except InputError as error:
            print(f"left out: {error}", flush=True)


if __name__ == "__main__":
    main()
