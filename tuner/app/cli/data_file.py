"""The options that name a file of training data, and the token lengths that are read from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tuner.app.listener import quiet_libraries
from tuner.core.errors import InputError

if TYPE_CHECKING:
    from tuner.space.lengths import LengthDistribution

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


def data_options(function: _Decorated) -> _Decorated:
    """`--data`, `--tokenizer`, `--length-column` and `--text-column`: the fields of `DataFile`."""
    for option in (
        click.option(
            "--text-column",
            "text_columns",
            multiple=True,
            metavar="COLUMN",
            help="Column of text or messages; repeatable, the texts are joined. "
            "[default: messages, text, or prompt and completion]",
        ),
        click.option("--length-column", metavar="COLUMN", help="Column with numbers of tokens."),
        click.option(
            "--tokenizer",
            metavar="NAME",
            help="Tokenizer to count with: a folder, or a model in the local Hugging Face cache.",
        ),
        click.option(
            "--data",
            "path",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="JSONL file of examples, instead of the space's lengths.",
        ),
    ):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """What was said of a file of training data; `path` is None where nothing was."""

    path: Path | None
    tokenizer: str | None
    length_column: str | None
    text_columns: tuple[str, ...]

    def lengths(self) -> LengthDistribution | None:
        """The token lengths of its examples; None without a file.

        Raises `InputError` for a file that cannot be read, and for columns of no file.
        """
        if self.path is None:
            if self.tokenizer or self.length_column or self.text_columns:
                raise InputError(
                    "a tokenizer or a column needs a file to read", hint="name it with --data"
                )
            return None
        from tuner.space.lengths import read_lengths  # numpy

        with quiet_libraries():
            return read_lengths(
                self.path,
                tokenizer=self.tokenizer,
                length_column=self.length_column,
                text_column=self.text_columns,
            )
