"""A real federation: SuperLink and SuperNodes as processes on this machine, with TLS and authentication."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fairwind
from fairwind import Comparison

pytest.importorskip("flwr")

from exchanged import Exchange
from flower_processes import EXAMPLE, Deployment, wait_for

pytestmark = pytest.mark.flower

NODES, SLOW = 4, 600


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("deployment"), NODES)
    try:
        made.start_superlink()
        for number in range(NODES):
            made.register(number)
            made.start_node(number)
        online(made)
        yield made
    finally:
        made.stop()
        assert made.processes() == []


def online(deployment: Deployment) -> None:
    """Waits until all nodes are there."""
    there = lambda: deployment.flwr("supernode", "list", "here").count("online") == NODES  # noqa: E731
    wait_for(there, 180, "the nodes' arrival")


def finished(out: Path, seconds: float = SLOW) -> Comparison:
    wait_for((out / "report.html").exists, seconds, f"the end of training in {out}")
    return fairwind.load(out)


def there(out: Path) -> int:
    """The newest round that is saved."""
    return max([int(path.stem) for path in (out / "checkpoints").glob("[0-9]*.json")], default=0)


def history(out: Path) -> dict[int, dict[str, Any]]:
    """Lines by round."""
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    return {line["round"]: line for line in lines}


def assert_simulated(found: Comparison, spec: str, rounds: int) -> None:
    task = fairwind.setup(f"synthetic:clients={NODES}")
    expected = fairwind.simulate(
        task, spec, rounds=rounds, progress=False, compile="off", device="cpu", workers=1
    )
    for name, value in expected.state_dict.items():
        torch.testing.assert_close(found[0].state_dict[name], value, rtol=1e-4, atol=1e-6)


def test_the_model_is_the_simulators(deployment: Deployment) -> None:
    out = deployment.folder / "plain"
    deployment.run(algorithm="adafedadam", alpha=2.0, num_server_rounds=3, share=1.0, out=str(out))
    found = finished(out)
    assert found.clients == sorted(deployment.node_ids.values())
    assert found[0].rounds == [0, 1, 2, 3]
    assert_simulated(found, "adafedadam:alpha=2", 3)


TYPES = ["scaffold", "mime", "ditto", "afl", "fedmgda"]


@pytest.mark.parametrize("spec", TYPES)
def test_one_algorithm_of_each_type_trains_the_simulators_model(deployment: Deployment, spec: str) -> None:
    out = deployment.folder / spec
    deployment.run(algorithm=spec, num_server_rounds=2, eval_every=2, share=1.0, out=str(out))
    assert_simulated(finished(out), spec, 2)


OWN_PARTS = """
from torch import nn

import fairwind


def network():
    return nn.Sequential(nn.Linear(60, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


data = fairwind.setup("synthetic:clients=4").federation
task = fairwind.Task(network, data, solver=fairwind.Solver(lr=0.05), {settings})
"""


@pytest.mark.parametrize("settings", ["batch_norm='local'", "personal='3.*', batch_norm='shared'"])
def test_what_stays_with_the_nodes_gives_the_simulators_models(deployment: Deployment, settings: str) -> None:
    name, source = settings.partition("=")[0], OWN_PARTS.format(settings=settings)
    made: dict[str, Any] = {}
    app, out = deployment.folder / f"{name}-app", deployment.folder / name
    shutil.copytree(EXAMPLE, app, ignore=shutil.ignore_patterns("secrets", "runs", "__pycache__"))
    (app / "fairwind_app" / "task.py").write_text(source)
    exec(source, made)
    deployment.run(app, algorithm="fedavg", num_server_rounds=3, share=1.0, eval_every=3, out=str(out))
    found = finished(out)
    expected = fairwind.compare(
        made["task"], "fedavg", rounds=3, progress=False, compile="off", device="cpu", workers=1
    )
    shared = set(expected[0].state_dict) - set(expected.results["sharing"]["personal"])
    assert shared
    for each in shared:
        values = found[0].state_dict[each], expected[0].state_dict[each]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-6)
    scores = (each.score.double().sort().values for each in (found[0], expected[0]))
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-4)


def test_a_run_config_switches_secure_aggregation_on(deployment: Deployment) -> None:
    out = deployment.folder / "secure"
    said: dict[str, Any] = {"secure_aggregation": True, "share": 1.0, "eval_every": 2, "out": str(out)}
    run = deployment.run(algorithm="fedavg", num_server_rounds=2, **said)
    found = finished(out)
    assert found.results["config"]["sends"] == "sums"  # type: ignore[typeddict-item]
    made = [json.loads(line) for line in (out / "releases.jsonl").read_text().splitlines()]
    assert [(each["what"], each["round"]) for each in made] == [
        ("magnitudes", 0),
        ("secure sum", 0),
        ("secure sum", 1),
    ]
    assert "Secure aggregation completed" in deployment.flwr("log", run, "here", "--show")
    task = fairwind.setup(f"synthetic:clients={NODES}")
    expected = fairwind.simulate(
        task, "fedavg", rounds=2, progress=False, compile="off", device="cpu", workers=1
    )
    for name, value in expected.state_dict.items():
        torch.testing.assert_close(found[0].state_dict[name], value, rtol=1e-3, atol=1e-4)


BROKEN_CLIENT = """
from fairwind.flower import client_app


def task(context):
    raise OSError("no data here")


app = client_app(task)
"""


def test_a_training_without_any_reply_fails_and_leaves_the_model(deployment: Deployment) -> None:
    app, out = deployment.folder / "broken-app", deployment.folder / "broken"
    shutil.copytree(EXAMPLE, app, ignore=shutil.ignore_patterns("secrets", "runs", "__pycache__"))
    (app / "fairwind_app" / "client.py").write_text(BROKEN_CLIENT)
    run = deployment.run(app, num_server_rounds=2, max_stalled=2, timeout=60.0, out=str(out))

    def ended() -> str:
        said = json.loads(deployment.flwr("list", "here", "--run-id", run, "--format", "json"))
        status = str(said["runs"][0]["status"])
        return status if "finished" in status else ""

    assert wait_for(ended, SLOW, "the end of a run without replies", pause=3) == "finished:failed"
    log = deployment.flwr("log", run, "here", "--show")
    assert "training stops in round 1, which was tried 2 times" in log
    assert "it failed: OSError" in log
    assert "no data here" not in log
    assert "no data here" in (deployment.folder / "node-0.log").read_text()
    assert (out / "models.safetensors").exists()
    assert not (out / "results.json").exists()


def test_a_node_that_is_not_registered_is_refused(deployment: Deployment) -> None:
    stranger = deployment.start_node(NODES)
    assert stranger.wait(60) != 0
    assert "Failed to activate SuperNode" in (deployment.folder / f"node-{NODES}.log").read_text()
    assert deployment.flwr("supernode", "list", "here").count("online") == NODES


def test_a_server_app_that_is_killed_goes_on_where_it_was(deployment: Deployment) -> None:
    out = deployment.folder / "killed"
    said: dict[str, Any] = {
        "algorithm": "adafedadam",
        "num_server_rounds": 3,
        "share": 1.0,
        "eval_every": 3,
        "out": str(out),
    }
    deployment.run(**said)
    wait_for(lambda: list((out / "checkpoints").glob("*1.json")), SLOW, "the first round")
    time.sleep(random.uniform(0, 5))
    assert deployment.kill("flwr-serverapp") >= 1
    assert not (out / "results.json").exists()
    time.sleep(5)
    deployment.run(**said)
    assert_simulated(finished(out), "adafedadam", 3)


@pytest.mark.parametrize("spec", ["fedavg", *TYPES])
def test_a_node_killed_in_a_round_is_named_and_takes_part_again_once_it_is_back(
    deployment: Deployment, spec: str
) -> None:
    out = deployment.folder / f"faulty-{spec}"
    online(deployment)
    run = deployment.run(
        algorithm=spec, num_server_rounds=4, min_nodes=2, eval_every=1, timeout=60.0, out=str(out)
    )
    wait_for(lambda: there(out) >= 1, SLOW, "the first round")
    wait_for(lambda: deployment.processes("flwr-clientapp"), SLOW, "the second round's training")
    deployment.kill_node(2)
    wait_for(lambda: there(out) >= 2, SLOW, "the second round")
    deployment.start_node(2)
    found = finished(out)
    lines = history(out)
    assert (lines[1]["used"], lines[1]["refused"]) == (NODES, 0)
    assert (lines[2]["used"], lines[2]["refused"]) == (NODES - 1, 1)
    assert (lines[4]["used"], lines[4]["refused"]) == (NODES, 0)
    assert found[0].left_out >= 1
    assert all(torch.isfinite(value).all() for value in found[0].state_dict.values())
    assert f"{deployment.node_ids[2]} is left out" in deployment.flwr("log", run, "here", "--show")


SLEEPER = 2
SLOW_CLIENT = f"""
import time

from fairwind.flower import client_app
from fairwind_app.task import task


def sleeps(message, context, call_next):
    late = message.metadata.message_type == "train" and message.content["config"]["server-round"] == 1
    if late and context.node_config["partition-id"] == {SLEEPER}:
        time.sleep(context.run_config["timeout"] + 15)
    return call_next(message, context)


app = client_app(task, mods=[sleeps])
"""


def test_a_node_that_is_too_slow_misses_its_round_and_no_other(deployment: Deployment) -> None:
    app, out = deployment.folder / "slow-app", deployment.folder / "slow"
    shutil.copytree(EXAMPLE, app, ignore=shutil.ignore_patterns("secrets", "runs", "__pycache__"))
    (app / "fairwind_app" / "client.py").write_text(SLOW_CLIENT)
    run = deployment.run(
        app, algorithm="adafedadam", num_server_rounds=3, share=1.0, timeout=60.0, out=str(out)
    )
    found = finished(out)
    lines = history(out)
    assert {number: (line["used"], line["refused"]) for number, line in lines.items() if number} == {
        1: (NODES - 1, 1),
        2: (NODES, 0),
        3: (NODES, 0),
    }
    assert found[0].left_out == 1
    named = f"round 1: node {deployment.node_ids[SLEEPER]} is left out: it did not reply in time"
    assert named in deployment.flwr("log", run, "here", "--show")
    # Its reply came while the first round was evaluated. The model is that of a round without it, then all.
    exchange = Exchange(fairwind.setup(f"synthetic:clients={NODES}"), "adafedadam")
    exchange.reply(SLEEPER)  # it trained, and remembers its first loss
    exchange.round([k for k in range(NODES) if k != SLEEPER])
    exchange.round()
    exchange.round()
    for name, value in exchange.server.weights().items():
        torch.testing.assert_close(found[0].state_dict[name], torch.tensor(value), rtol=1e-4, atol=1e-6)


def test_a_superlink_that_is_killed_is_started_again_and_training_goes_on(deployment: Deployment) -> None:
    out = deployment.folder / "restarted"
    said: dict[str, Any] = {
        "algorithm": "adafedadam",
        "num_server_rounds": 3,
        "share": 1.0,
        "eval_every": 3,
        "out": str(out),
    }
    online(deployment)  # with the node that came back
    deployment.run(**said)
    wait_for(lambda: list((out / "checkpoints").glob("*1.json")), SLOW, "the first round")
    deployment.kill_superlink()
    deployment.start_superlink()
    online(deployment)
    deployment.run(**said)
    assert_simulated(finished(out), "adafedadam", 3)


def test_a_server_killed_at_ten_random_moments_loses_no_round(tmp_path: Path) -> None:
    """Without a network, so that moments are close together: at worst the round in flight is done again."""
    rounds, out, straight = 400, tmp_path / "killed", tmp_path / "straight"

    def start(where: Path) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            str(Path(__file__).parents[1] / "flower_killed.py"),
            str(rounds),
            str(where),
        ]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start(straight).wait() == 0
    draw, reached = random.Random(0), 0
    for _ in range(10):
        process, before = start(out), reached
        further = lambda: there(out) > before or process.poll() is not None  # noqa: B023, E731
        wait_for(further, 120, "a further round", pause=0.02)
        time.sleep(draw.uniform(0, 0.2))
        assert process.poll() is None, "it ended before it was killed ten times"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        reached = there(out)
        assert reached > before
    assert start(out).wait() == 0
    one, other = load_file(out / "models.safetensors"), load_file(straight / "models.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(0, rounds + 1, 5))
