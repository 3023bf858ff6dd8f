"""The real data sets, where FAIRWIND_DATA names a folder that holds them (`make test-data DATA=…`).

The folder holds `femnist/` (parquet), `cifar10/` (parquet), `sent140/` (CSV) and `glove/` (text), or some of
them. Numbers and digests are those of FEMNIST's 374 writers with at least 50 images, of all of CIFAR-10, and
of a sample of 47,893 tweets with GloVe's 6B vectors.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairwind import setups
from fairwind.setups import Where
from samples import as_tensor

DATA = os.environ.get("FAIRWIND_DATA")
pytestmark = pytest.mark.skipif(not DATA, reason="FAIRWIND_DATA names no folder of real data")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def where(name: str, cache: Path, glove: bool = False) -> Where:
    assert DATA
    folder, vectors = Path(DATA) / name, Path(DATA) / "glove"
    if not folder.exists() or (glove and not vectors.exists()):
        pytest.skip(f"no {name} in {DATA}")
    return Where(folder, vectors if glove else None, cache)


# spec -> clients, samples, smallest and largest training set, digest
KNOWN = {
    "femnist": (374, 59_623, 40, 284, "fc5c5afe648dac6d"),
    "cifar10": (16, 50_000, 256, 8_378, "bba80537230bd843"),
    "cifar10:beta=0.1": (16, 50_000, 288, 4_812, "de0157a92be0574d"),
    "cifar10:beta=0.5": (16, 50_000, 1_076, 4_354, "94ed63396e9a6338"),
    "cifar10:beta=iid": (16, 50_000, 2_496, 2_504, "dac7f9a281cf0fb2"),
    "sent140": (837, 3_049, 2, 11, "03f9936b807e63c0"),
    "sent140:by=group": (697, 47_726, 35, 84, "6f7cedbb4231a208"),
}


@pytest.mark.parametrize("spec", KNOWN)
def test_prepared_real_data_is_the_same_on_every_machine(spec: str, cache: Path) -> None:
    name = spec.partition(":")[0]
    federation = setups.federation(spec, where(name, cache, glove=name == "sent140"))
    sizes = federation.train + federation.test
    found = len(federation), int(sizes.sum()), int(federation.train.min()), int(federation.train.max())
    assert (*found, federation.digest()[:16]) == KNOWN[spec]


@pytest.mark.parametrize("spec", ["femnist", "cifar10"])
def test_loading_takes_two_seconds_and_little_more_memory_than_the_data(spec: str, cache: Path) -> None:
    setups.entry(spec, where(spec, cache), lambda text: None)
    program = f"""
import time
from pathlib import Path
from fairwind import setups

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before, began = resident(), time.perf_counter()
federation = setups.federation({spec!r}, setups.Where(cache=Path({str(cache)!r})))
federation.inputs.sum()
grown = (resident() - before) / (federation.inputs.nbytes + federation.targets.nbytes)
print(time.perf_counter() - began, grown)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, grown = map(float, done.stdout.split())
    print(f"{spec}: loaded in {seconds:.2f} s, {grown:.2f} × its size in memory")
    assert seconds < 2
    assert grown < 1.3


def test_the_text_model_learns_real_tweets(cache: Path) -> None:
    """One client with all training tweets: held-out accuracy far above the majority's."""
    import torch

    from fairwind import Federation, Solver, Task, algorithms, models, simulate

    federation = setups.federation("sent140:by=group", where("sent140", cache, glove=True))
    pick = torch.randperm(len(federation.inputs), generator=torch.Generator().manual_seed(0))[:12_000]
    pooled = Federation.from_clients(
        [(as_tensor(federation.inputs)[pick], as_tensor(federation.targets)[pick])], classes=2
    )
    share = as_tensor(pooled.targets).double().mean().item()
    task = Task(lambda: models.lstm(vectors=federation.embedding), pooled)
    solver = Solver(lr=0.3, momentum=0.9, batch_size=32)
    result = simulate(task, algorithms.fedavg(), rounds=3, solver=solver, compile="off")
    majority = 100 * max(share, 1 - share)
    print(f"{result.metrics['avg']:.1f} % of held-out tweets, majority {majority:.1f} %")
    assert (result.metrics["avg"] or 0) > majority + 10
