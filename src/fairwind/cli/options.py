"""Options of the commands: how --help shows them, how values are read, and how mistakes are named."""

import ast
import inspect
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import (
    Annotated,
    Any,
    Literal,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from fairwind.engine.settings import Effect, Settings, names_of
from fairwind.engine.solver import Solver, option_names
from fairwind.runs.recipe import SOLVERS

Command = TypeVar("Command", bound=type)
Spec = PrimitiveConstructorSpec[Any]
KINDS: dict[Any, tuple[str, str]] = {  # metavar, and what a value is
    int: ("INT", "whole number"),
    float: ("FLOAT", "number"),
    str: ("STR", "text"),
    Path: ("PATH", "path"),
}
SOLVER = "How clients train; momentum and nesterov are SGD with --momentum 0.9 unless another is given"


def described(command: Command) -> Command:
    """Gives the options of a command, a dataclass, their texts and types.

    A text is the string below its field. A default is shown beside it, unless there is none, or it is not to
    have the option. A field with `options_of` becomes those options.
    """
    texts, types = _texts(command), command.__annotations__
    for field in fields(command):
        if field.name in types and "settings" in field.metadata:
            typed_dict: Any = TypedDict
            given = typed_dict("Given", _settings(Settings, field.metadata["settings"]), total=False)
            types[field.name] = Annotated[given, tyro.conf.arg(name="")]
        elif field.name in types:
            absent = field.default in (None, (), False)
            shown = "(required)" if field.default is MISSING else "" if absent else None
            types[field.name] = _option(types[field.name], texts[field.name], shown)
    return command


def options_of(*effects: Effect) -> dict[str, tuple[str, ...]]:
    """Metadata of a command's field: the settings with these effects, a dict of those that are given."""
    return {"settings": names_of(*effects)}


def _settings(record: type, names: Iterable[str]) -> dict[str, object]:
    """Options for the fields of `Settings`, or of its solver."""
    options: dict[str, object] = {}
    texts, types = _texts(record), get_type_hints(record)
    for name in names:
        default = record.__dataclass_fields__[name].default  # type: ignore[attr-defined]
        kind, text = types[name], texts[name]
        if kind is Solver:
            kind, text = Literal[*SOLVERS], SOLVER
        if name in ("rounds", "solver") or (record is Solver and default is not None):
            text, default = f"{text.removesuffix('.')} (the task's own if not given).", None
        options[name] = _option(kind, text, "" if default is None else f"(default: {default})")
        if name == "solver":
            options |= _settings(Solver, option_names())
    return options


def _texts(record: type) -> dict[str, str]:
    """The texts below the fields of a dataclass, each as one line: the parser would keep its line breaks."""
    tree = ast.parse(inspect.cleandoc(inspect.getsource(record))).body[0]
    assert isinstance(tree, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(below.value).split())
        for field, below in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


def _option(kind: Any, text: str, shown: str | None) -> Any:
    spec = _spec(kind)
    place = spec is not None and tyro.conf.Positional in get_args(kind)
    metavar = spec.metavar.removesuffix(" ...") if spec is not None and place else None
    about = tyro.conf.arg(help=text, help_behavior_hint=shown, metavar=metavar)
    return Annotated[kind, about] if spec is None else Annotated[kind, about, spec]


def _spec(kind: Any) -> Spec | None:
    """How the values of a type are read; None of a flag."""
    inner = get_args(kind)
    if get_origin(kind) is Annotated:
        given = (part for part in inner if isinstance(part, PrimitiveConstructorSpec))
        return next(given, None) or _spec(inner[0])
    if get_origin(kind) is Literal:
        words, metavar = f"one of {', '.join(map(repr, inner))}", "{" + ",".join(inner) + "}"
        return values(lambda text: inner[inner.index(text)], words, metavar, choices=inner)
    if get_origin(kind) is tuple:
        return values(inner[0], count="*")
    base, *pair = [part for part in inner or (kind,) if part is not NoneType]
    if pair:
        metavar, words = KINDS[base]
        return values(base, f"one or two {words}s", f"{metavar} [{metavar}]", count=(1, 2))
    return None if base is bool else values(base)


def values(
    kind: Callable[[str], Any], words: str = "", metavar: str = "", *, count: Any = 1, choices: Any = None
) -> Spec:
    """How one value is read, or a tuple of several; numbers of any count may also be separated by commas."""
    words = words or f"a {KINDS[kind][1]}"
    metavar = metavar or KINDS[kind][0]

    def read(given: list[str]) -> Any:
        found = []
        for part in ",".join(given).split(",") if count == "*" and kind is int else given:
            try:
                found += [kind(part)] if part or count != "*" else []
            except ValueError:
                raise ValueError(f"{part if count == '*' else ' '.join(given)!r} is not {words}") from None
        return tuple(found) if count == "*" or len(found) > 1 else found[0]

    return PrimitiveConstructorSpec(
        nargs=count,
        metavar=f"{metavar} ..." if count == "*" else metavar,
        instance_from_str=read,
        is_instance=lambda value: True,
        str_from_instance=lambda value: list(map(str, value if isinstance(value, tuple) else [value])),
        choices=choices,
    )


def names(command: type) -> list[str]:
    """The options of a command, as they are typed."""
    return [*_specs(command)[0], "--help"]


def _specs(command: type) -> tuple[dict[str, Spec | None], Spec | None]:
    """How a command's options are read, flags by None; and the word that it must have, if there is one."""
    options: dict[str, Spec | None] = {}
    required = {field.name for field in fields(command) if field.default is MISSING}
    place = None
    for name, kind in get_type_hints(command, include_extras=True).items():
        if is_typeddict(get_args(kind)[0]):
            settings = get_type_hints(get_args(kind)[0], include_extras=True)
            options |= {_typed(setting): _spec(of) for setting, of in settings.items()}
        elif tyro.conf.Positional not in get_args(kind):
            options[_typed(name)] = _spec(kind)
        elif name in required:
            place = _spec(kind)
    return options, place


def _typed(name: str) -> str:
    return "--" + name.replace("_", "-")


def mistake(command: type, words: list[str]) -> str:
    """What is wrong with words that the parser refused; empty if that is none of the usual mistakes."""
    options, place = _specs(command)
    rest, free = deque(words), []
    while rest:
        name, equals, value = rest.popleft().partition("=")
        if (spec := options.get(name.replace("_", "-"))) is None:
            free += [] if name.startswith("--") else [name + equals + value]
            continue
        given = [value] if equals else []
        while rest and not rest[0].startswith("--") and not (given and spec.nargs == 1):
            given.append(rest.popleft())
        if not given and spec.nargs != "*":
            return f"Missing value for {name}"
        if wrong := _wrong(spec, given):
            return f"{name}: {wrong}"
    if place is not None:
        return _wrong(place, free[:1]) if free else f"{place.metavar} is missing"
    return ""


def _wrong(spec: Spec, given: list[str]) -> str:
    try:
        spec.instance_from_str(given)
    except ValueError as error:
        return str(error)
    return ""


Seconds = Annotated[float, values(float, metavar="SECONDS")]
Time = Annotated[str | None, values(str, metavar="TIME")]
Names = Annotated[tuple[str, ...], values(str, metavar="NAME", count="*")]
Folders = Annotated[tuple[Path, ...], values(Path, metavar="DIR", count="*")]
Directory = Annotated[Path, tyro.conf.Positional, values(Path, metavar="DIR")]
