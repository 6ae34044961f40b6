"""`tuner data`: truncation and padding of the training data at each max length of a space."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from tuner.app.cli import subcommand
from tuner.app.cli.options import gathered, json_option, set_option, space_option, together
from tuner.core.errors import InputError
from tuner.program.vocabulary import settings_for
from tuner.report.terminal.render import count, echo, print_fields, print_json
from tuner.report.terminal.tables import print_rows
from tuner.space import SearchSpace, TokenLengths, configure, load_space, pin
from tuner.space.data import read_lengths
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
    _print_table(
        "truncation, optimizer steps an epoch (packed: rows of max_length, nothing cut)",
        rows,
        {
            "truncated": lambda row: _percent(row["truncated_examples_share"]),
            "tokens lost": lambda row: _percent(row["lost_tokens_share"]),
            "steps/epoch": lambda row: count(row["steps_per_epoch"]["longest"]),
            "packed steps": lambda row: count(row["steps_per_epoch"]["packing"]),
            "examples/row": lambda row: _number(
                row["padding"]["packing"][0]["samples_per_sequence"], "{:.2f}"
            ),
        },
    )
    sizes = [entry["micro_batch"] for entry in rows[0]["padding"]["longest"]]
    chosen = list(range(len(sizes)))
    if len(sizes) > MAX_COLUMNS:  # evenly spread, both ends included
        chosen = [round(i * (len(sizes) - 1) / (MAX_COLUMNS - 1)) for i in range(MAX_COLUMNS)]

    def of_batches(shown: Callable[[dict[str, Any]], str]) -> dict[str, Callable[..., str]]:
        return {
            f"batch {sizes[i]}": lambda row, i=i: shown(row["padding"]["longest"][i])
            for i in chosen
        }

    _print_table(
        "length of a micro-batch that is padded to its longest example",
        rows,
        {
            **of_batches(lambda batch: _number(batch["expected_length"], "{:.0f}")),
            "worst": lambda row: str(row["padding"]["longest"][0]["worst_length"]),
        },
    )
    _print_table(
        "share of padding, padded to the longest example and to max_length (packed: none)",
        rows,
        {
            **of_batches(lambda batch: _percent(batch["padding_share"])),
            "to max_length": lambda row: _percent(row["padding"]["max_length"][0]["padding_share"]),
        },
    )
    if len(chosen) < len(sizes):
        echo(f"\n{len(sizes) - len(chosen)} more micro-batches: see --json, or --set one")


def _print_table(
    title: str, rows: list[dict[str, Any]], cells: Mapping[str, Callable[[dict[str, Any]], str]]
) -> None:
    """A line for each max length; `cells` write the columns beside it, by their names."""
    columns = ("max_length", *cells)
    lines = [(str(row["max_length"]), *(cell(row) for cell in cells.values())) for row in rows]
    echo(f"\n{title}")
    print_rows(columns, lines, right=columns)


def _percent(bounds: dict[str, float | None]) -> str:
    form = "{:.1f}" if bounds["value"] is not None else "{:.0f}"  # an interval is coarse anyway
    return _number({k: v if v is None else 100 * v for k, v in bounds.items()}, form) + " %"


def _number(bounds: dict[str, float | None], form: str) -> str:
    """The number, or its interval as "low-high" where only that is known."""
    low, high = form.format(bounds["low"]), form.format(bounds["high"])
    return low if low == high else f"{low}-{high}"
