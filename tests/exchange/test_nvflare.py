"""Fairwind's algorithms on NVFLARE: the simulator's model, whatever some clients do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("nvflare")

from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

import fairwind
from exchanged import simulated
from fairwind import InputError, Solver, Task
from fairwind.codecs import codec_of
from fairwind.exchange import UNBOUNDED, Bounds, Privacy, RefusedError
from fairwind.nvflare import AlgorithmAggregator, AlgorithmController, AlgorithmExecutor, allow, make_job
from fairwind.nvflare.models import judged_of
from nvflare_clients import NaNExecutor

pytestmark = [pytest.mark.nvflare, pytest.mark.filterwarnings("default")]

SPEC = "synthetic:clients=4"
SITES = [f"site-{k}" for k in range(1, 5)]


@pytest.fixture(scope="module")
def task() -> Task:
    return fairwind.setup(SPEC)


# ---- no processes: messages handed over ----


class Handed:
    """An aggregator and executors whose shareables are handed over."""

    def __init__(self, task: Task, algorithm: str, **options: Any):
        self.aggregator = AlgorithmAggregator(task, algorithm, **{"bounds": UNBOUNDED} | options)
        self.executors = {site: AlgorithmExecutor(SPEC, k) for k, site in enumerate(SITES)}

    def replies(self, sites: list[str], kind: str = "train", phase: Any = None) -> dict[str, FLModel]:
        found = {}
        for site in sites:
            sent = FLModelUtils.to_shareable(self.aggregator.model(phase, sites))
            context = FLContext()
            context.set_prop(ReservedKey.IDENTITY_NAME, site, sticky=False)
            answer = self.executors[site].execute(kind, sent, context, Signal())
            found[site] = FLModelUtils.from_shareable(answer)
            found[site].meta["client_name"] = site
        return found

    def round(self, sites: list[str] = SITES, change: Any = None) -> FLModel:
        self.aggregator.asked = set(SITES)
        self.aggregator.reset_stats()
        if self.aggregator.server.phase == "gradient":
            for model in self.replies(sites).values():
                self.aggregator.accept_model(model)
            assert self.aggregator.server.turn() == set(sites)
        for site, model in self.replies(sites).items():
            if change is not None and site == SITES[-1]:
                change(model)
            self.aggregator.accept_model(model)
        return self.aggregator.aggregate_model()


@pytest.mark.parametrize("sends", ["report", "sums"])
@pytest.mark.parametrize("spec", ["fedavg", "adafedadam:warmup=2", "qfedavg", "fedprox:mu=0.1", "fedcm"])
def test_the_aggregators_model_is_the_simulators(task: Task, spec: str, sends: str) -> None:
    handed, simulation = Handed(task, spec, seed=3, sends=sends), simulated(task, spec, seed=3)
    for _ in range(3):
        model = handed.round()
        simulation.step()
    torch.testing.assert_close(handed.aggregator.server.x, simulation.x[0], rtol=1e-4, atol=1e-5)
    for name, value in simulation.state_dict(0).items():
        torch.testing.assert_close(torch.tensor(model.params[name]), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", ["int8", "topk:share=0.3"])
def test_in_a_codec_it_is_too(task: Task, codec: str) -> None:
    handed = Handed(task, "fedavg", seed=3, codec=codec)
    simulation = simulated(task, "fedavg", seed=3, codec=codec, engine="loop")
    for _ in range(3):
        handed.round()
        simulation.step()
    torch.testing.assert_close(handed.aggregator.server.x, simulation.x[0], rtol=1e-4, atol=1e-5)
    coded = codec_of(codec).bytes(handed.aggregator.layout.parameters)
    assert handed.aggregator.server.bytes.up == 3 * len(SITES) * coded


def test_clients_that_forget_change_nothing(task: Task) -> None:
    one, other = Handed(task, "adafedadam"), Handed(task, "adafedadam")
    for _ in range(3):
        one.round()
        other.round()
        other.executors = {site: AlgorithmExecutor(SPEC, k) for k, site in enumerate(SITES)}
    assert torch.equal(one.aggregator.server.x, other.aggregator.server.x)


def not_finite(model: FLModel) -> None:
    model.params = {name: array * np.float32(np.nan) for name, array in model.params.items()}


def reshaped(model: FLModel) -> None:
    model.params = {name: array.reshape(-1) for name, array in model.params.items()}


def no_numbers(model: FLModel) -> None:
    model.meta.pop("fairwind-numbers")


def no_arrays(model: FLModel) -> None:
    model.params = dict.fromkeys(model.params, "text")


def negative(model: FLModel) -> None:
    model.meta["fairwind-numbers"] = {**model.meta["fairwind-numbers"], "size": -1.0}


def gave_up(model: FLModel) -> None:
    model.meta["fairwind-failed"] = "no data\nhere"


FAULTS = {
    "NaN": (not_finite, "not finite"),
    "shapes": (reshaped, "is of shape"),
    "no numbers": (no_numbers, "no 'fairwind-numbers' in its meta"),
    "no arrays": (no_arrays, "is no array but a str"),
    "size -1": (negative, "its size is -1"),
    "failed": (gave_up, "it failed: 'no data\\nhere'"),
    "lost": (None, "it sent no update in time"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_client_is_named_counted_and_left_out(
    task: Task, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, why = FAULTS[name]
    faulty, without = Handed(task, "adafedadam"), Handed(task, "adafedadam")
    lines: list[str] = []
    monkeypatch.setattr(faulty.aggregator, "warning", lines.append)
    faulty.round(SITES if change else SITES[:-1], change)
    without.round(SITES[:-1])
    assert torch.equal(faulty.aggregator.server.x, without.aggregator.server.x)
    assert faulty.aggregator.server.counts()["refused"] == 1
    assert faulty.aggregator.server.counts()["used"] == 3
    assert any("client site-4 is left out" in line and why in line for line in lines)


def test_lies_are_capped_by_default(task: Task) -> None:
    def lie(model: FLModel) -> None:
        model.meta["fairwind-numbers"] = {**model.meta["fairwind-numbers"], "loss0": 1e-30, "size": 1e30}

    handed = Handed(task, "adafedadam", bounds=None)
    assert handed.aggregator.server.bounds == Bounds()
    handed.round(change=lie)
    assert handed.aggregator.server.last is not None
    assert set(handed.aggregator.server.last.capped["weight"]) == {"site-4"}


def test_an_executor_that_fails_says_why_in_its_own_log_and_sends_the_type(
    task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    handed = Handed(task, "adafedadam")
    handed.executors["site-1"] = AlgorithmExecutor(SPEC, 99)
    reply = handed.replies(["site-1"])["site-1"]
    assert reply.meta["fairwind-failed"] == "InputError"
    assert "client 99 is not one of the task's 4" in caplog.text


@pytest.mark.parametrize("spec", ["scaffold", "mimelite", "mime", "ditto", "afl", "fedmgda"])
def test_each_type_trains_and_evaluates_as_in_the_simulator(task: Task, spec: str) -> None:
    handed, simulation = Handed(task, spec), simulated(task, spec)
    for _ in range(3):
        handed.round()
        simulation.step()
    torch.testing.assert_close(handed.aggregator.server.x, simulation.x[0], rtol=1e-4, atol=1e-5)
    simulation.evaluate()
    for k, model in enumerate(handed.replies(SITES, "validate", "evaluate").values()):
        judged = judged_of(model)
        both = [judged] if judged.further is None else [judged, judged.further]
        expected = simulation.loss[:, k].tolist()
        assert [each.loss for each in both] == pytest.approx(expected, rel=1e-4)


def test_what_sites_keep_in_a_folder_outlasts_the_job(task: Task, tmp_path: Path) -> None:
    one, other = Handed(task, "scaffold"), Handed(task, "scaffold")
    for _ in range(3):
        other.executors = {
            site: AlgorithmExecutor(SPEC, k, state=str(tmp_path)) for k, site in enumerate(SITES)
        }
        one.round()
        other.round()
    assert torch.equal(one.aggregator.server.x, other.aggregator.server.x)


def spoilt(model: FLModel) -> None:
    model.meta["fairwind-second"] = {
        name: array * np.float32(np.nan) for name, array in model.meta["fairwind-second"].items()
    }


def test_a_spoilt_second_vector_is_named(task: Task) -> None:
    handed = Handed(task, "scaffold")
    handed.round(change=spoilt)
    assert handed.aggregator.server.last is not None
    assert "in its change of memory" in handed.aggregator.server.last.refused["site-4"]


@pytest.mark.parametrize(("spec", "sends"), [("fedavg", "report"), ("fedavg", "sums"), ("mime", "report")])
def test_a_reply_of_an_earlier_round_is_refused(task: Task, spec: str, sends: Any) -> None:
    handed, first = Handed(task, spec, sends=sends), list[FLModel]()
    handed.round(change=first.append)
    handed.aggregator.asked = set(SITES)
    handed.aggregator.reset_stats()
    handed.aggregator.accept_model(first[0])
    why = handed.aggregator.server.current.refused["site-4"]
    assert why.startswith("it answers the training of round 1, and this is the ")


def test_an_evaluation_says_which_it_is(task: Task) -> None:
    handed = Handed(task, "fedavg")
    model = handed.replies(["site-1"], "validate", "evaluate")["site-1"]
    assert judged_of(model).tag == handed.aggregator.server.tag("evaluate")
    model.meta.pop("fairwind-tag")
    with pytest.raises(RefusedError, match="it does not say which request it answers"):
        judged_of(model)


def test_privacy_is_counted_without_any_drawing(task: Task) -> None:
    pytest.importorskip("dp_accounting")
    privacy = Privacy(clip=1.0, weight=20.0, noise=1.0, delta=1e-3)
    handed = Handed(task, "fedavg", bounds=None, privacy=privacy)
    for _ in range(2):
        handed.round()
    assert handed.aggregator.server.accountant is not None
    assert handed.aggregator.server.accountant.record() == [[1, 1, 2]]
    assert handed.aggregator.server.counts()["epsilon"] > 0
    with pytest.raises(InputError, match="leave them out"):
        Handed(task, "fedavg", bounds=Bounds(), privacy=privacy)


def test_a_controller_takes_privacy_as_json_can_say_it() -> None:
    privacy = Privacy(clip=1.0, weight=20.0, noise=1.0, delta=1e-3)
    one = AlgorithmController(SPEC, privacy=privacy)
    assert AlgorithmController(SPEC, privacy=json.loads(json.dumps(one.privacy))).privacy == one.privacy
    with pytest.raises(InputError, match="noise=-1"):
        AlgorithmController(SPEC, privacy={"clip": 1.0, "weight": 1.0, "noise": -1.0, "delta": 0.1})


def test_a_controller_refuses_no_rounds() -> None:
    with pytest.raises(InputError, match="num_rounds"):
        AlgorithmController(SPEC, num_rounds=0)


# ---- NVFLARE's simulator ----


def trained(job: FedJob, folder: Path) -> str:
    """What the server logged."""
    allow(folder / "work", "nvflare_clients.NaNExecutor")
    assert job.simulator_run(str(folder / "work"), log_config="concise") == 0
    return "\n".join(file.read_text() for file in (folder / "work" / "server").rglob("log.txt"))


def job_of(folder: Path, **options: Any) -> FedJob:
    given: dict[str, Any] = {"sites": SITES, "num_rounds": 3, "bounds": UNBOUNDED, "out": str(folder / "out")}
    return make_job(SPEC, **{"algorithm": "adafedadam"} | given | options)


def assert_the_simulators(
    folder: Path, task: Task, solver: Solver | None = None, algorithm: str = "adafedadam"
) -> Any:
    expected = fairwind.simulate(
        task, algorithm, rounds=3, eval_every=1, solver=solver, compile="off", device="cpu", progress=False
    )
    found = fairwind.load(folder / "out")[algorithm]
    assert found.rounds == [0, 1, 2, 3]
    assert set(found.state_dict) == set(expected.state_dict)
    for name, value in expected.state_dict.items():
        torch.testing.assert_close(found.state_dict[name], value, rtol=1e-4, atol=1e-5)
    return found, expected


def test_in_nvflares_simulator_the_model_is_ours(task: Task, tmp_path: Path) -> None:
    trained(job_of(tmp_path), tmp_path)
    found, expected = assert_the_simulators(tmp_path, task)
    assert found.metrics["worst30"] == pytest.approx(expected.metrics["worst30"], rel=1e-4)
    assert found.metrics["loss_avg"] == pytest.approx(expected.metrics["loss_avg"], rel=1e-4)
    assert fairwind.load(tmp_path / "out").clients == SITES
    assert "AdaFedAdam" in (tmp_path / "out" / "report.html").read_text()


def test_the_last_model_is_evaluated_however_rarely_others_are(task: Task, tmp_path: Path) -> None:
    trained(job_of(tmp_path, eval_every=2), tmp_path)
    expected = fairwind.simulate(
        task, "adafedadam", rounds=3, eval_every=2, compile="off", device="cpu", progress=False
    )
    found = fairwind.load(tmp_path / "out")["adafedadam"]
    assert found.rounds == [0, 2, 3]
    assert found.metrics["loss_avg"] == pytest.approx(expected.metrics["loss_avg"], rel=1e-4)


@pytest.mark.parametrize("spec", ["mime", "scaffold"])
def test_so_it_is_of_algorithms_with_phases_or_memory(task: Task, tmp_path: Path, spec: str) -> None:
    trained(job_of(tmp_path, algorithm=spec), tmp_path)
    assert_the_simulators(tmp_path, task, algorithm=spec)


def test_stopped_it_goes_on(task: Task, tmp_path: Path) -> None:
    trained(job_of(tmp_path, num_rounds=2), tmp_path)
    assert "goes on after round 2" in trained(job_of(tmp_path), tmp_path)
    assert_the_simulators(tmp_path, task)


def test_a_client_that_sends_nan_is_named_counted_and_left_out(task: Task, tmp_path: Path) -> None:
    job = job_of(tmp_path, sites=SITES[:-1])
    job.to(NaNExecutor(SPEC, 3), SITES[-1])
    log = trained(job, tmp_path)
    for number in (1, 2, 3):
        assert f"round {number}: client site-4 is left out: 'weight' has numbers that are not finite" in log
    federation = task.federation
    others = {name: getattr(federation, name)[:3] for name in ("start", "train", "test", "names")}
    assert_the_simulators(tmp_path, replace(task, federation=replace(federation, **others)))
    history = fairwind.load(tmp_path / "out")["adafedadam"].history
    assert [line.get("refused") for line in history[1:]] == [1, 1, 1]
    assert [line.get("used") for line in history[1:]] == [3, 3, 3]


def test_a_training_without_any_reply_fails_and_leaves_the_model(tmp_path: Path) -> None:
    job = job_of(tmp_path, sites=[], clients=4)
    for site in SITES:
        job.to(AlgorithmExecutor(SPEC, 99), site)  # there are no such clients
    allow(tmp_path / "work")
    assert job.simulator_run(str(tmp_path / "work"), log_config="concise") != 0
    log = "\n".join(file.read_text() for file in (tmp_path / "work" / "server").rglob("log.txt"))
    assert "training stops in round 1, which was tried 3 times: usable replies: 0" in log
    assert "it failed: 'InputError'" in log
    assert "client 99" not in log
    assert (tmp_path / "out" / "models.safetensors").exists()
    assert not (tmp_path / "out" / "results.json").exists()


def test_privacy_in_nvflares_simulator_is_in_the_results(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    privacy = Privacy(clip=1.0, weight=20.0, noise=1.0, delta=1e-3)
    trained(job_of(tmp_path, algorithm="fedavg", bounds=None, privacy=privacy), tmp_path)
    found = json.loads((tmp_path / "out" / "results.json").read_text())["runs"][0]["privacy"]
    assert found["releases"] == [[1, 1, 3]]
    assert found["epsilon"] > 0


def test_a_loop_of_ones_own_sends_what_report_update_gives(task: Task, tmp_path: Path) -> None:
    job = FedJob("own")
    job.set_app_packages(["fairwind"])
    out = str(tmp_path / "out")
    job.to_server(AlgorithmController(SPEC, "adafedadam", 3, bounds=UNBOUNDED, out=out))
    script = str(Path(__file__).parents[1] / "nvflare_script.py")
    for site in SITES:
        job.to(ScriptRunner(script, SPEC, framework=FrameworkType.NUMPY), site)
    trained(job, tmp_path)
    assert_the_simulators(tmp_path, task, Solver(lr=0.1, batch_size=100_000))
