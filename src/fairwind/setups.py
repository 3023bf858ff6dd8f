"""Setups: data, model, local solver and rounds under one name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from fairwind.data import cifar10, femnist, sent140, store
from fairwind.data.federation import Federation
from fairwind.data.source import Source
from fairwind.data.synthetic import synthetic, synthetic_li
from fairwind.engine.ranks import ALONE, Ranks
from fairwind.engine.solver import Solver
from fairwind.errors import InputError, unknown
from fairwind.models import linear, lstm, mlp, vgg11
from fairwind.models.vgg import Init
from fairwind.runs.spec import Parameters, arguments, parameters, with_parameters
from fairwind.task import Task


class Setup(NamedTuple):
    """If a setup has no source, its data is generated. A spec's parameters are those of data and model."""

    data: Callable[..., Federation] | Source
    model: Callable[..., nn.Module]  # of the federation
    solver: Solver
    rounds: int

    @property
    def builder(self) -> Callable[..., Any]:
        """The function that creates the data; its docstring has the setup's citation."""
        return self.data.federate if isinstance(self.data, Source) else self.data

    @property
    def parameters(self) -> Parameters:
        """Those of the data, then those of the model, and shares of what is held out of training."""
        held_out = {"validation": (float, 0.0), "new_clients": (float, 0.0)}
        return {**parameters(self.builder), **parameters(self.model), **held_out}


class Where(NamedTuple):
    """The folders of data files and of the cache."""

    data_dir: Path | None = None
    glove: Path | None = None
    cache: Path | None = None


WHERE = Where()


def _linear(federation: Federation) -> nn.Module:
    assert federation.classes is not None
    assert isinstance(federation.inputs, Tensor)
    return linear(federation.inputs.shape[1], federation.classes)


def _lstm(federation: Federation) -> nn.Module:
    return lstm(len(federation.words), federation.embedding)


def _mlp(federation: Federation) -> nn.Module:
    return mlp(784, 128, 62)


def _vgg11(federation: Federation, *, init: Init = "pytorch") -> nn.Module:
    return vgg11(init=init)


BATCH_10 = Solver(lr=0.01, batch_size=10, epochs=1)
BATCH_32 = Solver(lr=0.01, batch_size=32, epochs=1)

SETUPS = {
    "femnist": Setup(femnist.SOURCE, _mlp, BATCH_10, rounds=500),
    "femnist-pooled": Setup(femnist.POOLED, _mlp, BATCH_32, rounds=100),
    "cifar10": Setup(cifar10.SOURCE, _vgg11, Solver(lr=0.01, batch_size=32, epochs=2), rounds=200),
    "cifar10-features": Setup(cifar10.FEATURES_SOURCE, _linear, BATCH_32, rounds=100),
    "sent140": Setup(sent140.SOURCE, _lstm, BATCH_10, rounds=1000),
    "synthetic": Setup(synthetic, _linear, BATCH_10, rounds=1000),
    "synthetic-li": Setup(synthetic_li, _linear, BATCH_10, rounds=1000),
}


def find(spec: str) -> Setup:
    """The setup that a spec such as "cifar10:beta=0.5,clients=8" names."""
    name = spec.partition(":")[0]
    if name not in SETUPS:
        raise InputError(f"{unknown('setup', name, SETUPS)}; a task of your own is FILE.py:NAME")
    return SETUPS[name]


def entry(spec: str, where: Where, say: store.Say) -> store.Entry:
    """The prepared data of a spec; generated data is stored too."""
    setup, name = find(spec), spec.partition(":")[0]
    given = _data_arguments(spec)
    if isinstance(setup.data, Source):
        return store.prepare(
            name, setup.data, given, data_dir=where.data_dir, glove=where.glove, cache=where.cache, say=say
        )
    _refuse_files(spec, where)
    return store.keep(name, setup.data(**given), given, cache=where.cache)


def federation(
    spec: str, where: Where, say: store.Say = lambda text: None, ranks: Ranks = ALONE
) -> Federation:
    """The data of a spec: prepared (by rank 0), or generated; without validation samples yet."""
    setup = find(spec)
    if isinstance(setup.data, Source):
        with ranks.first_alone():
            prepared = entry(spec, where, say)
        return prepared.load()
    _refuse_files(spec, where)
    return setup.data(**_data_arguments(spec))


def task(spec: str, where: Where = WHERE, say: store.Say = lambda text: None, ranks: Ranks = ALONE) -> Task:
    """The task of a spec."""
    return task_on(spec, federation(spec, where, say, ranks))


def task_on(spec: str, federation: Federation) -> Task:
    """The task of a spec, on data that is already loaded."""
    setup, given = find(spec), arguments_of(spec)
    federation = federation.with_validation(given["validation"]).with_new_clients(given["new_clients"])
    model = partial(setup.model, federation, **{name: given[name] for name in parameters(setup.model)})
    return Task(model, federation, solver=setup.solver, rounds=setup.rounds, name=spec).sourced(spec)


def arguments_of(spec: str) -> dict[str, Any]:
    """All parameters of a spec, of data and model: those it gives, and defaults."""
    return arguments("setup", spec, {name: setup.parameters for name, setup in SETUPS.items()})


def _data_arguments(spec: str) -> dict[str, Any]:
    given = arguments_of(spec)
    return {name: given[name] for name in parameters(find(spec).builder)}


def _refuse_files(spec: str, where: Where) -> None:
    for name, value in (("--data-dir", where.data_dir), ("--glove", where.glove)):
        if value is not None:
            raise InputError(f"{spec} is generated: it reads no files, so leave {name} out")


def with_clients(spec: str, clients: int | None) -> str:
    """A spec with a number of clients added."""
    if clients is None:
        return spec
    if "clients=" in spec:
        raise InputError(f"the number of clients is given twice: in {spec} and by --clients")
    return with_parameters(spec, clients=clients)
