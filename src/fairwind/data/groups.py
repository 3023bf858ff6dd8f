"""Groups of clients, such as hospital types or device classes: a label for each client."""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fairwind.data.values import is_frame, is_mapping
from fairwind.errors import InputError, shown

Groups = Mapping[str, str] | Sequence[str]
"""A label for each client: by the clients' names, or in their order."""


def read_groups(names: Sequence[str], given: Groups | None) -> tuple[str, ...]:
    """The label of each client, in the clients' order; none where there are no groups."""
    if given is None or (isinstance(given, tuple) and not given):
        return ()
    if is_frame(given) or isinstance(given, str | set | frozenset) or not isinstance(given, Iterable):
        kind = type(given).__name__
        remedy = "series.to_dict()" if is_frame(given) else '{"client": "group"}'
        raise InputError(
            f"groups are a {kind}: give a dict by the clients' names, as {remedy}, or a list in their order"
        )
    labels = _by_name(names, given) if is_mapping(given) else list(given)
    if len(labels) != len(names):
        which = f"client {names[len(labels)]!r} has none" if len(labels) < len(names) else "too many"
        raise InputError(
            f"{len(labels)} groups for {len(names)} clients ({which}): give each client one, in their order"
        )
    for name, label in zip(names, labels, strict=True):
        check_label(name, label)
    return tuple(map(str, labels))


def check_label(client: str, label: Any) -> None:
    """Refuses invalid labels."""
    if not isinstance(label, str):
        raise InputError(
            f"client {client!r}: its group is {shown(label)}, not a string; write it as one, such as "
            + (f"'{label}'" if isinstance(label, int) else "'other'")
        )
    if not label.strip():
        raise InputError(f"client {client!r}: its group is an empty string; write a label, such as 'other'")


def group_sizes(groups: Sequence[str]) -> dict[str, int]:
    """The number of clients in each group, in the order of their labels."""
    return dict(sorted(Counter(groups).items()))


def of_column(column: str, owners: Sequence[Any], labels: Sequence[Any]) -> dict[str, str]:
    """Each client's group from a column of a table; all rows of a client must agree."""
    found: dict[str, str] = {}
    for owner, label in zip(map(str, owners), labels, strict=True):
        if owner not in found:
            check_label(owner, label)
        elif label != found[owner]:
            raise InputError(
                f"client {owner!r} is of two groups in column {column!r}, {shown(found[owner])} and "
                f"{shown(label)}: give all its rows one, or make two clients of it"
            )
        found[owner] = label
    return found


def _by_name(names: Sequence[str], given: Any) -> list[Any]:
    by_name = {str(key): given[key] for key in given.keys()}  # noqa: SIM118 (it need not be a dict)
    known = set(names)
    for name in by_name:
        if name not in known:
            near = difflib.get_close_matches(name, names[:1000], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise InputError(f"groups name a client {name!r}, which the federation does not have; {hint}")
    for name in names:
        if name not in by_name:
            raise InputError(
                f"client {name!r} has no group: add it to groups=, as 'other' if it fits into none"
            )
    return [by_name[name] for name in names]
