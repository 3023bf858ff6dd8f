"""What users give in other forms than expected: taken where it is clear, else one line with the remedy."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fairwind as fw
from command import called
from conftest import make_federation, make_model
from fairwind.engine.machine import find_machine
from fairwind.exchange import Bounds, LocalClient, Privacy
from fairwind.report.interim import read_interim
from fairwind.report.page import page
from fairwind.report.record import read_record
from fairwind.runs.directory import RunDirectory
from fairwind.runs.spec import arguments, parameters, with_parameters


def make_task(**given: Any) -> fw.Task:
    return fw.Task(make_model, make_federation([12, 30, 21]), **{"rounds": 2, **given})


OWN = fw.algorithms.fedavg()._replace(name="")


@pytest.mark.parametrize("given", [OWN, {"mine": OWN}, [OWN], {"fedavg": "fedavg"}, ["fedavg"]])
def test_simulate_trains_the_one_algorithm_however_it_is_given(given: object) -> None:
    expected = fw.simulate(make_task(), "fedavg", progress=False)
    found = fw.simulate(make_task(), given, progress=False)  # type: ignore[arg-type]
    assert torch.equal(found.score, expected.score)


def test_an_own_algorithm_without_a_name_is_called_own() -> None:
    assert fw.simulate(make_task(), OWN, progress=False).algorithm == "own"
    assert fw.simulate(make_task(), {"mine": OWN}, progress=False).algorithm == "mine"


@pytest.mark.parametrize(
    "several", [["fedavg", "fedadam"], "fair", {"a": OWN, "b": OWN}, "fedavg,fedadam", []]
)
def test_simulate_refuses_several_algorithms(several: object) -> None:
    with pytest.raises(fw.InputError, match=r"simulate trains one algorithm, not \d+: .*compare"):
        fw.simulate(make_task(), several, progress=False)  # type: ignore[arg-type]


def test_a_builder_in_the_place_of_an_algorithm_is_to_be_called() -> None:
    for given in (fw.algorithms.fedavg, [fw.algorithms.fedavg], {"mine": fw.algorithms.fedavg}):
        with pytest.raises(fw.InputError, match=r"is not an algorithm.*call it, as in fedavg\(\)"):
            fw.simulate(make_task(), given, progress=False)  # type: ignore[arg-type]


def test_names_of_own_algorithms_are_told_apart() -> None:
    with pytest.raises(
        fw.InputError, match=r"algorithm 'own' is given twice: give names, \{'one': algorithm"
    ):
        fw.compare(make_task(), [OWN, OWN], progress=False)
    with pytest.raises(fw.InputError, match="an algorithm is called 3: give it a name that is a text"):
        fw.compare(make_task(), {3: OWN}, progress=False)  # type: ignore[dict-item]
    with pytest.raises(fw.InputError, match=r"to call it 'mine' give .*algorithms\.build\('fedavg'\)"):
        fw.simulate(make_task(), {"mine": "fedavg"}, progress=False)


Number = Callable[[Any], Any]


def compared(number: Number, whole: Number, device: object, out: Path) -> fw.Comparison:
    solver = fw.Solver(
        lr=number(0.25),
        batch_size=whole(4),
        epochs=whole([1, 2]),
        weight_decay=number(0.125),
        betas=(number(0.5), number(0.75)),
        clip=number(2.0),
    )
    return fw.compare(
        make_task(rounds=whole(2)),
        [fw.algorithms.fedprox(mu=number(0.5)), fw.algorithms.adafedadam(warmup=whole(1))],
        seeds=whole([0, 1]),
        solver=solver,
        participation=number(0.75),
        eval_every=whole(1),
        probe_samples=whole(5),
        target=number(100.0),
        memory=number(0.125),
        workers=whole(1),
        checkpoint_every=number(5.0),
        device=device,  # type: ignore[arg-type]
        out=out,
        progress=False,
    )


@pytest.mark.parametrize("of", [np.array, torch.tensor, lambda given: np.array(given).astype("float32")[()]])
def test_numbers_and_devices_of_other_libraries_give_the_same_recipe(of: Number, tmp_path: Path) -> None:
    def whole(given: Any) -> Any:
        found = of(given)
        return found if "int" in str(found.dtype) else np.array(given)[()]

    expected = compared(lambda given: given, lambda given: given, "cpu", tmp_path / "a")
    found = compared(of, whole, torch.device("cpu"), tmp_path / "b")
    assert [run.algorithm for run in found] == [run.algorithm for run in expected]
    assert all(torch.equal(a.curve, b.curve) for a, b in zip(expected, found, strict=True))
    mine, theirs = (RunDirectory.open(tmp_path / name).recipe for name in "ab")
    assert mine.digest == theirs.digest
    assert found[whole(1)] is found[1]
    assert len(compared(of, whole, "cpu", tmp_path / "a")) == len(expected)  # which is loaded, being the same


def test_a_list_in_a_solver_is_the_same_as_a_tuple(tmp_path: Path) -> None:
    for given in ((0.5, 0.75), [0.5, 0.75]):
        solver = fw.Solver(betas=given, optimizer="adam")  # type: ignore[arg-type]
        fw.compare(make_task(), "fedavg", solver=solver, out=tmp_path / "run", progress=False)


def test_numbers_of_other_libraries_in_a_federation() -> None:
    x, y = torch.randn(20, 2), torch.arange(20) % 2
    expected = fw.Federation.from_clients([(x, y)] * 2, train=0.5, seed=3, classes=4)
    found = fw.Federation.from_clients(
        [(x, y)] * 2,
        train=np.float32(0.5),  # type: ignore[arg-type]
        seed=torch.tensor(3),  # type: ignore[arg-type]
        classes=np.int64(4),  # type: ignore[arg-type]
    )
    assert found.digest() == expected.digest()
    assert json.dumps(found.describe()) == json.dumps(expected.describe())
    with pytest.raises(fw.InputError, match=r"seed=1\.5 is not a whole number"):
        fw.Federation.from_clients([(x, y)], seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(fw.InputError, match=r"train='half' is out of range: the training share lies in"):
        fw.Federation.from_clients([(x, y)], train="half")  # type: ignore[arg-type]


def test_numbers_of_other_libraries_in_a_real_federation() -> None:
    assert Bounds(share=np.float32(0.5)) == Bounds(share=0.5)  # type: ignore[arg-type]
    given: dict[str, Any] = {
        name: np.array(value) for name, value in {"clip": 1, "weight": 2, "noise": 0.5, "delta": 1e-5}.items()
    }
    assert json.dumps(Privacy(**given).noise) == "0.5"
    client = LocalClient(make_task(), fw.algorithms.fedavg(), np.int64(1), seed=np.int64(2))  # type: ignore[arg-type]
    assert json.dumps([client.number, client.seed]) == "[1, 2]"


def test_numbers_that_do_not_fit_are_shown_as_they_were_meant() -> None:
    with pytest.raises(fw.InputError, match=r"rounds=2\.5 is not a whole number"):
        fw.simulate(make_task(), "fedavg", rounds=np.float64(2.5), progress=False)  # type: ignore[arg-type]
    with pytest.raises(fw.InputError, match=r"rounds=\(1, 2\) is not a whole number"):
        make_task(rounds=np.array([1, 2]))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-7, 123456.789, 2.0, math.inf, float(np.float32(0.1))])
def test_the_name_of_an_algorithm_holds_its_parameters_to_the_last_bit(value: float) -> None:
    name = with_parameters("fedprox", mu=value)
    known = {"fedprox": parameters(fw.algorithms.fedprox)}
    assert arguments("algorithm", name, known)["mu"] == value


def test_a_device_has_one_name() -> None:
    assert fw.Settings(device=torch.device("cuda", 1)).device == "cuda:1"  # type: ignore[arg-type]
    assert find_machine(fw.Settings(device=torch.device("cpu", 0))).device == "cpu"  # type: ignore[arg-type]
    with pytest.raises(fw.InputError, match="device 'mps' is neither cpu nor cuda: give 'cpu'"):
        fw.simulate(make_task(), "fedavg", device=torch.device("mps"), progress=False)


def test_seeds_are_several_numbers() -> None:
    assert len(fw.compare(make_task(), "fedavg", seeds=range(2), progress=False)) == 2
    for one in (3, np.int64(3), torch.tensor(3)):
        with pytest.raises(fw.InputError, match=r"seeds=3 is one number: give seeds=\[3\], or range\(3\)"):
            fw.compare(make_task(), "fedavg", seeds=one, progress=False)  # type: ignore[arg-type]
    with pytest.raises(fw.InputError, match=r"seed=1\.5 is not a whole number"):
        fw.compare(make_task(), "fedavg", seeds=[1.5], progress=False)  # type: ignore[list-item]


@pytest.mark.parametrize(("target", "meant"), [(0.7, "70"), (1, "100"), (0.005, "0.5")])
def test_a_target_for_accuracy_is_in_percent(target: float, meant: str) -> None:
    with pytest.raises(fw.InputError, match=rf"target={target}: accuracy is in percent, so give {meant}$"):
        fw.simulate(make_task(), "fedavg", target=target, progress=False)
    done = called("compare", "synthetic:clients=3", "--target", target)
    assert f"target={target}: accuracy is in percent, so give {meant}" in done.stderr


def test_targets_of_other_scores_are_in_their_own_units() -> None:
    task = make_task(score=fw.scores.f1, rounds=40)
    assert fw.simulate(task, "fedavg", target=0.001, eval_every=1, progress=False).rounds == [0, 1]
    assert fw.simulate(task, "fedavg", target=1, eval_every=20, progress=False).rounds == [0, 20, 40]


@pytest.mark.parametrize("task", ["synthetic:clients=3", "mine.py:task"])
def test_a_task_among_the_algorithms_is_told_its_place(task: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_FILE)
    done = called("compare", "--algorithms", "fedavg", task, cwd=tmp_path)
    assert done.returncode == 2
    assert (
        f"not an algorithm: on the command line it comes first, as in 'fairwind compare {task}" in done.stderr
    )


def test_an_unknown_setup_is_told_how_a_task_of_ones_own_is_given(tmp_path: Path) -> None:
    assert "a task of your own is FILE.py:NAME" in called("compare", "mine:task", cwd=tmp_path).stderr


def zero(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.zeros(len(targets))


def test_a_result_of_zeros_shows_them() -> None:
    result = fw.simulate(make_task(score=zero), "fedavg", progress=False)
    assert repr(result) == "<Result of fedavg, seed 0: avg 0, worst30 0>"


OWN_FILE = """
import fairwind as fw
import torch
from torch import nn

task = fw.Task(nn.Linear(2, 2), fw.Federation.from_clients([(torch.randn(8, 2), torch.zeros(8).long())] * 2))
larger = fw.Task(nn.Linear(2, 2), task.federation, rounds=5)
averaging = fw.algorithms.fedavg()._replace(name="")


def made():
    return larger


def prepare(path):
    return path
"""


def test_a_file_without_the_name_of_its_task_is_told_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_FILE)
    (tmp_path / "makers.py").write_text(OWN_FILE.replace("task", "_task").replace("larger", "_larger"))
    (tmp_path / "empty.py").write_text("x = 3\n")
    for words, said in {
        (
            "compare",
            "mine.py",
        ): "mine.py is a file: name the task in it, as in mine.py:task (it has task, larger)",
        (
            "data",
            "mine.py:",
        ): "mine.py is a file: name the task in it, as in mine.py:task (it has task, larger)",
        ("compare", "makers.py"): "name the function that makes the task in it, as in makers.py:made",
        (
            "compare",
            "mine.py:task",
            "--algorithms",
            "mine.py",
        ): "name the algorithm in it, as in mine.py:averaging",
        (
            "compare",
            "empty.py",
        ): "empty.py is a file that makes no task: make one in it, task = fairwind.Task(…)",
        ("compare", "absent.py"): "there is no file absent.py",
    }.items():
        done = called(*words, cwd=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr


def titles(run: Path) -> list[str]:
    """What a browser's tab and the page's first line say."""
    html = page(read_record(run), {})
    found = [re.findall(f"<{tag}>(.*)</{tag}>", html)[0] for tag in ("title", "h1")]
    return [title.removesuffix(" · Fairwind") for title in found]


@pytest.mark.parametrize(
    ("name", "title"), [("clinics", "clinics"), ("clinics 2023/24", "clinics 2023/24"), ("", "3 clients")]
)
def test_the_page_is_titled_by_the_tasks_name(name: str, title: str, tmp_path: Path) -> None:
    fw.compare(make_task(name=name), ["fedavg", "fedadam"], out=tmp_path / "run", progress=False)
    assert titles(tmp_path / "run") == [f"2 algorithms on {title}"] * 2


@pytest.mark.parametrize(("name", "title"), [(', name="clinics"', "clinics"), ("", "mine.py:larger")])
def test_the_page_of_a_file_is_titled_by_the_tasks_name(name: str, title: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_FILE.replace("rounds=5", f"rounds=1{name}"))
    words = "compare", f"{tmp_path}/mine.py:larger", "--algorithms", "fedavg", "--seeds", 0, "--device", "cpu"
    done = called(*words, "--compile", "off", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run, *_ = (tmp_path / "runs").iterdir()
    assert titles(run) == [f"FedAvg on {title}"] * 2
    assert run.name.startswith(title.replace(":", "-"))
    (run / "results.json").unlink()
    assert f"<title>FedAvg on {title} ·" in page(read_interim(run), {})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["fedavg,adafedadam"], ["fedavg", "adafedadam"]),
        (["fedavg,", "adafedadam"], ["fedavg", "adafedadam"]),
        (
            ["adafedadam:alpha=2,warmup=0,fedavg,qfedavg:q=1"],
            ["adafedadam:alpha=2,warmup=0", "fedavg", "qfedavg:q=1"],
        ),
        (["adafedadam:alpha=2,warmup=0"], ["adafedadam:alpha=2,warmup=0"]),
        (
            ["fedadam:lr=1, mine.py:own,pkg.module:own,fedagv"],
            ["fedadam:lr=1", "mine.py:own", "pkg.module:own", "fedagv"],
        ),
        (["fedagv:lr=1,eps=2"], ["fedagv:lr=1,eps=2"]),
        (
            ["{fedavg,fedadam}", "adafedadam:alpha={0,1},warmup=0"],
            ["{fedavg,fedadam}", "adafedadam:alpha={0,1},warmup=0"],
        ),
    ],
)
def test_algorithms_may_be_separated_by_commas(given: list[str], expected: list[str]) -> None:
    assert list(fw.algorithms.with_sets(given)) == expected


def test_commas_on_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = called(
        *("compare", "synthetic:clients=4", "--rounds", 1, "--device", "cpu", "--compile", "off"),
        *("--algorithms", "fedavg,fedadam:lr=0.1", "--seeds", "0,1", "--out", out),
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads((out / "results.json").read_text())["runs"]
    assert [(run["algorithm"], run["seed"]) for run in runs] == [
        (algorithm, seed) for algorithm in ("fedavg", "fedadam:lr=0.1") for seed in (0, 1)
    ]
    alone = called("compare", "--algorithms", "fedavg,fedadam", "--alpha", 2)
    assert "--alpha is AdaFedAdam's" in alone.stderr
    assert (
        "unknown algorithm 'fedagv': did you mean 'fedavg'"
        in called("compare", "--algorithms", "fedadam,fedagv").stderr
    )
    assert (
        "parameter 'warmup' of adafedadam has no value"
        in called("compare", "--algorithms", "adafedadam:alpha=1,warmup").stderr
    )
