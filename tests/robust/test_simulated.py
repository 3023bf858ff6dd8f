"""Liars and defences in a simulation: what real messages give, and what stays as it is without them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fairwind as fw
from conftest import make_federation, make_model
from exchanged import Exchange, simulated, task_of
from fairwind import InputError, Task, algorithms
from fairwind.contract import Report
from fairwind.data.counter import fold
from fairwind.engine.checkpoint import load_checkpoint, save_checkpoint
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.exchange import UNBOUNDED, Aggregator, Bounds, Reply
from fairwind.exchange.message import from_report, to_report
from fairwind.robust.attacks import ATTACKS, Attack, build_attack
from fairwind.robust.defence import DEFENCES

SEED, ROUNDS = 3, 3
FEDERATION = make_federation([12, 1, 45, 8, 26, 20, 15, 9, 31, 14])
CLIENTS = len(FEDERATION)
TASK = task_of(FEDERATION)
BOUNDS = Bounds(**dict.fromkeys(("size", "steps", "lr", "loss", "loss0", "rate"), math.inf))
PAIRS = [
    *((attack, "bounds") for attack in ATTACKS),
    *(("inflated", defence) for defence in DEFENCES),
    ("signflip", None),
    (None, "median"),
    (None, "clipping"),
]


class Lying(Exchange):
    """An exchange in which some clients lie: colluders know what the honest ones reply."""

    def __init__(self, spec: str, attack: str | None, defence: str | None):
        self.attack = None if attack is None else build_attack(attack)
        task = TASK if self.attack is None else task_of(self.attack.poisoned(FEDERATION))
        super().__init__(task, spec, seed=SEED)
        one = self.clients[0]
        rule = None if defence == "bounds" else defence
        own: dict[str, Any] = {"defence": rule, "clients": CLIENTS}
        own["bounds"] = BOUNDS if defence else UNBOUNDED
        self.server = Aggregator(algorithms.build(spec), one.layout, one.start(), **own)

    def lie(self) -> list[str]:
        """A round, and its log."""
        replies = [self.reply(k) for k in range(CLIENTS)]
        if self.attack is not None:
            replies = self.told(self.attack, replies)
        for k in reversed(range(CLIENTS)):
            assert not self.server.accept(str(k), replies[k])
        return self.server.finish().lines()

    def told(self, attack: Attack, replies: list[Reply]) -> list[Reply]:
        form = self.server.form
        vectors = [form.vector(reply.arrays) for reply in replies]
        reports = [to_report(r.numbers, length) for r, (_, length) in zip(replies, vectors, strict=True)]
        report = Report(*(torch.stack(each) for each in zip(*reports, strict=True)))
        update = torch.stack([vector for vector, _ in vectors])
        key = fold(SEED, self.server.round)
        report, update = attack.lied(torch.arange(CLIENTS), report, update, key, CLIENTS)
        numbers = [from_report(Report(*(each[k] for each in report)), form) for k in range(CLIENTS)]
        return [Reply(form.arrays(u), own) for u, own in zip(update, numbers, strict=True)]


@pytest.mark.parametrize("spec", ["fedavg", "adafedadam:warmup=0", "qfedavg", "fedprox:mu=0.1"])
@pytest.mark.parametrize(("attack", "defence"), PAIRS)
def test_a_simulation_trains_what_the_lying_replies_of_real_messages_train(
    spec: str, attack: str | None, defence: str | None
) -> None:
    exchange = Lying(spec, attack, defence)
    simulation = simulated(TASK, spec, seed=SEED, attack=attack, defence=defence)
    for _ in range(ROUNDS):
        exchange.lie()
        simulation.step()
        torch.testing.assert_close(exchange.server.x, simulation.x[0], rtol=1e-8, atol=1e-9)
    assert simulation.x[0].ne(simulated(TASK, spec, seed=SEED).x[0]).any()


@pytest.mark.parametrize("defence", ["bounds", "median", "clipping"])
def test_a_defended_server_that_is_killed_goes_on(defence: str, tmp_path: Any) -> None:
    straight, broken = (Lying("adafedadam", "inflated", defence) for _ in range(2))
    for _ in range(ROUNDS):
        straight.lie()
        fresh = Lying("adafedadam", "inflated", defence).server
        checkpoint, _ = load_checkpoint(tmp_path, "me")
        if checkpoint is not None:
            fresh.restore(checkpoint)
        broken.server = fresh
        broken.lie()
        save_checkpoint(tmp_path, broken.server.checkpoint(), "me")
    assert torch.equal(straight.server.x, broken.server.x)


# ---- the simulation itself ----

OPTIONS: dict[str, Any] = {"rounds": 4, "eval_every": 2, "progress": False, "device": "cpu"}


def task() -> Task:
    return Task(make_model, FEDERATION, rounds=4)


@pytest.mark.parametrize("attack", [*ATTACKS, None])
def test_results_do_not_depend_on_how_it_is_computed(attack: str | None) -> None:
    specs, options = ["fedavg", "adafedadam"], {**OPTIONS, "attack": attack, "defence": "clipping"}
    options["clients_per_round"] = 7
    plain = fw.compare(task(), specs, **options)
    loop = fw.compare(task(), specs, engine="loop", **options)
    chunks = fw.compare(task(), specs, memory=1e-6, engine="stacked", **options)
    alone = fw.compare(task(), specs[1], **options)
    for run, *others in zip(plain, loop, chunks, strict=True):
        for other in others:
            for name, value in run.state_dict.items():
                torch.testing.assert_close(value, other.state_dict[name], rtol=1e-6, atol=1e-9)
    for name, value in plain[1].state_dict.items():
        torch.testing.assert_close(value, alone[0].state_dict[name], rtol=1e-6, atol=1e-9)


def test_it_resumes_to_the_same_bits(tmp_path: Any) -> None:
    settings = fw.Settings(rounds=6, device="cpu", attack="noise", defence="clipping", compile="off")
    runs = [Run(spec, algorithms.build(spec), seed) for spec in ("fedavg", "adafedadam") for seed in (0, 1)]

    def made(chosen: list[Run]) -> Simulation:
        return Simulation(make_model, FEDERATION, chosen, settings)

    straight, first, second = made(runs), made(runs), made(runs)
    straight.run()
    for _ in range(3):
        first.step()
    second.restore(first.checkpoint())
    second.run()
    assert torch.equal(straight.x, second.x)
    some = made(runs[1:3])
    some.restore(first.checkpoint_of([1, 2]))
    some.run()
    torch.testing.assert_close(some.x, straight.x[1:3], rtol=1e-6, atol=1e-9)
    parts = [(first.checkpoint_of(chosen), chosen) for chosen in ([0, 3], [1, 2])]
    joined = made(runs)
    joined.restore(joined.checkpoint_from(parts))
    joined.run()
    assert torch.equal(straight.x, joined.x)


def test_liars_are_not_scored_and_the_results_say_so() -> None:
    found = fw.compare(task(), "fedavg", attack="signflip:share=0.3", defence="median", **OPTIONS)
    liars = build_attack("signflip:share=0.3").liars(CLIENTS)
    assert int(liars.sum()) == 3
    assert torch.equal(found[0].score.isnan(), liars | (FEDERATION.test == 0))
    note = found.results["parts"]["note"]
    assert "3 of 10 clients lie (signflip:share=0.3), and numbers are of the others." in note
    assert "robust ones (median)" in note
    assert found.results["config"]["attack"] == "signflip:share=0.3"  # type: ignore[typeddict-item]


def test_who_lies_depends_on_the_draw_alone() -> None:
    same, other = (build_attack(f"{name}:share=0.5,draw={n}") for name, n in (("alie", 0), ("noise", 1)))
    plain = build_attack("signflip:share=0.5").liars(40)
    assert torch.equal(same.liars(40), plain)
    assert not torch.equal(other.liars(40), plain)
    assert torch.equal(build_attack("signflip:share=0.25").liars(40) & ~plain, torch.zeros(40).bool())


# ---- attacks ----


def report_of(update: Tensor) -> Report:
    clients = len(update)
    numbers = torch.ones(7, clients).double() * torch.arange(1, clients + 1)
    return Report(*numbers)._replace(update_norm=update.double().norm(dim=1))


def lied(spec: str) -> tuple[Tensor, Report, Tensor, Report, Tensor]:
    """Who lies, then reports and updates before and after."""
    update = torch.randn(CLIENTS, 5, generator=torch.Generator().manual_seed(1)).double()
    attack, report = build_attack(spec), report_of(update)
    told = attack.lied(torch.arange(CLIENTS), report, update.clone(), fold(0, 0), CLIENTS)
    return attack.liars(CLIENTS), report, update, *told


EXPECTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "signflip": lambda honest, own: -own,
    "inflated": lambda honest, own: (-10 * honest.mean(0)).expand_as(own),
    "inflated:factor=1": lambda honest, own: -honest.mean(0).expand_as(own),
    "labelflip": lambda honest, own: own,
}


@pytest.mark.parametrize("spec", EXPECTED)
def test_liars_send_what_the_attack_says_and_reports_are_of_that(spec: str) -> None:
    liars, before, update, report, told = lied(spec)
    torch.testing.assert_close(told[liars], EXPECTED[spec](update[~liars], update[liars]))
    assert torch.equal(told[~liars], update[~liars])
    torch.testing.assert_close(report.update_norm, told.norm(dim=1))
    claims = torch.where(liars & ("inflated" in spec), 50.0, 1.0)
    torch.testing.assert_close(report.size, before.size * claims)
    torch.testing.assert_close(report.loss, before.loss * claims)
    worth = report.update_norm / report.grad_norm
    torch.testing.assert_close(worth, before.update_norm / before.grad_norm)


def test_noise_is_as_long_as_honest_updates_and_differs_by_client() -> None:
    liars, _, update, _, told = lied("noise")
    expected = update[~liars].norm(dim=1).median().expand(int(liars.sum()))
    torch.testing.assert_close(told[liars].norm(dim=1), expected)
    assert told[liars][0].ne(told[liars][1]).all()
    assert torch.equal(lied("noise")[4], told)


def test_a_little_is_enough_stays_among_the_honest() -> None:
    liars, _, update, _, told = lied("alie:share=0.3")
    honest = update[~liars]
    away = (told[liars] - honest.mean(0)) / honest.std(0, correction=0)
    # 10 clients of which 3 lie need 3 more for a majority: 4 of the 7 honest are nearer, z = Φ⁻¹(4/7)
    torch.testing.assert_close(away, torch.full_like(away, -0.18001236979270496))


def labels(federation: fw.Federation) -> Tensor:
    assert isinstance(federation.targets, Tensor)
    return federation.targets


def test_labels_are_flipped_for_training_alone() -> None:
    attack = build_attack("labelflip:share=0.3,source=1,target=2")
    found, liars = attack.poisoned(FEDERATION), attack.liars(CLIENTS)
    for k in range(CLIENTS):
        start, train = int(FEDERATION.start[k]), int(FEDERATION.train[k])
        before, after = (labels(f)[start : start + train] for f in (FEDERATION, found))
        expected = torch.where(before == 1, 2, before) if liars[k] else before
        assert torch.equal(after, expected)
    opposite = build_attack("labelflip:share=0.99").poisoned
    with pytest.raises(InputError, match="no client that is honest"):
        opposite(FEDERATION)


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attack": "signflp"}, "did you mean 'signflip'"),
        ({"attack": "signflip:share=1.0"}, "share=1.0 is out of range"),
        ({"defence": "krum"}, "unknown defence 'krum'"),
        ({"defence": "trimmed:cut=0.5"}, "cut=0.5 is out of range"),
    ],
)
def test_what_is_no_attack_or_defence_is_refused(options: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        fw.compare(task(), "fedavg", **OPTIONS, **options)


@pytest.mark.parametrize("spec", ["scaffold", "mime", "afl", "fedmgda"])
def test_algorithms_of_more_than_one_sum_are_refused(spec: str) -> None:
    for name, value in (("attack", "signflip"), ("defence", "median")):
        options: Any = OPTIONS | {name: value}
        with pytest.raises(InputError, match="is for algorithms of one sum"):
            fw.compare(task(), spec, **options)
    one = Exchange(TASK, "fedavg").clients[0]
    with pytest.raises(InputError, match="is for algorithms of one sum"):
        Aggregator(algorithms.build(spec), one.layout, one.start(), clients=3, defence="median")


def test_labels_that_are_no_classes_cannot_be_flipped() -> None:
    with pytest.raises(InputError, match="there are 3 classes"):
        fw.compare(task(), "fedavg", attack="labelflip:source=7", **OPTIONS)
