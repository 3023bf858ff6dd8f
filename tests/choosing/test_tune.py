"""The search: settings leave a stack unnoticed by others, kills cost nothing, test samples stay unread."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fairwind as fw
from conftest import make_federation, make_model
from fairwind import InputError, algorithms
from fairwind.algorithms.ranges import ranges
from fairwind.choosing import Aim, Trial, Tuned, search, tune, tuned
from fairwind.engine.executor import Run
from fairwind.engine.settings import Settings
from fairwind.engine.simulation import Simulation
from fairwind.report.search import Page, Point, plane
from fairwind.runs.files import write_json
from fairwind.runs.spec import parameters
from narrowed import config_of

SIZES = [30, 12, 60, 25, 18, 40, 90, 15]


def task(**changes: Any) -> fw.Task:
    federation = make_federation(SIZES).with_validation(0.2)
    given: dict[str, Any] = {"rounds": 36, "solver": fw.Solver(lr=0.1, batch_size=8)} | changes
    return fw.Task(make_model, federation, **given)


def tuned_quietly(asked: fw.Task, **options: Any) -> Tuned:
    given = {"algorithms": ["fedavg", "adafedadam", "afl", "ditto"], "trials": 12, "compile": "off"}
    return tune(asked, **{**given, "progress": False, **options})


@pytest.fixture(scope="module")
def result() -> Tuned:
    return tuned_quietly(task())


def test_every_default_is_where_it_is_searched() -> None:
    """So that a search begins with the defaults, and cannot choose worse on the validation samples."""
    for name, builder in algorithms.REGISTRY.items():
        known = parameters(builder)
        for key, where in ranges(builder).items():
            assert where.low <= known[key][1] <= where.high, f"{name}:{key}"
            assert where.low > 0 or not where.log
            for end in (where.low, where.high):
                algorithms.build(f"{name}:{key}={end:g}")


def test_the_choice_is_the_best_of_those_trained_to_the_end(result: Tuned) -> None:
    finished = [trial for trial in result.trials if trial.rounds == 36]
    assert 1 <= len(finished) < len(result.trials) == 12
    assert result.choice.order == max(trial.order for trial in finished)
    assert result.spec in (result.choice.spec, result.choice.spec.partition(":")[0])
    assert result.cost["rounds"] == sum(trial.rounds for trial in result.trials) < 12 * 36
    assert config_of(result.compared.results["config"])["seeds"] == (1, 2, 3)
    labels = [row["algorithm"] for row in result.compared.results["summary"]]
    assert {result.spec, "fedavg", "adafedadam", "afl", "ditto"} <= set(labels)
    assert result.spec in repr(result)


def test_defaults_are_tried_first(result: Tuned) -> None:
    """The first four are the four algorithms with their default parameters."""
    for trial, name in zip(result.trials, ("fedavg", "adafedadam", "afl", "ditto"), strict=False):
        default, tried = algorithms.build(name), algorithms.build(trial.spec)
        assert trial.spec.startswith(name)
        known = {key: value for key, (_, value) in parameters(algorithms.REGISTRY[name]).items()}
        given = dict(item.split("=") for item in trial.spec.partition(":")[2].split(","))
        assert all(float(value) == known[key] for key, value in given.items())
        assert type(default) is type(tried)


@pytest.mark.parametrize("aim", ["worst30", "average", "within=60"])
def test_no_default_is_better_than_the_choice_on_the_validation_samples(aim: str) -> None:
    """Every default is trained to the end, also where it is behind at each of the rungs."""
    names = ["fedavg", "adafedadam", "fedadam", "qfedavg:q=2"]
    found = tuned_quietly(task(rounds=90), algorithms=names, trials=16, aim=aim, seeds=[1])
    defaults, others = found.trials[:4], found.trials[4:]
    assert [trial.spec.partition(":")[0] for trial in defaults] == [n.partition(":")[0] for n in names]
    assert {trial.rounds for trial in defaults} == {90}
    assert found.choice.order >= max(trial.order for trial in defaults)
    assert sorted(trial.rounds for trial in others) == [10] * 8 + [30] * 2 + [90] * 2


def test_a_trial_is_what_training_alone_gives(result: Tuned) -> None:
    """On the validation samples, whatever was stacked beside it and has left since."""
    asked = task()
    choosing = replace(asked, federation=asked.federation.for_choosing())
    for trial in (result.choice, *result.trials[1:4]):
        compared = fw.compare(choosing, trial.spec, rounds=trial.rounds, compile="off", progress=False)
        personal = trial.spec.startswith("ditto")  # judged by the models that clients use
        alone = compared[f"{trial.spec} (personal)" if personal else trial.spec]
        assert alone.metrics["avg"] == pytest.approx(trial.average, abs=1e-9)
        assert alone.metrics["worst30"] == pytest.approx(trial.worst30, abs=1e-9)


def poisoned(federation: fw.Federation) -> fw.Federation:
    """The same federation with test samples that nobody can read without notice: infinite inputs."""
    start, size = federation.part("test")
    assert isinstance(federation.inputs, torch.Tensor)
    assert isinstance(federation.targets, torch.Tensor)
    inputs, targets = federation.inputs.clone(), federation.targets.clone()
    for at, n in zip(start.tolist(), size.tolist(), strict=True):
        inputs[at : at + n], targets[at : at + n] = torch.inf, 0
    return replace(federation, inputs=inputs, targets=targets)


def test_the_test_part_is_not_read_before_the_end(result: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = task()
    bad = replace(asked, federation=poisoned(asked.federation))
    before: list[Any] = []

    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt  # the search is over, and nothing was chosen by the test part

    def keep(found: Any, say: Any) -> Any:
        before.append(search.search(found, say))
        return before[0]

    monkeypatch.setattr(tuned, "compare", stop)
    monkeypatch.setattr(tuned, "search", keep)
    with pytest.raises(KeyboardInterrupt):
        tuned_quietly(bad)
    assert before[0][0] == result.trials


class KilledError(Exception):
    """In place of a kill."""


@pytest.mark.parametrize("moment", [0, 2, 5, *(pytest.param(k, marks=pytest.mark.crash) for k in (1, 3, 4))])
def test_a_search_that_was_killed_goes_on_to_the_same_trials(
    moment: int, result: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when it says something for the n-th time. The second batch of six learns from the first."""
    monkeypatch.setattr(search, "BATCH", 6)
    whole = tuned_quietly(task(), out=tmp_path / "whole")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if len(said) == moment + 1:
            raise KilledError

    monkeypatch.setattr(tuned, "_quiet", say)
    with pytest.raises(KilledError):
        tuned_quietly(task(), out=tmp_path / "killed")
    again = tuned_quietly(task(), out=tmp_path / "killed")
    assert again.trials == whole.trials
    assert again.spec == whole.spec
    assert {**again.cost, "seconds": 0.0} == {**whole.cost, "seconds": 0.0}
    for one, other in zip(again.compared.runs, whole.compared.runs, strict=True):
        assert torch.equal(one.score, other.score)


def test_a_finished_search_is_read_back_and_another_is_refused(tmp_path: Path) -> None:
    first = tuned_quietly(task(), out=tmp_path / "a", trials=5)
    again = tuned_quietly(task(), out=tmp_path / "a", trials=5)
    assert again.trials == first.trials
    with pytest.raises(InputError, match="differs in its trials"):
        tuned_quietly(task(), out=tmp_path / "a", trials=6)
    with pytest.raises(InputError, match="differs in its data"):
        tuned_quietly(
            replace(task(), federation=make_federation(SIZES, seed=1).with_validation(0.2)),
            out=tmp_path / "a",
            trials=5,
        )


def test_local_rates_are_searched_too() -> None:
    found = tuned_quietly(task(), algorithms="fedavg", local_rates=[0.01, 0.3], trials=9)
    assert {trial.lr for trial in found.trials} == {0.1, 0.01, 0.3}
    assert found.solver.lr == found.choice.lr


def test_a_federation_without_validation_samples_gets_some() -> None:
    asked = replace(task(), federation=make_federation(SIZES))
    found = tuned_quietly(asked, algorithms="fedavg", trials=4)
    assert found.compared.results["federation"]["validation_samples"] > 0


def test_parameters_that_are_given_stay() -> None:
    found = tuned_quietly(task(), algorithms=["adafedadam:alpha=2"], trials=6)
    assert all("alpha=2" in trial.spec.split(":")[1].split(",") for trial in found.trials)
    assert len({trial.spec for trial in found.trials}) > 1


@pytest.mark.parametrize(
    ("text", "worse", "better", "sign"),
    [
        ("average", (70.0, 60.0), (71.0, 10.0), 1),
        ("worst30", (90.0, 60.0), (71.0, 61.0), 1),
        ("average", (0.5, 0.9), (0.4, 2.0), -1),  # an error
        ("worst30", (0.5, 0.9), (0.6, 0.8), -1),
        ("worst30", (20.0, 0.0), (30.0, 0.0), 1),  # the average decides among equal ones
        ("worst30", (0.6, 0.9), (0.5, 0.9), -1),
        ("within=5", (90.0, 84.0), (71.0, 66.0), 1),  # fair enough beats a better average
        ("within=5", (70.0, 66.0), (71.0, 66.0), 1),
        ("within=5", (90.0, 70.0), (60.0, 50.0), 1),  # where none is, the fairer one
    ],
)
def test_aims(text: str, worse: tuple[float, float], better: tuple[float, float], sign: int) -> None:
    aim = Aim.read(text)
    trials = [
        Trial("fedavg", 0.1, 50, average, worst30, *aim.judge(average, worst30, sign))
        for average, worst30 in ((None, None), worse, better)
    ]
    assert sorted(trials, key=lambda trial: trial.order) == trials
    assert sorted(trials, key=lambda trial: trial.told) == trials


def test_baselines_stand_beside_the_choice_in_the_end(tmp_path: Path) -> None:
    """They are not searched; neither are fine-tuned models, and new clients are left to the end."""
    asked = task()
    asked = replace(asked, federation=asked.federation.with_new_clients(["0", "3"]))
    names = ["local", "fedavg", "pooled"]
    found = tuned_quietly(asked, algorithms=names, trials=3, rounds=6, finetune=1, out=tmp_path / "found")
    assert {trial.spec.partition(":")[0] for trial in found.trials} == {"fedavg"}
    labels = [row["algorithm"] for row in found.compared.results["summary"]]
    assert {"local", "pooled", f"{found.spec} (fine-tuned)"} < set(labels)
    page = found.page().read_text()
    assert "Who gains from joining?" in page
    assert "2 clients took no part in training: 0, 3." in page
    plain = tuned_quietly(asked, algorithms="fedavg", trials=3, rounds=6)
    assert [trial.order for trial in plain.trials] == [trial.order for trial in found.trials]


def test_the_page_rings_the_choice_also_where_it_is_a_default(small: tuple[Tuned, Path]) -> None:
    """Which is called by its name alone, and was tried with its parameters."""
    found = small[0]
    points = [Point(*trial) for trial in found.trials]
    facts: dict[str, Any] = {
        "task": "",
        "aim": "",
        "runs": 1.0,
        "sample_gradients": 1.0,
        "ahead": {},
        "facts": {},
    }
    for place, name in enumerate(("fedavg", "adafedadam")):
        page = Page(choice=name, chosen=place, points=points, results=found.compared.results, **facts)
        drawn = plane(page).to_dict()
        (ringed,) = drawn["datasets"][drawn["layer"][1]["data"]["name"]]
        assert (ringed["average"], ringed["rounds"]) == (points[place].average, 36)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"aim": "best"}, "none of average, worst30 and within=POINTS"),
        ({"aim": "within=-1"}, "within"),
        ({"trials": 0}, "trials"),
        ({"trials": 3}, "too few for the defaults of 4 algorithms"),
        ({"algorithms": "fedavgg"}, "did you mean"),
        ({"seeds": [0, 1]}, "seed 0 is the search's"),
        ({"local_rates": [-1.0]}, "local_rates"),
        ({"algorithms": ["local", "pooled"]}, "nothing to search"),
        ({"algorithms": fw.algorithms.fedavg()}, "algorithms by name"),
        ({"algorithms": []}, "nothing to search"),
        ({"algorithms": "fedavg:foo=1"}, "parameter of fedavg"),
        ({"seeds": []}, "no seeds"),
        ({"seeds": (1, 1)}, "given twice"),
        ({"seeds": 3}, "is one number"),
    ],
)
def test_mistakes_are_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        tuned_quietly(task(), **options)


def test_a_gap_that_no_setting_keeps_is_never_said_to_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"no setting is as fair as asked: .* is \d.* points off"):
        fw.tune(task(), "fedavg", aim="within=0.0001", trials=4, rounds=6, progress=True)
    assert "within 0.0001 points" not in capsys.readouterr().err


def test_a_diverged_setting_is_below_every_other_whatever_the_score() -> None:
    aim = Aim.read("worst30")
    assert aim.judge(1e10, 1e10, -1) > aim.judge(None, None, -1)
    assert Aim.read("within=1e9").judge(1e10, 1.3e10, -1) < Aim.read("within=1e9").judge(1e12, 1e12, -1)


def test_a_kill_between_checkpoints_and_their_list_mixes_no_settings(
    result: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time that rungs are written: the checkpoints are of fewer settings than the list."""
    asked, options = replace(task(), rounds=90), {"algorithms": ["fedavg", "fedadam"], "trials": 8}
    whole = tuned_quietly(asked, out=tmp_path / "whole", **options)
    times = 0
    write = write_json

    def killed(path: Path, content: Any) -> Path:
        nonlocal times
        times += path.name == search.RUNGS
        if times == 2 and path.name == search.RUNGS:
            raise KilledError
        return write(path, content)

    monkeypatch.setattr("fairwind.choosing.search.write_json", killed)
    with pytest.raises(KilledError):
        tuned_quietly(asked, out=tmp_path / "killed", **options)
    monkeypatch.setattr("fairwind.choosing.search.write_json", write)
    assert tuned_quietly(asked, out=tmp_path / "killed", **options).trials == whole.trials


def another_number(content: Any) -> None:
    """The best trial becomes the worst: a search that believes it chooses another."""
    trials = content.get("trials") or content["results"]
    best = max(trials, key=lambda trial: trial[5:])
    best[6] = -1000.0


FALSIFIED: dict[str, Callable[[Any], object]] = {
    "another number": another_number,
    "null": lambda content: content.update(trials=None, results=None),
    "a missing field": lambda content: (content.pop("cost", 0), content.pop("results", 0)),
    "of an earlier version": lambda content: content.pop("sha256"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tuned, Path]:
    """A finished search, and its directory."""
    path = tmp_path_factory.mktemp("search") / "a"
    return tuned_quietly(task(), out=path, trials=6, algorithms=["fedavg", "adafedadam"], seeds=[1]), path


@pytest.mark.parametrize("name", ["batch-1.json", "batch-1/rungs.json", "search.json"])
@pytest.mark.parametrize("damage", [*FALSIFIED, "cut"])
def test_damaged_files_are_made_again_or_named(
    damage: str, name: str, small: tuple[Tuned, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, kept = small
    out = Path(shutil.copytree(kept, tmp_path / "a"))
    for later in {"batch-1.json": ["search.json"], "search.json": []}.get(
        name, ["search.json", "batch-1.json"]
    ):  # as before the search was finished
        (out / later).unlink()
    file = out / name
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-20])
    else:
        content = json.loads(file.read_bytes())
        FALSIFIED[damage](content)
        file.write_text(json.dumps(content))
    again: dict[str, Any] = {"out": out, "trials": 6, "algorithms": ["fedavg", "adafedadam"], "seeds": [1]}
    if name == "search.json":
        with pytest.raises(InputError, match=r"search\.json cannot be read .*; delete it, and the same call"):
            tuned_quietly(task(), **again)
        file.unlink()
        assert tuned_quietly(task(), **again).trials == first.trials
        return
    found = tuned_quietly(task(), **again, progress=True)
    assert found.trials == first.trials
    assert found.spec == first.spec
    assert f"{file.name} is damaged" in capsys.readouterr().err


def test_batches_of_another_search_are_not_read(small: tuple[Tuned, Path], tmp_path: Path) -> None:
    """The settings are the same, the data are not: what was found on other samples counts nothing."""
    out = Path(shutil.copytree(small[1], tmp_path / "a"))
    shutil.rmtree(out / "test")
    (out / "search.json").unlink()
    other = replace(task(), federation=make_federation(SIZES, seed=1).with_validation(0.2))
    options: dict[str, Any] = {"trials": 6, "algorithms": ["fedavg", "adafedadam"], "seeds": [1]}
    assert tuned_quietly(other, out=out, **options).trials == tuned_quietly(other, **options).trials


def test_a_search_with_other_settings_or_another_loss_is_another(tmp_path: Path) -> None:
    tuned_quietly(task(), out=tmp_path / "a", trials=4)
    with pytest.raises(InputError, match="differs in its setting 'participation'"):
        tuned_quietly(task(), out=tmp_path / "a", trials=4, participation=0.5)
    other = replace(task(), loss=torch.nn.CrossEntropyLoss(label_smoothing=0.3))
    with pytest.raises(InputError, match="differs in its loss or score"):
        tuned_quietly(other, out=tmp_path / "a", trials=4)


def test_a_search_with_a_model_that_computes_something_else_is_another(tmp_path: Path) -> None:
    tuned_quietly(task(), out=tmp_path / "a", trials=4)
    made: Any = task().model

    def other() -> torch.nn.Module:
        found: torch.nn.Module = made()
        found.register_forward_hook(lambda module, args, output: 2 * output)
        return found

    with pytest.raises(InputError, match="differs in its model"):
        tuned_quietly(replace(task(), model=other), out=tmp_path / "a", trials=4)


def test_a_search_of_an_earlier_version_is_refused_with_the_remedy(tmp_path: Path) -> None:
    tuned_quietly(task(), out=tmp_path / "a", trials=4)
    file = tmp_path / "a" / "search.json"
    content = json.loads(file.read_text())
    del content["recipe"]
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"of an earlier version of Fairwind.*give another out"):
        tuned_quietly(task(), out=tmp_path / "a", trials=4)


def test_small_clients_are_not_overlooked_without_a_word() -> None:
    small = replace(task(), federation=make_federation([5] * 9 + [30]))
    with pytest.raises(InputError, match="9 of 10 clients have no validation samples"):
        tuned_quietly(small)
    with pytest.raises(InputError, match="too small for validation samples"):
        tuned_quietly(replace(task(), federation=make_federation([5] * 9)))


TYPES = ("fedavg", "adafedadam", "fedprox", "scaffold", "feddyn", "mime", "ditto", "afl", "fedmgda", "aaggff")


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_runs_that_stay_do_not_notice_those_that_leave(engine: Any) -> None:
    """Every type of algorithm: states, memories, personal and averaged models go with their runs."""
    settings = Settings(rounds=6, solver=fw.Solver(lr=0.1), engine=engine, compile="off", eval_every=2)

    def made(labels: tuple[str, ...]) -> Simulation:
        runs = [Run(label, algorithms.build(label), 0) for label in labels]
        return Simulation(make_model, make_federation(SIZES), runs, settings)

    whole, kept = made(TYPES), [1, 3, 4, 6, 7, 9]
    whole.run()
    first = made(TYPES)
    for _ in range(3):
        first.step()
    smaller = made(tuple(TYPES[r] for r in kept))
    smaller.restore(first.checkpoint_of(kept))
    smaller.run()
    assert torch.allclose(smaller.x, whole.x[kept], rtol=0, atol=1e-12)
    views = [i for i, view in enumerate(whole.views) if view.run in kept]
    assert [view.label for view in smaller.views] == [whole.views[i].label for i in views]
    assert torch.equal(smaller.score, whole.score[views])
    lines = [line for i, line in enumerate(whole.history) if i % len(whole.views) in views]
    assert [(line["algorithm"], line["round"], line["avg"]) for line in smaller.history] == [
        (line["algorithm"], line["round"], line["avg"]) for line in lines
    ]
