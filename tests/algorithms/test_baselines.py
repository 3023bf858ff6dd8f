"""What a federation is compared with: each client alone, all data in one place, fine-tuned models."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fairwind as fw
from batches import batches_by_hand
from conftest import FEATURES, make_federation, make_model
from fairwind import Federation, InputError, Solver, algorithms
from fairwind.comparison import Comparison
from fairwind.engine.loop.learner import Learner
from fairwind.engine.settings import Engine
from fairwind.exchange import LocalClient
from fairwind.intervals import share
from fairwind.report.interim import read_interim
from fairwind.runs.gains import joining
from samples import as_tensor
from simulations import Spoilt, simulation, stacked_of

SIZES = [30, 12, 60, 25]
SOLVER = Solver(lr=0.1, batch_size=4)
ENGINES = pytest.mark.parametrize("engine", ["stacked", "loop"])


def task_of(federation: Federation, **options: Any) -> fw.Task:
    given: dict[str, Any] = {"rounds": 3, "solver": SOLVER} | options
    return fw.Task(make_model, federation, **given)


def train(model: nn.Module, inputs: Tensor, targets: Tensor, batches: Sequence[list[int]]) -> None:
    """Steps of SGD, in place."""
    for batch in batches:
        loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            weight.data -= 0.1 * gradient


def own(federation: Federation, k: int, part: str) -> tuple[Tensor, Tensor]:
    """A client's samples of a part."""
    start, size = federation.part(part)  # type: ignore[arg-type]
    rows = slice(int(start[k]), int(start[k] + size[k]))
    return as_tensor(federation.inputs)[rows], as_tensor(federation.targets)[rows]


def accuracy(model: nn.Module, federation: Federation, k: int) -> float:
    inputs, targets = own(federation, k, "test")
    return 100 * float((model(inputs).argmax(1) == targets).double().mean())


def fresh(state: dict[str, Tensor] | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = make_model()
    if state is not None:
        model.load_state_dict(state)
    return model


def assert_state(found: dict[str, Tensor], model: nn.Module, k: int | None = None) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name] if k is None else found[name][k], value, rtol=1e-9, atol=1e-12)


# ---- as in loops by hand ----


@ENGINES
@pytest.mark.parametrize("given", [["fedavg", "local"], ["local"], {"alone": algorithms.local()}])
def test_each_client_trains_alone(engine: Engine, given: Any) -> None:
    """Beside others and by itself; scores are of each client's own model."""
    federation = make_federation(SIZES)
    compared = fw.compare(task_of(federation), given, engine=engine, progress=False)
    run = compared.runs[-1]
    assert run.baseline == "local"
    for k in range(len(SIZES)):
        model, size = fresh(), int(federation.train[k])
        for round in range(3):
            train(model, *own(federation, k, "train"), batches_by_hand(size, -(-size // 4), 0, round, k))
        assert_state(run.state_dict, model, k)
        assert float(run.score[k]) == pytest.approx(accuracy(model, federation, k))


@ENGINES
@pytest.mark.parametrize("given", [["pooled", "fedavg"], ["pooled"], {"all": algorithms.pooled()}])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_pooled_data_trains_one_model(engine: Engine, given: Any, participation: float) -> None:
    """On all training samples, whoever takes part in the federation beside it."""
    federation = make_federation(SIZES)
    options: dict[str, Any] = {"engine": engine, "progress": False, "participation": participation}
    run = fw.compare(task_of(federation), given, **options).runs[-1]
    assert run.baseline == "pooled"
    samples = [own(federation, k, "train") for k in range(len(SIZES))]
    inputs, targets = (torch.cat(each) for each in zip(*samples, strict=True))
    model = fresh()
    for round in range(3):
        train(model, inputs, targets, batches_by_hand(len(inputs), -(-len(inputs) // 4), 0, round, 0))
    assert_state(run.state_dict, model)
    expected = [accuracy(model, federation, k) for k in range(len(SIZES))]
    assert run.score.tolist() == pytest.approx(expected)


def test_pooled_data_takes_as_many_steps_as_all_clients() -> None:
    federation = make_federation(SIZES)
    task = task_of(federation, solver=Solver(lr=0.1, batch_size=4, steps=5), rounds=1)
    run = fw.simulate(task, "pooled", progress=False)
    samples = [own(federation, k, "train") for k in range(len(SIZES))]
    inputs, targets = (torch.cat(each) for each in zip(*samples, strict=True))
    model = fresh()
    train(model, inputs, targets, batches_by_hand(len(inputs), 5 * len(SIZES), 0, 0, 0))
    assert_state(run.state_dict, model)


def test_fine_tuning_trains_all_of_a_model_whose_parts_train_in_turn() -> None:
    """Also where it is shorter than the phase of the personal part, and at its cost."""
    solver = Solver(lr=0.1, batch_size=4, epochs=6, personal_first=5, lr_decay=0.5)
    task = task_of(make_federation(SIZES), solver=solver, rounds=1, personal="2.*")
    plain, tuned = fw.compare(task, ["fedavg"], finetune=2, progress=False).results["runs"]
    assert tuned["algorithm"] == "fedavg (fine-tuned)"
    trained = int(task.federation.train.sum())
    assert tuned["cost"]["sample_gradients"] - plain["cost"]["sample_gradients"] == 2 * trained


@ENGINES
def test_a_fine_tuned_model_is_the_runs_after_epochs_at_the_client(engine: Engine) -> None:
    """With the solver's first learning rate, although that of the rounds has decayed."""
    federation = make_federation(SIZES)
    task = task_of(federation, solver=replace(SOLVER, lr_decay=0.5))
    options: dict[str, Any] = {"engine": engine, "progress": False, "clients_per_round": 2}
    compared = fw.compare(task, ["fedavg", "adafedadam"], finetune=2, **options)
    assert [run.algorithm for run in compared.runs[2:]] == ["fedavg (fine-tuned)", "adafedadam (fine-tuned)"]
    for trained, tuned in zip(compared.runs[:2], compared.runs[2:], strict=True):
        assert (tuned.baseline, tuned.personal, tuned.rounds, tuned.history) == ("finetuned", True, [], [])
        for k in range(len(SIZES)):
            model, size = fresh(trained.state_dict), int(federation.train[k])
            train(model, *own(federation, k, "train"), batches_by_hand(size, 2 * -(-size // 4), 0, 3, k))
            assert_state(tuned.state_dict, model, k)
            assert float(tuned.score[k]) == pytest.approx(accuracy(model, federation, k))
            assert_state(tuned.model_of(k).state_dict(), model)


@ENGINES
def test_new_clients_get_the_model_and_may_fine_tune_it(engine: Engine) -> None:
    federation = make_federation(SIZES).with_new_clients(["1", "3"])
    new = federation.new_clients
    assert new is not None
    compared = fw.compare(task_of(federation), ["fedavg", "local"], engine=engine, progress=False, finetune=1)
    trained, alone, tuned = compared.runs
    assert trained.clients == ["0", "2"]
    assert alone.new_clients is None  # there is no model for them
    assert trained.new_clients is not None
    assert tuned.new_clients is not None
    for k in range(2):
        model, size = fresh(trained.state_dict), int(new.train[k])
        assert float(trained.new_clients.score[k]) == pytest.approx(accuracy(model, new, k))
        train(model, *own(new, k, "train"), batches_by_hand(size, -(-size // 4), 0, 3, k))
        assert float(tuned.new_clients.score[k]) == pytest.approx(accuracy(model, new, k))
        inputs, targets = own(new, k, "test")
        loss = nn.functional.cross_entropy(model(inputs), targets).item()
        assert float(tuned.new_clients.loss[k]) == pytest.approx(loss)
    assert trained.new_clients.metrics["avg"] == pytest.approx(float(trained.new_clients.score.mean()))


# ---- what they leave alone, and what leaves them alone ----

EVERY = ["fedavg", "adafedadam", "scaffold", "ditto", "mime", "afl", "aaggff", "local", "pooled"]


def same_training(one: Comparison, other: Comparison) -> None:
    for a, b in zip(one.runs, other.runs, strict=True):
        assert (a.algorithm, a.metrics, a.history) == (b.algorithm, b.metrics, b.history)
        assert all(torch.equal(value, b.state_dict[name]) for name, value in a.state_dict.items())


@ENGINES
@pytest.mark.parametrize("poison", [float("nan"), 1e9])
def test_no_training_number_depends_on_new_clients(engine: Engine, poison: float) -> None:
    whole = make_federation(SIZES)
    bad = as_tensor(whole.inputs).clone()
    for k in (1, 3):
        bad[int(whole.start[k]) : int(whole.start[k] + whole.sizes[k])] = poison
    options: dict[str, Any] = {"engine": engine, "progress": False, "finetune": 1}
    clean, spoilt = (
        fw.compare(task_of(federation.with_new_clients(["1", "3"])), EVERY, **options)
        for federation in (whole, replace(whole, inputs=bad))
    )
    same_training(clean, spoilt)
    assert clean.runs[0].new_clients is not None
    assert spoilt.runs[0].new_clients is not None
    assert not torch.equal(clean.runs[0].new_clients.loss, spoilt.runs[0].new_clients.loss)
    without = fw.compare(task_of(whole.held_out(["1", "3"])[0]), EVERY, **options)
    same_training(clean, without)


@ENGINES
def test_algorithms_do_not_notice_baselines(engine: Engine) -> None:
    """Not what is beside them, nor in which order; and fine-tuning comes when all is over."""
    federation = make_federation(SIZES).with_validation(0.2)
    names = [name for name in EVERY if name not in algorithms.BASELINES]
    options: dict[str, Any] = {"engine": engine, "progress": False, "seeds": [0, 1], "patience": 2}
    plain = fw.compare(task_of(federation, rounds=5), names, eval_every=1, **options)
    mixed = ["pooled", *names, "local"]
    more = fw.compare(task_of(federation, rounds=5), mixed, eval_every=1, **options, finetune=1)
    labels = [run.algorithm for run in more.runs]
    assert labels.index("pooled") == len(plain.runs) + 2  # after all others
    assert labels[-1] == "aaggff (fine-tuned)"
    for run in plain.runs:
        other = more[run.algorithm, run.seed]
        rounds = len(run.history) if len(run.history) <= len(other.history) else len(other.history)
        assert run.history[:rounds] == other.history[:rounds]


@ENGINES
def test_the_test_samples_are_read_once(engine: Engine) -> None:
    """Whatever they hold, training, its history and the fine-tuned models are the same."""
    whole = make_federation(SIZES).with_validation(0.2).with_new_clients(["0"])
    assert whole.new_clients is not None
    spoilt = []
    for federation in (whole, whole.new_clients):
        bad, (start, size) = as_tensor(federation.inputs).clone(), federation.part("test")
        for at, count in zip(start.tolist(), size.tolist(), strict=True):
            bad[at : at + count] = float("nan")
        spoilt.append(replace(federation, inputs=bad))
    names = ["fedavg", "pooled", "local"]
    options: dict[str, Any] = {"engine": engine, "progress": False, "finetune": 1, "eval_every": 1}
    clean = fw.compare(task_of(whole), names, **options)
    bad_one = fw.compare(task_of(replace(spoilt[0], new_clients=spoilt[1])), names, **options)
    for a, b in zip(clean.runs, bad_one.runs, strict=True):
        assert a.history == b.history
        assert all(torch.equal(value, b.state_dict[name]) for name, value in a.state_dict.items())
        assert not torch.equal(a.loss, b.loss)


# ---- the same bits ----


def stop_after(evaluations: int) -> Callable[[object], None]:
    left = [evaluations]

    def called(_: object) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    return called


@ENGINES
def test_resumed_they_have_the_same_bits(tmp_path: Path, engine: Engine) -> None:
    federation = make_federation(SIZES).with_validation(0.2).with_new_clients(0.25)
    own_names: dict[str, Any] = {"mine": algorithms.pooled(), "fedavg": "fedavg", "alone": algorithms.local()}
    options: dict[str, Any] = {
        "engine": engine,
        "progress": False,
        "seeds": [0, 1],
        "finetune": 1.5,
        "eval_every": 1,
        "checkpoint_every": 0,
    }
    task = task_of(federation, rounds=4)
    whole = fw.compare(task, own_names, **options, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fw.compare(task, own_names, **options, out=tmp_path / "cut", after_evaluation=stop_after(3))
    interim = read_interim(tmp_path / "cut")
    assert [row.get("baseline") for row in interim.results["runs"][::2]] == [None, "local", "pooled"]
    resumed = fw.compare(task, own_names, **options, out=tmp_path / "cut")
    names = "results.json", "history.jsonl", "clients.safetensors", "models.safetensors"
    for name in names[1:]:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    loaded = fw.load(tmp_path / "cut")
    for a, b, c in zip(whole.runs, resumed.runs, loaded.runs, strict=True):
        for other in (b, c):
            assert (a.algorithm, a.seed, a.baseline) == (other.algorithm, other.seed, other.baseline)
            assert (a.metrics, a.history, a.rounds) == (other.metrics, other.history, other.rounds)
            assert all(torch.equal(value, other.state_dict[n]) for n, value in a.state_dict.items())
            assert (a.new_clients is None) == (other.new_clients is None)
            if a.new_clients is not None and other.new_clients is not None:
                assert a.new_clients.metrics == other.new_clients.metrics
                assert a.new_clients.clients == other.new_clients.clients
    (tmp_path / "cut" / "clients.safetensors").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="damaged"):
        fw.compare(task, own_names, **options, out=tmp_path / "cut")
    for name in names[1:]:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_comparison_grows_by_them_to_the_same_bits(tmp_path: Path) -> None:
    """Although pooled data stands first in the one, and last among its runs."""
    task, options = task_of(make_federation(SIZES)), {"progress": False, "eval_every": 1, "seeds": [0, 1]}
    given: Any = options
    fw.compare(task, ["pooled", "fedavg"], **given, out=tmp_path / "grown", rounds=2)
    names = ["pooled", "fedavg", "adafedadam", "local"]
    grown = fw.compare(task, names, **given, out=tmp_path / "grown", rounds=3)
    whole = fw.compare(task, names, **given, rounds=3)
    assert [run.algorithm for run in grown] == [run.algorithm for run in whole]
    same_training(grown, whole)


def test_stacked_is_the_loop() -> None:
    federation = make_federation([1, 2, 3, 17, 45, 8, 1, 26]).with_new_clients(0.25)
    one, other = (
        fw.compare(
            task_of(federation), ["local", "pooled", "fedavg"], engine=engine, finetune=2, progress=False
        )
        for engine in ("stacked", "loop")
    )
    for a, b in zip(one.runs, other.runs, strict=True):
        for name, value in a.state_dict.items():
            torch.testing.assert_close(value, b.state_dict[name], rtol=1e-9, atol=1e-10)
        if a.new_clients is not None and b.new_clients is not None:
            torch.testing.assert_close(a.new_clients.loss, b.new_clients.loss)


# ---- regression, who gains, and what they cost ----


@ENGINES
def test_where_lower_is_better_a_gain_is_a_smaller_error(engine: Engine) -> None:
    draw = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(4):
        inputs = torch.randn(40, FEATURES, generator=draw, dtype=torch.float64)
        clients.append((inputs, inputs.sum(1, keepdim=True)))
    federation = Federation.from_clients(clients, new_clients=0.25)
    task = fw.Task(
        lambda: nn.Linear(FEATURES, 1).double(),
        federation,
        loss=nn.MSELoss(),
        rounds=8,
        solver=SOLVER,
        score="mse",
    )
    names = ["fedavg", "local", "pooled"]
    compared = fw.compare(task, names, engine=engine, finetune=1, progress=False)
    gains = {joined.algorithm: joined for joined in compared.joining()}
    assert list(gains) == ["fedavg", "pooled", "fedavg (fine-tuned)"]
    for label, joined in gains.items():
        expected = (compared["local"].score - compared[label].score).numpy()
        assert joined.gains == pytest.approx(expected)
        assert joined.average is not None
        assert joined.average.difference == pytest.approx(expected.mean())
        assert joined.better == (expected > 0).sum()
    saved = compared.results["joining"]
    assert saved["alone"] == "local"
    for row in saved["algorithms"]:
        joined = gains[row["algorithm"]]
        assert (row["better"], row["worse"], row["equal"]) == (joined.better, joined.worse, joined.equal)
        assert row["losers"] == dict(joined.losers(compared.clients))
        assert row["average"]["low"] < row["average"]["value"] < row["average"]["high"]


def test_the_page_and_the_table_show_who_gains_and_new_clients(tmp_path: Path) -> None:
    federation = make_federation([30, 12, 60, 25, 18, 40]).with_new_clients(["1", "4"])
    names: dict[str, Any] = {"fedavg": "fedavg", "alone": algorithms.local(), "pooled": "pooled"}
    options: dict[str, Any] = {"seeds": [0, 1], "finetune": 1, "progress": False}
    compared = fw.compare(task_of(federation), names, **options, out=tmp_path / "run")
    page = compared.report().read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "<h1>FedAvg on " in page  # what it is compared with are no algorithms
    assert "a model that it trains alone (alone)" in page
    assert "2 clients took no part in training: 1, 4." in page
    assert "<dt>new clients</dt><dd>2</dd>" in page
    fedavg = compared.joining()[0]
    better = fedavg.better_share
    assert better is not None
    cell = f"<td>{better.difference:.0f} % [{better.low:.0f}, {better.high:.0f}]</td>"
    assert f"<td>{fedavg.better}</td><td>{fedavg.equal}</td><td>{fedavg.worse}</td>{cell}" in page
    new = compared.new_clients_to_pandas()
    assert list(new["algorithm"].unique()) == ["fedavg", "pooled", "fedavg (fine-tuned)"]
    mean = new[new["algorithm"] == "fedavg"]["avg"].mean()
    assert f"<td>{mean:.2f} ±" in page
    said = repr(fw.load(tmp_path / "run"))
    assert said == repr(compared)
    assert "2 new clients, which took no part in training." in said
    assert (tmp_path / "run" / "figures" / "joining.png").exists()


def test_a_client_whose_model_diverged_is_in_no_average() -> None:
    runs: list[Any] = [
        {"algorithm": "fedavg", "seed": 0},
        {"algorithm": "alone", "seed": 0, "baseline": "local"},
        {"algorithm": "fednova", "seed": 0},
    ]
    nan = float("nan")
    score = [[nan, 4.0, 6.0, nan], [1.0, 2.0, 8.0, nan], [0.5, 3.0, 8.0, nan]]  # the last is not tested
    first, second = joining(runs, score, "lower")
    assert (first.better, first.equal, first.worse, first.average) == (1, 0, 1, None)
    assert first.losers(["a", "b", "c", "d"]) == [("b", -2.0)]
    assert (second.better, second.equal, second.worse) == (1, 1, 1)
    assert second.average is not None
    assert second.average.difference == pytest.approx(-0.5 / 3)
    none = joining(runs, [[nan] * 4] * 3, "lower")[0]
    assert (none.better_share, none.average) == (None, None)


def test_a_share_stays_within_its_bounds() -> None:
    """As Wilson's interval, which holds the shares that a binomial test would not reject."""
    assert share(0, 10).low == pytest.approx(0)
    assert share(10, 10).high == pytest.approx(100)
    assert 0 <= share(0, 10).low <= share(10, 10).high <= 100
    middle = share(50, 100)
    assert middle.low == pytest.approx(40.36, abs=0.2)  # 40.4 and 59.6 by the normal distribution
    assert middle.high == pytest.approx(59.64, abs=0.2)


def test_they_send_nothing_cost_what_they_take_and_are_in_no_set() -> None:
    task = task_of(make_federation(SIZES), rounds=2)
    compared = fw.compare(task, ["local", "fedavg", "pooled"], finetune=2, progress=False)
    *costs, tuned = [run["cost"] for run in compared.results["runs"]]
    assert tuned["sample_gradients"] == 2 * costs[1]["sample_gradients"]  # two rounds, and two epochs
    assert [cost["bytes_up"] + cost["bytes_down"] > 0 for cost in costs] == [False, True, False]
    assert len({cost["sample_gradients"] for cost in costs}) == 1
    assert not {"local", "pooled"} & set(fw.algorithms.with_sets(["all"]))


@ENGINES
def test_clients_alone_train_no_other_model(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made = simulation(make_federation(SIZES), ["local"], [0], engine=engine)
    if engine == "stacked":
        assert list(stacked_of(made).locals) == ["personal"]
    trained, calls, steps = made.x.clone(), [], Learner.steps

    def counted(*given: Any, **more: Any) -> None:
        calls.append(1)
        steps(*given, **more)

    monkeypatch.setattr(Learner, "steps", counted)
    made.step()
    assert len(calls) == (len(SIZES) if engine == "loop" else 0)
    assert torch.equal(made.x, trained)
    assert (made.memories.values[0] != trained[0]).any(1).all()
    assert made.left_out.tolist() == made.stalled.tolist() == [0]


@ENGINES
@pytest.mark.parametrize("name", ["local", "pooled"])
def test_what_is_not_finite_is_counted(name: str, engine: Engine) -> None:
    federation = make_federation([10, 20, 30])
    broken = as_tensor(federation.inputs).clone()
    broken[10:30] += 1000  # client 1
    ill = simulation(replace(federation, inputs=broken), [name], [0], engine=engine, model=Spoilt)
    for _ in range(3):
        ill.step()
    assert ill.left_out.tolist() == [3]
    assert ill.stalled.tolist() == ([0] if name == "local" else [3])
    assert torch.isfinite(ill.x).all()


# ---- what is refused ----


def test_any_algorithm_may_have_any_name() -> None:
    """Baselines are known by what they do."""
    task = task_of(make_federation(SIZES))
    given: dict[str, Any] = {"local": algorithms.fedavg(), "alone": algorithms.local()}
    compared = fw.compare(task, given, progress=False)
    assert [run.baseline for run in compared.runs] == [None, "local"]
    assert [joined.algorithm for joined in compared.joining()] == ["local"]
    with pytest.raises(InputError, match="training alone is not compared"):
        fw.compare(task, {"local": algorithms.fedavg()}, progress=False).joining()


def test_one_name_of_two_baselines_is_two_recipes(tmp_path: Path) -> None:
    """Although clients and servers compute the same: they do so on other samples."""
    task = task_of(make_federation(SIZES))
    fw.compare(task, {"mine": algorithms.local()}, progress=False, out=tmp_path / "run")
    for other in (algorithms.pooled(), algorithms.fedavg()):
        with pytest.raises(InputError, match="differs in its algorithm"):
            fw.compare(task, {"mine": other}, progress=False, out=tmp_path / "run")
    with pytest.raises(InputError, match="differs in its setting 'finetune'"):
        fw.compare(task, {"mine": algorithms.local()}, progress=False, out=tmp_path / "run", finetune=1)


def test_what_cannot_be_is_refused() -> None:
    federation = make_federation(SIZES)
    with pytest.raises(InputError, match="a real federation does not have"):
        LocalClient(task_of(federation), algorithms.pooled(), 0)
    for wrong in (1.0, -0.1, 0.01, "0", ["7"], [], ["0", "1", "2", "3"]):
        with pytest.raises(InputError, match=r"new.clients?"):
            federation.with_new_clients(wrong)
    with pytest.raises(InputError, match="already"):
        federation.with_new_clients(0.5).with_new_clients(0.5)
    with pytest.raises(InputError, match="finetune"):
        fw.Settings(finetune=-1)
    with pytest.raises(InputError, match="federation"):
        fw.compare(task_of(federation), "fedavg", new_clients=0.2)  # type: ignore[call-arg]
    untested = replace(federation, test=torch.tensor([6, 0, 12, 5]))
    with pytest.raises(InputError, match="test samples"):
        untested.with_new_clients(["1"])


def test_the_rounding_of_scores_is_no_gain() -> None:
    """Means of float32 over seeds, of clients to whom it makes no difference and of one that gains little."""
    thirds = np.float32(100) * np.arange(6, dtype=np.float32) / np.float32(3)
    alone, fed = np.stack([thirds] * 3), np.stack([thirds] * 3)
    fed[0, 2], fed[1, 2] = np.nextafter(fed[0, 2], np.float32(200)), np.nextafter(fed[1, 2], np.float32(200))
    fed[:, 3] += np.float32(0.001)  # one more sample of 100 000
    fed[:, 4] -= np.float32(0.001)
    rows: Any = [{"algorithm": a, "seed": s} for a in ("local", "fedavg") for s in range(3)]
    for row in rows[:3]:
        row["baseline"] = "local"
    (found,) = joining(rows, np.concatenate([alone, fed]), "accuracy")
    assert (found.better, found.equal, found.worse) == (1, 4, 1)
    assert [name for name, _ in found.losers([*"abcdef"])] == ["e"]
