"""What hears of a search while it runs: the command line prints it, a program does otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from tuner.app.notices import Notices
from tuner.app.plan import SearchPlan, SkippedGpu
from tuner.core.records import TrialRecord
from tuner.searches.progress import Progress

Compiling = Callable[[int, int], None]
"""Called with the number of structures that were traced, and of those in all."""
Searching = Callable[[Mapping[str, "Progress"]], None]
"""Called with how far the search of each GPU type is, by its id; those that have begun."""


class Listener(Notices):
    """Hears of a whole search and tells nobody: the base of those that do."""

    def planned(self, plan: SearchPlan, known: tuple[TrialRecord, ...]) -> None:
        """A search was checked and begins; `known` are the trials of earlier ones."""

    def refused(self, refused: SkippedGpu) -> None:
        """No trial is run on a GPU type, where others are searched as well."""

    @contextlib.contextmanager
    def compiling(self) -> Iterator[Compiling]:
        """While a space is predicted; what it yields is called as that goes on."""
        yield lambda done, total: None

    @contextlib.contextmanager
    def searching(self) -> Iterator[Searching]:
        """While trials run; what it yields is called at each change."""
        yield lambda progress: None


SILENT = Listener()
