import math
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fairwind as fw
from conftest import CLASSES, FEATURES, Point, half_square, make_federation, make_model, points
from samples import as_tensor

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_public_names() -> None:
    assert sorted(fw.__all__) == [
        "Algorithm",
        "Change",
        "Cohort",
        "CohortAlgorithm",
        "Comparison",
        "Contribution",
        "Evaluation",
        "Federation",
        "GradientAlgorithm",
        "GramAlgorithm",
        "InputError",
        "Local",
        "LocalAlgorithm",
        "Memory",
        "MemoryAlgorithm",
        "NewClients",
        "PersonalAlgorithm",
        "PooledAlgorithm",
        "Report",
        "Result",
        "Score",
        "Settings",
        "Solver",
        "Stateless",
        "Task",
        "Tracked",
        "Tracker",
        "Tuned",
        "algorithms",
        "augment",
        "compare",
        "evaluate",
        "load",
        "models",
        "scores",
        "setup",
        "simulate",
        "tune",
    ]
    assert list(fw.algorithms.REGISTRY)[:5] == ["fedavg", "fedadam", "fednova", "qfedavg", "adafedadam"]
    assert all(getattr(fw.algorithms, name) is build for name, build in fw.algorithms.REGISTRY.items())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr": 0.1}, "'lr' is the local solver's: give solver=fairwind.Solver\\(lr=…\\)"),
        ({"learning_rate": 0.1}, "Solver\\(lr=…\\)"),
        ({"epochs": 2}, "Solver\\(epochs=…\\)"),
        ({"batch_size": 2}, "Solver\\(batch_size=…\\)"),
        ({"num_rounds": 2}, "unknown setting of {}.*did you mean 'rounds'"),
        ({"fraction": 0.1}, "did you mean 'participation'"),
        ({"wind": 9}, "unknown setting of {} 'wind': known: task, algorithm"),
    ],
)
@pytest.mark.parametrize("function", [fw.simulate, fw.compare])
def test_a_setting_by_another_name_is_told_where_it_belongs(function: Any, given: Any, words: str) -> None:
    task = fw.Task(make_model, make_federation([12, 30]))
    with pytest.raises(fw.InputError, match=words.format(function.__name__)):
        function(task, "fedavg", **given)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("own_*.py")), ids=lambda path: path.stem)
def test_examples_run(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = runpy.run_path(str(example), run_name="__main__")
    assert found["result"].metrics["avg"] > 80
    assert "Uppsala" in capsys.readouterr().out


def test_simulate_learns_and_tells_how_each_client_fares() -> None:
    federation = make_federation([12, 30, 50])
    task = fw.Task(make_model, federation, rounds=4)
    result = fw.simulate(task, fw.algorithms.adafedadam(alpha=2), eval_every=2, seed=3)
    assert (result.algorithm, result.seed) == ("adafedadam:alpha=2", 3)
    assert result.rounds == [0, 2, 4]
    assert torch.equal(result.curve[-1], result.score.float())
    assert [line["round"] for line in result.history] == [0, 2, 4]
    assert result.score.shape == result.loss.shape == (3,)
    assert result.metrics["avg"] == pytest.approx(result.score.mean().item())
    model = make_model()
    model.load_state_dict(result.state_dict)
    start = int(federation.start[1] + federation.train[1])
    test = slice(start, start + int(federation.test[1]))
    right = (
        (model(as_tensor(federation.inputs)[test]).argmax(1) == as_tensor(federation.targets)[test])
        .double()
        .mean()
    )
    assert result.score[1].item() == pytest.approx(100 * right.item())


def test_a_module_starts_from_its_own_weights_and_a_function_from_the_seeds() -> None:
    federation = make_federation([12, 30])
    module = make_model()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    options: dict[str, Any] = {"rounds": 1, "solver": fw.Solver(lr=1e-9)}
    own, drawn = fw.Task(module, federation), fw.Task(make_model, federation)
    a, b = (fw.simulate(own, "fedavg", seed=s, **options) for s in (0, 1))
    for name, value in before.items():
        torch.testing.assert_close(a.state_dict[name], value, rtol=0, atol=1e-6)
        torch.testing.assert_close(b.state_dict[name], value, rtol=0, atol=1e-6)
        assert torch.equal(module.state_dict()[name], value)  # the caller's module is left alone
    state = torch.get_rng_state()
    c, d = (fw.simulate(drawn, "fedavg", seed=s, **options) for s in (0, 1))
    assert not torch.allclose(c.state_dict["0.weight"], d.state_dict["0.weight"])
    assert torch.equal(torch.get_rng_state(), state)  # and so is the caller's generator


def test_compare_is_simulate_for_each() -> None:
    federation = make_federation([12, 30, 7])
    named: dict[str, Any] = {"fair": fw.algorithms.adafedadam(alpha=2), "mean": fw.algorithms.fedavg()}
    task = fw.Task(make_model, federation, rounds=3)
    together = fw.compare(task, named, seeds=[0, 1])
    labels = [(r.algorithm, r.seed) for r in together.runs]
    assert labels == [("fair", 0), ("fair", 1), ("mean", 0), ("mean", 1)]
    alone = fw.simulate(task, named["mean"], seed=1)
    torch.testing.assert_close(together[3].state_dict, alone.state_dict)


def test_another_loss_and_score() -> None:
    federation = points(torch.tensor([[1.0], [3.0]], dtype=torch.float64), [4, 4])
    task = fw.Task(Point(1), federation, loss=half_square, score=half_square, solver=fw.Solver(lr=0.1))
    result = fw.simulate(task, fw.algorithms.fedavg(), rounds=200)
    assert result.state_dict["w"].item() == pytest.approx(2)


def test_tied_weights_are_trained_and_returned_as_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.back = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 4)
            self.out = nn.Linear(4, CLASSES)
            self.back.weight = self.into.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(torch.tanh(self.into(x)) + self.back(x))
            return out

    federation = make_federation([12, 30], dtype=torch.float32)
    model = Tied()
    before = model.into.weight.clone()
    result = fw.simulate(fw.Task(model, federation), fw.algorithms.fedavg(), rounds=2)
    assert torch.equal(result.state_dict["into.weight"], result.state_dict["back.weight"])
    model.load_state_dict(result.state_dict)
    assert not torch.equal(model.into.weight, before)


def test_seeds_must_agree_on_what_is_not_trained() -> None:
    def model() -> nn.Module:
        made = make_model()
        made[0].requires_grad_(False)
        return made

    federation = make_federation([12, 30])
    named = {"a": fw.algorithms.fedavg()}
    fw.compare(fw.Task(model, federation), named, seeds=[1], rounds=1)
    with pytest.raises(fw.InputError, match=r"'0.weight' is not trained but differs by seed"):
        fw.compare(fw.Task(model, federation), named, seeds=[0, 1], rounds=1)


def refuse(model: nn.Module, message: str, **settings: Any) -> None:
    federation = make_federation([12, 30], dtype=torch.float32)
    with pytest.raises(fw.InputError, match=message) as caught:
        fw.simulate(fw.Task(model, federation), fw.algorithms.fedavg(), **{"rounds": 1, **settings})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)])
def test_batch_norm_is_refused_and_a_remedy_named(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 4), norm, nn.Linear(4, CLASSES))
    refuse(model, f"layer '1' is {type(norm).__name__}.*say what.*local.*shared.*recomputed.*frozen.*group")


def test_other_normalisation_works() -> None:
    federation = make_federation([12, 30], dtype=torch.float32)
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES))
    result = fw.simulate(fw.Task(model, federation), fw.algorithms.adafedadam(), rounds=2)
    assert math.isfinite(result.metrics["loss_avg"] or math.nan)


def test_other_things_in_the_place_of_an_algorithm_or_a_federation_are_refused() -> None:
    federation, model = make_federation([12, 30]), make_model()
    task = fw.Task(model, federation)
    with pytest.raises(fw.InputError, match="is not an algorithm"):
        fw.simulate(task, fw.algorithms.fedavg, rounds=1)  # type: ignore[arg-type]
    with pytest.raises(fw.InputError, match="unknown algorithm 'fedavgg': did you mean 'fedavg'"):
        fw.simulate(task, "fedavgg", rounds=1)
    with pytest.raises(fw.InputError, match="is not a federation"):
        fw.Task(model, [(1, 2)])  # type: ignore[arg-type]
    with pytest.raises(fw.InputError, match="is not a model"):
        fw.Task(3, federation)  # type: ignore[arg-type]
    with pytest.raises(fw.InputError, match="is not a task"):
        fw.compare(model, "fedavg")  # type: ignore[arg-type]


def test_models_that_cannot_train_are_refused() -> None:
    refuse(nn.Linear(FEATURES + 1, CLASSES), r"inputs \(float32 of shape \(5,\) per sample\)")
    refuse(nn.ReLU(), "no trainable parameters")
    refuse(nn.LazyLinear(CLASSES), "call the model on a batch")
    refuse(nn.Linear(FEATURES, CLASSES, dtype=torch.complex64), "'weight' is complex64: only real numbers")
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(nn.Linear(FEATURES, CLASSES))
    refuse(scripted, "before torch.jit.script")
    refuse(nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES).double()), "mixes parameter types")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients_per_round": 3}, "clients_per_round=3 is more than the 2 clients"),
        ({"clients_per_round": 0}, "clients_per_round=0"),
        ({"participation": 0.5, "clients_per_round": 1}, "give one of them"),
        ({"rounds": 0}, "rounds=0"),
        ({"rounds": 2.5}, "rounds=2.5 is not a whole number"),
        ({"rounds": "2"}, "rounds='2' is not a whole number"),
        ({"solver": "sgd"}, "solver='sgd' is not a solver"),
        ({"eval_every": 0}, "eval_every=0"),
        ({"probe_samples": 0}, "probe_samples=0"),
        ({"participation": 5}, "participation=5"),
        ({"device": "abacus"}, "device 'abacus' is neither cpu nor cuda"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
        ({"engine": "warp"}, "engine='warp' is not one of auto, stacked, loop"),
        ({"memory": 0}, "memory=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    refuse(nn.Linear(FEATURES, CLASSES), message, **settings)


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        ({"lr": 0}, "lr=0"),
        ({"lr": "fast"}, "lr='fast' is not a number"),
        ({"lr": math.nan}, "lr=nan"),
        ({"momentum": 1}, "momentum=1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"epochs": (3, 1)}, r"epochs=\(3, 1\)"),
        ({"epochs": 0}, "epochs=0"),
        ({"nesterov": True}, "nesterov needs SGD with momentum"),
    ],
)
def test_bad_solvers_are_refused_by_name(solver: dict[str, Any], message: str) -> None:
    with pytest.raises(fw.InputError, match=message):
        fw.Solver(**solver)


def test_many_clients_need_no_more_memory_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that train at once are bounded by the budget, however many clients there are."""
    from fairwind.engine.executor import Run
    from fairwind.engine.simulation import Simulation
    from fairwind.engine.stacked import executor as stacked

    made = vars(stacked)["train_step"]

    def counted(step: Any, rows: list[int]) -> Any:
        def step_and_count(given: Any, *rest: Any) -> Any:
            rows.append(len(given.loss))
            return step(given, *rest)

        return step_and_count

    federation = make_federation([4] * 3000, dtype=torch.float32)
    model = nn.Linear(FEATURES, CLASSES)
    runs = [Run("a", fw.algorithms.adafedadam(), 0)]
    models, most = [], []
    for memory in (0.001, 1):
        settings = fw.Settings(rounds=1, memory=memory, compile="off", workers=1)
        rows: list[int] = []
        monkeypatch.setattr(stacked, "train_step", lambda *given, rows=rows: counted(made(*given), rows))
        simulation = Simulation(model, federation, runs, settings)
        simulation.step()
        assert sum(rows) == 3000
        models.append(simulation.x)
        most.append(max(rows))
    assert most[0] < 1000
    assert most[1] == 3000
    torch.testing.assert_close(*models, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_gradients_that_a_users_file_has_switched_off_are_computed(engine: Any) -> None:
    """To the bit; also those of a linear model, for which there is hand-written code."""
    task = fw.Task(lambda: nn.Linear(FEATURES, CLASSES).double(), make_federation([3, 17, 8]))
    names = ["fedavg", "adafedadam", "mime", "ditto"]
    options: dict[str, Any] = {"rounds": 2, "engine": engine, "compile": "off", "progress": False}
    expected = fw.compare(task, names, **options)
    with torch.no_grad():
        found = fw.compare(task, names, **options)
    assert [run.metrics for run in found] == [run.metrics for run in expected]
    with torch.inference_mode(), pytest.raises(fw.InputError, match="train outside of it"):
        fw.compare(task, names, **options)


class Halving:
    """A schedule that is an object."""

    def __call__(self, round: int) -> float:
        return 0.5**round


def test_a_partial_optimizer_and_a_schedule_that_is_an_object_are_resumed(tmp_path: Path) -> None:
    def compare(rate: float, rounds: int) -> fw.Comparison:
        optimizer = partial(torch.optim.SGD, momentum=rate)
        solver = fw.Solver(lr=0.1, optimizer=optimizer, lr_schedule=Halving())
        task = fw.Task(make_model, make_federation([12, 30]), solver=solver)
        return fw.compare(task, ["fedavg"], rounds=rounds, out=tmp_path / "run", progress=False)

    compare(0.9, 1)
    assert compare(0.9, 2).runs[0].rounds[-1] == 2
    with pytest.raises(fw.InputError, match="differs in its setting 'optimizer'"):
        compare(0.5, 2)
