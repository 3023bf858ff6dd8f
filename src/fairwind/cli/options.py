"""Options of the commands: how --help shows them, how values are read, and how mistakes are named."""

import ast
import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from itertools import pairwise, zip_longest
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from fairwind.engine.settings import Effect, Settings, names_of
from fairwind.engine.solver import Solver
from fairwind.runs.recipe import SOLVERS
from fairwind.task import Task

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
        if field.name in types and EFFECTS in field.metadata:
            options = _settings(*field.metadata[EFFECTS])
            types[field.name] = Annotated[options, tyro.conf.arg(name="")]
        elif field.name in types:
            absent = field.default in (None, (), False)
            shown = "(required)" if field.default is MISSING else "" if absent else None
            types[field.name] = _option(types[field.name], texts[field.name], shown)
    return command


def options_of(*effects: Effect) -> dict[str, tuple[Effect, ...]]:
    """Metadata of a command's field whose options are the settings with these effects."""
    return {EFFECTS: effects}


EFFECTS = "effects"


def _settings(*effects: Effect) -> Any:
    """A dict of those settings that are given, of which each has an option."""
    options: dict[str, Any] = {}
    texts, types, own = _texts(Settings), get_type_hints(Settings), {field.name for field in fields(Task)}
    for field in fields(Settings):
        if field.name in names_of(*effects):
            if field.name == "solver":
                options["solver"] = _setting(Literal[*SOLVERS], SOLVER, field, own=True)
                options |= _solver()
            else:
                kind, text = types[field.name], texts[field.name]
                options[field.name] = _setting(kind, text, field, own=field.name in own)
    typed_dict: Any = TypedDict
    return typed_dict("Given", options, total=False)


def _solver() -> dict[str, Any]:
    texts, types = _texts(Solver), get_type_hints(Solver)
    given = [field for field in fields(Solver) if field.metadata.get("command_line", True)]
    return {f.name: _setting(types[f.name], texts[f.name], f, own=f.default is not None) for f in given}


def _setting(kind: Any, text: str, field: "Field[Any]", *, own: bool) -> Any:
    """An option for a setting; `own` is one of which a task has its own value."""
    if own:
        return _option(kind, text.removesuffix(".") + " (the task's own if not given).", "")
    return _option(kind, text, "" if field.default is None else f"(default: {field.default})")


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
    positional = spec is not None and tyro.conf.Positional in get_args(kind)
    metavar = spec.metavar.removesuffix(" ...") if spec is not None and positional else None
    about = tyro.conf.arg(help=text, help_behavior_hint=shown, metavar=metavar)
    return Annotated[kind, about] if spec is None else Annotated[kind, about, spec]


def _spec(kind: Any) -> Spec | None:
    """How the values of a type are read; None of a flag."""
    if get_origin(kind) is Annotated:
        base, *metadata = get_args(kind)
        given = (part for part in metadata if isinstance(part, PrimitiveConstructorSpec))
        return next(given, None) or _spec(base)
    if get_origin(kind) is Literal:
        return _choice(get_args(kind))
    if get_origin(kind) is tuple:
        return several(get_args(kind)[0])
    kinds = [part for part in get_args(kind) or (kind,) if part is not NoneType]
    number = next(part for part in kinds if get_origin(part) is None)
    return None if number is bool else _one_or_two(number) if len(kinds) > 1 else one(number)


def one(kind: Callable[[str], Any], metavar: str = "") -> Spec:
    """One value."""
    name, words = KINDS[kind]
    return _read(lambda given: _value(kind, given[0], f"a {words}"), 1, metavar or name)


def several(kind: Callable[[str], Any], metavar: str = "") -> Spec:
    """Any number of values, separated by spaces, and numbers also by commas."""

    def values(given: list[str]) -> tuple[Any, ...]:
        parts = [part for text in given for part in text.split(",") if part] if kind is int else given
        return tuple(_value(kind, part, f"a {KINDS[kind][1]}") for part in parts)

    return _read(values, "*", f"{metavar or KINDS[kind][0]} ...")


def _one_or_two(kind: Callable[[str], Any]) -> Spec:
    """One number, or two to draw between."""
    metavar, words = KINDS[kind]

    def values(given: list[str]) -> Any:
        if not 1 <= len(given) <= 2:
            raise ValueError(f"{' '.join(given)!r} is not one or two {words}s")
        low, *high = (_value(kind, text, f"one or two {words}s", " ".join(given)) for text in given)
        return (low, *high) if high else low

    return _read(values, (1, 2), f"{metavar} [{metavar}]")


def _choice(known: tuple[str, ...]) -> Spec:
    def value(given: list[str]) -> str:
        if given[0] not in known:
            raise ValueError(f"{given[0]!r} is not one of {', '.join(map(repr, known))}")
        return given[0]

    return _read(value, 1, "{" + ",".join(known) + "}", known)


def _value(kind: Callable[[str], Any], text: str, words: str, said: str = "") -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{said or text!r} is not {words}") from None


def _read(
    read: Callable[[list[str]], Any], count: Any, metavar: str, choices: tuple[str, ...] | None = None
) -> Spec:
    return PrimitiveConstructorSpec(
        nargs=count,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [
            str(part) for part in (value if isinstance(value, tuple) else [value])
        ],
        choices=choices,
    )


def names(command: type) -> list[str]:
    """The options of a command, as they are typed."""
    return [*_specs(command)[0], "--help"]


def _specs(command: type) -> tuple[dict[str, Spec | None], dict[str, tuple[Spec, bool]]]:
    """How options are read, flags by None; and by metavar the other words, and whether they are required."""
    options: dict[str, Spec | None] = {}
    places: dict[str, tuple[Spec, bool]] = {}
    required = {field.name for field in fields(command) if field.default is MISSING}
    waiting = list(get_type_hints(command, include_extras=True).items())
    while waiting:
        name, kind = waiting.pop(0)
        base, *metadata = get_args(kind)
        if hasattr(base, "__total__"):  # settings
            waiting += get_type_hints(base, include_extras=True).items()
            continue
        spec = next((part for part in metadata if isinstance(part, PrimitiveConstructorSpec)), None)
        if spec is not None and tyro.conf.Positional in metadata:
            places[spec.metavar] = spec, name in required
        else:
            options["--" + name.replace("_", "-")] = spec
    return options, places


def mistake(command: type, words: list[str]) -> str:
    """What is wrong with words that the parser refused; empty if that is none of the usual mistakes."""
    options, places = _specs(command)
    rest, free = deque(words), []
    while rest:
        name, equals, value = rest.popleft().partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        spec = options.get(name)
        if spec is None:
            free += [] if name.startswith("--") else [name + equals + value]
            continue
        given = [value] if equals else []
        while rest and not rest[0].startswith("--") and not (given and spec.nargs == 1):
            given.append(rest.popleft())
        if not given and spec.nargs != "*":
            return f"Missing value for {name}"
        if wrong := _wrong(spec, given):
            return f"{name}: {wrong}"
    for (metavar, (spec, required)), word in zip_longest(places.items(), free[: len(places)]):
        if word is None and required:
            return f"{metavar} is missing"
        if word is not None and (wrong := _wrong(spec, [word])):
            return f"{metavar}: {wrong}"
    return ""


def _wrong(spec: Spec, given: list[str]) -> str:
    try:
        spec.instance_from_str(given)
    except ValueError as error:
        return str(error)
    return ""


Seconds = Annotated[float, one(float, "SECONDS")]
Names = Annotated[tuple[str, ...], several(str, "NAME")]
Folders = Annotated[tuple[Path, ...], several(Path, "DIR")]
Directory = Annotated[Path, tyro.conf.Positional, one(Path, "DIR")]
