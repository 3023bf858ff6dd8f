"""What computes compiled steps: PyTorch's compiler, ahead of time or not, or C++ written for them."""

import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Literal, assert_never

from fairwind.engine.backends.classifier import Classifier, applies
from fairwind.engine.backends.compiling import Library, compiled_for_gpu
from fairwind.engine.backends.native import compiler
from fairwind.engine.executor import Run
from fairwind.engine.local import PLAIN, Locals, Pass, Rules
from fairwind.engine.machine import CPP_COMPILER, TRITON
from fairwind.engine.plan import Steps
from fairwind.engine.schedule import Planner
from fairwind.engine.solver import Solver
from fairwind.engine.stacked.chunks import Kind
from fairwind.engine.stacked.model import StackedModel
from fairwind.engine.stacked.workspace import Workspace
from fairwind.errors import InputError, first_line


def handwritten(
    model: StackedModel, planner: Planner, runs: Sequence[Run], ways: Mapping[Pass, Locals]
) -> Literal["all", "some", "none"]:
    """For which of the kinds of steps that runs need there is C++."""
    federation = planner.federation
    hosted = federation.compute_device is not None
    data = federation.at(slice(0, 1)) if hosted else (federation.inputs, federation.targets)
    rules: dict[Kind, Rules] = {run.algorithm.probe: PLAIN for run in runs if run.algorithm.probe != "none"}
    rules |= {way: local.rules for way, local in ways.items()}
    has = [applies(kind, model, data, rule, planner.solver) for kind, rule in rules.items()]
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
        library: Library | Classifier
        match how:
            case "hand-written" if applies(kind, first.model, first.data, first.rules, solver):
                library = Classifier(kind, first.model, first.rules)
            case "hand-written" | "ahead-of-time":
                library = Library(first.step, *first.example())
            case _:
                assert_never(how)
        for workspace in workspaces:
            workspace.compiled = library.driver()
    except Exception as error:  # whatever the compiler makes of a user's module
        if compiler() is None:
            raise _no_compiler(CPP_COMPILER) from error
        warnings.warn(f"{kind} steps run uncompiled, and slower: {first_line(error)}", stacklevel=4)


def _no_compiler(missing: str) -> InputError:
    return InputError(
        f"{missing} was not found, and this run compiles its steps: install it, or begin anew with "
        "--compile off (compile='off' in Python), which differs in the last bits"
    )
