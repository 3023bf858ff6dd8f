"""Types of options, as --help shows them and mistakes are named."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from fairwind.recipe import SOLVERS


def _read(kind: Callable[[str], Any], words: str) -> Callable[[list[str]], Any]:
    """Reads an option's text, or says what it should have been."""

    def read(given: list[str]) -> Any:
        try:
            return kind(given[0])
        except ValueError:
            raise ValueError(f"{given[0]!r} is not {words}") from None

    return read


def _option(kind: Callable[[str], Any], metavar: str, words: str) -> PrimitiveConstructorSpec[Any]:
    """An option that may be left out; its text says what happens then."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=_read(kind, words),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def _epochs(given: list[str]) -> int | tuple[int, int]:
    try:
        first, *second = map(int, given)
    except ValueError:
        raise ValueError(f"{' '.join(given)!r} is not one or two whole numbers") from None
    return (first, *second) if second else first  # type: ignore[return-value]


def _solver(text: str) -> str:
    if text not in SOLVERS:
        raise ValueError
    return text


SILENT = tyro.conf.arg(help_behavior_hint="")  # no default beside the text

Whole = Annotated[int | None, _option(int, "INT", "a whole number"), SILENT]
Number = Annotated[float | None, _option(float, "FLOAT", "a number"), SILENT]
Folder = Annotated[Path | None, _option(Path, "PATH", "a path"), SILENT]
LocalSolver = Annotated[
    str | None, _option(_solver, "{" + ",".join(SOLVERS) + "}", f"one of {', '.join(SOLVERS)}"), SILENT
]
Epochs = Annotated[
    int | tuple[int, int] | None,
    PrimitiveConstructorSpec(
        nargs=(1, 2),
        metavar="INT [INT]",
        instance_from_str=_epochs,
        is_instance=lambda value: True,
        str_from_instance=lambda value: list(map(str, value if isinstance(value, tuple) else [value])),
    ),
    SILENT,
]
