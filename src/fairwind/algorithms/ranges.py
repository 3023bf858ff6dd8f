"""Where it is worth searching for an algorithm's parameters: said in its signature, read by `fw.tune`."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_type_hints


class Range(NamedTuple):
    """From `low` to `high`; with `log`, by orders of magnitude."""

    low: float
    high: float
    log: bool = True


ServerRate = Annotated[float, Range(0.1, 30.0)]  # multiplies a mean of updates: 1 is the plain mean
AdaptiveRate = Annotated[float, Range(3e-4, 0.3)]  # about how far each weight moves in a round
Size = Annotated[float, Range(0.0, 1.0, log=False)]  # the size exponent


def ranges(builder: Callable[..., Any]) -> dict[str, Range]:
    """Of the parameters that have one."""
    hints = get_type_hints(builder, include_extras=True)
    return {
        name: extra
        for name, hint in hints.items()
        for extra in getattr(hint, "__metadata__", ())
        if isinstance(extra, Range)
    }
