"""Prints what a search tells while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tuner.app.cli.search_text import print_plan
from tuner.app.listener import Compiling, Listener, Searching
from tuner.app.search.plan import SearchPlan, SkippedGpu
from tuner.core.records import TrialRecord
from tuner.report.terminal.progress import compiling, reporting
from tuner.report.terminal.render import echo, print_fields


class Printer(Listener):
    """Prints everything, on stderr where stdout is for JSON; warnings only where `quiet`."""

    def __init__(self, *, err: bool = False, quiet: bool = False) -> None:
        self._err = err
        self._quiet = quiet
        self._planned = 0

    def say(self, text: str) -> None:
        """A line."""
        if not self._quiet:
            echo(text, err=self._err)

    def warn(self, text: str) -> None:
        """A line on stderr."""
        echo(text, err=True)

    def note(self, text: str) -> None:
        """A field."""
        if not self._quiet:
            print_fields([("note", text)], err=self._err)

    def planned(self, plan: SearchPlan, known: tuple[TrialRecord, ...]) -> None:
        """The plan as fields; of a second GPU type those that are about it."""
        if not self._quiet:
            print_plan(plan, known, err=self._err, again=self._planned > 0)
            self._planned += 1

    def refused(self, refused: SkippedGpu) -> None:
        """A field named after the GPU type."""
        if not self._quiet:
            print_fields([refused.field], err=self._err)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[Compiling]:
        """Lines, or one that is drawn over in a terminal."""
        with compiling(err=self._err, quiet=self._quiet) as report:
            yield report

    @contextlib.contextmanager
    def searching(self) -> Iterator[Searching]:
        """A live display in a terminal, lines elsewhere."""
        with reporting(err=self._err, quiet=self._quiet) as report:
            yield report
