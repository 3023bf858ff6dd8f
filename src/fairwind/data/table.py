"""Tables with a column that names the client: pandas data frames and Hugging Face datasets."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fairwind.data.given import PARTS, Part
from fairwind.data.groups import of_column
from fairwind.data.samples import refuse_rounded
from fairwind.data.values import ColumnNames, ColumnOrder, as_values, is_mapping
from fairwind.errors import InputError

Columns = str | Sequence[str]


class Rows(NamedTuple):
    """The rows of one client, or of one of its parts."""

    client: str
    of: str  # one of PARTS, or ""
    rows: np.ndarray[Any, np.dtype[np.int64]]


def read_frame(
    frame: Any, client: str, target: str, inputs: Columns | None, split: str | None, group: str | None
) -> tuple[tuple[str, ...], list[Part], dict[str, str] | None, ColumnNames]:
    """Names, parts and groups of a data frame's clients, in the order of their names; and its columns."""
    if not hasattr(frame, "iloc") or not hasattr(frame, "columns"):
        remedy = "give frame.to_pandas()" if hasattr(frame, "to_pandas") else "give a pandas DataFrame"
        raise InputError(f"{type(frame).__name__} is not a data frame: {remedy}")
    known = list(frame.columns)
    if inputs is None:
        chosen = [name for name in known if name not in (client, target, split, group)]
    else:
        chosen = [inputs] if isinstance(inputs, str) else list(inputs)
    said = [column for column in (split, group) if column is not None]
    _check_columns("frame", known, [client, target, *chosen, *said])
    if not chosen:
        raise InputError(f"the frame has no columns for inputs; it has {', '.join(map(str, known))}")
    for column in (client, *said):
        if frame[column].isna().any():
            row = frame.index[int(np.argmax(frame[column].isna().to_numpy()))]
            raise InputError(f"column {column!r} has no value in row {row}; fill it or drop the row")
    owners = frame[client].tolist()
    names, dealt = _deal(owners, frame[split].tolist() if split is not None else None, split)
    for column in (*chosen, target):
        _check_numbers(frame, column, owners, inputs is None and column != target, column == target)
    x = frame[chosen].to_numpy(dtype=np.float32)
    y = frame[target].to_numpy()
    if y.dtype.kind not in "biuf":  # of pandas' own types, with room for missing values
        y = y.astype(np.int64 if frame[target].dtype.kind in "biu" else np.float64)
    y = y.astype(np.float32) if y.dtype.kind == "f" else y
    found = ColumnOrder()
    parts = [
        Part(
            g.client,
            g.of,
            *(as_values(each[g.rows], what, found) for what, each in (("inputs", x), ("targets", y))),
        )
        for g in dealt
    ]
    groups = of_column(group, owners, frame[group].tolist()) if group is not None else None
    return names, parts, groups, {"inputs": tuple(map(str, chosen)), "targets": (str(target),)}


def read_dataset(
    dataset: Any, client: str, inputs: Columns, targets: Columns, split: str | None, group: str | None
) -> tuple[tuple[str, ...], list[Part], dict[str, str] | None, tuple[str, ...]]:
    """Names, parts and groups of the clients of a Hugging Face dataset; class names, if known."""
    tables = {"": dataset}
    if is_mapping(dataset):
        if not {"train", "test"} <= set(dataset) <= set(PARTS):
            raise InputError(
                f"the dataset has the splits {', '.join(map(str, dataset)) or 'none'}: "
                'give one of them, or {"train": …, "test": …}, perhaps with a "validation"'
            )
        if split is not None:
            raise InputError(f"the dataset is split into train and test already: leave split={split!r} out")
        tables = {of: dataset[of] for of in PARTS if of in dataset}
    owners: list[Any] = []
    parts_of: list[Any] = []
    labels: list[Any] = []
    columns: list[dict[str, Any]] = []
    chosen = [name for given in (inputs, targets) for name in ([given] if isinstance(given, str) else given)]
    for of, table in tables.items():
        if not hasattr(table, "column_names") or not hasattr(table, "__len__"):
            remedy = (
                "load it without streaming" if hasattr(table, "column_names") else "give a datasets.Dataset"
            )
            raise InputError(f"{type(table).__name__} cannot be dealt to clients: {remedy}")
        said = [column for column in (client, split, group) if column is not None]
        _check_columns("dataset", table.column_names, [*said, *chosen])
        _refuse_format(table)
        _refuse_other_classes(of, table, tables, [*said, *chosen])
        plain = table.select_columns(said).with_format(None)[:]
        owners += plain[client]
        parts_of += [of] * len(table) if split is None else plain[split]
        labels += [] if group is None else plain[group]
        columns.append(_arrays(table, chosen))
    if None in owners:
        raise InputError(f"column {client!r} has no value in row {owners.index(None)}; filter such rows out")
    names, dealt = _deal(owners, parts_of if split is not None or len(tables) > 1 else None, split)
    rows = {name: _rows(name, [each[name] for each in columns], owners) for name in chosen}

    def values(part: Rows, given: Columns, what: str) -> Any:
        what = f"client {part.client!r}: {what}"
        if isinstance(given, str):
            return as_values(rows[given][part.rows], what, ColumnOrder())
        return as_values({name: rows[name][part.rows] for name in given}, what, ColumnOrder())

    parts = [Part(g.client, g.of, values(g, inputs, "inputs"), values(g, targets, "targets")) for g in dealt]
    classes = (
        _class_names(next(iter(tables.values())).features.get(targets)) if isinstance(targets, str) else []
    )
    groups = of_column(group, owners, labels) if group is not None else None
    return names, parts, groups, tuple(classes)


def read_partitions(
    partitioner: Any, inputs: str, targets: str
) -> tuple[list[str], list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]]:
    """Names and samples of the clients of a partitioner of flwr-datasets."""
    try:
        count = partitioner.num_partitions
        parts = [partitioner.load_partition(k) for k in range(count)]
    except AttributeError as error:
        raise InputError(
            f"{type(partitioner).__name__} cannot be partitioned: {error}; "
            "give a flwr-datasets partitioner and set its dataset first"
        ) from None
    known = getattr(partitioner, "partition_id_to_natural_id", {})
    names = [str(known.get(k, k)) for k in range(count)]
    clients = []
    for label, part in zip(names, parts, strict=True):
        _check_columns("dataset", part.column_names, [inputs, targets])
        _refuse_format(part)
        rows = _arrays(part, [inputs, targets])
        for column in (inputs, targets):
            if rows[column].dtype.kind not in "biuf":
                raise InputError(
                    f"client {label!r}: column {column!r} does not hold numbers or images of one shape; "
                    "map it to such first"
                )
        clients.append((rows[inputs], rows[targets]))
    return names, clients


def _arrays(table: Any, columns: list[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Columns of a Hugging Face dataset as arrays: integers as int64, other numbers as float32."""
    found: dict[str, np.ndarray[Any, Any]] = table.select_columns(columns).with_format("numpy")[:]
    for name in columns:
        if "float64" in repr(table.features[name]):  # the format has rounded it already
            exact = table.select_columns([name]).with_format("numpy", dtype=np.float64)[:][name]
            if exact.dtype.kind == "O":
                filled = [np.atleast_1d(each) for each in exact if np.size(each)]
                exact = np.concatenate(filled or [np.empty(0)])
            refuse_rounded(torch.tensor(exact), torch.float32, f"the numbers of column {name!r}")
        elif "uint64" in repr(table.features[name]):  # the format makes large ones negative
            found[name] = table.select_columns([name]).with_format("numpy", dtype=np.uint64)[:][name]
    return found


def _refuse_format(table: Any) -> None:
    """Refuses a dataset with a transform, or options of a format, which would not be applied."""
    given = getattr(table, "format", None) or {}
    if given.get("type") == "custom" or given.get("format_kwargs"):
        what = "a transform" if given.get("type") == "custom" else f"a format with {given['format_kwargs']}"
        raise InputError(
            f"the dataset has {what}, which is not applied here: apply it with dataset.map(…), "
            "or drop it with dataset.with_format(None)"
        )


def _refuse_other_classes(of: str, table: Any, tables: dict[str, Any], columns: list[str]) -> None:
    """Refuses parts in which the same numbers mean other classes."""
    first = next(iter(tables))
    for column in columns:
        mine, theirs = (_class_names(each.features.get(column)) for each in (table, tables[first]))
        if mine != theirs:
            raise InputError(
                f"the classes of column {column!r} are {', '.join(mine) or 'not named'} in {of!r}, and "
                f"{', '.join(theirs) or 'not named'} in {first!r}: give both the same, in one order, with "
                "dataset.align_labels_with_mapping"
            )


def _class_names(feature: Any) -> list[str]:
    """The names of the classes of a column, which may hold lists of labels."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return list(getattr(feature, "names", None) or ())


def _check_columns(kind: str, known: Sequence[Any], wanted: Sequence[str]) -> None:
    for column in wanted:
        if column not in known:
            raise InputError(f"the {kind} has no column {column!r}; it has {', '.join(map(str, known))}")
        if list(known).count(column) > 1:
            raise InputError(f"the {kind} has two columns {column!r}; rename one")
    for column in wanted:
        if list(wanted).count(column) > 1:
            raise InputError(
                f"column {column!r} is named twice: client, targets, inputs, split and group differ"
            )


def _check_numbers(frame: Any, column: str, owners: list[Any], by_default: bool, is_target: bool) -> None:
    """Refuses a column that is not all numbers, and names the client of the first such row."""
    values = frame[column]
    if values.dtype.kind not in "biuf":
        shown = f"{values.iloc[0]!r} for client {str(owners[0])!r}" if len(values) else str(values.dtype)
        remedy = f"leave it out with inputs=[…], or map it to numbers: pandas.factorize(frame[{column!r}])[0]"
        raise InputError(
            f"column {column!r} does not hold numbers, but {shown}: "
            + (remedy if by_default else remedy.partition(", or ")[2])
        )
    missing = values.isna().to_numpy()
    with np.errstate(over="ignore"):
        bad = missing | ~np.isfinite(values.fillna(0).to_numpy(dtype=np.float32))
    if bad.any():
        i = int(bad.argmax())
        held = "no value" if missing[i] else "no finite number"
        raise InputError(
            f"column {column!r} has {held} in row {frame.index[i]}, of client {str(owners[i])!r}; "
            "fill it or drop the row"
        )
    if not (is_target and values.dtype.kind in "biu"):  # else they are labels, and stay integers
        own = {"i": np.int64, "u": np.uint64}.get(values.dtype.kind, np.float64)
        exact = as_values(values.to_numpy(dtype=own, copy=True), f"column {column!r}", ColumnOrder())
        assert isinstance(exact, torch.Tensor)
        refuse_rounded(
            exact,
            torch.float32,
            f"the numbers of column {column!r}",
            lambda i: f"client {str(owners[i])!r}: ",
        )


def _deal(
    owners: list[Any], parts: list[Any] | None, split: str | None
) -> tuple[tuple[str, ...], list[Rows]]:
    """Each client's rows, in their order; the clients in the order of their names."""
    if not owners:
        raise InputError("a federation needs at least one client: there are no rows")
    for row, part in enumerate(parts or ()):
        if part not in PARTS:
            raise InputError(
                f"column {split!r} holds {part!r} for client {str(owners[row])!r}; write "
                "train, validation or test"
            )
    known = _sorted(set(owners))
    place = {owner: k for k, owner in enumerate(known)}
    keys = np.array([len(PARTS) * place[owner] for owner in owners], dtype=np.int64)
    if parts is not None:
        keys += np.array([PARTS.index(part) for part in parts], dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    found, starts = np.unique(keys[order], return_index=True)
    dealt = [
        Rows(str(known[key // len(PARTS)]), PARTS[key % len(PARTS)] if parts is not None else "", rows)
        for key, rows in zip(found.tolist(), np.split(order, starts[1:]), strict=True)
    ]
    return tuple(str(owner) for owner in known), dealt


def _sorted(values: Iterable[Any]) -> list[Any]:
    values = list(values)
    try:
        return sorted(values)
    except TypeError:  # numbers and strings
        return sorted(values, key=str)


def _rows(column: str, tables: list[Any], owners: list[Any]) -> np.ndarray[Any, Any]:
    """A column's values, one for each row: an array of numbers, or of arrays that differ in shape."""
    for i, value in enumerate(v for table in tables for v in (table if table.dtype.kind in "OUS" else ())):
        if isinstance(value, str | dict):
            raise InputError(
                f"client {str(owners[i])!r}: column {column!r} holds {str(value)!r}, not numbers: "
                f"map labels by dataset.class_encode_column({column!r}), texts by a tokenizer"
            )
    if len({(table.dtype.kind == "O", table.shape[1:]) for table in tables}) == 1:
        return np.concatenate(tables)
    result = np.empty(sum(map(len, tables)), dtype=object)
    result[:] = [value for table in tables for value in table]
    return result
