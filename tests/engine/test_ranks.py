"""Several processes, started by torchrun, find what one finds."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fairwind as fw
import layouts
import ranked
from command import ENV, lines, wait_for
from conftest import DEVICE
from fairwind import setups
from fairwind.cli.compare import Compare
from fairwind.engine.ranks import ALONE, Ranks
from fairwind.engine.simulation import Simulation
from fairwind.runs import growth
from fairwind.runs.directory import RunDirectory
from fairwind.runs.files import write_atomic
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


GROWN: dict[str, Any] = {
    "rounds": 4,
    "seeds": (0,),
    "algorithms": "fedavg",
    "compile": "off",
    "device": "cpu",
}


@pytest.fixture
def unsettled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a comparison that has grown, killed while its files took their places."""
    path, written, write = tmp_path / "run", 0, write_atomic

    def killed(file: Path, data: bytes) -> Path:
        nonlocal written
        written += 1
        if written == 3:
            raise KeyboardInterrupt
        return write(file, data)

    given: dict[str, Any] = {"compile": "off", "device": "cpu", "out": path, "progress": False}
    fw.compare(fw.setup(SMALL), "fedavg", rounds=2, **given)
    with monkeypatch.context() as patch:
        patch.setattr(growth, "write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            fw.compare(fw.setup(SMALL), "fedavg", rounds=4, **given)
    assert (path / "growing" / "results.json").exists()
    return path


def test_two_ranks_find_a_directory_as_the_first_of_them_settled_it(unsettled: Path) -> None:
    """Else one would go on with what the other has finished, and wait for it."""
    code, _, stderr = fairwind("resume", unsettled)
    assert code == 0, stderr
    assert "finished: nothing is left to train" in stderr
    assert not (unsettled / "growing").exists()
    assert [row["rounds"] for row in json.loads((unsettled / "results.json").read_text())["runs"]] == [4]


@pytest.mark.slow
def test_the_same_command_again_is_of_two_ranks_too(unsettled: Path) -> None:
    """Finished it shows the results, stopped it goes on, with more it grows."""
    command = "compare", SMALL, *words(GROWN), "--out", unsettled
    code, stdout, stderr = fairwind(*command)
    assert (code, stdout.count("report.html")) == (0, 1), stderr
    (unsettled / "results.json").unlink()
    newest = max((unsettled / "checkpoints").glob("*.json"))
    newest.unlink()
    code, stdout, stderr = fairwind(*command)
    assert (code, stdout.count("report.html")) == (0, 1), stderr
    assert stderr.count("going on at round") == 1
    code, _, stderr = fairwind(*command, "--rounds", 6)
    assert code == 0, stderr
    alone = unsettled.with_name("alone")
    found = fw.compare(
        fw.setup(SMALL), "fedavg", rounds=6, compile="off", device="cpu", out=alone, progress=False
    )
    models = load_file(unsettled / "models.safetensors")
    for name, value in found[0].state_dict.items():
        torch.testing.assert_close(models[f"fedavg/0/{name}"], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_settles_leaves_none_waiting(unsettled: Path) -> None:
    script = (
        "import os, signal, sys; from fairwind import cli; from fairwind.runs import session;"
        "kill = lambda _: os.kill(os.getpid(), signal.SIGKILL);"
        "session.settle = kill if os.environ['RANK'] == '0' else session.settle;"
        f"sys.argv = ['fairwind', 'resume', {str(unsettled)!r}]; cli.main()"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=ENV | place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    _, said = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [-signal.SIGKILL, 2]
    assert "another rank has failed" in said
    assert fairwind("resume", unsettled)[0] == 0
