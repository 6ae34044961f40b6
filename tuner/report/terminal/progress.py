"""Progress of a search: a live display in a terminal, plain lines everywhere else."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from tuner.core.expressions import settings_text
from tuner.core.units import format_duration, format_size, printable, significant
from tuner.report.terminal.render import PIPE_WIDTH, echo, is_interactive
from tuner.report.terminal.tables import console
from tuner.searches.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Spinner
    from rich.table import Table

Report = Callable[[Mapping[str, "Progress"]], None]
"""Called with how far the search of each GPU type is, by its id."""

LINE_PERIOD_S = 5.0
"""Between two plain lines, unless a better configuration was found."""


@contextlib.contextmanager
def reporting(*, err: bool, quiet: bool) -> Iterator[Report]:
    """A function to call at each change of a search; the display ends on leaving."""
    if quiet:
        yield lambda progress: None
        return
    if is_interactive(sys.stderr if err else sys.stdout):
        from rich.live import Live

        with Live(console=console(err=err), transient=True, refresh_per_second=4) as live:
            yield lambda states: live.update(drawn(states))
        return
    lines: dict[str, _PlainLines] = {}

    def report(states: Mapping[str, Progress]) -> None:
        for gpu, progress in states.items():
            if gpu not in lines:
                lines[gpu] = _PlainLines(err=err, label=gpu if len(states) > 1 else "")
            lines[gpu](progress)

    yield report


class Waiting:
    """A spinner with what is being done and the time since the start, on a terminal's stderr.

    Anywhere else nothing is shown.
    """

    def __init__(self) -> None:
        self._spinner: Spinner | None = None
        if is_interactive(sys.stderr):
            from rich.progress import Progress as Spinner
            from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
            shown = console(err=True)
            self._spinner = Spinner(*columns, console=shown, transient=True, redirect_stdout=False)
            self._task = self._spinner.add_task("", visible=False)

    def __enter__(self) -> Waiting:
        if self._spinner is not None:
            self._spinner.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._spinner is not None:
            self._spinner.stop()

    def __call__(self, text: str) -> None:
        """Show what is being done now."""
        if self._spinner is not None:
            self._spinner.update(self._task, description=printable(text), visible=True)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take the spinner off the screen while something is printed."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


@contextlib.contextmanager
def compiling(*, err: bool, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A function to call with the structures traced and all structures of a space."""
    if quiet:
        yield lambda done, total: None
        return
    drawn_over = is_interactive(sys.stderr if err else sys.stdout)
    started = time.monotonic()
    last = 0.0 if drawn_over else started
    is_open = False
    known: int | None = None  # structures that were there before

    def report(done: int, total: int) -> None:
        nonlocal last, is_open, known
        known = done if known is None else known
        now = time.monotonic()
        if done < total and not (drawn_over and done) and now - last < LINE_PERIOD_S:
            return
        last = now
        text = f"predicting the space: {done} of {total} structures traced"
        text += f", {format_duration(now - started)}"
        if known < done < total:
            left_s = (now - started) / (done - known) * (total - done)
            text += f", about {format_duration(left_s)} left"
        is_open = drawn_over and done < total
        # As wide as a screen, so that nothing of a longer line before it stays.
        shown = f"\r{text:<{PIPE_WIDTH - 1}}" if drawn_over else text
        click.echo(shown, err=err, nl=not is_open)  # with the return of a line

    try:
        yield report
    finally:
        if is_open:
            echo(err=err)


def progress_line(progress: Progress, label: str = "") -> str:
    """One line of at most 80 columns: done, running, out of memory, best so far, time left.

    `label` comes first: the GPU type, where several are searched.
    """
    evidence = progress.best.outcome.evidence if progress.best else None
    speed = f"{significant(evidence.speed.samples_per_s)} samples/s" if evidence else "unknown"
    times = "once" if progress.verified == 1 else f"{progress.verified} times"
    parts = {
        "done": f"{label}{': ' * bool(label)}{progress.done}/{progress.total} done",
        "verified": f"verified {times}" if progress.verified else "",
        "running": f"{progress.running} running" if progress.running else "",
        "oom": f"{progress.oom} out of memory",
        "failed": f"{progress.failed} failed" if progress.failed else "",
        "best": f"best {speed}" if progress.best else "none fits yet",
    }
    if progress.eta_s is not None and progress.done < progress.total:
        parts["left"] = f"{format_duration(progress.eta_s)} left"
    line = ", ".join(filter(None, parts.values()))
    for name in ("running", "failed", "verified"):  # what can best be spared
        if len(line) > PIPE_WIDTH:
            del parts[name]
            line = ", ".join(filter(None, parts.values()))
    return line


class _PlainLines:
    """Prints a line when there is something new to say, and not too often."""

    def __init__(
        self, *, err: bool = False, clock: Callable[[], float] = time.monotonic, label: str = ""
    ) -> None:
        self._err = err
        self._label = label
        self._clock = clock
        self._last_s: float | None = None
        self._said: tuple[Any, ...] = ()

    def __call__(self, progress: Progress) -> None:
        """Print the line of `progress`, if it is due."""
        best = progress.best.trial_id if progress.best else None
        state = (progress.done, progress.verified, progress.oom, progress.failed, best)
        if state == self._said:
            return
        now_s = self._clock()
        better = self._said and best != self._said[-1]
        waited = self._last_s is None or now_s - self._last_s >= LINE_PERIOD_S
        if better or waited or progress.done == progress.total:
            self._last_s, self._said = now_s, state
            echo(progress_line(progress, self._label), err=self._err)


def drawn(states: Mapping[str, Progress]) -> Table:
    """For each GPU type a bar, the line of `progress_line` and the best configuration."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    grid = Table.grid()
    for gpu, progress in states.items():
        grid.add_row(ProgressBar(total=progress.total, completed=progress.done, width=60))
        grid.add_row(progress_line(progress, gpu if len(states) > 1 else ""))
        grid.add_row(best_line(progress))
    return grid


def best_line(progress: Progress) -> str:
    """The best configuration so far with its memory; empty before there is one."""
    record = progress.best
    evidence = record.outcome.evidence if record else None
    if record is None or evidence is None:
        return ""

    names = ("micro_batch", "lora_rank", "max_length", "precision", "gradient_checkpointing")
    return (
        f"best ({evidence.source}): {format_size(evidence.memory.device_bytes)}, "
        f"{settings_text(record.configuration, names)}"
    )
