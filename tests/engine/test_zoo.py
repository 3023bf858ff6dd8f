"""Modules and inputs of the kinds that users bring: each trains, and both executors agree where both can."""

from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from conftest import DEVICE
from fairwind import Federation, InputError, Settings, Solver, algorithms
from fairwind.engine.backends.compiling import traced
from fairwind.engine.executor import Run
from fairwind.engine.losses.loss import cross_entropy
from fairwind.engine.settings import Engine
from fairwind.engine.simulation import Simulation
from fairwind.scores import accuracy
from simulations import stacked_of
from zoo import ZOO, Specimen

NAMES = ("fedavg", "adafedadam", "fednova")
REFUSED = dict.fromkeys(("batch-norm", "batch-norm-without-statistics"), "say what is done with them")


# Whose steps run uncompiled, on a CPU and on a GPU: what has no form in layers/functions.py.
UNTRACED = {
    "segmentation": "any number of models",  # upsampling
    "autoencoder": "any number of models",  # a transposed convolution
    "embedding-bag": "any number of models",
    "ctc": "_ctc_loss",
}


def simulation(specimen: Specimen, engine: Engine) -> Simulation:
    clients = specimen.clients()
    federation = Federation.from_clients(clients, train=0.7)
    runs = [Run(name, algorithms.build(name), 0) for name in NAMES]
    settings = Settings(
        rounds=2,
        solver=Solver(lr=0.05, batch_size=3),
        engine=engine,
        compile="off",
        device=DEVICE,
        precision="float32",
    )
    given: dict[str, Any] = {"loss": specimen.loss or cross_entropy, "score": specimen.score or accuracy}
    return Simulation(specimen.model, federation, runs, settings, sharing=specimen.sharing, **given)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", ZOO)
def test_a_users_module_trains(name: str) -> None:
    specimen = ZOO[name]
    for package in specimen.needs:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    if name in REFUSED:
        with pytest.raises(InputError, match=REFUSED[name]):
            simulation(specimen, "auto")
        return
    torch.manual_seed(0)
    model = specimen.model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    loop = simulation(specimen, "loop")
    loop.run()
    assert torch.isfinite(loop.x).all()
    assert loop.left_out.tolist() == [0, 0, 0]
    assert loop.stalled.tolist() == [0, 0, 0]
    trained = loop.state_dict(0)
    assert trained.keys() == before.keys()
    assert any(not torch.equal(trained[key].cpu(), before[key]) for key in before)
    own = set(loop.own_names(0))
    assert all(len(trained[name]) == len(loop.federation) for name in own)
    model.load_state_dict({key: value[0] if key in own else value for key, value in trained.items()})
    if specimen.executor == "loop":
        with pytest.raises(InputError, match=r"cannot be stacked.*engine=loop trains it"):
            simulation(specimen, "stacked")
        chosen = simulation(specimen, "auto")
        assert chosen.stacked is None
        return
    stacked = simulation(specimen, "stacked")
    stacked.run()
    tolerance = 1e-9 if stacked.x.dtype == torch.float64 else 2e-4
    for one, other in zip(stacked.own.tensors().values(), loop.own.tensors().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=10 * tolerance)
    apart = (stacked.x - loop.x).norm(dim=1)
    assert (apart <= tolerance * loop.x.norm(dim=1)).all(), apart
    assert stacked.state_dict(0).keys() == before.keys()
    training = stacked_of(stacked)._needed()["training"]
    why = UNTRACED.get(name) if DEVICE == "cpu" else None  # an earlier PyTorch says it otherwise
    with pytest.raises(RuntimeError, match=why) if name in UNTRACED else nullcontext():
        assert traced(training.step, *training.example()).graph.graph.nodes


def itself(model: nn.Module) -> nn.Module:
    return model


def test_a_users_module_is_never_changed() -> None:
    for name in ("counting-buffer", "running-mean", "dropout", "lstm", "weight-norm"):
        torch.manual_seed(0)
        specimen = ZOO[name]
        model = specimen.model()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        kinds = [type(module) for module in model.modules()]
        found = []
        for _ in range(2):
            again = simulation(specimen._replace(model=partial(itself, model)), "auto")
            again.run()
            found.append(again.x.clone())
        assert torch.equal(*found), name
        assert [type(module) for module in model.modules()] == kinds
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key]), (name, key)


@pytest.mark.parametrize("name", ["noise", "noise-always", "dropout-always"])
def test_a_modules_randomness_is_seeded(name: str) -> None:
    """Results do not depend on PyTorch's global generator, whose state is left as it was."""
    found = []
    for seed in (1, 2):
        ours = simulation(ZOO[name], "auto")
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        ours.run()
        assert torch.equal(torch.get_rng_state(), before)
        found.append((ours.x.clone(), ours.loss))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
