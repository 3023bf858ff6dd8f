"""The size exponent: S^size wherever an algorithm says S, for every algorithm that weighs by size, alike."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fairwind as fw
from conftest import make_federation, make_model
from fairwind import InputError, algorithms
from fairwind.aggregation import first_state
from fairwind.contract import AnyAlgorithm, Cohort, CohortAlgorithm, GramAlgorithm, Report
from fairwind.runs.spec import parameters

SIZED = [name for name, builder in algorithms.REGISTRY.items() if "size" in parameters(builder)]
DEFAULT_0 = ("fedeba", "fedmgda")


def weights(algorithm: AnyAlgorithm, size: Tensor) -> list[Tensor]:
    """All that clients alike but for their sizes add to a round."""
    draw = torch.Generator().manual_seed(0)
    report = Report(*torch.rand(len(Report._fields), 1, generator=draw, dtype=torch.float64) + 0.5)
    report = report._replace(**{name: value.repeat(len(size)) for name, value in report._asdict().items()})
    report = report._replace(size=size)
    if isinstance(algorithm, CohortAlgorithm | GramAlgorithm):
        cohort = Cohort(torch.arange(len(size)), report)
        state = first_state(algorithm, torch.zeros(3, dtype=torch.float64), len(size))
        if isinstance(algorithm, GramAlgorithm):
            return [algorithm.weigh(state, cohort, torch.eye(len(size), dtype=torch.float64))[0]]
        return [algorithm.weigh(state, cohort)[0]]
    part = algorithm.client(report)
    return [part.coef, *part.sums]


SIZES = torch.tensor([1.0, 9.0, 100.0], dtype=torch.float64)


@pytest.mark.parametrize("name", algorithms.REGISTRY)
def test_those_that_weigh_by_size_have_it_and_no_others(name: str) -> None:
    build: Any = algorithms.REGISTRY[name]
    algorithm = build(size=1.0) if name in DEFAULT_0 else build()
    same, other = weights(algorithm, SIZES), weights(algorithm, torch.ones_like(SIZES))
    by_size = any(not torch.allclose(a, b) for a, b in zip(same, other, strict=True))
    gradient = name in ("mime", "mimelite")  # the engine weighs their mean gradient by size
    if name in algorithms.BASELINES:  # whose global model is not shown
        return
    assert by_size == (name in SIZED or gradient)


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("exponent", [0.0, 0.5, 2.0])
def test_it_is_the_algorithm_with_other_sizes(name: str, exponent: float) -> None:
    build: Any = algorithms.REGISTRY[name]
    sized = weights(build(size=exponent), SIZES)
    for a, b in zip(sized, weights(build(size=1.0), SIZES**exponent), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_by_default_it_is_the_papers() -> None:
    for name in SIZED:
        default = parameters(algorithms.REGISTRY[name])["size"][1]
        assert default == (0.0 if name in DEFAULT_0 else 1.0)
    assert algorithms.fedavg(size=1.0).name == "fedavg"
    assert algorithms.adafedadam(alpha=2.0, size=0.5).name == "adafedadam:alpha=2,size=0.5"


def test_without_sizes_clients_count_once() -> None:
    """FedAvg with size=0 is the plain mean of the models: by hand, one step of one batch each."""
    federation = make_federation([4, 40, 8])
    task = fw.Task(make_model, federation, rounds=1, solver=fw.Solver(lr=0.1, batch_size=64))
    both = fw.compare(task, ["fedavg:size=0", "fedavg:size=0.5"], progress=False)
    torch.manual_seed(0)
    start = torch.nn.utils.parameters_to_vector(make_model().parameters()).detach()
    updates = []
    for k in range(3):
        torch.manual_seed(0)
        model = make_model()
        at = int(federation.start[k])
        rows = slice(at, at + int(federation.train[k]))
        assert isinstance(federation.inputs, Tensor)
        assert isinstance(federation.targets, Tensor)
        loss = torch.nn.functional.cross_entropy(model(federation.inputs[rows]), federation.targets[rows])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        updates.append(0.1 * torch.cat([g.reshape(-1) for g in gradients]))
    for run, exponent in zip(both.runs, (0.0, 0.5), strict=True):
        share = federation.train.double() ** exponent
        wanted = start - (share[:, None] * torch.stack(updates)).sum(0) / share.sum()
        found = torch.cat([value.reshape(-1) for value in run.state_dict.values()])
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_wrong_ones_are_refused() -> None:
    with pytest.raises(InputError, match="size"):
        algorithms.fedavg(size=-1.0)
    with pytest.raises(InputError, match="parameter of qfedavg"):
        algorithms.build("qfedavg:size=0.5")
