"""The command `tuner`: finds the subcommand, and turns its exceptions into an exit code.

A subcommand is imported when it is used, and imports its libraries when it runs:
`tuner --help` and the commands that only read files answer at once.
"""

from __future__ import annotations

import gc
import importlib
import io
import math
import os
import shlex
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

import click

from tuner import __version__
from tuner.app.cli import examples, help_all, shows_all, with_help_all
from tuner.core import errors
from tuner.core.units import printable
from tuner.report.terminal.render import echo, echo_error

GROUPS = {
    "Check": {
        "check": "Check whether your program fits on a GPU.",
        "diff": "Compare what your program needs under two library versions.",
    },
    "Choose a GPU": {
        "estimate": "Predict memory and speed of one configuration.",
        "calculator": "Write a page that predicts in the browser.",
    },
    "Find settings": {
        "tune": "Find the fastest settings of your program that fit.",
        "search": "Find the fastest configuration of a search space.",
        "best": "Print the recommendation of a search.",
        "show": "Print the front of a search, or one trial.",
        "report": "Redraw the report of a search.",
        "data": "Show truncation and padding of your data.",
    },
    "Apply": {
        "apply": "Write the recommendation into your files.",
        "export": "Print it as the settings of another tool.",
    },
    "Measure": {
        "trial": "Train one configuration for a few steps.",
        "emulate": "Run your program, with its output, on an emulated GPU.",
        "calibrate": "Measure this machine's GPU to improve its predictions.",
    },
    "Look up": {
        "gpus": "List the GPU types, or print one.",
        "models": "List the models that work offline, or print one.",
        "spaces": "List the search spaces, or print one.",
        "doctor": "Check that trials run on this machine.",
        "mcp": "Answer an agent's questions, as an MCP server.",
    },
}
"""The commands by task, each with a line of help, in the order in which users need them."""

COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}

FIRST = frozenset({
    "check", "estimate", "tune", "search", "best", "apply", "trial", "gpus", "models", "doctor",
})  # fmt: skip
"""The commands of `tuner --help`; `tuner --help-all` lists the others too."""

_SHARED = {
    "catalogues": ("gpus", "spaces", "models"),
    "check": ("check", "emulate"),
    "estimate": ("estimate", "calculator"),
    "machine": ("calibrate", "doctor"),
    "results": ("best", "show", "report", "apply", "export"),
    "tune": ("tune", "search"),
}
"""Modules of several commands, which have the names of these; others have one, `command`."""


def module_of(command: str) -> str:
    """The module of a command: `tuner.app.cli.machine` for "doctor"."""
    shared = (module for module, commands in _SHARED.items() if command in commands)
    return f"tuner.app.cli.{next(shared, command)}"


def load(command: str) -> click.Command:
    """The command of that name; its module is imported."""
    module = importlib.import_module(module_of(command))
    shared = getattr(module, command.replace("-", "_"), None)
    found = shared if isinstance(shared, click.Command) else module.command
    assert isinstance(found, click.Command)
    return found


ANSWERS = ("best", "show", "report")
"""Commands that read a journal, answer and end. For 100,000 trials, cyclic garbage collection took
seconds while they ran and two more at the end, although records have no cycles."""

AT_ONCE_S = 1.0
"""SIGTERMs within this time count as one."""

EXIT_BROKEN_PIPE = 128 + 13
"""The exit code that a shell reports for a program ended by SIGPIPE."""


class _LazyGroup(click.Group):
    """A group that imports a subcommand's module when the subcommand is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand, or None when there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        return with_help_all(load(cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of `--help`, for which no command is imported."""
        shown = {name for name in COMMANDS if shows_all(ctx) or name in FIRST}
        width = max(map(len, shown))
        for title, commands in GROUPS.items():
            rows = [(name.ljust(width), text) for name, text in commands.items() if name in shown]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does. Raises `InputError` with the nearest spelling of an unknown name."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise errors.unknown("command", args[0], COMMANDS)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """As click does, but a closed output pipe doesn't give the code 1 of "nothing fits"."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise click.exceptions.Exit(EXIT_BROKEN_PIPE) from None


@click.group(
    cls=_LazyGroup,
    epilog=f"Exit codes: {errors.EXIT_CODES_TEXT}.\n\n"
    + examples(
        "tuner check train.py --gpu rtx4090",
        "tuner estimate --model qwen3-8b --gpu rtx4090 --qlora --batch-size 4",
        "tuner search --space qlora27b --gpu a6000",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@help_all("Show all commands.")
@click.version_option(__version__, prog_name="tuner")
def cli() -> None:
    """Find out whether a fine-tuning run fits on a GPU, and the fastest settings that do.

    You need no GPU and no model weights: memory and speed are predicted from the training step.
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command line, and return its exit code.

    Errors that are answers to the user go to stderr without a traceback; anything else that
    is raised is a bug and is passed on.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _note
            warnings.simplefilter("default", errors.Note)
            result = cli.main(
                list(arguments), prog_name="tuner", standalone_mode=False, obj=tuple(arguments)
            )
    except errors.TunerError as error:
        echo_error(f"{error.word}: {error}")
        return error.exit_code
    except ModuleNotFoundError as error:
        missing = errors.missing_extra(error)
        if missing is None:
            raise
        echo_error(f"error: {missing}")
        return missing.exit_code
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.ClickException as error:
        _show(error, arguments)
        return errors.EXIT_BAD_INPUT
    except (KeyboardInterrupt, click.Abort):
        echo("interrupted", err=True)
        return errors.EXIT_INTERRUPTED
    return result if isinstance(result, int) else errors.EXIT_FOUND


def _behind_dashes(error: click.NoSuchOption, arguments: Sequence[str]) -> str:
    """The command line with the program's own options behind --; "" if no program is before them.

    Options of tuner stay tuner's, wherever they stand.
    """
    command = error.ctx.command if error.ctx is not None else None
    if command is None or all(parameter.name != "program" for parameter in command.params):
        return ""
    options = [one for one in command.params if isinstance(one, click.Option)]
    takes_value = {name: not one.is_flag for one in options for name in one.opts}
    own, program, words = list[str](), list[str](), iter(arguments[1:])
    for word in words:
        name, equals, _ = word.partition("=")
        (own if name in takes_value else program).append(word)
        if takes_value.get(name) and not equals:
            own += [next(words, "")]
    if not program or program[0].startswith("-"):
        return ""
    return shlex.join(["tuner", str(command.name), *own, "--", *program])


_show_warning = warnings.showwarning


def _note(message: Warning | str, category: type[Warning], *more: Any, **kwargs: Any) -> None:
    """Print a note as one line, and any other warning as Python does."""
    if issubclass(category, errors.Note):
        echo(str(message), err=True)
    else:
        _show_warning(message, category, *more, **kwargs)


def _show(error: click.ClickException, arguments: Sequence[str]) -> None:
    """Print `error` with the control characters of the typed text spelled out."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()  # the help itself
        return
    if isinstance(error, click.NoSuchOption) and (line := _behind_dashes(error, arguments)):
        close = errors.nearest(error.option_name, error.possibilities or ())
        hint = f"did you mean {close!r}? " if close else ""
        hint += f"behind --, it goes to your program: {line}"
        echo_error(f"error: {errors.InputError(f'no such option: {error.option_name}', hint=hint)}")
        return
    text = printable(error.format_message())
    if isinstance(error, click.UsageError):
        click.UsageError(text, error.ctx).show()
    else:
        click.ClickException(text).show()


class _Stop:
    """Handler of SIGTERM; `timeout` sends it twice at once, which counts as one."""

    _heard_s = -math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        before_s, self._heard_s = self._heard_s, time.monotonic()
        if self._heard_s - before_s > AT_ONCE_S:
            raise KeyboardInterrupt


def main() -> None:
    """Entry point of the console script. SIGTERM stops a command as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _Stop())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the terminal's encoding lacks is spelled out, and ends nothing.
            stream.reconfigure(errors="backslashreplace")
    if sys.argv[1:2] and sys.argv[1] in ANSWERS:
        gc.disable()
    try:
        code = run(sys.argv[1:])
    except Exception:  # noqa: BLE001 - Python would end with 1, which says "does not fit"
        traceback.print_exc()
        code = errors.EXIT_UNAVAILABLE
    if not gc.isenabled():
        gc.freeze()  # the interpreter looks for cycles once more when it ends
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it is ending
    if code == EXIT_BROKEN_PIPE:
        # Whoever read the output has gone; the interpreter must not try to flush the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
