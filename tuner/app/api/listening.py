"""Progress of a running search: a callback, and lines for people."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console

from tuner.app.listener import Compiling, Listener, Searching
from tuner.app.search.plan import SkippedGpu
from tuner.report.terminal.progress import compiling, reporting
from tuner.report.terminal.render import print_fields
from tuner.searches.progress import Progress

OnProgress = Callable[[Mapping[str, "Progress"]], None]


def listener_of(shown: bool | None, on_progress: OnProgress | None) -> Listener:
    """What shows progress where that is wanted, and calls `on_progress`.

    None shows it where somebody looks: in a notebook and in a terminal.
    """
    err = Console(stderr=True)
    is_shown = bool(shown or (shown is None and (err.is_jupyter or err.is_terminal)))
    # A notebook paints stderr as if something were wrong.
    return _ProgramListener(on_progress, is_shown=is_shown, err=not err.is_jupyter)


class _ProgramListener(Listener):
    """Passes on how far a search is; what was planned is in the result already."""

    def __init__(self, on_progress: OnProgress | None, *, is_shown: bool, err: bool) -> None:
        self._on_progress = on_progress
        self._is_shown = is_shown
        self._err = err

    def warn(self, text: str) -> None:
        """As a warning of Python."""
        warnings.warn(text.removeprefix("warning: "), stacklevel=2)

    def refused(self, refused: SkippedGpu) -> None:
        """Shown, where progress is."""
        if self._is_shown:
            print_fields([refused.field], err=self._err)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[Compiling]:
        """Shown, where progress is."""
        with compiling(err=self._err, quiet=not self._is_shown) as report:
            yield report

    @contextlib.contextmanager
    def searching(self) -> Iterator[Searching]:
        """Shown, where progress is, and told."""
        with reporting(err=self._err, quiet=not self._is_shown) as show:

            def report(states: Mapping[str, Progress]) -> None:
                show(states)
                if self._on_progress is not None:
                    self._on_progress(dict(states))

            yield report
