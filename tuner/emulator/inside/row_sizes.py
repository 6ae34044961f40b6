"""The sizes of the rows behind a data loader, by field, and of batches that are made of them."""

from __future__ import annotations

import contextlib
import importlib
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_ROWS = 50_000
"""Rows that are read one by one."""

MOST_ELEMENTS = 1_000_000_000
"""Elements that are read one by one: rows of this many together, as of thousands of images."""

_MOST_NUMBERS = 1 << 15
"""Bytes of a field of integers, up to which they are summed up."""

_MOST_FIELDS = 100
"""Fields or items of a row in which names of files are looked for."""

ROW_ELEMENTS = 1_000_000
"""A row counts as at most this many elements, so that a very large one doesn't end the reading."""

MOST_COLLATED = 1_000
"""Batches that are made to see their sizes, where the rows don't tell them; more if small."""

_NO_LENGTHS = ("attention_mask", "input_ids", "labels", "position_ids", "token_type_ids")
"""Fields whose numbers are no lengths."""

_FILE = re.compile(r"\S+\.[A-Za-z]\w{1,4}")
"""A text that names a file, of which the collate function may make something large."""

ALL = ""
"""The field of all that a row has; with input ids, these."""

Sizes = Mapping[int, int]


class RowSizes:
    """The sizes of rows by field and row, as far as they are known, of `rows`.

    The `unit` of a row is tokens, characters or elements. Rows that are only numbers and texts,
    such as ids and paths, don't tell (`tells`) the size of what is made of them. `numbers` are the
    sums of fields of integers, which may be lengths.
    """

    def __init__(
        self,
        by_field: Mapping[str, Sizes],
        rows: int,
        unit: str,
        *,
        tells: bool = True,
        numbers: Mapping[str, Sizes] | None = None,
    ) -> None:
        self.by_row = by_field.get(ALL, {})
        self.fields = [self.by_row, *_others(by_field)] if by_field else []
        self.numbers = [one for one in (numbers or {}).values() if len(set(one.values())) > 1]
        self.rows, self.unit, self.tells = rows, unit, tells


def _others(by_field: Mapping[str, Sizes]) -> Iterator[Sizes]:
    """The fields in which the rows differ in another way than in all."""
    seen = [by_field[ALL]]
    for one in by_field.values():
        if one not in seen and len(set(one.values())) > 1:
            seen.append(one)
            yield one


def row_sizes(dataset: Any) -> RowSizes:
    """The sizes of the rows: of the columns of a table at once, of other rows by reading them.

    What follows from the program's random numbers stays as it would be.
    """
    rows = rows_of(dataset)
    if rows == 0:
        return RowSizes({}, 0, "elements")
    of_table = table_sizes(dataset)
    if of_table is not None:
        return of_table
    with same_random_numbers():
        first = dataset[0]
        by_field: dict[str, dict[int, int]] = {}
        numbers: dict[str, dict[int, int]] = {}
        elements = 0
        for number in range(min(rows, MOST_ROWS)):
            row = dataset[number]
            sizes = sizes_of(row)
            for field, size in sizes.items():
                by_field.setdefault(field, {})[number] = size
            for field, total in _totals(row):
                numbers.setdefault(field, {})[number] = total
            elements += min(sizes[ALL], ROW_ELEMENTS)
            if elements > MOST_ELEMENTS:
                break
    unit = "tokens" if hasattr(first, "keys") and "input_ids" in first else "elements"
    tells = _has_data(first) and not _names_file(first)
    return RowSizes(by_field, rows, unit, tells=tells, numbers=numbers)


def collated_sizes(
    loader: Any, batches: Sequence[Sequence[int]], sizes: Sequence[int]
) -> dict[str, dict[int, int]]:
    """The sizes of batches by field and number, as the collate function makes them.

    Of many batches those with the largest rows by `sizes` are made. A function that fails here
    fails for the program, too.
    """
    order = sorted(range(len(batches)), key=lambda number: -sizes[number])
    found: dict[str, dict[int, int]] = {}
    rows = elements = 0
    with same_random_numbers(), contextlib.suppress(Exception):
        for made, number in enumerate(order):
            if made >= MOST_COLLATED and (rows > MOST_ROWS or elements > MOST_ELEMENTS):
                break
            batch = loader.collate_fn([loader.dataset[index] for index in batches[number]])
            for field, size in sizes_of(batch).items():
                found.setdefault(field, {})[number] = size
            rows += len(batches[number])
            elements += min(found[ALL][number], ROW_ELEMENTS * len(batches[number]))
    return found


def sizes_of(row: Any) -> dict[str, int]:
    """The number of elements of each field of a row or a batch, and of all (`ALL`)."""
    if hasattr(row, "keys"):
        found = {str(name): _size(row[name]) for name in row}
    elif _is_row(row):
        found = {str(number): _size(one) for number, one in enumerate(row)}
    else:
        found = {}
    every = found.get("input_ids", sum(found.values())) if found else _size(row)
    return {**found, ALL: every}


def _totals(row: Any) -> Iterator[tuple[str, int]]:
    """The integers of each field of a row, summed up."""
    named = hasattr(row, "keys")
    fields = (
        [(name, row[name]) for name in row] if named else enumerate(row if _is_row(row) else ())
    )
    for name, value in fields:
        if name in _NO_LENGTHS or isinstance(value, bool):
            continue
        if isinstance(value, int):
            yield str(name), value
        elif isinstance(value, list) and _is_numbers(value):
            yield str(name), int(sum(value))
        elif 0 < getattr(value, "nbytes", 0) <= _MOST_NUMBERS and str(value.dtype).endswith(
            ("int32", "int64")
        ):
            yield str(name), int(value.sum())


def _is_row(row: Any) -> bool:
    return isinstance(row, list | tuple) and not _is_numbers(row)


def _names_file(row: Any) -> bool:
    """True if a field of a row is a file's name, or a list of them."""
    if isinstance(row, str):
        return _FILE.fullmatch(row) is not None
    if hasattr(row, "keys"):
        row = [row[name] for name in row]
    return isinstance(row, list | tuple) and any(map(_names_file, row[:_MOST_FIELDS]))


def rows_of(dataset: Any) -> int:
    """The number of rows; 0 if it is not known."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return 0


def table_sizes(dataset: Any) -> RowSizes | None:
    """The sizes of the rows of a `datasets.Dataset`, from its Arrow table; None for others."""
    table, indices = getattr(dataset, "data", None), getattr(dataset, "_indices", None)
    if table is None or not hasattr(table, "column_names"):
        return None
    if getattr(dataset, "_format_type", None) == "custom":  # rows are made when they are read
        return None
    arrow, compute = map(importlib.import_module, ("pyarrow", "pyarrow.compute"))
    kinds = {name: table.schema.field(name).type for name in table.column_names}
    shown = [name for name in kinds if name in (dataset.column_names or ())]
    lists = [name for name in shown if _is_list(arrow, kinds[name])]
    texts = [name for name in shown if arrow.types.is_string(kinds[name])]
    if not lists and not texts:
        return None
    main = [name for name in lists if name.endswith("input_ids")] or lists or texts
    by_field: dict[str, Any] = {}
    for name in lists or texts:
        column = table.column(name)
        sizes = _elements(arrow, column) if lists else _filled(compute.utf8_length(column))
        by_field[name] = sizes if indices is None else sizes[indices.column(0).to_numpy()]
    by_field[ALL] = sum(by_field[name] for name in main)
    found = {name: dict(enumerate(sizes.tolist())) for name, sizes in by_field.items()}
    numbers = {}
    for name in shown:
        if arrow.types.is_integer(kinds[name]) and name not in _NO_LENGTHS:
            values = _filled(table.column(name))
            values = values if indices is None else values[indices.column(0).to_numpy()]
            numbers[name] = dict(enumerate(values.tolist()))
    first = {name: table.column(name)[0].as_py() for name in shown} if len(dataset) else {}
    tells = bool(lists) and not _names_file(first)
    unit = "tokens" if lists else "characters"
    return RowSizes(found, len(dataset), unit, tells=tells, numbers=numbers)


def _elements(arrow: Any, column: Any) -> Any:
    """The number of elements of each row of a column of lists, also of lists in them."""
    lengths = _filled(sys.modules["pyarrow.compute"].list_value_length(column))
    if not _is_list(arrow, column.type.value_type):
        return lengths
    import numpy as np

    inner = sys.modules["pyarrow.compute"].list_flatten(column)
    before = np.concatenate([[0], _elements(arrow, inner).cumsum()])
    ends = lengths.cumsum()
    return before[ends] - before[ends - lengths]


def _filled(lengths: Any) -> Any:
    """Lengths without a value, as of missing rows, are 0."""
    return sys.modules["pyarrow.compute"].fill_null(lengths, 0).to_numpy()


def _is_list(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_list(kind) or arrow.types.is_large_list(kind))


def _is_numbers(values: Any) -> bool:
    return bool(values) and isinstance(values[0], int | float)


def _has_data(row: Any) -> bool:
    """True if a row has more than single numbers and texts, which may be ids and paths."""
    if hasattr(row, "keys"):
        return any(_has_data(row[name]) for name in row)
    if isinstance(row, tuple | list):
        return (isinstance(row, list) and _is_numbers(row)) or any(map(_has_data, row))
    return not isinstance(row, int | float | str | bytes | None)


def _size(row: Any) -> int:
    """The number of elements of a value."""
    if hasattr(row, "keys"):
        return sum(_size(row[name]) for name in row)
    if hasattr(row, "numel"):
        return int(row.numel())
    if isinstance(row, str | bytes):
        return len(row)
    if isinstance(row, list | tuple):
        return len(row) if _is_numbers(row) else sum(map(_size, row))
    size = getattr(row, "size", 1)
    if isinstance(size, tuple):  # an image
        width, height = size[:2]
        return int(width) * int(height)
    return int(size) if isinstance(size, int) else 1


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """A context whose end restores the random numbers of its beginning."""
    import torch

    numpy = sys.modules.get("numpy")
    states = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy and states[2]:
            numpy.random.set_state(states[2])
