"""Prints what a search tells while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from tuner.cli.progress import compiling, reporting
from tuner.cli.render import print_fields
from tuner.engine.listener import Compiling, Listener

if TYPE_CHECKING:
    from tuner.engine.plan import Plan
    from tuner.records import TrialRecord
    from tuner.tune.progress import Progress


class Printer(Listener):
    """Prints everything, on stderr where stdout is for JSON; warnings only where `quiet`."""

    def __init__(self, *, err: bool = False, quiet: bool = False) -> None:
        self._err = err
        self._quiet = quiet

    def say(self, text: str) -> None:
        """A line."""
        if not self._quiet:
            click.echo(text, err=self._err)

    def warn(self, text: str) -> None:
        """A line on stderr."""
        click.echo(text, err=True)

    def note(self, text: str) -> None:
        """A field."""
        if not self._quiet:
            print_fields([("note", text)], err=self._err)

    def planned(self, plan: Plan, known: tuple[TrialRecord, ...]) -> None:
        """The plan as fields."""
        from tuner.cli.search_text import print_plan

        if not self._quiet:
            print_plan(plan, known, err=self._err)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[Compiling]:
        """Lines, or one that is drawn over in a terminal."""
        with compiling(err=self._err, quiet=self._quiet) as report:
            yield report

    @contextlib.contextmanager
    def searching(self) -> Iterator[Callable[[Progress], None]]:
        """A live display in a terminal, lines elsewhere."""
        with reporting(err=self._err, quiet=self._quiet) as report:
            yield report
