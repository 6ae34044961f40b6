"""`tuner data`: truncation and padding of the training data at each max length of a space."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from tuner.app.cli.options import (
    gathered,
    json_option,
    set_option,
    space_option,
    subcommand,
    together,
)
from tuner.core.errors import InputError
from tuner.program.vocabulary import settings_for
from tuner.report.terminal.render import count, echo, print_fields, print_json
from tuner.report.terminal.tables import print_rows
from tuner.space import SearchSpace, TokenLengths, configure, load_space, pin
from tuner.space.data_file import read_lengths
from tuner.space.lengths import PADDING_MODES

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of training data, as the options name it; `path` is None without one."""

    path: Path | None
    length_column: str | None

    def lengths(self) -> TokenLengths | None:
        """The token lengths of its examples; None without a file.

        Raises `InputError` for a file that cannot be read, and for a column of no file.
        """
        if self.path is None:
            if self.length_column:
                raise InputError("a column needs a file to read", hint="name it with --data")
            return None
        return read_lengths(self.path, self.length_column)


def data_options(function: _Decorated) -> _Decorated:
    """`--data` and `--length-column` as `data`."""
    return _data_options(gathered(function, "data", DataFile))


_data_options = together(
    click.option(
        "--data",
        "path",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="JSONL file of examples, instead of the space's lengths.",
    ),
    click.option("--length-column", metavar="COLUMN", help="Column with numbers of tokens."),
)


MAX_COLUMNS = 6
"""Micro-batches that a table of 80 columns has room for; --json has them all."""


@subcommand(
    "data",
    "tuner data --space qlora27b",
    "tuner data --space qlora27b --data train.jsonl --length-column n_tokens",
)
@space_option()
@data_options
@set_option
@json_option
def command(*, space: str, settings: dict[str, str], data: DataFile, as_json: bool) -> None:
    """Show what each max length of a space does to the training data.

    Shows the share of truncated examples, the padding in a batch, the average and worst length of
    batches, and the optimizer steps in an epoch. If only mean and maximum of the lengths are known,
    these are intervals.
    """
    of = load_space(space)
    of = pin(of, settings_for(of, settings))
    lengths, stated = data.lengths(), of.data.token_lengths
    if lengths is None and stated:
        lengths = dataclasses.replace(stated, examples=of.data.examples)
    if lengths is None:
        raise InputError(
            f"search space {of.name!r} has no token lengths",
            hint="give a JSONL file with --data, or add data.token_lengths to the space",
        )
    report = _report(of, lengths)
    if as_json:
        print_json({**report, "data": data.path})
    else:
        _print(report, lengths, str(data.path or f"as search space {of.name} states"))


def _values(space: SearchSpace, name: str) -> list[int]:
    """The values of a knob, rising, or the one value of what is no knob."""
    if name in space.choices:
        return sorted(int(str(value)) for value in space.choices[name])
    return [_value(space, name)]


def _value(space: SearchSpace, name: str) -> int:
    """The value that is held fixed, or that the configuration has in which nothing is set."""
    if name not in space.terms:
        raise InputError(f"configurations of search space {space.name!r} have no {name}")
    source = space.fixed if name in space.fixed else configure(space)
    return int(str(source[name]))


def _report(space: SearchSpace, lengths: TokenLengths) -> dict[str, Any]:
    """Everything as JSON types: one entry for each max length."""
    micro_batches = _values(space, "micro_batch")
    effective_batch = _value(space, "effective_batch")
    rows = []
    for max_length in _values(space, "max_length"):
        cut = lengths.truncation(max_length)
        modes = {m: _padding(lengths, micro_batches, max_length, m) for m in PADDING_MODES}
        steps = {m: lengths.steps_per_epoch(effective_batch, max_length, m) for m in PADDING_MODES}
        rows.append(
            {
                "max_length": max_length,
                "truncated_examples_share": cut.share_examples.to_dict(),
                "lost_tokens_share": cut.share_tokens.to_dict(),
                "steps_per_epoch": steps,
                "padding": modes,
            }
        )
    return {
        "space": space.name,
        "examples": lengths.examples,
        "tokens": lengths.tokens,
        "mean_tokens": lengths.mean,
        "max_tokens": lengths.max,
        "distribution_known": lengths.known,
        "effective_batch": effective_batch,
        "padding": space.data.padding,
        "max_lengths": rows,
    }


def _padding(
    lengths: TokenLengths, micro_batches: list[int], max_length: int, mode: str
) -> list[dict[str, Any]]:
    found = [(size, lengths.batch(size, max_length, mode)) for size in micro_batches]
    return [
        {
            "micro_batch": size,
            "expected_length": shape.expected_length.to_dict(),
            "worst_length": shape.worst_length,
            "padding_share": shape.padding_share.to_dict(),
            "tokens_per_sample": shape.tokens_per_sample.to_dict(),
            "samples_per_sequence": shape.samples_per_sequence.to_dict(),
        }
        for size, shape in found
    ]


def _print(report: dict[str, Any], lengths: TokenLengths, source: str) -> None:
    known = "" if lengths.known else "; nothing else is known, so intervals are shown"
    tokens = f", {count(lengths.tokens)} tokens" if lengths.tokens is not None else ""
    print_fields(
        [
            ("data", source),
            ("examples", f"{count(lengths.examples)}{tokens}"),
            ("tokens an example", f"mean {lengths.mean:.4g}, longest {count(lengths.max)}{known}"),
            ("effective batch", count(report["effective_batch"])),
        ]
    )
    rows = report["max_lengths"]
    _print_truncation(rows)
    sizes = [entry["micro_batch"] for entry in rows[0]["padding"]["longest"]]
    chosen = list(range(len(sizes)))
    if len(sizes) > MAX_COLUMNS:  # evenly spread, both ends included
        chosen = [round(i * (len(sizes) - 1) / (MAX_COLUMNS - 1)) for i in range(MAX_COLUMNS)]
    _print_by_batch(rows, [sizes[i] for i in chosen], chosen)
    if len(chosen) < len(sizes):
        echo(f"\n{len(sizes) - len(chosen)} more micro-batches: see --json, or --set one")


def _print_truncation(rows: list[dict[str, Any]]) -> None:
    columns = (
        "max_length",
        "truncated",
        "tokens lost",
        "steps/epoch",
        "packed steps",
        "examples/row",
    )
    echo("\ntruncation, optimizer steps an epoch (packed: rows of max_length, nothing cut)")
    print_rows(
        columns,
        [
            (
                str(row["max_length"]),
                _percent(row["truncated_examples_share"]),
                _percent(row["lost_tokens_share"]),
                count(row["steps_per_epoch"]["longest"]),
                count(row["steps_per_epoch"]["packing"]),
                _number(row["padding"]["packing"][0]["samples_per_sequence"], "{:.2f}"),
            )
            for row in rows
        ],
        right=columns,
    )


def _print_by_batch(rows: list[dict[str, Any]], sizes: list[int], chosen: list[int]) -> None:
    def cells(row: dict[str, Any], mode: str, key: str) -> list[dict[str, float | None]]:
        return [row["padding"][mode][i][key] for i in chosen]

    batches = [f"batch {size}" for size in sizes]
    columns = ("max_length", *batches, "worst")
    echo("\nlength of a micro-batch that is padded to its longest example")
    print_rows(
        columns,
        [
            (
                str(row["max_length"]),
                *(_number(c, "{:.0f}") for c in cells(row, "longest", "expected_length")),
                str(row["padding"]["longest"][0]["worst_length"]),
            )
            for row in rows
        ],
        right=columns,
    )
    columns = ("max_length", *batches, "to max_length")
    echo("\nshare of padding, padded to the longest example and to max_length (packed: none)")
    print_rows(
        columns,
        [
            (
                str(row["max_length"]),
                *(_percent(c) for c in cells(row, "longest", "padding_share")),
                _percent(row["padding"]["max_length"][0]["padding_share"]),
            )
            for row in rows
        ],
        right=columns,
    )


def _percent(bounds: dict[str, float | None]) -> str:
    form = "{:.1f}" if bounds["value"] is not None else "{:.0f}"  # an interval is coarse anyway
    return _number({k: v if v is None else 100 * v for k, v in bounds.items()}, form) + " %"


def _number(bounds: dict[str, float | None], form: str) -> str:
    """The number, or its interval as "low-high" where only that is known."""
    low, high = form.format(bounds["low"]), form.format(bounds["high"])
    return low if low == high else f"{low}-{high}"
