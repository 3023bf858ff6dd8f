"""Whether steps are compiled, and what compiles them."""

import warnings
from collections.abc import Sequence

from fairwind.engine.backends.classifier import Classifier, applies
from fairwind.engine.backends.compiling import Library, compiled_for_gpu, compiler_found
from fairwind.engine.solver import Solver
from fairwind.engine.stacked.chunks import Kind
from fairwind.engine.stacked.workspace import Workspace
from fairwind.errors import InputError, first_line

# About how many seconds it takes: with PyTorch's compiler, or where C++ for these steps is at hand.
SECONDS = {"cpu": 30, "cuda": 60}
HANDWRITTEN_SECONDS = 3
COMPILER = "a C++ compiler (g++ or clang++)"


def seconds(steps: dict[Kind, Workspace], solver: Solver) -> float:
    """About how long it takes to compile these kinds of steps."""
    if all(has_handwritten_step(kind, workspace, solver) for kind, workspace in steps.items()):
        return HANDWRITTEN_SECONDS
    return SECONDS[next(iter(steps.values())).device.type]


def compile_steps(kind: Kind, workspaces: Sequence[Workspace], solver: Solver) -> None:
    """Compiles the steps of a kind for each worker; if that fails, they run uncompiled, with a warning.

    Without a compiler, and where nothing compiled is cached, they are refused: a resumed run would differ.
    """
    first = workspaces[0]
    if first.device.type == "cuda":  # where one worker has all rows
        if not compiler_found(first.device):
            raise _no_compiler("Triton")
        first.step = compiled_for_gpu(first.step)
        return
    try:
        if has_handwritten_step(kind, first, solver):
            library: Library | Classifier = Classifier(kind, first.model, first.rules)
        else:
            library = Library(first.step, *first.example())
        for workspace in workspaces:
            workspace.compiled = library.driver()
    except Exception as error:  # whatever the compiler makes of a user's module
        if not compiler_found(first.device):
            raise _no_compiler(COMPILER) from error
        warnings.warn(f"{kind} steps run uncompiled, and slower: {first_line(error)}", stacklevel=4)


def _no_compiler(missing: str) -> InputError:
    return InputError(
        f"{missing} was not found, and this run compiles its steps: install it, or begin anew with "
        "--compile off (compile='off' in Python), which differs in the last bits"
    )


def has_handwritten_step(kind: Kind, workspace: Workspace, solver: Solver) -> bool:
    """Whether there is C++ for these steps."""
    on_cpu = workspace.device.type == "cpu"
    return on_cpu and applies(kind, workspace.model, workspace.data, workspace.rules, solver)
