"""The check of what only a GPU can show: the engine's tests there, and timings beside the recorded ones.

    python benchmarks/gpu.py [--record]

The programs that are timed compile while the tests run, and are then timed one after another. A timing fails
if something in it falls back to a slow path, or if its ratio to the least time that this GPU needs
(arithmetic, memory or launches, measured in the same run) fell by more than 15 %. The ratio to a plain loop
is shown beside it: it differs by up to 40 % between machines with the same GPU, as their processors do.
`--record` writes what was run to benchmarks/results/gpu.json, unless something failed. From that, the tables
of README.md and docs/benchmarks.md are written by `python docs/tables.py`.

For want of time, tests/engine/test_paths.py is left out: run it apart, with FAIRWIND_TEST_DEVICE=cuda.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fairwind.runs.environment import environment

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "gpu.json"
ENGINE = "augment", "chunks", "compiled", "costs", "graphs", "host", "ill", "local_work", "losses"
TESTS = [f"tests/engine/test_{name}.py" for name in (*ENGINE, "stacked", "types", "zoo")]
TESTS += ["tests/layers/test_kernels.py", "tests/models/test_models.py"]
MAY_FALL = 0.15  # of a ratio
TIMED = {  # by name: task of benchmarks/tasks.py, runs, precision
    "synthetic-1": ("synthetic", 1, "tf32"),
    "synthetic-15": ("synthetic", 15, "tf32"),
    "femnist-1": ("femnist", 1, "tf32"),
    "femnist-15": ("femnist", 15, "tf32"),
    "vgg11-1": ("cifar10", 1, "bf16"),
    "vgg11-15": ("cifar10", 15, "bf16"),
    "lstm": ("lstm", 1, "tf32"),
    "leaf": ("leaf", 1, "tf32"),
    "resnet": ("resnet", 1, "tf32"),
    "encoder": ("encoder", 1, "tf32"),
}

Result = dict[str, Any]


def tests(folder: Path, workers: int) -> subprocess.Popen[bytes]:
    """Starts the engine's tests on the GPU."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-n", str(workers)]
    env = os.environ | {"FAIRWIND_TEST_DEVICE": "cuda"}
    with (folder / "tests.log").open("wb") as log:
        command = [sys.executable, "-m", "pytest", *options, *TESTS]
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)


def timing(folder: Path, name: str, programs: int) -> subprocess.Popen[bytes]:
    """Starts a program that is timed when all have been built."""
    task, runs, precision = TIMED[name]
    given = [task, "--device", "cuda", "--precision", precision, "--runs", str(runs), "--quick"]
    waits = ["--turn", str(folder / "turn"), "--of", str(programs), "--json", str(folder / f"{name}.json")]
    with (folder / f"{name}.log").open("wb") as log:
        command = [sys.executable, "benchmarks/engine.py", *given, *waits]
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def failure(result: Result, recorded: Result | None) -> str:
    """What is wrong with a timing; empty if nothing."""
    if result["steps"] == "eager":
        return "its steps were not compiled"
    if result["graphs"] == "none":
        return "no CUDA graphs"
    if recorded is None:
        return ""
    share = result["round_of_floor"] / recorded["round_of_floor"]
    return "" if share >= 1 - MAY_FALL else f"{share:.0%} of the recorded ratio to the floor"


def line(name: str, result: Result, recorded: Result | None, wrong: str) -> str:
    """A timing beside the recorded one."""
    cells = f"{result['ratio']:8.1f}×  {result['round_of_floor']:6.1%}"
    if recorded is not None:
        cells += f"   recorded {recorded['ratio']:8.1f}×  {recorded['round_of_floor']:6.1%}"
    return f"{name:14}{cells}   {result['run_round_ms']:8.2f} ms a round   {wrong}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--record", action="store_true", help="write the record, instead of comparing with it"
    )
    parser.add_argument("--out", type=Path, help="a folder for the logs and results")
    parser.add_argument("--only", nargs="*", default=["tests", *TIMED], help="tests, or names of timings")
    parser.add_argument("--workers", type=int, default=8, help="of the tests")
    o = parser.parse_args()
    began, folder = time.monotonic(), o.out or Path(tempfile.mkdtemp())
    (folder / "turn").mkdir(parents=True)
    names = [name for name in TIMED if name in o.only]
    tested = tests(folder, o.workers) if "tests" in o.only else None
    timed = {name: timing(folder, name, len(names) + (tested is not None)) for name in names}
    failed, said = [], [""]
    if tested is not None:
        code = tested.wait()
        (folder / "turn" / "built-tests").touch()
        said = (folder / "tests.log").read_text().splitlines()
        print("\n".join(each for each in said if each.startswith(("FAILED", "ERROR"))))
        print(f"tests: {said[-1]} ({time.monotonic() - began:.0f} s)", flush=True)
        failed += ["tests"] if code else []
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {"results": {}}
    known: dict[str, Result] = {} if o.record else record["results"]
    found: dict[str, Result] = {}
    for name, program in timed.items():
        if program.wait():
            last = (folder / f"{name}.log").read_text().splitlines()[-1:]
            print(f"{name:14}failed: {''.join(last)}", flush=True)
            failed.append(name)
            continue
        (found[name],) = json.loads((folder / f"{name}.json").read_text())["results"]
        wrong = failure(found[name], known.get(name))
        failed += [name] if wrong else []
        print(line(name, found[name], known.get(name), wrong), flush=True)
    print(f"{time.monotonic() - began:.0f} s; failed: {', '.join(failed) or 'none'}")
    made_with = environment("cuda")
    if tested is not None:
        record["tests"] = {"environment": made_with, "result": said[-1].strip("= ")}
    if found:
        record |= {"environment": made_with, "results": record["results"] | found}
    (folder / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    if o.record and not failed:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
