"""The stacked executor computes what a plain loop computes, whatever is stacked beside it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import CLASSES, DEVICE, FEATURES, make_federation, make_model
from fairwind import Federation, InputError, Settings, algorithms, evaluate
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from samples import as_tensor
from simulations import SOLVERS, assert_together, dropout_model, simulation, stacked_of


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", algorithms.REGISTRY)
def test_stacked_is_the_loop(ragged: Federation, name: str, solver: str) -> None:
    options = {"solver": SOLVERS[solver]}
    stacked = simulation(ragged, [name], [0, 1], **options)
    loop = simulation(ragged, [name], [0, 1], engine="loop", **options)
    assert_together(stacked, loop)


@pytest.mark.parametrize("options", [{"participation": 0.5}, {"clients_per_round": 3}, {"probe_samples": 6}])
def test_stacked_is_the_loop_with_some_clients_or_samples(
    ragged: Federation, options: dict[str, Any]
) -> None:
    names = list(algorithms.PAPER)
    assert_together(
        simulation(ragged, names, [0, 1], **options),
        simulation(ragged, names, [0, 1], engine="loop", **options),
    )


class Mixing(nn.Module):
    """Adds a batch's mean, which is computed with padding too; the first gradients may not show it."""

    def __init__(self, hidden_by: str):
        super().__init__()
        self.hidden_by = hidden_by
        self.first, self.last = nn.Linear(FEATURES, 4).double(), nn.Linear(4, CLASSES).double()
        self.shift = nn.Parameter(torch.zeros((), dtype=torch.float64))
        if hidden_by == "zeros":
            nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        mean = hidden.mean(0)
        out: Tensor = self.last(hidden + mean - mean.detach())
        if self.hidden_by == "a NaN":
            out = out + self.shift.abs().sqrt()  # whose derivative is NaN
        if self.hidden_by == "only NaN":
            out = out * torch.where(x[:, :1] > 100, torch.nan, 1.0)
        return out + self.shift


@pytest.mark.parametrize("hidden_by", ["", "a NaN", "only NaN", "zeros"])
def test_no_model_is_stacked_whose_gradients_were_not_verified(hidden_by: str) -> None:
    federation = make_federation([12, 7])
    if hidden_by == "only NaN":
        federation = replace(federation, inputs=as_tensor(federation.inputs) + 1000)
    with pytest.raises(InputError, match=r"cannot be stacked: .* not those of a plain backward pass"):
        simulation(federation, ["fedavg"], [0], model=lambda: Mixing(hidden_by))


def test_a_model_whose_gradients_are_never_finite_is_not_stacked() -> None:
    class Log(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((FEATURES, CLASSES), -9.0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.log()

    with pytest.raises(InputError, match="cannot be stacked: its gradients are not finite"):
        simulation(make_federation([12, 7]), ["fedavg"], [0], model=Log)


def test_stacked_is_the_loop_in_float32() -> None:
    federation = make_federation([1, 5, 30, 12], dtype=torch.float32)
    options = {"model": lambda: make_model().float(), "solver": SOLVERS["momentum"]}
    names = list(algorithms.PAPER)
    loop = simulation(federation, names, [0], engine="loop", **options)
    assert_together(simulation(federation, names, [0], **options), loop, rounds=3, tolerance=1e-4)


def test_dropout_drops_the_same_units_in_either_executor(ragged: Federation) -> None:
    names = ["adafedadam", "fedavg"]
    stacked = simulation(ragged, names, [0, 1], model=dropout_model)
    loop = simulation(ragged, names, [0, 1], engine="loop", model=dropout_model)
    assert_together(stacked, loop)
    plain = simulation(ragged, names, [0, 1], model=lambda: without_dropout(dropout_model()))
    dropped = simulation(ragged, names, [0, 1], model=dropout_model)
    assert torch.equal(plain.x, dropped.x)
    plain.step()
    dropped.step()
    assert not torch.allclose(plain.x, dropped.x)


def without_dropout(model: nn.Module) -> nn.Module:
    return nn.Sequential(*(layer for layer in model.children() if not isinstance(layer, nn.Dropout)))


@pytest.mark.parametrize("options", [{}, {"clients_per_round": 4, "solver": SOLVERS["uneven"]}])
def test_a_run_does_not_depend_on_what_is_stacked_beside_it(
    ragged: Federation, options: dict[str, Any]
) -> None:
    names = list(algorithms.PAPER)
    together = simulation(ragged, names, [0, 1, 2], **options)
    for _ in range(4):
        together.step()
    for r, run in enumerate(together.runs):
        alone = simulation(ragged, [run.label], [run.seed], **options)
        for _ in range(4):
            alone.step()
        torch.testing.assert_close(alone.x[0], together.x[r], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("budget", [1, 2000, 5000])
def test_chunking_changes_nothing(ragged: Federation, budget: int) -> None:
    names = list(algorithms.PAPER)
    whole, chunked = (simulation(ragged, names, [0, 1], workers=1) for _ in range(2))
    stacked_of(chunked).cutter.budget = budget
    assert_together(whole, chunked)
    assert len(stacked_of(whole).kept["training"]) == 1
    assert len(stacked_of(chunked).kept.get("training", [None] * 99)) > 1


def test_padding_never_touches_another_clients_samples(ragged: Federation) -> None:
    """The loss √|output| has an infinite slope where client 0's inputs are zero; nobody else may notice."""

    def root(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.abs().sum(1).sqrt()

    inputs = as_tensor(ragged.inputs).clone()
    inputs[: int(ragged.train[0] + ragged.test[0])] = 0
    federation = replace(ragged, inputs=inputs)
    model = nn.Linear(FEATURES, CLASSES, bias=False).double()
    runs = [Run(name, algorithms.build(name), 0) for name in algorithms.PAPER]
    pair = [
        Simulation(
            model, federation, runs, Settings(rounds=3, engine=e, compile="off", device=DEVICE), loss=root
        )
        for e in ("stacked", "loop")
    ]
    assert_together(pair[0], pair[1], rounds=3)
    assert pair[0].left_out.tolist() == pair[1].left_out.tolist() == [3] * 5


def test_probes_are_paid_for_only_by_algorithms_that_ask(
    ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fairwind.engine.stacked.executor as stacked

    counted = {"loss": 0, "gradient": 0}

    def counting(made: Callable[..., Any], probe: str) -> Callable[..., Any]:
        def make(model: object) -> Callable[..., Any]:
            step = made(model)

            def counted_step(rows: Any, *rest: Any) -> Any:
                counted[probe] += len(rows.loss)
                return step(rows, *rest)

            return counted_step

        return make

    for probe in counted:
        made = getattr(stacked, f"{probe}_step")
        monkeypatch.setattr(stacked, f"{probe}_step", counting(made, probe))
    plain = simulation(ragged, ["fedavg", "fedadam", "fednova"], [0], workers=1)
    asking = simulation(ragged, ["fedavg", "qfedavg", "adafedadam"], [0], workers=1)
    plain.step()
    assert counted == {"loss": 0, "gradient": 0}
    asking.step()
    # One row for each client, in the first batch; the largest client's second batch is taken by two rows.
    assert counted == {"loss": len(ragged) + 2, "gradient": len(ragged) + 2}


def test_restored_is_uninterrupted_bit_for_bit(ragged: Federation) -> None:
    options = {"participation": 0.7, "solver": SOLVERS["uneven"]}
    names = list(algorithms.REGISTRY)
    whole = simulation(ragged, names, [0, 1], **options)
    while not whole.done:
        whole.step()
    for stop in range(1, 6):
        first = simulation(ragged, names, [0, 1], **options)
        for _ in range(stop):
            first.step()
        second = simulation(ragged, names, [0, 1], **options)
        second.restore(first.checkpoint())
        while not second.done:
            second.step()
        assert torch.equal(second.x, whole.x)
        torch.testing.assert_close(second.score, whole.score, rtol=0, atol=0, equal_nan=True)
        assert second.history == whole.history
        assert second.client_steps == whole.client_steps


def test_frozen_parameters_stay_and_are_not_copied(ragged: Federation) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    sim = simulation(ragged, ["adafedadam"], [0], model=model)
    assert sim.layout.parameters == 4 * CLASSES + CLASSES
    sim.step()
    trained = sim.state_dict(0)
    before = model.state_dict()
    assert torch.equal(trained["0.weight"].cpu(), before["0.weight"])
    assert not torch.equal(trained["2.weight"].cpu(), before["2.weight"])
    model.load_state_dict(trained)


def test_the_same_seed_starts_every_algorithm_from_the_same_model(ragged: Federation) -> None:
    sim = simulation(ragged, ["fedavg", "adafedadam"], [0, 1])
    assert torch.equal(sim.x[0], sim.x[2])
    assert not torch.equal(sim.x[0], sim.x[1])


def test_first_losses_are_measured_only_for_those_who_ask(ragged: Federation) -> None:
    runs = [Run("mean", algorithms.fedavg(), 0), Run("fair", algorithms.adafedadam(), 1)]
    both = Simulation(make_model, ragged, runs, Settings(rounds=1, device=DEVICE, compile="off"))
    fair = Simulation(make_model, ragged, runs[1:], Settings(rounds=1, device=DEVICE, compile="off"))
    both.start()
    fair.start()
    assert both.loss0[0].isnan().all()
    torch.testing.assert_close(both.loss0[1], fair.loss0[0])
    both.step()
    assert both.left_out.tolist() == [0, 0]


def test_a_module_under_two_names_and_a_parameter_of_two_modules() -> None:
    """What PyTorch calls tied: trained as one, and whole afterwards."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, FEATURES)
            self.same = self.first
            self.second = nn.Linear(FEATURES, FEATURES)
            self.second.weight = self.first.weight
            self.out = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(torch.tanh(self.second(torch.tanh(self.same(torch.tanh(self.first(x)))))))
            return out

    federation = make_federation([12, 5, 9])
    stacked, loop = (
        simulation(federation, ["fedavg", "adafedadam"], [0], engine=engine, model=lambda: Tied().double())
        for engine in ("stacked", "loop")
    )
    assert_together(stacked, loop, rounds=3)
    state = stacked.state_dict(0)
    assert torch.equal(state["first.weight"], state["same.weight"])
    assert torch.equal(state["first.weight"], state["second.weight"])
    assert stacked.layout.parameters == sum(p.numel() for p in Tied().parameters())


class Leaking(nn.Module):
    """A model in which samples of a batch influence each other, by little, in training or in evaluation."""

    def __init__(self, when: str):
        super().__init__()
        self.layers, self.when = make_model(), when

    def forward(self, x: Tensor) -> Tensor:
        here = self.training == (self.when == "training")
        out: Tensor = self.layers(x + (0.003 * x.sum(0) if here else 0))
        return out


@pytest.mark.parametrize("when", ["training", "evaluation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_that_mix_samples_by_little_train_one_client_after_another(
    when: str, dtype: torch.dtype
) -> None:
    federation = make_federation([12, 9, 15], dtype=dtype)
    with pytest.raises(InputError, match=r"cannot be stacked: .*influence each other"):
        simulation(federation, ["fedavg"], [0], model=lambda: Leaking(when).to(dtype))


def test_clients_of_a_model_that_mixes_samples_are_scored_by_their_own(ragged: Federation) -> None:
    torch.manual_seed(0)
    model = Leaking("evaluation").double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    both = evaluate(model, ragged)
    for k in range(len(ragged)):
        if ragged.test[k]:
            alone = evaluate(model, ragged.of_clients(torch.tensor([k])))
            torch.testing.assert_close(alone.loss[0], both.loss[k])
