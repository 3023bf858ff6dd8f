"""Options: how --help shows them, how their values are read, and how mistakes are named."""

import ast
import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import MISSING, fields
from itertools import pairwise, zip_longest
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from fairwind.engine.settings import Effect, Settings, names_of
from fairwind.engine.solver import Solver
from fairwind.runs.recipe import SOLVERS
from fairwind.task import Task

Command = TypeVar("Command", bound=type)
Spec = PrimitiveConstructorSpec[Any]
Settled = dict[str, Any]  # those settings that are given

KINDS = {  # metavar, and what a value should be
    int: ("INT", "a whole number"),
    float: ("FLOAT", "a number"),
    str: ("STR", "a text"),
    Path: ("PATH", "a path"),
}
TASKS_OWN = " (the task's own if not given)."
HOW_CLIENTS_TRAIN = "How clients train; momentum and nesterov are SGD with --momentum 0.9, unless it is given"


def described(command: Command) -> Command:
    """Gives the options of a command, a dataclass, their types and their texts as --help shows them.

    A default is shown beside the text, unless there is none, or it is not to have the option. A field of
    `settings` becomes one option for each of them.
    """
    texts, types = _texts(command), command.__annotations__
    for field in fields(command):
        if field.name in types and "effects" in field.metadata:
            settings = _settings(*field.metadata["effects"])
            types[field.name] = Annotated[settings, tyro.conf.arg(name="")]
        elif field.name in types:
            default = "" if field.default in (None, (), False) else None
            shown = "(required)" if field.default is MISSING else default
            types[field.name] = _option(types[field.name], texts[field.name], shown)
    return command


def settings_of(*effects: Effect) -> dict[str, Any]:
    """Metadata of a command's field that has the options of `Settings` with these effects."""
    return {"effects": effects}


def _settings(*effects: Effect) -> Any:
    """A dict of the settings that are given, of which each is an option."""
    options: dict[str, Any] = {}
    for record in (Settings, Solver):
        texts, types = _texts(record), get_type_hints(record)
        for field in fields(record):
            name, text, kind = field.name, texts[field.name], types[field.name]
            hint = "" if field.default is None else f"(default: {field.default})"
            if record is Solver and field.default is not None or name in types_of(Task):
                text, hint = text.removesuffix(".") + TASKS_OWN, ""
            if kind is Solver:
                text, kind = HOW_CLIENTS_TRAIN + TASKS_OWN, Literal[*SOLVERS]
            wanted = name in names_of(*effects) if record is Settings else "solver" in options
            if wanted and field.metadata.get("command_line", True):
                options[name] = _option(kind, text.replace("`", ""), hint)
    typed_dict: Any = TypedDict
    return typed_dict("Settings", options, total=False)
