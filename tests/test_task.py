"""One task, every door: the command line, Python and a notebook; killed, resumed, loaded, reported."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import fairwind as fw
from command import ENV, called, refused, succeeded
from conftest import CLASSES, FEATURES, make_federation, make_model
from narrowed import known

EXAMPLES = Path(__file__).parents[1] / "examples"
OWN = """
import torch
from torch import nn
import fairwind as fw
from fairwind.algorithms import fedavg

def task():
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(n, 5, generator=draw), torch.randn(n, generator=draw)) for n in range(20, 26)]
    federation = fw.Federation.from_clients(clients, name="six")
    return fw.Task(lambda: nn.Linear(5, 1), federation, loss=nn.functional.mse_loss,
                   score=[fw.scores.mae, fw.scores.r2], rounds=40, solver=fw.Solver(lr=LR))

half = fedavg(lr=0.5)
not_a_task = 3
def broken():
    return 1 / 0
def wants(argument):
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(OWN.replace("LR", "0.01"))
    return file


def bits(path: Path) -> dict[str, torch.Tensor]:
    found = {f"c.{k}": v for k, v in load_file(path / "clients.safetensors").items()}
    return found | {f"m.{k}": v for k, v in load_file(path / "models.safetensors").items()}


def assert_same_bits(one: Path, other: Path) -> None:
    a, b = bits(one), bits(other)
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value.nan_to_num(7), b[name].nan_to_num(7)), name
    assert (one / "history.jsonl").read_bytes() == (other / "history.jsonl").read_bytes()


@pytest.mark.slow
def test_a_users_file_is_compared_killed_resumed_and_reported(own: Path, tmp_path: Path) -> None:
    algorithms = ["fedavg", "adafedadam", f"{own}:half"]
    options = [
        "--algorithms",
        *algorithms,
        "--seeds",
        "0",
        "1",
        "--checkpoint-every",
        "0",
        "--eval-every",
        "4",
    ]
    succeeded("compare", f"{own}:task", *options, "--out", tmp_path / "whole")
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "fairwind", "compare", f"{own}:task", *options, "--out", str(killed)]
    process = subprocess.Popen(command, env=ENV, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not list(killed.glob("checkpoints/*.json")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if not (killed / "results.json").exists():
        assert "going on at round" in succeeded("resume", killed).stderr
    assert_same_bits(tmp_path / "whole", killed)
    results = json.loads((killed / "results.json").read_text())
    assert results["scores"] == [{"name": "mae", "kind": "lower"}, {"name": "r2", "kind": "higher"}]
    assert [row["algorithm"] for row in results["summary"]] == algorithms
    final = results["runs"][0]["final"]
    assert final["best30"] <= final["avg"] <= final["worst30"] <= final["worst"]
    assert not {"gini", "jain", "rsd_error", "std_beyond_noise"} & set(final)
    said = succeeded("report", killed)
    assert "MAE over clients, lower is better" in said.stdout
    page = (killed / "report.html").read_text()
    assert "lower is better" in page
    assert "R²" in page
    assert "fairwind compare" in results["command"]
    assert len(fw.load(killed)) == 6


def test_a_task_that_is_not_the_same_any_more_is_not_resumed(own: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    succeeded(
        "compare", f"{own}:task", "--algorithms", "fedavg", "--seeds", "0", "--rounds", "3", "--out", out
    )
    (out / "results.json").unlink()
    own.write_text(own.read_text().replace("range(20, 26)", "range(21, 27)"))
    assert "was started with a task that differs in its data" in refused("resume", out)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tsk", "did you mean 'task'"),
        ("not_a_task", "is a int, not a task"),
        ("half", "is a Algorithm, not a task"),
        ("broken", "ZeroDivisionError"),
        ("wants", "a function without arguments"),
    ],
)
def test_what_is_no_task_is_refused_by_name(own: Path, name: str, said: str, tmp_path: Path) -> None:
    from fairwind.runs.references import load_task

    with pytest.raises(fw.InputError, match=said) as caught:
        load_task(f"{own}:{name}")
    assert "\n" not in str(caught.value)


IMPORTS = {
    "at once": "from {} import rate\ndef algorithm(): return fw.algorithms.fedavg(lr=rate)\n",
    "when called": "def algorithm():\n    from {} import rate\n    return fw.algorithms.fedavg(lr=rate)\n",
    "later": "def algorithm(): return fw.algorithms.fedavg()\ndef late():\n    from {} import rate\n",
}


@pytest.mark.parametrize("second", ["at once", "when called"])
@pytest.mark.parametrize("first", IMPORTS)
@pytest.mark.parametrize("form", ["{}.py", "{}/__init__.py", "{}/part.py"])
def test_two_files_do_not_share_a_module_of_one_name(
    first: str, second: str, form: str, tmp_path: Path
) -> None:
    from fairwind.runs.references import load_algorithm

    helper = f"helper_{abs(hash((first, second, form)))}"
    name = f"{helper}.part" if "part" in form else helper
    for folder, code, rate in (("one", IMPORTS[first], 0.5), ("two", IMPORTS[second], 0.25)):
        file = tmp_path / folder / form.format(helper)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"rate = {rate}\n")
        (tmp_path / folder / "mine.py").write_text("import fairwind as fw\n" + code.format(name))
    load_algorithm(f"{tmp_path}/one/mine.py:algorithm")
    for _ in range(2):  # also if it is tried again
        with pytest.raises(fw.InputError, match=f"(one|two) both have a module '{helper}'"):
            load_algorithm(f"{tmp_path}/two/mine.py:algorithm")
    for module in [module for module in sys.modules if module.startswith(helper)]:
        del sys.modules[module]


def test_files_of_one_folder_share_its_modules_and_other_folders_have_their_own(tmp_path: Path) -> None:
    from fairwind.runs.references import load_algorithm

    code = "import fairwind as fw\nfrom {} import rate\nalgorithm = fw.algorithms.fedavg(lr=rate)\n"
    for folder, helper, rate in (("one", "helper_of_one", 0.5), ("two", "helper_of_two", 0.25)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{helper}.py").write_text(f"rate = {rate}\n")
        for name in ("mine.py", "further.py"):
            (tmp_path / folder / name).write_text(code.format(helper))
            assert load_algorithm(f"{tmp_path / folder / name}:algorithm").name == f"fedavg:lr={rate}"


def test_a_file_that_cannot_be_loaded_says_where(tmp_path: Path) -> None:
    from fairwind.runs.references import is_reference, load_task

    file = tmp_path / "bad.py"
    file.write_text("import torch\n\nraise KeyError('x')\n")
    with pytest.raises(fw.InputError, match=r"bad.py cannot be loaded \(line 3\): KeyError"):
        load_task(f"{file}:task")
    with pytest.raises(fw.InputError, match="there is no file"):
        load_task(f"{tmp_path / 'none.py'}:task")
    with pytest.raises(fw.InputError, match="ModuleNotFoundError"):
        load_task("no_such.module:task")
    assert not any(map(is_reference, ("synthetic", "synthetic:classes=5", "adafedadam:alpha=2.5,warmup=0")))


EXITING = {
    "while loading": ("import sys\nsys.exit(0)\n", "cannot be loaded (line 2): SystemExit: 0"),
    "in the function": (
        OWN.replace("LR", "0.1").replace("def task():", "def task():\n    raise SystemExit"),
        "failed (line 8): SystemExit",
    ),
    "in training": (
        OWN.replace("LR", "0.1").replace("loss=nn.functional.mse_loss", "loss=leave")
        + "def leave(outputs, targets):\n    quit(0)\n",
        "own code called sys.exit(0), so there are no results",
    ),
}


@pytest.mark.parametrize(("text", "said"), EXITING.values(), ids=EXITING)
def test_a_users_file_that_exits_is_no_success(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "leaving.py"
    file.write_text(text)
    words = "compare", f"{file}:task", "--algorithms", "fedavg", "--seeds", 0, "--rounds", 2
    assert said in refused(*words, "--out", tmp_path / "run")


def test_a_users_file_that_changes_its_folder_moves_no_results(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").mkdir()
    file = tmp_path / "moving.py"
    file.write_text(f"import os\nos.chdir({str(tmp_path / 'elsewhere')!r})\n" + OWN.replace("LR", "0.1"))
    words = "compare", f"{file}:task", "--algorithms", "fedavg", "--seeds", 0, "--rounds", 2
    done = called(*words, "--out", "run", cwd=tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "run" / "results.json").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


class StopHereError(Exception):
    pass


def test_from_python_a_stopped_comparison_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    task = fw.Task(make_model, make_federation([12, 30, 7]), rounds=12, name="three")

    def compare(out: str, **given: Any) -> fw.Comparison:
        own: dict[str, Any] = {"fair": fw.algorithms.adafedadam(alpha=2), "fedavg": "fedavg"}
        options: dict[str, Any] = {"seeds": [0, 1], "eval_every": 2, "checkpoint_every": 0, "progress": False}
        return fw.compare(task, own, out=tmp_path / out, **options | given)

    whole = compare("whole")
    heard: list[int] = []

    def stop(lines: list[dict[str, Any]]) -> None:
        heard.append(lines[0]["round"])
        assert [line["algorithm"] for line in lines] == ["fair", "fair", "fedavg", "fedavg"]
        if lines[0]["round"] == 6:
            raise StopHereError

    with pytest.raises(StopHereError):
        compare("stopped", after_evaluation=stop)
    assert heard == [0, 2, 4, 6]
    assert "made in Python" in refused("resume", tmp_path / "stopped")
    again = compare("stopped")
    assert_same_bits(tmp_path / "whole", tmp_path / "stopped")
    loaded = compare("stopped")  # finished: read, not trained
    for one, other in zip(again, loaded, strict=True):
        assert torch.equal(one.score.float(), other.score)
        assert torch.equal(one.curve, other.curve)
        assert one.rounds == other.rounds == [0, 2, 4, 6, 8, 10, 12]
        assert one.history == other.history
        assert one.state_dict.keys() == other.state_dict.keys()
    assert whole["fair", 1].metrics == again["fair", 1].metrics
    with pytest.raises(fw.InputError, match=r"holds more than is asked for .*algorithm fedavg"):
        fw.compare(task, {"fair": fw.algorithms.fedavg()}, out=tmp_path / "stopped", progress=False)
    with pytest.raises(fw.InputError, match=r"holds more than is asked for \(12 rounds, not 11\)"):
        compare("stopped", rounds=11)
    assert again.report().exists()
    assert list(again.to_pandas()["algorithm"]) == ["fair", "fair", "fedavg", "fedavg"]
    assert len(again.clients_to_pandas()) == 12
    difference = again.difference("fair", "fedavg")["avg"]
    assert difference.low <= difference.difference <= difference.high
    assert "fair" in repr(again)
    assert "<table" in again._repr_html_()


def test_training_stops_at_a_target() -> None:
    federation = make_federation([40, 60, 50], dtype=torch.float32)
    task = fw.Task(make_model, federation, rounds=400, solver=fw.Solver(lr=0.1))
    whole = fw.simulate(task, "fedavg", eval_every=5, progress=False)
    averages = [known(line["avg"]) for line in whole.history]
    between = (averages[0] + max(averages)) / 2
    early = fw.simulate(task, "fedavg", eval_every=5, target=between, progress=False)
    reached = next(line["round"] for line in whole.history if known(line["avg"]) >= between)
    assert early.rounds[-1] == reached < 400


@pytest.mark.parametrize(
    "loss", [F.cross_entropy, nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="none")]
)
def test_pytorchs_cross_entropy_is_the_usual_loss(loss: object) -> None:
    federation = make_federation([12, 30])
    ours, theirs = (
        fw.simulate(fw.Task(make_model, federation, rounds=3, loss=each), "adafedadam", progress=False)
        for each in (fw.Task(make_model, federation).loss, loss)
    )
    torch.testing.assert_close(ours.state_dict, theirs.state_dict)


@pytest.mark.parametrize("loss", [F.mse_loss, nn.MSELoss(), F.l1_loss, F.huber_loss, nn.SmoothL1Loss()])
def test_regression_works_with_targets_of_either_shape(loss: object) -> None:
    draw = torch.Generator().manual_seed(0)
    x = [torch.randn(30, 4, generator=draw) for _ in range(4)]
    found = []
    for shape in ((30,), (30, 1)):
        clients = [(each, (3 * each[:, 0]).view(shape)) for each in x]
        task = fw.Task(
            lambda: nn.Linear(4, 1),
            fw.Federation.from_clients(clients),
            loss=loss,
            score=fw.scores.r2,
            solver=fw.Solver(lr=0.05),
            rounds=60,
        )
        found.append(fw.simulate(task, "fedavg", seed=1, progress=False).metrics["avg"] or 0)
    assert found[0] > 0.9
    assert found[1] == pytest.approx(found[0])


def test_what_is_no_loss_or_score_is_refused() -> None:
    federation = make_federation([12, 30])
    for given, said in (
        ({"loss": 3}, "3 is not a loss"),
        ({"loss": F.relu}, "F.relu is not a loss"),
        ({"score": "acuracy"}, "unknown score 'acuracy': did you mean 'accuracy'"),
        ({"score": 3}, "3 is not a score"),
        ({"score": []}, "at least one score"),
        ({"score": [fw.scores.f1, fw.scores.f1]}, "two scores are called 'f1'"),
    ):
        with pytest.raises(fw.InputError, match=said):
            fw.Task(make_model, federation, **given)
    for_outputs = fw.Task(make_model, federation, loss=lambda o, t: o**2)
    with pytest.raises(fw.InputError, match=r"not one number per sample.*reduction='none'"):
        fw.simulate(for_outputs, "fedavg", progress=False)


def test_divergence_is_a_warning() -> None:
    draw = torch.Generator().manual_seed(0)
    clients = [(100 * torch.randn(20, 3, generator=draw), torch.randn(20, generator=draw)) for _ in range(3)]
    federation = fw.Federation.from_clients(clients)
    task = fw.Task(
        nn.Linear(3, 1), federation, loss=F.mse_loss, score=fw.scores.mae, solver=fw.Solver(lr=1.0)
    )
    with pytest.warns(UserWarning, match="fedavg.*left out, being not finite.*smaller learning rate"):
        fw.simulate(task, "fedavg", rounds=20, progress=False)


def test_a_label_keeps_its_parameters(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["--algorithms", "fedavg:lr=0.1", "--seeds", "0", "--rounds", "2", "--out", out]
    succeeded("compare", "synthetic:clients=6", *words)
    results = json.loads((out / "results.json").read_text())
    assert [row["algorithm"] for row in (*results["summary"], *results["runs"])] == ["fedavg:lr=0.1"] * 2
    assert '"algorithm": "fedavg:lr=0.1"' in (out / "history.jsonl").read_text()
    federation = make_federation([12, 30])
    made = fw.simulate(
        fw.Task(make_model, federation), fw.algorithms.fedavg(lr=0.1), rounds=1, progress=False
    )
    assert made.algorithm == "fedavg:lr=0.1"


def test_a_text_task_with_a_mask() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(50, 8), nn.Linear(8, 2)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            weight = mask.to(self.words.weight.dtype)
            out: torch.Tensor = self.out(
                (self.words(ids) * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
            )
            return out

    draw = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(5):
        ids, mask = torch.randint(0, 50, (40, 6), generator=draw), torch.rand(40, 6, generator=draw) < 0.8
        mask[:, 0] = True
        clients.append(({"ids": ids, "mask": mask}, (ids[:, 0] > 24).long()))
    scores = [fw.scores.accuracy, fw.scores.auc, fw.scores.f1]
    task = fw.Task(
        Bag, fw.Federation.from_clients(clients), score=scores, solver=fw.Solver(lr=0.5), rounds=30
    )
    result = fw.simulate(task, "adafedadam", progress=False)
    assert set(result.scores) == {"accuracy", "auc", "f1"}
    assert 0 <= float(result.scores["auc"].nanmean()) <= 1
    assert result.history[-1]["scores"]["auc"]["avg"] is not None


@pytest.mark.slow
def test_the_notebook_executes(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "own_task.ipynb", as_version=4)
    before = os.getcwd()
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert os.getcwd() == before
    assert (tmp_path / "runs" / "notebook" / "report.html").exists()
    shown = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "<table" in shown
    assert "Traceback" not in shown


def test_a_module_with_other_outputs_than_classes_is_named() -> None:
    federation = make_federation([12, 30], dtype=torch.float32)
    with pytest.raises(fw.InputError, match="labels must be 0 to 1"):
        fw.simulate(fw.Task(nn.Linear(FEATURES, CLASSES - 1), federation), "fedavg", progress=False)
