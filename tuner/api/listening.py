"""What a search tells a program while it runs: a callback, and lines for people."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console

from tuner.cli.listening import Printer
from tuner.engine.listener import SILENT, Compiling, Listener, Searching
from tuner.engine.plan import SkippedGpu
from tuner.tune.progress import Progress

OnProgress = Callable[[Mapping[str, "Progress"]], None]


@contextlib.contextmanager
def listener_of(shown: bool | None, on_progress: OnProgress | None) -> Iterator[Listener]:
    """What shows progress where that is wanted, and calls `on_progress`.

    None shows it where somebody looks: in a notebook and in a terminal.
    """
    printer = SILENT
    err = Console(stderr=True)
    if shown or (shown is None and (err.is_jupyter or err.is_terminal)):
        # A notebook paints stderr as if something were wrong.
        printer = Printer(err=not err.is_jupyter)
    yield _Told(printer, on_progress)


class _Told(Listener):
    """Passes on how far a search is; what was planned is in the result already."""

    def __init__(self, printer: Listener, on_progress: OnProgress | None) -> None:
        self._printer = printer
        self._on_progress = on_progress

    def warn(self, text: str) -> None:
        """As a warning of Python."""
        warnings.warn(text.removeprefix("warning: "), stacklevel=2)

    def refused(self, refused: SkippedGpu) -> None:
        """Shown, where progress is."""
        self._printer.refused(refused)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[Compiling]:
        """Shown, where progress is."""
        with self._printer.compiling() as report:
            yield report

    @contextlib.contextmanager
    def searching(self) -> Iterator[Searching]:
        """Shown, where progress is, and told."""
        with self._printer.searching() as show:

            def report(states: Mapping[str, Progress]) -> None:
                show(states)
                if self._on_progress is not None:
                    self._on_progress(dict(states))

            yield report
