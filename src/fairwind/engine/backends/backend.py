"""What computes compiled steps: PyTorch's compiler, ahead of time or not, or C++ written for them.

Code of one's own for a kind of model is a `Handwritten` class in HANDWRITTEN.
"""

import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal, Protocol, assert_never

from fairwind.engine.backends.classifier import Classifier
from fairwind.engine.backends.compiling import Library, compiled_for_gpu
from fairwind.engine.backends.convolutions import Convolutions
from fairwind.engine.backends.native import compiler
from fairwind.engine.executor import Run
from fairwind.engine.local import PLAIN, Locals, Pass, Rules
from fairwind.engine.machine import CPP_COMPILER, TRITON
from fairwind.engine.plan import Steps
from fairwind.engine.schedule import Planner
from fairwind.engine.solver import Solver
from fairwind.engine.stacked.chunks import Kind
from fairwind.engine.stacked.model import StackedModel
from fairwind.engine.stacked.workspace import TakeSteps, Workspace
from fairwind.errors import InputError, SlowPathWarning, first_line


class Handwritten(Protocol):
    """Code for the steps of some models, as `stacked/steps.py` defines them."""

    @staticmethod
    def applies(
        kind: str, model: StackedModel, data: tuple[Any, Any], rules: Rules, solver: Solver
    ) -> bool: ...

    def __init__(self, kind: str, model: StackedModel, data: tuple[Any, Any], rules: Rules) -> None: ...

    def driver(self) -> TakeSteps: ...  # for one thread


HANDWRITTEN: tuple[type[Handwritten], ...] = (Classifier, Convolutions)


def _handwritten(
    kind: str, model: StackedModel, data: tuple[Any, Any], rules: Rules, solver: Solver
) -> type[Handwritten] | None:
    """What computes the steps of a kind, if there is code for them."""
    return next((code for code in HANDWRITTEN if code.applies(kind, model, data, rules, solver)), None)


def handwritten(
    model: StackedModel, planner: Planner, runs: Sequence[Run], ways: Mapping[Pass, Locals]
) -> Literal["all", "some", "none"]:
    """For which of the kinds of steps that runs need there is code of our own."""
    federation = planner.federation
    hosted = federation.compute_device is not None
    data = federation.at(slice(0, 1)) if hosted else (federation.inputs, federation.targets)
    rules: dict[Kind, Rules] = {run.algorithm.probe: PLAIN for run in runs if run.algorithm.probe != "none"}
    rules |= {way: local.rules for way, local in ways.items()}
    has = [_handwritten(kind, model, data, rule, planner.solver) for kind, rule in rules.items()]
    return "all" if all(has) else "some" if any(has) else "none"


def compile_steps(how: Steps, kind: Kind, workspaces: Sequence[Workspace], solver: Solver) -> None:
    """Compiles the steps of a kind for each worker; if that fails, they run uncompiled, with a warning.

    Without a compiler, and where nothing compiled is cached, they are refused: a resumed run would differ.
    """
    first = workspaces[0]
    if how == "eager":
        return
    if how == "torch.compile":  # where one worker has all rows
        if find_spec("triton") is None:
            raise _no_compiler(TRITON)
        first.step = compiled_for_gpu(first.step)
        return
    try:
        library: Library | Handwritten
        match how:
            case "hand-written" if code := _handwritten(kind, first.model, first.data, first.rules, solver):
                library = code(kind, first.model, first.data, first.rules)
            case "hand-written" | "ahead-of-time":
                library = Library(first.step, *first.example())
            case _:
                assert_never(how)
        for workspace in workspaces:
            workspace.compiled = library.driver()
    except Exception as error:  # whatever the compiler makes of a user's module
        if compiler() is None:
            raise _no_compiler(CPP_COMPILER) from error
        why = f"{kind} steps run uncompiled, and slower: {first_line(error)}"
        warnings.warn(why, SlowPathWarning, stacklevel=4)


def _no_compiler(missing: str) -> InputError:
    return InputError(
        f"{missing} was not found, and this run compiles its steps: install it, or begin anew with "
        "--compile off (compile='off' in Python), which differs in the last bits"
    )
