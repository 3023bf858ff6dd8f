"""The one error a user's input can raise, and the warning of a slow path."""

import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from fairwind.runs.hints import near

# Line breaks, escape sequences, direction marks, surrogates, noncharacters.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


class InputError(ValueError):
    """An invalid input; the message names it and the remedy, in one line."""

    def __init__(self, message: str):
        super().__init__(printable(message, 1200, 600))


class SlowPathWarning(UserWarning):
    """Something fell back to a slower path, with the same results."""


@contextmanager
def damaged(what: Callable[[], str], remedy: str) -> Iterator[None]:
    """Turns any error of reading a damaged file into a one-line InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # parsers raise many undocumented errors on bad bytes
        raise InputError(f"{what()} ({first_line(error)}); {remedy}") from None


NEEDED = ("rich", "tyro", "altair", "vl_convert")  # by the command line and the report


def needs_extra(what: str, missing: ImportError | str, extra: str) -> InputError:
    """What to say where a package of an extra is missing."""
    name = missing if isinstance(missing, str) else missing.name
    return InputError(f"{what} needs {name}: install it with pip install 'fairwind[{extra}]'")


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """An error for a name that is not among the known ones, with the one that may be meant."""
    known = list(known)
    meant = near(name, known)
    hint = f"did you mean {meant!r}? " if meant else ""
    return InputError(f"unknown {kind} {name!r}: {hint}known: {', '.join(known)}")


def first_line(error: BaseException) -> str:
    """An error's message as one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def printable(text: str, start: int = 60, end: int = 30) -> str:
    """Text that a terminal and a page can show in one line; long text is cut in the middle."""
    if len(text) > start + end:
        text = f"{text[:start]} … {text[-end:]}"
    return UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)


def shown(value: object) -> str:
    """An unexpected value, shortened to a few words."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to print numbers with thousands of digits
        return "a number of thousands of digits"


def python_numbers(value: Any) -> Any:
    """Numbers of NumPy and PyTorch as Python's own, several of them as a tuple; all else as it is."""
    if hasattr(value, "ndim") and hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(python_numbers, value)) if isinstance(value, list | tuple) else value


def store_python_numbers(record: Any) -> None:
    """Converts the numbers in the fields of a frozen dataclass, in place; an int where floats go, too."""
    for field in fields(record):
        value = python_numbers(getattr(record, field.name))
        if type(value) is int and abs(value) < 2**53 and field.type in (float, float | None):
            value = float(value)
        object.__setattr__(record, field.name, value)


def positive(**values: float) -> None:
    """Refuses a value that is not a positive, finite number."""
    for name, value in values.items():
        _number(name, value)
        if not 0 < value < float("inf"):
            raise InputError(f"{name}={value} is out of range: it must be a positive number")


def in_range(low: float, high: float, **values: float) -> None:
    """Refuses a value outside [low, high)."""
    for name, value in values.items():
        _number(name, value)
        if not low <= value < high:
            below = f" < {high}" if high < float("inf") else ""
            raise InputError(f"{name}={value} is out of range: {low} ≤ {name}{below}")


def whole(low: int, **values: int) -> None:
    """Refuses a value that is not a whole number, or below `low`."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"{name}={value!r} is not a whole number")
        in_range(low, float("inf"), **{name: value})


def _number(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"{name}={value!r} is not a number")
