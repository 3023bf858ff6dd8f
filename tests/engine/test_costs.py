"""Which executor is chosen on a CPU, by counts that are the same every time."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import CLASSES, DEVICE, FEATURES, make_federation, make_model
from fairwind import Federation, InputError, Settings, Solver, algorithms
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from simulations import loop_of

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU all that can be stacked is")


def chosen(model: nn.Module, federation: Federation, runs: int = 1, **options: Any) -> Simulation:
    own: dict[str, Any] = {
        "rounds": 1,
        "compile": "off",
        "device": "cpu",
        "workers": 2,
        "solver": Solver(batch_size=10),
    }
    made = [Run("fedavg", algorithms.fedavg(), seed) for seed in range(runs)]
    return Simulation(model, federation, made, Settings(**own | options))


def images(side: int, clients: int) -> Federation:
    g = torch.Generator().manual_seed(0)
    one = torch.randn(20, 1, side, side, generator=g), torch.randint(0, CLASSES, (20,), generator=g)
    return Federation.from_clients([one] * clients)


def convolutions(side: int) -> nn.Module:
    layers = [nn.Conv2d(1, 4, 5, padding=2), nn.ReLU(), nn.Conv2d(4, 8, 5, padding=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * side * side, CLASSES))


def test_few_clients_train_one_after_another_and_many_at_once() -> None:
    model = make_model()
    few, many = chosen(model, make_federation([9] * 2)), chosen(model, make_federation([9] * 40))
    assert few.settings.engine == "loop"
    assert "clients at once (2) are few" in str(few.choice)
    assert many.settings.engine == "stacked"
    assert chosen(model, make_federation([9] * 2), runs=20).settings.engine == "stacked"  # runs are rows, too
    assert chosen(model, make_federation([9] * 2), compile="on").settings.engine == "stacked"
    assert chosen(model, make_federation([9] * 40), clients_per_round=2).settings.engine == "loop"


def test_convolutions_of_common_sizes_train_one_after_another() -> None:
    assert chosen(convolutions(6), images(6, 60)).settings.engine == "stacked"
    larger = chosen(convolutions(28), images(28, 60))
    assert larger.settings.engine == "loop"
    assert "keeps a core busy" in str(larger.choice)
    assert len(loop_of(larger).workers.states) == 2  # whose kernels run side by side
    assert chosen(convolutions(28), images(28, 60), engine="stacked").settings.engine == "stacked"


def test_small_modules_in_the_loop_have_one_thread() -> None:
    federation = make_federation([9] * 40)
    alone = chosen(nn.Linear(FEATURES, CLASSES).double(), federation, engine="loop")
    assert len(loop_of(alone).workers.states) == 1


def test_a_model_that_is_too_large_to_gain_by_stacking_is_not_stacked_on_trial() -> None:
    """The trial takes longer than rounds of a large model."""

    class Large(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            float(x.sum())  # cannot be vectorised
            return super().forward(x)

    one = torch.randn(20, 1000), torch.randint(0, 10, (20,))
    federation = Federation.from_clients([one] * 100)
    assert "keeps a core busy" in str(chosen(Large(1000, 1000), federation).choice)
    assert "cannot be stacked" in str(chosen(Large(1000, 10), federation).choice)
    with pytest.raises(InputError, match="cannot be stacked"):
        chosen(Large(1000, 1000), federation, engine="stacked")
