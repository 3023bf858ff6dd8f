"""Users' objects on the command line: FILE.py:NAME, or PACKAGE.MODULE:NAME."""

import importlib
import importlib.util
import inspect
import os
import sys
from contextlib import chdir
from pathlib import Path
from types import ModuleType
from typing import Any

from fairwind.contract import AnyAlgorithm, is_algorithm
from fairwind.errors import InputError, first_line, unknown
from fairwind.task import Task

FOLDERS: set[Path] = set()  # of users' files, where these find what they import


def is_reference(text: str) -> bool:
    """Whether a text refers to an object in a file or module, and is not a spec."""
    place, colon, name = text.rpartition(":")
    if (place if colon else name).endswith(".py"):
        return True  # also where the object's name is missing, which `_load` says
    return bool(colon) and name.isidentifier() and ("." in place or os.sep in place)


def load_task(text: str) -> Task:
    """The task that a reference names; a function without arguments is called."""
    found = _load(text, "task")
    if not isinstance(found, Task):
        raise InputError(f"{text} is a {type(found).__name__}, not a task: make one with fairwind.Task(…)")
    return found.sourced(text)


def load_algorithm(text: str) -> AnyAlgorithm:
    """The algorithm that a reference names; a function without arguments is called."""
    found = _load(text, "algorithm")
    if isinstance(found, Task):
        raise not_an_algorithm(text, "task")
    if not is_algorithm(found):
        raise InputError(
            f"{text} is a {type(found).__name__}, not an algorithm: make a fairwind.Algorithm(init, …)"
        )
    return found


def not_an_algorithm(text: str, kind: str) -> InputError:
    """What to say of a task among algorithms: an option before it has taken it for one of its values."""
    return InputError(
        f"{text} is a {kind}, not an algorithm: on the command line it comes first, as in "
        f"'fairwind compare {text} --algorithms …'"
    )


def _load(text: str, kind: str) -> Any:
    with chdir(os.getcwd()):  # afterwards back to it: a user's os.chdir must not move the command's paths
        found = _found(text, kind)
    _check_imports()
    return found


def _found(text: str, kind: str) -> Any:
    place, name = text.rpartition(":")[::2] if ":" in text else (text, "")
    module = _module(place, kind)
    if not name:
        raise _nameless(place, module, kind)
    if not hasattr(module, name):
        public = [each for each in vars(module) if not each.startswith("_")]
        raise unknown(f"name in {place}", name, public)
    found = getattr(module, name)
    if isinstance(found, Task) or is_algorithm(found) or not callable(found):
        return found
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError) as error:
        raise InputError(f"{text} must be a {kind}, or a function without arguments: {error}") from None
    try:
        return found()
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        where = _line(error, place)
        raise InputError(f"{text} failed{where}: {type(error).__name__}: {first_line(error)}") from error


def _nameless(place: str, module: ModuleType, kind: str) -> InputError:
    """What to say of a file without the name of an object in it: the names there are."""
    public = {name: thing for name, thing in vars(module).items() if not name.startswith("_")}
    wanted = (lambda thing: isinstance(thing, Task)) if kind == "task" else is_algorithm
    held = [name for name, thing in public.items() if wanted(thing)]
    what = f"the {kind}"
    if not held:
        held = [name for name, thing in public.items() if _is_maker(thing, module)]
        what = f"the function that makes the {kind}"
    if not held:
        make = "task = fairwind.Task(…)" if kind == "task" else "algorithm = fairwind.Algorithm(…)"
        return InputError(f"{place} is a file that makes no {kind}: make one in it, {make}")
    several = f" (it has {', '.join(held)})" if len(held) > 1 else ""
    return InputError(f"{place} is a file: name {what} in it, as in {place}:{held[0]}{several}")


def _is_maker(thing: object, module: ModuleType) -> bool:
    """Whether it is a function of the module that needs no arguments."""
    if not inspect.isfunction(thing) or thing.__module__ != module.__name__:
        return False
    try:
        inspect.signature(thing).bind()
    except TypeError:
        return False
    return True


def _module(place: str, kind: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            return importlib.import_module(place)
        path = Path(place).absolute()
        if not path.is_file():
            where = "" if Path(place).is_absolute() else f" in {os.getcwd()}"
            raise InputError(f"there is no file {place}{where}: give FILE.py:NAME of a {kind}")
        name = f"fairwind_user_{path.stem}"
        known = sys.modules.get(name)
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        _check_imports(path.parent.resolve())
        sys.path.insert(0, str(path.parent))  # for imports from its own folder
        sys.modules[name] = module  # needed by pickle, and for files imported twice
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's file raises
        where = _line(error, place)
        raise InputError(
            f"{place} cannot be loaded{where}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _check_imports(*new: Path) -> None:
    """Refuses modules of one name in the folders of two files: an import would find the first for both."""
    folders = FOLDERS | {Path.cwd().resolve(), *new}
    for name in [name for name in sys.modules if "." not in name]:
        file = getattr(sys.modules[name], "__file__", None)
        parts = list(getattr(sys.modules[name], "__path__", [])) or [file]
        home = Path(parts[0]).resolve().parent if parts[0] else None
        for folder in (FOLDERS | {*new}) - {home} if home in folders else ():
            places = [f"{name}.py", f"{name}/__init__.py", *([] if file else [name])]
            if any((folder / place).exists() for place in places):
                raise InputError(
                    f"{home} and {folder} both have a module {name!r}, and Python would import one of them "
                    "for both: rename one"
                )
    FOLDERS.update(new)


def _line(error: BaseException, place: str) -> str:
    """Where in the user's file it happened."""
    at, found = error.__traceback__, 0
    while at is not None:
        if Path(at.tb_frame.f_code.co_filename).name == Path(place).name:
            found = at.tb_lineno
        at = at.tb_next
    return f" (line {found})" if found else ""
