"""Types of options, as --help shows them and mistakes are named."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from fairwind.runs.recipe import SOLVERS

Command = TypeVar("Command", bound=type)


def described(command: Command) -> Command:
    """Gives the options of a command, a dataclass, their texts as --help shows them.

    A text is the string below its field, as one line: the parser would keep its line breaks. A default is
    shown beside it, unless there is none, or it is not to have the option.
    """
    defaults = {field.name: field.default for field in fields(command)}
    tree = ast.parse(inspect.cleandoc(inspect.getsource(command))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for field, below in pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            name, text = ast.unparse(field.target), " ".join(ast.literal_eval(below.value).split())
            hint = "" if defaults[name] in (None, (), False) else None
            if defaults[name] is MISSING:
                hint = "(required)"
            shown = tyro.conf.arg(help=text, help_behavior_hint=hint)
            command.__annotations__[name] = Annotated[command.__annotations__[name], shown]
    return command


def _read(kind: Callable[[str], Any], words: str) -> Callable[[list[str]], Any]:
    """Reads an option's text, or says what it should have been."""

    def read(given: list[str]) -> Any:
        try:
            return kind(given[0])
        except ValueError:
            raise ValueError(f"{given[0]!r} is not {words}") from None

    return read


def _option(kind: Callable[[str], Any], metavar: str, words: str) -> PrimitiveConstructorSpec[Any]:
    """An option of one value."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=_read(kind, words),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def _several(
    kind: Callable[[str], Any], metavar: str, words: str, *, commas: bool = False
) -> PrimitiveConstructorSpec[Any]:
    """An option of any number of values, separated by spaces, or also by commas."""
    read = _read(kind, words)

    def texts(given: list[str]) -> list[str]:
        return [part for each in given for part in each.split(",") if part] if commas else given

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{metavar} ...",
        instance_from_str=lambda given: tuple(read([each]) for each in texts(given)),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: list(map(str, value)),
    )


def _range(kind: Callable[[str], Any], metavar: str, words: str) -> PrimitiveConstructorSpec[Any]:
    """An option of one number, or of two to draw between."""

    def read(given: list[str]) -> Any:
        try:
            first, *second = map(kind, given)
        except ValueError:
            raise ValueError(f"{' '.join(given)!r} is not {words}") from None
        return (first, *second) if second else first

    return PrimitiveConstructorSpec(
        nargs=(1, 2),
        metavar=f"{metavar} [{metavar}]",
        instance_from_str=read,
        is_instance=lambda value: True,
        str_from_instance=lambda value: list(map(str, value if isinstance(value, tuple) else [value])),
    )


def _solver(text: str) -> str:
    if text not in SOLVERS:
        raise ValueError
    return text


Whole = Annotated[int | None, _option(int, "INT", "a whole number")]
Count = Annotated[int, _option(int, "INT", "a whole number")]
Number = Annotated[float | None, _option(float, "FLOAT", "a number")]
Share = Annotated[float, _option(float, "FLOAT", "a number")]
Seconds = Annotated[float, _option(float, "SECONDS", "a number")]
Folder = Annotated[Path | None, _option(Path, "PATH", "a path")]
Names = Annotated[tuple[str, ...], _several(str, "NAME", "a name")]
Seeds = Annotated[tuple[int, ...], _several(int, "INT", "a whole number", commas=True)]
Folders = Annotated[tuple[Path, ...], _several(Path, "DIR", "a path")]
Directory = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
LocalSolver = Annotated[
    str | None, _option(_solver, "{" + ",".join(SOLVERS) + "}", f"one of {', '.join(SOLVERS)}")
]
Epochs = Annotated[float | tuple[float, float] | None, _range(float, "FLOAT", "one or two numbers")]
Steps = Annotated[int | tuple[int, int] | None, _range(int, "INT", "one or two whole numbers")]
