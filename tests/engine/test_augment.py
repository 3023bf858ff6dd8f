"""Augmentation: training inputs change at random at every step, by the seed alone, and nothing else does."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

import fairwind as fw
from batches import batches_by_hand, put
from conftest import CLASSES, DEVICE, FEATURES, compiler_found, make_federation
from exchanged import Exchange, simulated
from fairwind import Federation, InputError, Settings, Solver, algorithms
from fairwind.data.counter import DROPOUT, fold, mix
from fairwind.data.samples import Samples
from fairwind.engine.executor import Run
from fairwind.engine.plan import Decision
from fairwind.engine.simulation import Simulation
from fairwind.layers import CountedRandomness
from replay import Replayer
from samples import as_tensor
from simulations import assert_together, stacked_of

READY = {
    "flip": fw.augment.flip,
    "crop": fw.augment.crop(padding=2),
    "noise": fw.augment.noise(std=0.1),
    "both": [fw.augment.flip, fw.augment.crop()],
}
SHAPES = {"grey": (8, 9), "last": (8, 9, 3), "first": (3, 8, 9)}


def images(shape: tuple[int, ...] = (8, 9, 3), sizes: tuple[int, ...] = (5, 9, 14, 3)) -> Federation:
    draw = torch.Generator().manual_seed(0)
    clients = [
        (torch.randint(0, 256, (n, *shape), generator=draw, dtype=torch.uint8), torch.arange(n) % 3)
        for n in sizes
    ]
    return Federation.from_clients(clients, classes=3)


def network(shape: tuple[int, ...] = (8, 9, 3)) -> nn.Module:
    layers = (
        nn.Flatten(),
        nn.Linear(torch.Size(shape).numel(), 6),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(6, 3),
    )
    return nn.Sequential(fw.models.Pixels(channels=None), *layers).double()


def simulation(federation: Federation, names: list[str], augment: Any, **options: Any) -> Simulation:
    runs = [Run(name, algorithms.build(name), seed) for name in names for seed in (0, 1)]
    own: dict[str, Any] = {"rounds": 6, "compile": "off", "engine": "stacked", "device": DEVICE, "workers": 1}
    own["solver"] = Solver(lr=0.1, batch_size=4)
    model, plan = options.pop("model", network), options.pop("plan", None)
    made = Simulation(model, federation, runs, Settings(**own | options), augment=augment, plan=plan)
    made.start()
    return made


@pytest.mark.parametrize(
    ("layout", "kind"), [("grey", "bytes"), ("last", "bytes"), ("last", "numbers"), ("first", "numbers")]
)
@pytest.mark.parametrize("name", READY)
def test_either_executor_augments_alike(name: str, layout: str, kind: str) -> None:
    shape = SHAPES[layout]
    data = images(shape)
    if kind == "numbers":
        data = replace(data, inputs=as_tensor(data.inputs).double() / 255)
    options: dict[str, Any] = {"model": lambda: network(shape), "names": ["fedavg", "adafedadam"]}
    stacked = simulation(data, augment=READY[name], **options)
    loop = simulation(data, augment=READY[name], engine="loop", **options)
    plain = simulation(data, augment=None, **options)
    assert_together(stacked, loop, rounds=2)
    for _ in range(2):
        plain.step()
    assert not torch.allclose(plain.x, stacked.x, rtol=1e-4)


def counted(function: Callable[[Tensor], Tensor], x: Tensor, key: int = 7) -> Tensor:
    with CountedRandomness(torch.tensor(key)):
        return function(x)


@pytest.mark.parametrize("layout", SHAPES)
def test_a_flip_mirrors_half_of_the_images(layout: str) -> None:
    x = as_tensor(images(SHAPES[layout], (1000,)).inputs)
    mirrored, found = x.flip(3 if layout == "first" else 2), counted(fw.augment.flip, x)
    as_it_was, other = ((found == each).flatten(1).all(1) for each in (x, mirrored))
    assert (as_it_was ^ other).all()
    assert 400 < int(other.sum()) < 600


@pytest.mark.parametrize("layout", SHAPES)
def test_a_crop_is_a_window_of_the_padded_image(layout: str) -> None:
    x = as_tensor(images(SHAPES[layout], (600,)).inputs)
    found = counted(fw.augment.crop(padding=2), x)
    if layout == "last":
        x, found = x.movedim(-1, 1), found.movedim(-1, 1)
    padded, seen = F.pad(x, (2, 2, 2, 2)), set()
    for image, taken in zip(padded, found, strict=True):
        windows = {(i, j): image[..., i : i + 8, j : j + 9] for i in range(5) for j in range(5)}
        seen.add(next(at for at, window in windows.items() if torch.equal(window, taken)))
    assert len(seen) == 25


def test_noise_is_normal_and_bytes_stay_bytes() -> None:
    x = torch.full((400, 50), 0.5)
    found = counted(fw.augment.noise(std=0.1), x) - x
    assert found.std().item() == pytest.approx(0.1, rel=0.03)
    assert abs(found.mean().item()) < 0.003
    grey = torch.full((400, 50), 128, dtype=torch.uint8)
    noisy = counted(fw.augment.noise(std=0.1), grey)
    assert noisy.dtype == torch.uint8
    assert noisy.double().std().item() == pytest.approx(25.5, rel=0.03)
    assert counted(fw.augment.noise(std=9.0), grey).unique().tolist()[:1] == [0]  # type: ignore[no-untyped-call]


def scaled(x: Tensor) -> Tensor:
    return x * (0.5 + torch.rand(len(x), 1, dtype=torch.float64, device=x.device))


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_it_is_a_loop_written_by_hand(engine: str) -> None:
    """Each step's numbers are hashes of (seed, round, client, step) and the sample's place in its batch."""
    data = make_federation([1, 2, 17, 8])

    def linear() -> nn.Module:
        return nn.Linear(FEATURES, CLASSES).double()

    options: dict[str, Any] = {
        "solver": Solver(lr=0.1, batch_size=4, steps=6),
        "engine": engine,
        "model": linear,
    }
    made = simulation(data, ["fedavg"], scaled, **options)
    model = linear()
    model.load_state_dict(made.state_dict(0))
    sizes = data.train.tolist()
    for round in range(3):
        made.step()
        x = [p.detach().clone() for p in model.parameters()]
        mean = [torch.zeros_like(p) for p in x]
        for k, size in enumerate(sizes):
            put(model, x)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step, batch in enumerate(batches_by_hand(size, 6, 0, round, k)):
                key = mix(mix(mix(mix(fold(DROPOUT, 0, round), k), step), -1), torch.arange(len(batch)))
                factor = (0.5 + key.double() / 2**32)[:, None]
                at = int(data.start[k]) + torch.tensor(batch)
                optimizer.zero_grad()
                torch.autograd.backward(
                    F.cross_entropy(model(as_tensor(data.inputs)[at] * factor), as_tensor(data.targets)[at])
                )
                optimizer.step()
            part = [p.detach() * size / sum(sizes) for p in model.parameters()]
            mean = [a + b for a, b in zip(mean, part, strict=True)]
        put(model, mean)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(made.state_dict(0)[name].cpu(), value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_probes_and_evaluations_see_the_inputs_as_they_are(engine: str) -> None:
    """Also after a round that did not move the model."""

    def blind(x: Tensor) -> Tensor:
        return x * 0

    found = []
    for augment in (blind, None):
        still = Solver(lr=1e-300, batch_size=4)
        made = simulation(images(), ["adafedadam"], augment, engine=engine, solver=still)
        made.step()
        made.evaluate()
        state = made.states[0]._asdict()
        found.append((made.loss0, made.loss, made.score, made.lowest, state["certainty"]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_chunks_hosts_neighbours_and_resuming_change_nothing(engine: str) -> None:
    data, names = images(), ["adafedadam", "fednova"]
    whole = simulation(data, names, READY["both"], engine=engine)
    small = simulation(data, names, READY["both"], engine=engine, memory=2e-5, data_on="host")
    alone = simulation(data, names[1:], READY["both"], engine=engine)
    for _ in range(2):
        whole.step()
    kept = whole.checkpoint()
    whole.step()
    resumed = simulation(data, names, READY["both"], engine=engine)
    resumed.restore(kept)
    resumed.step()
    assert torch.equal(resumed.x, whole.x)
    for _ in range(3):
        small.step()
        alone.step()
    torch.testing.assert_close(small.x, whole.x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(alone.x, whole.x[2:], rtol=1e-12, atol=1e-12)


def test_a_recorded_round_augments_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = simulation(images(), ["adafedadam"], READY["both"])
    plan = plain.plan._replace(graphs=Decision("rounds", "replayed on a CPU"))
    monkeypatch.setattr("fairwind.engine.stacked.executor.Graphs", Replayer)
    monkeypatch.setattr("fairwind.engine.tuning.NUMPY_SORTS", False)  # as on a GPU
    recorded = simulation(images(), ["adafedadam"], READY["both"], plan=plan)
    assert_together(plain, recorded, rounds=4, tolerance=0)
    replayer: Any = stacked_of(recorded).round_graphs
    assert replayer.replays == 2


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(torch.device(DEVICE)), reason="needs a compiler")
@pytest.mark.parametrize("name", ["both", "noise"])
def test_compiled_steps_augment_alike(name: str, recwarn: pytest.WarningsRecorder) -> None:
    """Also those of a linear classifier, whose steps in C++ know no augmentation."""

    def linear() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).double()

    data = images((8, 9))
    data = replace(data, inputs=as_tensor(data.inputs).double() / 255)
    given = data, ["fedavg"], READY[name]
    eager, compiled = (simulation(*given, model=linear, compile=c) for c in ("off", "on"))
    assert_together(eager, compiled, rounds=3)
    assert not recwarn.list


def tossed(x: Tensor) -> Tensor:
    return x.flip(2) if torch.rand(()) < 0.5 else x


def drawn_in_place(x: Tensor) -> Tensor:
    return x + torch.empty(x.shape, device=x.device).uniform_()


def mixing(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x.roll(1, 0) * torch.rand(len(x), 1, 1, 1, device=x.device)


@pytest.mark.parametrize("augment", [tossed, drawn_in_place, mixing])
def test_what_cannot_be_stacked_runs_in_the_loop_and_is_seeded_too(augment: Callable[..., Any]) -> None:
    data = images()
    data = replace(data, inputs=as_tensor(data.inputs).double() / 255)
    with pytest.raises(InputError, match=r"cannot be stacked: .*; engine=loop trains it"):
        simulation(data, ["fedavg"], augment)
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        made = simulation(data, ["fedavg"], augment, engine="auto")
        for _ in range(2):
            made.step()
        assert torch.equal(torch.get_rng_state(), before)
        found.append(made.x)
        assert made.settings.engine == "loop"
        if augment is not mixing:
            assert f"its augmentation ({augment.__name__}): RuntimeError: vmap" in made.plan.executor.why
    assert torch.equal(*found)
    plain = simulation(data, ["fedavg"], None, engine="loop")
    for _ in range(2):
        plain.step()
    assert not torch.equal(plain.x, made.x)


def test_the_callers_generator_is_left_as_it_was() -> None:
    """Also where a linear classifier is looked for, whose forward pass is tried."""
    data, model = make_federation([10, 12]), nn.Linear(FEATURES, CLASSES).double()
    state = torch.get_rng_state()
    simulation(data, ["fedavg"], fw.augment.noise(0.1), compile="auto", model=model, rounds=10**6)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (lambda x: x if random.random() < 0.5 else x.flip(2), "the seed of a run does not decide: draw with"),
        (lambda x: x * int(np.random.randint(9)), "the seed of a run does not decide"),
        (lambda x: x[:1], "it must return as many samples, in the same structure"),
        (lambda x: None, "returns NoneType for inputs"),
        (lambda x: (x,), "in the same structure"),
        (lambda x: x.no_such, "cannot take inputs .*AttributeError"),
        ("flip", "augment='flip' is not a function of a batch"),
        (nn.Identity, "is not a function of a batch"),
        ([fw.augment.flip, 3], "is not a function of a batch"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(augment: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulation(images(), ["fedavg"], augment)


def test_images_of_which_nobody_knows_the_width_are_refused() -> None:
    for shape in ((4, 9, 3), (8, 9, 2), (7,)):
        with pytest.raises(InputError, match="images"):
            fw.augment.flip(torch.zeros(2, *shape))


def test_a_client_of_a_real_federation_augments_alike() -> None:
    task = fw.Task(network, images(), augment=READY["both"], solver=Solver(lr=0.1, batch_size=4))
    exchange = Exchange(task, "fedavg")
    runs = [Run("fedavg", algorithms.fedavg(), 0)]
    settings = Settings(solver=task.solver, compile="off", device="cpu", workers=1)
    made = Simulation(task.model, task.federation, runs, settings, augment=task.augment)
    without = simulated(task, "fedavg")
    for _ in range(2):
        for each in (exchange.round, made.step, without.step):
            each()
    torch.testing.assert_close(exchange.server.x, made.x[0], rtol=1e-9, atol=1e-10)
    assert not torch.allclose(without.x[0], made.x[0], rtol=1e-4)


def test_inputs_of_several_tensors_are_handed_over_as_they_are() -> None:
    class Two(nn.Linear):
        def forward(self, image: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(torch.cat([image.flatten(1), table], 1))

    def only_the_image(x: dict[str, Tensor]) -> dict[str, Tensor]:
        return x | {"image": fw.augment.flip(x["image"])}

    data = images((4, 5))
    inputs: Samples = {
        "image": as_tensor(data.inputs).double(),
        "table": as_tensor(data.targets)[:, None].double(),
    }
    data = replace(data, inputs=inputs)
    given = {"model": lambda: Two(21, 3).double()}
    stacked, loop = (
        simulation(data, ["fedavg"], only_the_image, engine=e, **given) for e in ("stacked", "loop")
    )
    assert_together(stacked, loop, rounds=2)


def test_a_run_goes_on_with_the_same_augmentation_only(tmp_path: Path) -> None:
    task = fw.Task(network, images(), augment=[fw.augment.flip, fw.augment.crop(padding=2)], rounds=2)
    fw.compare(task, ["fedavg"], seeds=[0], out=tmp_path / "run", progress=False)
    fw.compare(task, ["fedavg"], seeds=[0], out=tmp_path / "run", progress=False)
    for other in (None, fw.augment.flip, [fw.augment.flip, fw.augment.crop(padding=3)]):
        changed = replace(task, augment=other)
        with pytest.raises(InputError, match="differs in its augmentation"):
            fw.compare(changed, ["fedavg"], seeds=[0], out=tmp_path / "run", progress=False)


def draws(x: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """Every way of drawing that is counted."""
    with CountedRandomness(key):
        return (
            *(
                torch.rand(len(x)),
                torch.rand(2, 3, dtype=torch.float64),
                torch.rand(()),
                torch.rand(size=(4,)),
            ),
            *(torch.randn(3, 2), torch.rand_like(x), torch.randn_like(x, dtype=torch.float64)),
            *(torch.randint(-3, 4, (len(x),)), torch.randint(9, (2, 2)), torch.randint(high=2, size=(3,))),
            *(torch.bernoulli(x.sigmoid()), x.sigmoid().bernoulli(), torch.bernoulli(x, 0.3)),
        )


def test_a_row_draws_as_it_does_alone_and_for_any_number_of_samples() -> None:
    x, keys = torch.randn(3, 5, 2), torch.tensor([1, 2, 3])
    state = torch.get_rng_state()
    stacked = vmap(draws)(x, keys)
    for row in range(3):
        for together, alone in zip(stacked, draws(x[row], keys[row]), strict=True):
            assert torch.equal(together[row], alone)
    assert torch.equal(torch.get_rng_state(), state)
    for together, fewer in zip(stacked, draws(x[0, :2], keys[0]), strict=True):
        assert torch.equal(together[0].reshape(-1)[: fewer.numel()], fewer.reshape(-1))
    assert not any(torch.equal(each[0], each[1]) for each in stacked if each[0].numel() > 4)


def test_counted_numbers_are_distributed_as_they_should_be() -> None:
    with CountedRandomness(torch.tensor(3)):
        uniform, again = torch.rand(100_000), torch.rand(100_000)
        normal, whole = torch.randn(100_000), torch.randint(-2, 5, (70_000,))
        few = torch.rand(100_000, dtype=torch.bfloat16)
    assert 0 <= uniform.min() < 1e-4
    assert 1 - 1e-4 < uniform.max() < 1
    assert few.max() < 1
    for drawn in (uniform, again):
        assert drawn.mean().item() == pytest.approx(0.5, abs=0.005)
        assert drawn.var().item() == pytest.approx(1 / 12, rel=0.02)
    assert abs(torch.corrcoef(torch.stack([uniform, again]))[0, 1]) < 0.01
    edges = torch.linspace(-3, 3, 25, dtype=torch.float64)
    shares = torch.histogram(normal.double(), edges).hist / len(normal)
    exact = torch.special.ndtr(edges[1:]) - torch.special.ndtr(edges[:-1])
    assert (shares - exact).abs().max() < 0.005
    assert torch.bincount(whole + 2).sub(10_000).abs().max() < 500


def test_numbers_of_a_generator_of_its_own_are_left_to_it() -> None:
    def drawn() -> Tensor:
        return torch.rand(3, generator=torch.Generator().manual_seed(5))

    with CountedRandomness(torch.tensor(3)) as mode:
        inside = drawn()
    assert torch.equal(inside, drawn())
    assert not mode.needed
