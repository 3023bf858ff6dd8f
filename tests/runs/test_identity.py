"""A directory answers for the task it was begun with, and for no other, whatever the names of its parts."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fairwind as fw
from fairwind.algorithms import REGISTRY
from fairwind.errors import InputError
from fairwind.runs.files import RECIPE, RESULTS, is_sealed, read_json, sealed, write_json
from fairwind.runs.recipe import algorithm_digest, build_algorithm, task_digests
from fairwind.runs.rehearsal import Rehearsal, rehearsed
from fairwind.runs.spec import parameters
from fairwind.study import read_runs

QUICK: dict[str, Any] = {"rounds": 2, "progress": False, "compile": "off"}
Changed = Callable[[fw.Task], fw.Task]


def federation(**options: Any) -> fw.Federation:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 20, 5, generator=draw)
    return fw.Federation.from_clients([(x, (x[:, :3]).argmax(1)) for x in inputs], **options)


class Model(nn.Module):
    """One of several ways to compute with the same names and shapes."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.one, self.two, self.way = nn.Linear(5, 8), nn.Linear(8, 3), way
        if way == "a weight":
            with torch.no_grad():
                self.one.weight[0, 0] += 1e-3

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "a type":
            x = x.float()
        if self.way == "other randomness":
            x = x + float(np.random.rand()) + random.random()
        if self.way == "in training" and self.training:
            x = 1.1 * x
        hidden = self.one(x).tanh()
        if self.way == "a gradient":
            hidden = hidden.detach()
        found: Tensor = self.two(hidden if self.way != "forward" else hidden.relu())
        return found


def loss_of(factor: float) -> Any:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return factor * nn.functional.cross_entropy(outputs, targets, reduction="none")

    return loss


def score_of(threshold: float) -> Any:
    def score(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.softmax(1).gather(1, targets[:, None])[:, 0] > threshold).float()

    return score


def augmentation_of(share: float) -> Any:
    def augmentation(x: Tensor) -> Tensor:
        return torch.where(torch.rand(len(x))[:, None] < share, -x, x)

    return augmentation


def schedule_of(last: float) -> Any:
    def schedule(t: int) -> float:
        return 1.0 if t < 1 else last

    return schedule


def own_task() -> fw.Task:
    return fw.Task(
        Model,
        federation(),
        loss=loss_of(1),
        score=score_of(0.5),
        augment=augmentation_of(0.5),
        solver=fw.Solver(lr=0.1, lr_schedule=schedule_of(0.5)),
    )


def with_optimizer(momentum: float) -> Changed:
    def made(params: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=lr, momentum=momentum)

    return lambda task: replace(task, solver=fw.Solver(lr=0.1, optimizer=made))


def other_targets(task: fw.Task) -> fw.Task:
    data = task.federation
    assert isinstance(data.targets, Tensor)
    return replace(task, federation=replace(data, targets=data.targets.flip(0)))


def in_place(task: fw.Task) -> fw.Task:
    assert isinstance(task.federation.targets, Tensor)
    task.federation.targets[:3] = 0
    return task


def on(change: Callable[[fw.Federation], fw.Federation]) -> Changed:
    return lambda task: replace(task, federation=change(task.federation))


DATA: dict[str, Changed] = {
    "of_clients": on(lambda data: data.of_clients(torch.arange(3))),
    "held_out": on(lambda data: data.held_out(0.5)[0]),
    "with_validation": on(lambda data: data.with_validation(0.2)),
    "with_new_clients": on(lambda data: data.with_new_clients(0.5)),
    "targets": other_targets,
    "in place": in_place,
}
PARTS: dict[str, tuple[Changed, str]] = {
    "forward": (lambda task: replace(task, model=lambda: Model("forward")), "its model"),
    "in training": (lambda task: replace(task, model=lambda: Model("in training")), "its local steps"),
    "a gradient": (lambda task: replace(task, model=lambda: Model("a gradient")), "its local steps"),
    "a weight": (lambda task: replace(task, model=lambda: Model("a weight")), "its initial weights under"),
    "loss": (lambda task: replace(task, loss=loss_of(1.01)), "its loss"),
    "score": (lambda task: replace(task, score=score_of(0.7)), "its score"),
    "its kind": (
        lambda task: replace(task, score=fw.scores.Score("score", score_of(0.5), "lower")),
        "its score",
    ),
    "augmentation": (lambda task: replace(task, augment=augmentation_of(0.6)), "its augmentation"),
    "schedule": (
        lambda task: replace(task, solver=replace(task.solver, lr_schedule=schedule_of(0.25))),
        r"its lr_schedule, which gave 0\.5 for round 1 and gives 0\.25",
    ),
}


def refuses(base: Callable[[], fw.Task], change: Changed, words: str, out: Path) -> None:
    """The directory of a task resumes with the same one made again, and refuses the changed one."""
    given: dict[str, Any] = {"out": out, **QUICK}
    first = fw.compare(base(), "fedavg", **given)
    assert fw.compare(base(), "fedavg", **given)[0].metrics == first[0].metrics
    with pytest.raises(InputError, match=words):
        fw.compare(change(base()), "fedavg", **given)
    assert fw.compare(base(), "fedavg", **given)[0].metrics == first[0].metrics


@pytest.mark.parametrize("kind", ["generated", "own"])
@pytest.mark.parametrize("name", DATA)
def test_other_samples_are_another_task(name: str, kind: str, tmp_path: Path) -> None:
    base = own_task if kind == "own" else lambda: fw.setup("synthetic:clients=6")
    words = "differs in its (data|task)"
    refuses(base, DATA[name], words, tmp_path / "run")


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_computes_something_else_is_another_task(name: str, tmp_path: Path) -> None:
    change, words = PARTS[name]
    refuses(own_task, change, words, tmp_path / "run")


def test_a_schedule_is_compared_in_the_rounds_that_both_have(tmp_path: Path) -> None:
    given: dict[str, Any] = {"out": tmp_path / "run", **QUICK}
    fw.compare(own_task(), "fedavg", **given | {"rounds": 50, "time_budget": 1e-9})
    assert fw.compare(own_task(), "fedavg", **given)[0].rounds[-1] == QUICK["rounds"]


@pytest.mark.parametrize("batch_norm", ["local", "shared"])
def test_batch_norm_that_moves_otherwise_is_another_task(batch_norm: Any, tmp_path: Path) -> None:
    def base(momentum: float = 0.1) -> fw.Task:
        norm = nn.BatchNorm1d(8, momentum=momentum)
        model = nn.Sequential(nn.Linear(5, 8), norm, nn.Linear(8, 3))
        for value in model.parameters():
            nn.init.constant_(value, 0.1)
        return fw.Task(model, federation(), batch_norm=batch_norm)

    refuses(base, lambda task: base(0.3), "its local steps", tmp_path / "run")


def test_an_optimizer_that_steps_otherwise_is_another_task(tmp_path: Path) -> None:
    base = lambda: with_optimizer(0.5)(own_task())  # noqa: E731
    refuses(base, with_optimizer(0.9), "its local steps", tmp_path / "run")


def test_an_algorithm_that_computes_something_else_is_another_also_under_its_own_name(tmp_path: Path) -> None:
    given: dict[str, Any] = {"out": tmp_path / "run", **QUICK}
    fw.compare(own_task(), fw.algorithms.fedavg()._replace(name="mine"), **given)
    for other in (fw.algorithms.fedavg(lr=0.5), fw.algorithms.mime(), fw.algorithms.local()):
        with pytest.raises(InputError, match="differs in its algorithm 'mine'"):
            fw.compare(own_task(), other._replace(name="mine"), **given)


UNSEEN = {("adafedadam", "eps"), ("fedadam", "eps")}  # at 1e-8 it changes steps as little as rounding
OTHERS: dict[Any, Any] = {None: 1.0, True: "false", 6: 3, "silo": "device", "weibull": "normal"}


@pytest.mark.parametrize("name", REGISTRY)
def test_every_parameter_changes_an_algorithms_digest(name: str) -> None:
    specs = [name]
    for parameter, (_, value) in parameters(REGISTRY[name]).items():
        if (name, parameter) not in UNSEEN:
            halves = isinstance(value, float) and value > 0
            other = value / 2 if halves else OTHERS.get(value, 0.5)
            specs.append(f"{name}:{parameter}={other}")
    assert len({algorithm_digest(build_algorithm(spec)) for spec in specs}) == len(specs)


def clamped(least: float) -> Any:
    """FedAvg whose server leaves out what is below a bound."""
    mean = fw.algorithms.fedavg()
    return mean._replace(server=lambda x, s, total, sums: mean.server(x, s, total.clamp(min=least), sums))


def sized(power: float) -> Any:
    """FedAvg that weighs clients otherwise that have more than 400 samples."""
    mean = fw.algorithms.fedavg()

    def client(r: fw.Report) -> Any:
        return mean.client(r._replace(size=torch.where(r.size > 400, r.size**power, r.size)))

    return mean._replace(client=client)


def without_conflicts() -> Any:
    """FedFV that projects nothing."""
    plain = fw.algorithms.fedfv()
    return plain._replace(weigh=lambda s, cohort, gram: plain.weigh(s, cohort, gram.clamp(min=0)))


def test_algorithms_that_differ_have_other_digests() -> None:
    specs = [*REGISTRY, "propfair:near=0.05", "propfair:near=0.45", "fedfv:alpha=0.3"]
    made = [*map(build_algorithm, specs), clamped(0), sized(0.5), without_conflicts()]
    assert len({algorithm_digest(each) for each in made}) == len(made)
    assert algorithm_digest(clamped(-torch.inf)) == algorithm_digest(fw.algorithms.fedavg())


def test_a_studys_own_task_is_known_by_its_optimizer_and_schedule_too() -> None:
    base = own_task()
    rates = [
        replace(base, solver=replace(base.solver, lr_schedule=schedule_of(last))) for last in (0.5, 0.25)
    ]
    tasks = [with_optimizer(0.5)(base), with_optimizer(0.9)(base), *rates]
    assert len({task_digests(task, [0], 2)["0"] for task in tasks}) == 4
    assert task_digests(base, [0], 2) == task_digests(own_task(), [0], 2)
    assert task_digests(rates[0], [0], 1) == task_digests(rates[1], [0], 1)  # of the rounds that it trains


@pytest.mark.parametrize("way", ["a type", "other randomness"])
def test_a_module_with_its_type_in_its_code_or_other_randomness_goes_on(way: str, tmp_path: Path) -> None:
    def base() -> fw.Task:
        return replace(own_task(), model=lambda: Model(way))

    def change(task: fw.Task) -> fw.Task:
        return replace(task, loss=loss_of(2))

    refuses(base, change, "its loss", tmp_path / "run")


@pytest.mark.parametrize(("way", "tolerance"), [("", 1e-5), ("a type", 1e-3)])
def test_weights_of_a_loss_have_the_models_type(way: str, tolerance: float) -> None:
    """So that it is rehearsed as exactly as the model computes."""
    weighed = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    task = replace(own_task(), model=lambda: Model(way), loss=weighed)
    assert rehearsed(task, task.solver).tolerance == tolerance


def test_a_rehearsal_leaves_random_numbers_and_the_model_as_they_were() -> None:
    model = Model()
    task = replace(own_task(), model=model)
    before = [value.clone() for value in model.state_dict().values()]
    states = torch.get_rng_state(), random.getstate()
    rehearsed(task, task.solver)
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def test_rounding_is_no_difference() -> None:
    """On another machine, or with other threads, the last digits differ."""
    task = own_task()
    first = rehearsed(task, task.solver)

    def rounded(size: float) -> Rehearsal:
        noisy = {
            name: [[each if each is None else each * (1 + size) for each in numbers] for numbers in found]
            for name, found in first.found.items()
        }
        return Rehearsal(first.tolerance, noisy)

    assert first.tolerance < 1e-4
    assert not first.differs(rounded(1e-11))
    assert first.text == rounded(1e-11).text
    assert first.differs(rounded(1e-3))
    assert first.text != rounded(1e-3).text


def test_generated_data_may_have_other_last_bits_but_no_other_numbers(tmp_path: Path) -> None:
    """On another processor, a setup generates the same numbers up to rounding."""
    given: dict[str, Any] = {"out": tmp_path / "run", **QUICK}
    fw.compare(fw.setup("synthetic:clients=6"), "fedavg", **given)
    for size, same in ((1e-7, True), (1e-3, False)):
        task = fw.setup("synthetic:clients=6")
        assert isinstance(task.federation.inputs, Tensor)
        task.federation.inputs.mul_(1 + size)
        task = task.sourced(task.name)  # as made there
        if same:
            fw.compare(task, "fedavg", **given)
            continue
        with pytest.raises(InputError, match="differs in its data"):
            fw.compare(task, "fedavg", **given)


def test_a_changed_copy_of_a_setups_task_is_ones_own(tmp_path: Path) -> None:
    """No command and no study takes it for the setup, whose name it still has."""
    task = fw.setup("synthetic:clients=6")
    assert task.source == "synthetic:clients=6"
    changed = on(lambda data: data.of_clients(torch.arange(3)))(task)
    assert (changed.source, changed.name) == ("", task.name)
    fw.compare(changed, "fedavg", out=tmp_path / "run", **QUICK)
    fw.compare(replace(task, name="synthetic"), "fedavg", out=tmp_path / "named", **QUICK)
    runs, passed = read_runs(tmp_path)
    assert not runs
    assert ["made in Python" in str(each) for each in passed] == [True, True]
    results = read_json(tmp_path / "run" / RESULTS)
    assert (results["setup"], results["task"], results["command"]) == ("", task.name, "")


def test_a_directory_of_another_version_is_refused_with_the_remedy_and_still_read(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = fw.compare(own_task(), "fedavg", out=out, **QUICK)
    content = read_json(out / RECIPE)
    assert is_sealed(content)
    for name in ("rehearsal", "numbers", "sha256"):
        del content[name]
    write_json(out / RECIPE, sealed(content))
    with pytest.raises(InputError, match=r"another version of Fairwind .* give another out"):
        fw.compare(own_task(), "fedavg", out=out, **QUICK)
    assert fw.load(out)[0].metrics == first[0].metrics
