"""The one error a user's input can raise."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave cannot be used; the message names it and the remedy, in one line."""


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """An error for a name that is not among the known ones, with the nearest of them."""
    known = list(known)
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(f"unknown {kind} {name!r}: {hint}known: {', '.join(known)}")


def first_line(error: BaseException) -> str:
    """An error's message as one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
    if not isinstance(value, int | float):
        raise InputError(f"{name}={value!r} is not a number")
