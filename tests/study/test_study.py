"""Studies: what a run is known by, what is trained and what is not, and the pages."""

import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro

import fairwind as fw
import layouts
from command import fairwind, refused, succeeded
from fairwind.cli.compare import Compare
from fairwind.engine.settings import NUMBERS
from fairwind.errors import InputError
from fairwind.paper.studies import STUDIES, scaled
from fairwind.report import write_study
from fairwind.report.panel import show
from fairwind.report.plane import plane_points, planes
from fairwind.report.table import display_name
from fairwind.runs.files import CLIENTS, sealed, write_json
from fairwind.runs.recipe import Recipe, settings_of
from fairwind.runs.schema import ResultsFile
from fairwind.runs.training import Plain
from fairwind.setups import Where, find
from fairwind.study import (
    Finished,
    Panel,
    RunKey,
    Study,
    choose,
    missing,
    narrowed,
    read_runs,
    read_study,
    run,
)
from fairwind.study.panel import _task_digests, digests_of, own_task

SMALL = "synthetic:clients=4"
PANEL = Panel("small", SMALL, ("fedavg", "adafedadam"), (0, 1), {"rounds": 4, "eval_every": 2})
OPTIONS: dict[str, Any] = {"device": "cpu", "compile": "off"}


class Stops(Plain):
    """Interrupts training after the second round."""

    def show(self, done: int, rate: str, standing: str) -> None:
        if done == 2:
            raise KeyboardInterrupt


def train(panel: Panel, out: Path) -> list[Finished]:
    """Trains what a panel lacks in `out`; returns all runs that are there then."""
    for job in missing([panel], read_runs(out)[0], lambda _: Where(), **OPTIONS):
        run(job, out, print)
    return read_runs(out)[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study")
    train(PANEL, out)
    return out


def key(setup: str, algorithm: str, **changes: Any) -> RunKey:
    return RunKey.of(setup, algorithm, 0, asdict(settings_of(setup, **changes)), digests_of([algorithm]))


def test_a_run_is_known_by_what_decides_its_numbers() -> None:
    same = key("synthetic", "adafedadam:alpha=1")
    assert same == key("synthetic:classes=10,clients=100", "adafedadam:warmup=6,alpha=1.0")
    assert same == key("synthetic", "adafedadam", compile="off", memory=2.0, eval_every=1)
    assert same != key("synthetic:classes=5", "adafedadam")
    assert same != key("synthetic", "adafedadam:alpha=2")
    assert same != key("synthetic", "adafedadam", lr=0.02)
    assert same != key("synthetic", "adafedadam", epochs=(1, 3))
    assert same != key("synthetic", "adafedadam", probe_samples=512)


def test_a_run_of_an_own_algorithm_is_known_by_what_it_computes(tmp_path: Path) -> None:
    mine = tmp_path / "own_algorithm.py"
    panel = replace(PANEL, algorithms=(f"{mine}:mine", "fedavg"), seeds=(0,))
    text = "import fairwind\nmine = fairwind.algorithms.fedavg(lr=RATE)._replace(name='')\n"
    mine.write_text(text.replace("RATE", "0.5"))
    runs = train(panel, tmp_path / "out")
    assert not missing([panel], runs, lambda _: Where())
    assert list(runs[0].results["algorithm_digests"]) == [f"{mine}:mine", "fedavg"]
    mine.write_text(text.replace("RATE", "0.25"))
    del sys.modules["fairwind_user_own_algorithm"]  # as in another process
    (job,) = missing([panel], runs, lambda _: Where())
    assert job.recipe.algorithms == (f"{mine}:mine",)


OWN = """
import torch, fairwind as fw
from torch import nn
draw = torch.Generator().manual_seed(0)
clients = [(torch.randn(20, 5, generator=draw), torch.randint(0, 3, (20,), generator=draw)) for _ in "abc"]
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.dropout = nn.Linear(5, 4), nn.Linear(4, 3), nn.Dropout(0.1)
    def forward(self, x):
        return self.two(self.dropout(self.one(x).tanh()))
def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
def good(outputs, targets):
    return (outputs.argmax(1) == targets).float()
def noise(x):
    return x + 0.1 * torch.randn_like(x)
task = fw.Task(Model, fw.Federation.from_clients(clients), loss=loss, score=good, augment=noise,
               solver=fw.Solver(lr=0.1), rounds=2)
"""


def test_a_run_of_an_own_task_is_known_by_what_the_task_is(tmp_path: Path) -> None:
    file = tmp_path / "own_task.py"
    panel = Panel("mine", f"{file}:task", ("fedavg", "fedadam"), (0, 1))

    def read(text: str) -> None:
        """The file as another process reads it."""
        file.write_text(text)
        sys.modules.pop("fairwind_user_own_task", None)
        own_task.cache_clear()
        _task_digests.cache_clear()

    read(OWN)
    runs = train(panel, tmp_path / "out")
    assert len(runs) == 4
    assert all((run.folder / "results.json").parent.name.startswith("own_task-") for run in runs)
    assert [len(found) for found in choose(panel, runs).values()] == [2, 2]
    read(OWN + "# a remark")
    assert not missing([panel], runs, lambda _: Where(), **OPTIONS)
    assert not missing([replace(panel, seeds=(1,))], runs, lambda _: Where(), **OPTIONS)
    for before, after in (
        ("randn(20, 5", "rand(20, 5"),
        (".tanh()", ".sigmoid()"),
        ("Dropout(0.1)", "Dropout(0.2)"),
        ("nn.Linear(4, 3)", "nn.Linear(4, 3, bias=False)"),
        ("nn.Dropout(0.1)\n", "nn.Dropout(0.1)\n        nn.init.zeros_(self.two.bias)\n"),
        ('reduction="none")', 'reduction="none") / 2'),
        ("== targets).float()", "!= targets).float()"),
        ("0.1 * torch.randn_like", "0.2 * torch.randn_like"),
        ("lr=0.1", "lr=0.2"),
        ("rounds=2", "rounds=3"),
    ):
        assert before in OWN
        read(OWN.replace(before, after))
        (job,) = missing([panel], runs, lambda _: Where(), **OPTIONS)
        assert job.recipe.algorithms == panel.algorithms, after
    run(job, tmp_path / "out", print)  # beside the others, which stay
    assert len(read_runs(tmp_path / "out")[0]) == 8
    read(OWN)
    assert all(
        len(each.history) == 2
        for found in choose(panel, read_runs(tmp_path / "out")[0]).values()
        for each in found
    )


@pytest.mark.slow
def test_a_sweep_takes_an_own_task_beside_setups(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_task.py").write_text(OWN)
    Path("both.toml").write_text(
        'title = "Both"\n[[grid]]\nalgorithms = ["fedavg", "adafedadam"]\nseeds = [0, 1]\nrounds = 2\n'
        f'lr = [0.1, 0.2]\nsetups = ["{SMALL}", "own_task.py:task"]\n'
    )
    words = "sweep", "both.toml", "--out", "out", "--device", "cpu", "--compile", "off"
    assert "4 of 4: fedavg, adafedadam on own_task.py:task" in succeeded(*words).stderr
    assert "own_task.py:task, lr 0.2" in Path("out/both/index.html").read_text()
    assert " of " not in succeeded(*words).stderr  # nothing is left to train
    assert "there is no file gone.py" in refused(
        "sweep", _written(Path("gone.toml"), '[[grid]]\nsetups = ["gone.py:task"]\n')
    )


def _written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_a_finished_study_is_small_and_lacks_nothing(trained: Path) -> None:
    (folder,) = (trained / "runs").iterdir()
    assert sorted(file.name for file in folder.iterdir()) == [
        "clients.safetensors",
        "history.jsonl.gz",
        "results.json",
    ]
    assert str(trained) not in (folder / "results.json").read_text()
    runs, refused_files = read_runs(trained)
    assert not refused_files
    assert len(runs) == 4
    assert not missing([PANEL], runs, lambda _: Where())
    for each in runs:
        assert [line["round"] for line in each.history] == [0, 2, 4]
        assert each.accuracy is not None
        assert each.row["final"]["avg"] == pytest.approx(float(each.accuracy.mean()), abs=1e-4)


def test_only_what_is_missing_is_trained(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "all")
    wider = replace(PANEL, algorithms=("fedavg", "fednova", "adafedadam:alpha=1"), seeds=(0, 1, 2))
    runs, _ = read_runs(tmp_path / "all")
    jobs = missing([PANEL, wider], runs, lambda _: Where())
    wanted = {(j.recipe.algorithms, j.recipe.seeds) for j in jobs}
    assert wanted == {(("fednova",), (0, 1, 2)), (("fedavg", "adafedadam:alpha=1"), (2,))}
    chosen = choose(wider, train(wider, tmp_path / "all"))
    assert {spec: [r.key.seed for r in found] for spec, found in chosen.items()} == {
        spec: [0, 1, 2] for spec in wider.algorithms
    }


def stored(folder: Path, **changes: Any) -> None:
    """Results as they would be stored if something had been otherwise."""
    (file,) = folder.glob("runs/*/results.json")
    content = json.loads(file.read_text())
    write_json(file, sealed({**content, **changes}))


def test_stored_runs_of_another_formula_or_another_engine_are_trained_again(
    trained: Path, tmp_path: Path
) -> None:
    digests = digests_of(PANEL.algorithms)
    left = {"fedavg": ["adafedadam"], "adafedadam": ["fedavg"]}
    for name in PANEL.algorithms:
        out = shutil.copytree(trained, tmp_path / name)
        stored(out, algorithm_digests=digests | {name: "of another formula"})
        (job,) = missing([PANEL], read_runs(out)[0], lambda _: Where())
        assert job.recipe.algorithms == (name,)
        kept = choose(PANEL, read_runs(out)[0])
        assert [label for label, runs in kept.items() if runs] == left[name]
    out = shutil.copytree(trained, tmp_path / "engine")
    stored(out, numbers=NUMBERS + 1)
    (job,) = missing([PANEL], read_runs(out)[0], lambda _: Where())
    assert job.recipe.algorithms == PANEL.algorithms


def test_runs_that_do_not_say_what_their_algorithms_compute_are_passed_over(
    trained: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(trained, tmp_path / "earlier")
    (file,) = out.glob("runs/*/results.json")
    content = json.loads(file.read_text())
    del content["algorithm_digests"]
    write_json(file, sealed(content))
    runs, (passed,) = read_runs(out)
    assert not runs
    assert not passed.damaged
    assert "an earlier version of Fairwind" in str(passed)


@pytest.mark.parametrize("by", ["time_budget", "after_evaluation"])
def test_a_comparison_that_was_cut_short_fills_no_cell(by: str, tmp_path: Path) -> None:
    panel = replace(PANEL, seeds=(0,), algorithms=("fedavg",))
    given: dict[str, Any] = {"rounds": 4, "eval_every": 2, "progress": False, **OPTIONS}
    task, short = fw.setup(SMALL), tmp_path / "short"
    cut: dict[str, Any] = {"time_budget": 1e-9, "after_evaluation": lambda lines: True}
    fw.compare(task, "fedavg", out=short, **given, **{by: cut[by]})
    runs, (passed,) = read_runs(tmp_path)
    assert not runs
    assert f"cut short by {by}" in str(passed)
    assert missing([panel], runs, lambda _: Where())
    fw.compare(task, "fedavg", out=short, **given)
    assert not missing([panel], read_runs(tmp_path)[0], lambda _: Where())


def test_a_run_joined_from_two_machines_is_the_run_of_one(trained: Path, tmp_path: Path) -> None:
    for seed in PANEL.seeds:
        train(replace(PANEL, seeds=(seed,)), tmp_path / str(seed))
    joined = choose(PANEL, read_runs(tmp_path / "0", tmp_path / "1")[0])
    whole = choose(PANEL, read_runs(trained)[0])
    for spec in PANEL.algorithms:
        for one, other in zip(joined[spec], whole[spec], strict=True):
            assert one.folder != other.folder
            assert one.row["final"] == pytest.approx(other.row["final"], rel=1e-5)


def test_a_study_that_was_stopped_ends_with_the_same_bits(trained: Path, tmp_path: Path) -> None:
    (job,) = missing([PANEL], [], lambda _: Where(), **OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path, print, Stops(quiet=True), every=0)
    assert not read_runs(tmp_path)[0]
    again = train(PANEL, tmp_path)
    assert len(list((tmp_path / "runs").iterdir())) == 1
    for one, other in zip(again, read_runs(trained)[0], strict=True):
        assert one.row == other.row
        assert one.history == other.history


def test_runs_on_other_data_are_not_joined(trained: Path) -> None:
    runs, _ = read_runs(trained)
    first, *rest = runs
    elsewhere: ResultsFile = {
        **first.results,
        "federation": {**first.results["federation"], "digest": "other"},
    }
    chosen = choose(PANEL, [first._replace(results=elsewhere), *rest])
    assert [len(found) for found in chosen.values()] == [1, 2]
    assert [len(found) for found in choose(PANEL, runs, digest="other").values()] == [0, 0]


def test_a_panel_that_names_a_precision_takes_no_other(trained: Path) -> None:
    runs, _ = read_runs(trained)
    exact = replace(PANEL, changes={**PANEL.changes, "precision": "float32"})
    half = replace(PANEL, changes={**PANEL.changes, "precision": "bf16"})
    assert [len(found) for found in choose(exact, runs).values()] == [2, 2]
    assert [len(found) for found in choose(half, runs).values()] == [0, 0]


def test_damaged_results_are_passed_over_and_named(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "results.json").write_text("{")
    runs, said = read_runs(tmp_path)
    assert len(runs) == 4
    assert len(said) == 1
    assert "bad/results.json is damaged" in str(said[0])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"solver": "momentum"},
        {"solver": "nesterov", "momentum": 0.5},
        {"epochs": (1, 3), "lr": 0.1, "batch_size": 7, "weight_decay": 0.01},
        {"clients_per_round": 10, "probe_samples": 5, "eval_every": 3, "rounds": 12, "precision": "bf16"},
    ],
)
def test_the_recorded_command_is_the_recipe(changes: dict[str, Any]) -> None:
    settings = settings_of("synthetic", **changes)
    recipe = Recipe("synthetic:classes=5", ("fedavg:lr=0.1", "adafedadam"), (0, 3), settings)
    words = recipe.command().split()
    assert words[:2] == ["fairwind", "compare"]
    assert tyro.cli(Compare, args=words[2:]).recipe() == recipe


def test_narrowing_keeps_what_is_named() -> None:
    panels = STUDIES["heterogeneity"].panels
    assert [p.setup for p in narrowed(panels, ["cifar10:beta=0.1"], ())] == ["cifar10:beta=0.1"]
    assert {p.seeds for p in narrowed(panels, ["cifar10"], (2,))} == {(2,)}
    assert len(narrowed(panels, [], ())) == len(panels)


@pytest.mark.parametrize("scale", ["smoke", "reduced", "full"])
@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_the_papers_studies_are_sound(study, scale) -> None:  # type: ignore[no-untyped-def]
    smaller = scaled(study, scale)
    for panel, whole in zip(smaller.panels, study.panels, strict=True):
        panel.check()
        assert panel.algorithms == whole.algorithms
        assert panel.settings().rounds <= whole.settings().rounds
        if scale == "full":
            assert whole.settings().rounds in (30, 150, find(whole.setup).rounds)


TOML = """
title = "How fair?"
question = "What does alpha buy?"

[[grid]]
setups = ["synthetic:clients=4"]
algorithms = ["fedavg", "adafedadam:alpha={0,2}"]
seeds = [0]
rounds = 2
eval_every = 1
lr = [0.01, 0.1]
"""


def test_a_file_becomes_a_study(tmp_path: Path) -> None:
    (tmp_path / "fair.toml").write_text(TOML)
    study = read_study(tmp_path / "fair.toml")
    assert (study.name, study.title) == ("fair", "How fair?")
    assert [p.title for p in study.panels] == ["synthetic:clients=4, lr 0.01", "synthetic:clients=4, lr 0.1"]
    assert study.panels[1].settings().solver.lr == 0.1
    assert study.panels[0].algorithms == ("fedavg", "adafedadam:alpha=0", "adafedadam:alpha=2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("lr =", "learning_rate ="), "unknown setting in a grid of .*'learning_rate'"),
        (("[[grid]]", "[[grids]]"), "unknown key of .*'grids': did you mean 'grid'"),
        (('"fedavg"', '"fedagv"'), "unknown algorithm 'fedagv': did you mean 'fedavg'"),
        (('["synthetic:clients=4"]', '"synthetic"'), "setups in a grid of .* must be a list"),
        (("rounds = 2", "rounds = 0"), "rounds=0 is out of range"),
        (('title = "', "title = "), "is not TOML"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    (tmp_path / "fair.toml").write_text(TOML.replace(*change))
    with pytest.raises(InputError, match=message):
        read_study(tmp_path / "fair.toml")


@pytest.mark.slow
def test_a_sweep_by_command_trains_once_and_shows_its_page(tmp_path: Path) -> None:
    (tmp_path / "fair.toml").write_text(TOML)
    words = ("sweep", tmp_path / "fair.toml", "--out", tmp_path / "out", "--device", "cpu")
    first = succeeded(*words)
    assert "2 of 2: fedavg, adafedadam:alpha=0, adafedadam:alpha=2 on synthetic:clients=4" in first.stderr
    again = succeeded(*words)
    assert "on synthetic" not in again.stderr
    page = (tmp_path / "out" / "fair" / "index.html").read_text()
    assert "AdaFedAdam (alpha=2)" in page
    assert "settings are compared on the test samples, so the best of them is known with hindsight" in page
    content = json.loads((tmp_path / "out" / "fair" / "study.json").read_text())
    assert [panel["missing"] for panel in content["panels"]] == [{}, {}]
    assert {row["algorithm"] for row in content["panels"][1]["summary"]} == {
        "fedavg",
        "adafedadam:alpha=0",
        "adafedadam:alpha=2",
    }
    for name in ("average-0.pdf", "worst30-1.png", "distribution-0.png"):
        assert (tmp_path / "out" / "fair" / "figures" / name).stat().st_size > 1000
    assert r"\begin{tabular}" in (tmp_path / "out" / "fair" / "tables.tex").read_text()


@pytest.mark.slow
def test_the_paper_by_command(tmp_path: Path) -> None:
    """Every study, smaller than `make paper-smoke`: without VGG11, and with one draw of generated data."""
    layouts.everything(tmp_path / "files")
    out = tmp_path / "out"
    words = ("--scale", "smoke", "--device", "cpu", "--out", out, "--cache", tmp_path / "cache")
    unequal = (f"{name}:clients=2,beta=0.05,seed=0" for name in ("femnist-pooled", "cifar10-features"))
    setups = ("femnist", *unequal, "sent140", "synthetic:clients=10")
    given = ("--data-dir", tmp_path / "files", "--setups", *setups)
    succeeded("paper", "all", *words, *given)
    content = {name: json.loads((out / name / "study.json").read_text())["panels"] for name in STUDIES}
    for name, panels in content.items():
        for panel in panels:
            setup = panel["setup"]
            asked = setup in setups or setup.partition(":")[0] in setups
            assert (not panel["missing"]) == asked, (name, panel["title"])
        assert (out / name / "index.html").exists()
    assert all(cell["paper"] for row in content["convergence"][0]["paper"].values() for cell in row.values())
    assert len(json.loads((out / "theory" / "theory.json").read_text())["checks"]) >= 6
    assert (out / "theory" / "index.html").exists()
    assert "15 of 20" in succeeded("paper", "--list", *words).stdout


def test_mistakes_with_the_paper_are_named(tmp_path: Path) -> None:
    assert "unknown study 'convergance': did you mean 'convergence'?" in refused("paper", "convergance")
    said = refused(
        *("paper", "resources", "--scale", "smoke", "--device", "cpu", "--out", tmp_path / "out"),
        *("--cache", tmp_path / "cache", "--data-dir", tmp_path / "nowhere"),
    )
    assert "1 of 1 could not be trained" in said
    assert "does not exist" in said
    assert (tmp_path / "out" / "resources" / "index.html").exists()
    assert "cannot read" in refused("sweep", tmp_path / "none.toml")


def test_the_data_at_hand_decides_which_runs_count(trained: Path) -> None:
    runs, _ = read_runs(trained)
    assert not missing([PANEL], runs, lambda _: Where(), digest=lambda _: None)
    (job,) = missing([PANEL], runs, lambda _: Where(), digest=lambda _: "of the whole set")
    assert (job.recipe.algorithms, job.recipe.seeds) == (PANEL.algorithms, PANEL.seeds)


def test_one_client_is_not_all_clients() -> None:
    one, every = (
        replace(PANEL, changes={**PANEL.changes, **changed})
        for changed in ({"clients_per_round": 1}, {"participation": 1.0})
    )
    jobs = missing([one, every], [], lambda _: Where())
    assert [job.recipe.settings.clients_per_round for job in jobs] == [1, None]
    assert "--clients-per-round 1" in jobs[0].recipe.command().split("--seeds")[1]
    assert "participation" not in jobs[1].recipe.command()


def test_panels_that_want_the_same_runs_train_them_once() -> None:
    often = replace(PANEL, changes={**PANEL.changes, "eval_every": 1})
    assert len(missing([PANEL, often], [], lambda _: Where())) == 1
    whole, decimal = (replace(PANEL, changes={**PANEL.changes, "lr": lr}) for lr in (1, 1.0))
    assert len(missing([whole, decimal], [], lambda _: Where())) == 1


def test_any_precision_will_do_where_it_is_left_open(trained: Path) -> None:
    open_ = replace(PANEL, changes={**PANEL.changes, "precision": "auto"})
    assert [len(found) for found in choose(open_, read_runs(trained)[0]).values()] == [2, 2]


def test_a_seed_without_clients_numbers_still_makes_a_page(trained: Path, tmp_path: Path) -> None:
    for seed in PANEL.seeds:
        train(replace(PANEL, seeds=(seed,)), tmp_path / str(seed))
    (lost,) = (tmp_path / "0").rglob(CLIENTS)
    lost.unlink()
    results = json.loads((lost.parent / "results.json").read_text())
    del results["files"][CLIENTS]
    write_json(lost.parent / "results.json", sealed(results))
    study = Study("page", "A page", "", (PANEL,))
    write_study(study, read_runs(tmp_path)[0], tmp_path / "page")
    (panel,) = json.loads((tmp_path / "page" / "study.json").read_text())["panels"]
    assert panel["missing"] == {}
    assert list(panel["against_others"]) == ["fedavg"]  # over the seed that is left


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("memory = [0.01, 0.02]", "memory=.* changes no result: give it one value"),
        ("eval_every = [1, 2]", "eval_every=.* changes no result"),
        ("rounds = []", "rounds=.* has no value"),
        ("rounds = true", "rounds=True is not a whole number"),
        ("epochs = [1, 2, 3]", "epochs=.* is neither a number nor a pair"),
        ("epochs = [2]", "epochs=.* is neither a number nor a pair"),
        ("steps = [2, 3, 4]", "steps=.* is neither a number nor a pair"),
        ("steps = 4\nepochs = 2", "epochs=2 and steps=4 are both given: give one of them"),
        ("seeds = 3", "seeds in a grid of .* must be a list"),
        ("seeds = []", "seeds in a grid of .* must be a list"),
        ('seeds = ["a"]', "seed='a' is not a whole number"),
        ("seeds = [-1]", "seed=-1 is out of range"),
        ('algorithms = ["fedavg:lr={1,2"]', "has a brace without its partner"),
    ],
)
def test_values_that_cannot_be_used_are_named(tmp_path: Path, line: str, message: str) -> None:
    name = line.partition(" =")[0]
    kept = [text for text in TOML.splitlines() if not text.startswith(f"{name} =")]
    (tmp_path / "fair.toml").write_text("\n".join([*kept, line]))
    with pytest.raises(InputError, match=message):
        read_study(tmp_path / "fair.toml")


@pytest.mark.parametrize("charts", ['["pie"]', '"pareto"', "5", '["readings"]'])
def test_charts_that_are_not_there_are_named(tmp_path: Path, charts: str) -> None:
    (tmp_path / "fair.toml").write_text(f"charts = {charts}\n{TOML}")
    with pytest.raises(InputError, match=r"charts? of"):
        read_study(tmp_path / "fair.toml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--setups", "synthtic"), "unknown setup of these studies 'synthtic': did you mean 'synthetic'?"),
        (("--seeds", "7"), "seed 7 is in none of these studies"),
        (("--runs", "nowhere"), "--runs nowhere is no folder"),
        (("--device", "gpu"), "device 'gpu' is neither cpu nor cuda"),
        (("--out", "/proc/none"), "cannot write to /proc/none"),
        (("--checkpoint-every", "-1"), "checkpoint_every=-1.0 is out of range"),
    ],
)
def test_mistaken_options_are_named_before_anything_is_trained(
    tmp_path: Path, words: tuple[str, str], message: str
) -> None:
    given = ("--out", tmp_path / "out") if words[0] != "--out" else ()
    said = fairwind("paper", "solvers", "--scale", "smoke", *given, *words)
    assert said.returncode == 2
    assert message in said.stderr
    assert len(said.stderr.splitlines()) == 1
    assert not list(tmp_path.rglob("results.json"))


@pytest.mark.slow
def test_further_models_of_a_run_are_not_taken_for_other_runs(tmp_path: Path) -> None:
    succeeded(
        "compare",
        "synthetic:clients=6",
        "--algorithms",
        "ditto",
        "fedavg",
        "--seeds",
        0,
        1,
        "--rounds",
        2,
        "--out",
        tmp_path / "run",
    )
    found, refused = read_runs(tmp_path)
    assert not refused
    assert [(run.row["algorithm"], run.row["seed"]) for run in found] == [
        ("ditto", 0),
        ("ditto", 1),
        ("fedavg", 0),
        ("fedavg", 1),
    ]
    for one, other in zip(found[:2], found[2:], strict=True):  # Ditto's global model is FedAvg's
        assert one.row["final"] == other.row["final"]
        np.testing.assert_array_equal(one.accuracy, other.accuracy)


def test_the_plane_of_a_sweep_has_the_points_that_none_beats_on_its_front(tmp_path: Path) -> None:
    panels = [
        replace(PANEL, title=f"{SMALL}, lr {lr}", changes={**PANEL.changes, "lr": lr}) for lr in (0.01, 0.1)
    ]
    for panel in panels:
        train(panel, tmp_path)
    runs = read_runs(tmp_path)[0]
    shown = [show(panel, runs) for panel in panels]
    ((setup, together),) = planes(shown).items()
    found = plane_points(together)
    assert setup == SMALL
    assert [point["name"] for point in found] == [
        "FedAvg, lr 0.01", "AdaFedAdam, lr 0.01", "FedAvg, lr 0.1", "AdaFedAdam, lr 0.1",
    ]  # fmt: skip
    for point in found:
        better = [
            other
            for other in found
            if other["average"] >= point["average"]
            and other["spread"] <= point["spread"]
            and (other["average"], other["spread"]) != (point["average"], point["spread"])
        ]
        assert point["front"] == (not better)
    study = Study("rates", "Rates", "Which?", tuple(panels), ("plane",))
    write_study(study, runs, tmp_path / "page")
    assert (tmp_path / "page" / "figures" / "plane-0.pdf").exists()
    assert "Average against fairness on" in (tmp_path / "page" / "index.html").read_text()


def test_a_variant_is_shown_by_its_name() -> None:
    assert (
        display_name("fairwind.paper.variants:adafedadam_with_fixed_betas") == "AdaFedAdam with fixed betas"
    )
    assert display_name("mine.py:better") == "mine.py (better)"
