"""Times as users give them: seconds, or a text such as 10m."""

import math
import re
from typing import Any

from fairwind.errors import InputError, python_numbers, shown

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Duration = float | str  # seconds, or "90s", "10m", "1h30m"


def seconds_of(given: Any, name: str) -> float:
    """A time in seconds; `name` is what it is called where it is given."""
    value = python_numbers(given)
    found = value
    if isinstance(value, str):
        parts = re.findall(r"([0-9.]+)\s*([smhd]?)", value)
        whole = re.fullmatch(r"(\s*[0-9]+(\.[0-9]+)?\s*[smhd])+\s*|\s*[0-9]+(\.[0-9]+)?\s*", value)
        found = sum(float(number) * UNITS[unit or "s"] for number, unit in parts) if whole else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise InputError(
            f"{name}={shown(given)} is not a time: give seconds, or a text such as '10m' or '1h30m'"
        )
    return float(found)
