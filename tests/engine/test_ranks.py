"""Several processes, started by torchrun, find what one finds."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import layouts
import ranked
from command import ENV, lines, wait_for
from conftest import DEVICE
from fairwind import setups
from fairwind.cli.compare import Compare
from fairwind.engine.ranks import ALONE, Ranks
from fairwind.engine.simulation import Simulation
from fairwind.runs.directory import RunDirectory
from fairwind.setups import Where

OPTIONS: dict[str, Any] = {"rounds": 10, "seeds": (0, 1), "participation": 0.3, "eval_every": 2}
OPTIONS |= {"compile": "off", "device": "cpu"}
SMALL = "synthetic:clients=12,features=5,classes=3"


def torchrun(*words: object) -> subprocess.Popen[str]:
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *two, *map(str, words)]
    pipe, env = subprocess.PIPE, ENV | {"GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env)


def fairwind(*words: object) -> tuple[int, str, str]:
    process = torchrun("-m", "fairwind", *words)
    stdout, stderr = process.communicate(timeout=120)
    return process.returncode, stdout, stderr


def words(options: dict[str, Any]) -> list[str]:
    """Options as they are typed."""
    typed = []
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        typed += ["--" + name.replace("_", "-"), *map(str, values)]
    return typed


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_row_is_dealt_to_one_rank_and_shares_are_alike(world: int) -> None:
    costs = torch.tensor([3, 50, 2, 40, 1, 1, 45, 5])
    shares = [Ranks(rank, world).share(costs) for rank in range(world)]
    assert sorted(torch.cat(shares).tolist()) == list(range(8))
    assert all(share.tolist() == sorted(share.tolist()) for share in shares)
    each = [int(costs[share].sum()) for share in shares]
    assert max(each) - min(each) <= 50  # by no more than the longest
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_alone_nothing_is_exchanged() -> None:
    parts = torch.ones(2, 3), torch.tensor(4)
    assert [s is part for s, part in zip(ALONE.sum(*parts), parts, strict=True)] == [True, True]
    assert [ALONE.any(wish) for wish in (True, False)] == [True, False]
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(DEVICE != "cpu" and torch.cuda.device_count() < 2, reason="needs a GPU for each rank")
def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    """To rounding in the sums; before the first round, and between the ranks, to the bit."""
    layouts.femnist_parquet(tmp_path / "in")
    process = torchrun(ranked.__file__, tmp_path)
    alone = ranked.outcomes()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    exact: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
    for case, expected in alone.items():
        found = first[case]
        assert found["counts"] == expected["counts"], case
        torch.testing.assert_close(found["first"], expected["first"], **exact)
        for what in ("x", "states", "kept", "own", "left out"):
            torch.testing.assert_close(found[what], second[case][what], **exact)
            torch.testing.assert_close(found[what], expected[what], rtol=1e-10, atol=1e-10)
        assert found["history"] == second[case]["history"]
        assert_same_history(found["history"], expected["history"], 1e-10)
    assert alone["a client left out"]["counts"]["left_out"] == [6] * len(ranked.EVERY)

    leading, following = first["prepared"], second["prepared"]
    assert [line.partition(" from")[0] for line in leading["said"]] == ["preparing femnist"]
    assert following == leading | {"said": []}  # found in the cache


def assert_same_history(
    found: Sequence[Mapping[str, object]], expected: Sequence[Mapping[str, object]], tolerance: float
) -> None:
    for line, other in zip(found, expected, strict=True):
        assert line.keys() == other.keys()
        for name, value in other.items():
            near = pytest.approx(value, tolerance, tolerance) if isinstance(value, float) else value
            assert line[name] == near, (name, line, other)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Simulation, Path]:
    """A comparison that one process finished; and its directory, as it was after round 4."""
    path = tmp_path_factory.mktemp("ranks") / "run"
    settings = {name: value for name, value in OPTIONS.items() if name != "seeds"}
    recipe = Compare(SMALL, seeds=OPTIONS["seeds"], settings=settings).recipe()
    path.mkdir()
    simulation = recipe.build(setups.task(SMALL))
    directory = RunDirectory.create(path, replace(recipe, settings=simulation.settings), Where(), simulation)
    while simulation.round < 4:
        simulation.step()
    directory.save(simulation)
    simulation.run()
    return simulation, path


def assert_found_by_two(path: Path, alone: Simulation) -> None:
    results = json.loads((path / "results.json").read_text())
    assert results["environment"]["ranks"] == 2
    assert results["config"]["device"] == "cpu"
    assert [row["rounds"] for row in results["runs"]] == [10] * 10
    history = [json.loads(line) for line in (path / "history.jsonl").read_text().splitlines()]
    assert_same_history(history, alone.history, 1e-5)
    models = load_file(path / "models.safetensors")
    for r, run in enumerate(alone.runs):
        for name, value in alone.state_dict(r).items():
            found = models[f"{run.label}/{run.seed}/{name}"]
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
    assert (path / "report.html").exists()


@pytest.mark.slow
def test_a_comparison_of_two_ranks_is_that_of_one(alone: tuple[Simulation, Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, stdout, stderr = fairwind("compare", SMALL, *words(OPTIONS), "--out", out)
    assert code == 0, stderr
    assert stdout.count("AdaFedAdam") == stdout.count("report.html") == 1
    assert stderr.count("10 runs × 4 of 12 clients on cpu") == 1
    assert_found_by_two(out, alone[0])


@pytest.mark.slow
def test_two_ranks_go_on_where_one_stopped(alone: tuple[Simulation, Path]) -> None:
    simulation, path = alone
    code, stdout, stderr = fairwind("resume", path)
    assert code == 0, stderr
    assert stdout.count("AdaFedAdam") == 1
    assert stderr.count("going on at round 4 of 10") == 1
    assert stderr.count("ranks was 1, is 2") == 1
    assert_found_by_two(path, simulation)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--algorithms", "fedavgg"], "unknown algorithm 'fedavgg': did you mean 'fedavg'"),
        ([], "thesis is not empty"),  # which rank 0 alone looks at
    ],
)
def test_a_mistake_is_said_once_and_nobody_waits(given: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    code, _, stderr = fairwind("compare", SMALL, *given, "--out", tmp_path / "thesis")
    assert code != 0
    assert stderr.count("fairwind: error:") == 1
    assert message in stderr
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]


@pytest.mark.slow
def test_asked_to_stop_all_ranks_stop_after_the_same_round(tmp_path: Path) -> None:
    out = tmp_path / "run"
    endless = OPTIONS | {"rounds": 100_000, "out": out, "algorithms": "fedavg"}
    process = torchrun("-m", "fairwind", "compare", SMALL, *words(endless))
    wait_for(lambda: (out / "history.jsonl").exists() and lines(out) > 9, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    saved = json.loads(max((out / "checkpoints").glob("*.json")).read_text())
    assert stderr.count(f"stopped after round {saved['round']}; go on with: fairwind resume") == 1
    assert stderr.count("stopping after this round") == 1
    assert "fairwind: error" not in stderr
