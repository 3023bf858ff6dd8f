"""The stacked executor computes what a plain loop computes, whatever is stacked beside it."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from conftest import CLASSES, DEVICE, FEATURES, Point, half_square, make_federation, make_model, points
from fairwind import Federation, InputError, Settings, Solver, algorithms
from fairwind.engine.bench import Rows
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation, _compiler_found
from fairwind.engine.stacked import PROBES, _evenly
from replay import Replayer

SOLVERS = {
    "sgd": Solver(lr=0.1, batch_size=10),
    "momentum": Solver(lr=0.1, momentum=0.9, batch_size=10),
    "nesterov": Solver(lr=0.1, momentum=0.9, nesterov=True, batch_size=10, epochs=2),
    "decay": Solver(lr=0.1, weight_decay=0.1, momentum=0.5, batch_size=7),
    "uneven": Solver(lr=0.1, batch_size=4, epochs=(1, 3)),
}


def simulation(federation: Federation, names: list[str], seeds: list[int], **options: object) -> Simulation:
    built = {name: algorithms.build(name) for name in names}
    runs = [Run(name, algorithm, seed) for name, algorithm in built.items() for seed in seeds]
    model = options.pop("model", make_model)
    given = {"rounds": 6, "eval_every": 2, "compile": "off", "device": DEVICE} | options
    return Simulation(model, federation, runs, Settings(**given))


def assert_together(a: Simulation, b: Simulation, rounds: int = 5, tolerance: float = 1e-10) -> None:
    """Two simulations of the same runs, side by side, round by round."""
    for _ in range(rounds):
        a.step()
        b.step()
        torch.testing.assert_close(a.x, b.x, rtol=tolerance, atol=tolerance)
        for one, other in zip(a.states, b.states, strict=True):
            torch.testing.assert_close(tuple(one), tuple(other), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", algorithms.REGISTRY)
def test_stacked_is_the_loop(ragged: Federation, name: str, solver: str) -> None:
    options = {"solver": SOLVERS[solver]}
    stacked = simulation(ragged, [name], [0, 1], **options)
    loop = simulation(ragged, [name], [0, 1], engine="loop", **options)
    assert_together(stacked, loop)


@pytest.mark.parametrize("options", [{"participation": 0.5}, {"participation": 3}, {"probe_samples": 6}])
def test_stacked_is_the_loop_with_some_clients_or_samples(ragged: Federation, options: dict) -> None:
    names = list(algorithms.PAPER)
    assert_together(
        simulation(ragged, names, [0, 1], **options),
        simulation(ragged, names, [0, 1], engine="loop", **options),
    )


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
    return nn.Sequential(*(layer for layer in model if not isinstance(layer, nn.Dropout)))


def test_dropout_keeps_the_expected_share() -> None:
    from fairwind.engine.cohort import CountedDropout

    layer = CountedDropout(0.3, layer=2)
    kept = layer(torch.ones(200, 500))
    assert abs((kept == 0).double().mean() - 0.3) < 0.005
    assert abs(kept.mean() - 1) < 0.01


@pytest.mark.parametrize("options", [{}, {"participation": 4, "solver": SOLVERS["uneven"]}])
def test_a_run_does_not_depend_on_what_is_stacked_beside_it(ragged: Federation, options: dict) -> None:
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
    whole, chunked = (simulation(ragged, names, [0, 1]) for _ in range(2))
    chunked.executor.budget = budget
    chunks = [0, 0]
    for i, executor in enumerate((whole.executor, chunked.executor)):
        executor.prepare(0)
        chunks[i] = len(executor._cut("training", executor._rows("training")))
    assert chunks[0] == 1 < chunks[1]
    assert_together(whole, chunked)


@pytest.mark.parametrize("solver", ["sgd", "momentum", "nesterov", "decay"])
def test_a_recorded_round_is_the_round(ragged: Federation, solver: str) -> None:
    """What a GPU replays: a round whose order of samples, models and states are new, on the same memory."""
    options = {"solver": SOLVERS[solver], "probe_samples": 6 if solver == "momentum" else None}
    plain, recorded, replayer = recorded_pair(ragged, list(algorithms.REGISTRY), **options)
    for s in (plain, recorded):
        s.executor.budget = 20_000
    assert_together(plain, recorded, rounds=5, tolerance=0)
    assert replayer.replays == 3
    assert len(recorded.executor.kept["training"]) > 1


def recorded_pair(
    federation: Federation, names: list[str], **options: object
) -> tuple[Simulation, Simulation, Replayer]:
    """The same simulation twice, one of which records its rounds."""
    plain, recorded = (simulation(federation, names, [0, 1], **options) for _ in range(2))
    recorded.executor.repeats, recorded.recorder = True, Replayer()
    return plain, recorded, recorded.recorder


def test_a_recorded_round_drops_out_anew_and_can_be_restored(ragged: Federation) -> None:
    plain, recorded, replayer = recorded_pair(ragged, ["adafedadam", "fedavg"], model=dropout_model)
    assert_together(plain, recorded, rounds=3, tolerance=0)
    kept, before = recorded.checkpoint(), recorded.x.clone()
    assert_together(plain, recorded, rounds=2, tolerance=0)
    assert replayer.replays == 3
    assert torch.equal(kept.tensors["x"], before)  # not what it is two rounds later
    after = recorded.x.clone()
    recorded.restore(kept)
    for _ in range(2):
        recorded.step()
    assert torch.equal(recorded.x, after)
    assert replayer.replays == 3  # what was recorded before is not for the restored tensors


@pytest.mark.parametrize("kind", ["gradient", "training"])
def test_a_round_that_ran_short_of_memory_is_not_the_one_recorded(ragged: Federation, kind: str) -> None:
    plain, recorded, replayer = recorded_pair(ragged, ["adafedadam", "qfedavg"])
    bench, failures = recorded.executor.benches[kind], []
    step = bench.step

    def scarce(rows: Rows, *rest: object) -> object:
        if len(rows.loss) > 5:
            failures.append(len(rows.loss))
            raise torch.OutOfMemoryError("CUDA out of memory, so to say")
        return step(rows, *rest)

    bench.step = scarce
    assert_together(plain, recorded, rounds=6, tolerance=1e-12)
    assert failures
    assert replayer.replays >= 2


def test_a_round_too_long_to_record_is_taken_step_by_step(ragged: Federation, monkeypatch) -> None:
    monkeypatch.setattr("fairwind.engine.stacked.LONG", 3)
    plain, recorded, replayer = recorded_pair(ragged, ["adafedadam"])
    assert_together(plain, recorded, rounds=3, tolerance=0)
    assert not recorded.executor.repeats
    assert replayer.replays == 0


def test_chunks_of_one_size_keep_within_the_budget() -> None:
    costs = torch.tensor([100] * 3 + [10] * 50)
    for budget in (50, 100, 150, 400, 10_000):
        cut = _evenly(costs, budget)
        assert torch.equal(torch.cat(cut), torch.arange(len(costs)))
        assert max(map(len, cut)) - min(map(len, cut)) <= 1
        assert max(int(costs[part].sum()) for part in cut) <= budget or len(cut) == len(costs)


@pytest.mark.parametrize("counts", [3, 128])
def test_recorded_steps_are_the_steps(ragged: Federation, monkeypatch, counts: int) -> None:
    """Whoever takes part, and however long: a step is replayed for its number of rows, or rounded up."""
    monkeypatch.setattr("fairwind.engine.bench.COUNTS", counts)
    options = {"solver": SOLVERS["uneven"], "participation": 0.7, "model": dropout_model}
    plain, recorded = (simulation(ragged, list(algorithms.PAPER), [0, 1], **options) for _ in range(2))
    replayer = Replayer()
    for bench in recorded.executor.benches.values():
        bench.recorder = replayer
    assert_together(plain, recorded, rounds=5, tolerance=1e-12)
    assert replayer.replays > 10


@pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="needs a GPU")
def test_steps_recorded_once_rounds_are_not_share_their_memory(ragged: Federation) -> None:
    def pools() -> set[tuple[int, int]]:
        return {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()}

    s = simulation(ragged, ["fedavg"], [0])
    s.step()
    s.executor.step_by_step()
    before = pools()
    for _ in range(3):
        s.step()
    assert sum(graph is not None for graph in s.executor.recorder.recorded.values()) > 1
    assert len(pools() - before) == 1


def dropout_model() -> nn.Module:
    layers = nn.Linear(FEATURES, 8), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES)
    return nn.Sequential(*layers).double()


@pytest.mark.skipif(not _compiler_found(DEVICE), reason="needs a compiler")
@pytest.mark.parametrize(
    ("solver", "model"), [("sgd", lambda: nn.Linear(FEATURES, CLASSES).double()), ("nesterov", dropout_model)]
)
def test_compiled_is_eager(ragged: Federation, solver: str, model: Callable[[], nn.Module]) -> None:
    eager = simulation(ragged, list(algorithms.PAPER), [0, 1], solver=SOLVERS[solver], model=model)
    compiled = Simulation(model, ragged, eager.runs, replace(eager.settings, compile="on"))
    assert_together(eager, compiled, rounds=3)


def test_a_step_that_cannot_be_compiled_for_all_row_counts_runs_uncompiled(ragged: Federation) -> None:
    """F.cross_entropy fixes the number of rows in compiled code: say so, and go on."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    runs = [Run("fedavg", algorithms.fedavg(), 0)]
    settings = Settings(rounds=2, compile="on", device=DEVICE)
    compiled = Simulation(make_model, ragged, runs, settings, loss=loss)
    with pytest.warns(UserWarning, match="runs uncompiled"):
        compiled.step()
    eager = simulation(ragged, ["fedavg"], [0])
    eager.step()
    torch.testing.assert_close(compiled.x, eager.x)


class Spoilt(nn.Module):
    """A linear model whose output is NaN where the first feature is above 100."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.where(x[:, :1] > 100, torch.nan, 1.0)


@pytest.mark.parametrize("engine", ["stacked", "loop"])
@pytest.mark.parametrize("name", algorithms.REGISTRY)
def test_a_client_that_turns_nan_is_left_out_and_counted(name: str, engine: str) -> None:
    federation = make_federation([10, 20, 30])
    broken = federation.inputs.clone()
    broken[10:30] += 1000  # client 1
    ill = simulation(replace(federation, inputs=broken), [name], [0], engine=engine, model=Spoilt)
    well = simulation(federation, [name], [0], engine=engine, model=Spoilt)
    for _ in range(3):
        ill.step()
        well.step()
    assert ill.left_out.tolist() == [3]
    assert ill.stalled.tolist() == [0]
    assert well.left_out.tolist() == [0]
    assert torch.isfinite(ill.x).all()
    assert not torch.allclose(ill.x, well.x)
    assert ill.accuracy[0, 1] == 0  # a model that outputs NaN predicts nothing


def test_padding_never_touches_another_clients_samples(ragged: Federation) -> None:
    """The loss √|output| has an infinite slope where client 0's inputs are zero; nobody else may notice."""

    def root(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.abs().sum(1).sqrt()

    inputs = ragged.inputs.clone()
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
    assert_together(*pair, rounds=3)
    assert pair[0].left_out.tolist() == pair[1].left_out.tolist() == [3] * 5


@pytest.mark.parametrize("spec", ["adafedadam:alpha=40", "qfedavg:q=40"])
@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_weights_beyond_float32_do_not_stop_a_run(spec: str, engine: str) -> None:
    """A lag or a loss of about 0.05 to the power 40 is far below what float32 can hold."""
    federation = points(torch.tensor([[1.0], [1.02]]), [8, 8])
    solver = Solver(lr=0.2)
    settings = Settings(rounds=10, engine=engine, compile="off", solver=solver, device=DEVICE)
    model = Point(1).float()
    runs = [Run(spec, algorithms.build(spec), 0)]
    simulation = Simulation(model, federation, runs, settings, loss=half_square, score=half_square)
    simulation.x.fill_(0.7)  # F ≈ 0.05, F⁰ ≈ 0.5; 0.05⁴⁰ ≈ 1e-52, 0.1⁴⁰ = 1e-40
    path = [simulation.x.item()]
    for _ in range(10):
        simulation.step()
        path.append(simulation.x.item())
    assert simulation.x.dtype == torch.float32
    assert simulation.stalled.tolist() == [0]
    assert path == sorted(set(path))  # every round moves it towards the centres


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_with_every_client_nan_the_model_stays_and_the_run_says_so(engine: str) -> None:
    federation = make_federation([10, 20])
    broken = replace(federation, inputs=federation.inputs + 1000)
    ill = simulation(broken, list(algorithms.PAPER), [0], engine=engine, model=Spoilt)
    start = ill.x.clone()
    ill.step()
    assert torch.equal(ill.x, start)
    assert ill.stalled.tolist() == [1] * 5
    assert ill.left_out.tolist() == [2] * 5


def test_probes_are_paid_for_only_by_algorithms_that_ask(ragged: Federation, monkeypatch) -> None:
    counted = {"loss": 0, "gradient": 0}
    plain = simulation(ragged, ["fedavg", "fedadam", "fednova"], [0])
    asking = simulation(ragged, ["fedavg", "qfedavg", "adafedadam"], [0])
    for sim in (plain, asking):
        for probe in PROBES:
            bench = sim.executor.benches[probe]

            def count(models, run, seat=bench.seat, probe=probe):
                counted[probe] += len(run)
                return seat(models, run)

            monkeypatch.setattr(bench, "seat", count)
    plain.step()
    assert counted == {"loss": 0, "gradient": 0}
    asking.step()
    assert counted == {"loss": len(ragged), "gradient": len(ragged)}  # one row per client of one run


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
        torch.testing.assert_close(second.accuracy, whole.accuracy, rtol=0, atol=0, equal_nan=True)
        assert second.history == whole.history
        assert second.client_steps == whole.client_steps


def test_frozen_parameters_stay_and_are_not_copied(ragged: Federation) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    sim = simulation(ragged, ["adafedadam"], [0], model=model)
    assert sim.cohort.parameters == 4 * CLASSES + CLASSES
    sim.step()
    trained = sim.cohort.state_dict(sim.x[0])
    assert torch.equal(trained["0.weight"].cpu(), model[0].weight)
    assert not torch.equal(trained["2.weight"].cpu(), model[2].weight)
    model.load_state_dict(trained)


def test_the_same_seed_starts_every_algorithm_from_the_same_model(ragged: Federation) -> None:
    sim = simulation(ragged, ["fedavg", "adafedadam"], [0, 1])
    assert torch.equal(sim.x[0], sim.x[2])
    assert not torch.equal(sim.x[0], sim.x[1])


@pytest.mark.parametrize("fits", [1, 3, 7])
def test_a_chunk_that_does_not_fit_is_halved(ragged: Federation, monkeypatch, fits: int) -> None:
    """However few rows fit, a round ends as if all had; and fewer are tried from then on."""
    runs = [Run("fair", algorithms.adafedadam(), 0), Run("mean", algorithms.fedavg(), 1)]
    settings = Settings(rounds=2, device=DEVICE, compile="off")
    whole, halved = (Simulation(make_model, ragged, runs, settings) for _ in range(2))
    failures = 0

    def scarce(step):
        def limited(rows: Rows, *rest: torch.Tensor) -> None:
            nonlocal failures
            if len(rows.loss) > fits:
                failures += 1
                raise torch.OutOfMemoryError("CUDA out of memory, so to say")
            return step(rows, *rest)

        return limited

    for bench in halved.executor.benches.values():
        monkeypatch.setattr(bench, "step", scarce(bench.step))
    for simulation in (whole, halved):
        simulation.run()
    assert failures > 0
    assert halved.executor.budget < whole.executor.budget
    torch.testing.assert_close(halved.x, whole.x, rtol=1e-12, atol=1e-13)
    assert torch.equal(halved.left_out, whole.left_out)


def test_a_client_that_does_not_fit_alone_is_an_error_with_a_remedy(ragged: Federation, monkeypatch) -> None:
    runs = [Run("mean", algorithms.fedavg(), 0)]
    simulation = Simulation(make_model, ragged, runs, Settings(rounds=1, device=DEVICE, compile="off"))

    def never(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(simulation.executor.benches["training"], "step", never)
    with pytest.raises(InputError, match=r"a single client does not fit .* smaller batch size"):
        simulation.step()


def test_first_losses_are_measured_only_for_those_who_ask(ragged: Federation) -> None:
    runs = [Run("mean", algorithms.fedavg(), 0), Run("fair", algorithms.adafedadam(), 1)]
    both = Simulation(make_model, ragged, runs, Settings(rounds=1, device=DEVICE, compile="off"))
    fair = Simulation(make_model, ragged, runs[1:], Settings(rounds=1, device=DEVICE, compile="off"))
    assert both.loss0[0].isnan().all()
    torch.testing.assert_close(both.loss0[1], fair.loss0[0])
    both.step()
    assert both.left_out.tolist() == [0, 0]


@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_trains_as_float32_but_for_its_rounding(compiled: bool) -> None:
    """Weights, sums and norms stay float32: steps too small for bf16 are not lost."""
    if compiled and not _compiler_found(DEVICE):
        pytest.skip("needs a compiler")
    federation = make_federation([30, 4, 17, 9], dtype=torch.float32)
    runs = [Run(name, algorithms.build(name), 0) for name in algorithms.PAPER]
    solver = Solver(lr=1e-4, batch_size=5, momentum=0.5)
    exact, rounded = (
        Simulation(
            lambda: nn.Linear(FEATURES, CLASSES),
            federation,
            runs,
            Settings(
                rounds=5, device=DEVICE, precision=p, solver=solver, compile="on" if compiled else "off"
            ),
        )
        for p in ("float32", "bf16")
    )
    start = exact.x.clone()
    for _ in range(3):
        exact.step()
        rounded.step()
    assert rounded.x.dtype == torch.float32
    moved, apart = (exact.x - start).norm(dim=1), (rounded.x - exact.x).norm(dim=1)
    assert (moved > 0).all()
    assert (apart > 0).all()  # it was another computation
    assert (apart < 0.03 * moved).all()
    # bf16 has 8 bits: of weights that were kept in it, most would not have moved at all
    assert (exact.x[0] - start[0]).abs().median() < 2**-8 * start[0].abs().median()


def test_precision_is_refused_where_it_cannot_be_kept(ragged: Federation) -> None:
    for options, message in (
        ({"precision": "fp8"}, "precision='fp8' is not one of auto, float32, tf32, bf16"),
        ({"precision": "bf16", "engine": "loop"}, "precision bf16 is the stacked engine's"),
        *([({"precision": "tf32"}, "precision tf32 is a GPU's")] if DEVICE == "cpu" else []),
    ):
        with pytest.raises(InputError, match=message):
            simulation(ragged, ["fedavg"], [0], **options)


def test_a_model_that_insists_on_float32_is_told_of_precision() -> None:
    class Stubborn(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    federation = make_federation([10, 10], dtype=torch.float32)
    with pytest.raises(
        InputError, match=r"cannot train.*with precision=float32 it need not compute in bfloat16"
    ):
        simulation(federation, ["fedavg"], [0], precision="bf16", model=lambda: Stubborn(FEATURES, CLASSES))


def test_without_a_compiler_a_long_run_says_so_once_and_goes_on(ragged: Federation, monkeypatch) -> None:
    monkeypatch.setattr("fairwind.engine.simulation._compiler_found", lambda device: False)
    runs = [Run("mean", algorithms.fedavg(), 0)]
    short = Simulation(make_model, ragged, runs, Settings(rounds=2, device=DEVICE))
    assert short.settings.compile == "off"
    with pytest.warns(UserWarning, match="was not found: steps run uncompiled") as said:
        long = Simulation(make_model, ragged, runs, Settings(rounds=10**12, device=DEVICE))
    assert len(said) == 1
    assert long.settings.compile == "off"
    long.step()


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
            return self.out(torch.tanh(self.second(torch.tanh(self.same(torch.tanh(self.first(x)))))))

    federation = make_federation([12, 5, 9])
    stacked, loop = (
        simulation(federation, ["fedavg", "adafedadam"], [0], engine=engine, model=lambda: Tied().double())
        for engine in ("stacked", "loop")
    )
    assert_together(stacked, loop, rounds=3)
    state = stacked.cohort.state_dict(stacked.x[0])
    assert torch.equal(state["first.weight"], state["same.weight"])
    assert torch.equal(state["first.weight"], state["second.weight"])
    assert stacked.cohort.parameters == sum(p.numel() for p in Tied().parameters())


def test_bf16_with_dropout_frozen_parameters_and_buffers() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(FEATURES, 8).requires_grad_(False)
            self.register_buffer("scale", torch.tensor(0.5))
            self.layers = nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(self.frozen(x) * self.scale)

    federation = make_federation([30, 4, 17], dtype=torch.float32)
    model = Mixed()
    found = {
        p: simulation(federation, ["adafedadam", "qfedavg"], [0], precision=p, model=model)
        for p in ("float32", "bf16")
    }
    start = found["bf16"].x.clone()
    for s in found.values():
        for _ in range(3):
            s.step()
    moved = (found["float32"].x - start).norm()
    assert 0 < (found["bf16"].x - found["float32"].x).norm() < 0.1 * moved
    state = found["bf16"].cohort.state_dict(found["bf16"].x[0])
    assert torch.equal(state["frozen.weight"].cpu(), model.frozen.weight)


def test_a_state_that_changes_shape_is_refused_by_name(ragged: Federation) -> None:
    class State(NamedTuple):
        total: Tensor

    mean = algorithms.fedavg()
    grown = mean._replace(
        init=lambda x: State(torch.zeros(())),
        server=lambda x, s, total, sums: (
            mean.server(x, mean.init(x), total, sums)[0],
            State(s.total + total),
        ),
    )
    found = Simulation(make_model, ragged, [Run("mine", grown, 0)], Settings(rounds=1, device=DEVICE))
    with pytest.raises(InputError, match=r"mine: the state's 'total' is of shape \(\) at first and \(\d+,\)"):
        found.step()
