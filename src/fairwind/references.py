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


def is_reference(text: str) -> bool:
    """Whether a text refers to an object in a file or module, and is not a spec."""
    place, colon, name = text.rpartition(":")
    return bool(colon) and name.isidentifier() and (place.endswith(".py") or "." in place or os.sep in place)


def load_task(text: str) -> Task:
    """The task that a reference names; a function without arguments is called."""
    found = _load(text, "task")
    if not isinstance(found, Task):
        raise InputError(f"{text} is a {type(found).__name__}, not a task: make one with fairwind.Task(…)")
    return found.sourced(text)


def load_algorithm(text: str) -> AnyAlgorithm:
    """The algorithm that a reference names; a function without arguments is called."""
    found = _load(text, "algorithm")
    if not is_algorithm(found):
        raise InputError(
            f"{text} is a {type(found).__name__}, not an algorithm: make a fairwind.Algorithm(init, …)"
        )
    return found


def _load(text: str, kind: str) -> Any:
    with chdir(os.getcwd()):  # afterwards back to it: a user's os.chdir must not move the command's paths
        return _found(text, kind)


def _found(text: str, kind: str) -> Any:
    place, _, name = text.rpartition(":")
    module = _module(place, kind)
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
        sys.modules[name] = module  # needed by pickle, and for files imported twice
        sys.path.insert(0, str(path.parent))  # for imports from its own folder
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


def _line(error: BaseException, place: str) -> str:
    """Where in the user's file it happened."""
    at, found = error.__traceback__, 0
    while at is not None:
        if Path(at.tb_frame.f_code.co_filename).name == Path(place).name:
            found = at.tb_lineno
        at = at.tb_next
    return f" (line {found})" if found else ""
