"""The command line: modules of commands, and here what their help texts need.

These are command lines as examples, and options that only `--help-all` shows.
Imports nothing of tuner: `tuner --help` needs no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_ALL_OPTIONS = "tuner.all_options"
"""Key of a context's `meta`: True to show all options."""

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


def examples(*lines: str) -> str:
    """An epilog that shows command lines as they are (click would fill them as prose)."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def subcommand(
    name: str, *lines: str, **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """A command of this name, whose help ends with command lines as examples."""
    return click.command(name, epilog=examples(*lines), **settings)


class RareOption(click.Option):
    """An option that few need: `--help` leaves it out, and `--help-all` shows it."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """As click does, where all options are asked for; else None, which leaves it out."""
        return super().get_help_record(ctx) if shows_all(ctx) else None


def with_help_all(command: click.Command) -> click.Command:
    """`command` with `--help-all`, where it has rare options."""
    names = {name for parameter in command.params for name in parameter.opts}
    if "--help-all" in names or not any(isinstance(p, RareOption) for p in command.params):
        return command
    return help_all("Show all options, including rare ones.")(command)


def help_all(text: str) -> Callable[[_Decorated], _Decorated]:
    """`--help-all`."""
    return click.option(
        "--help-all", is_flag=True, is_eager=True, expose_value=False, help=text, callback=_show_all
    )


def shows_all(ctx: click.Context) -> bool:
    """True where `--help-all` asks for everything."""
    return bool(ctx.meta.get(_ALL_OPTIONS))


def _show_all(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_ALL_OPTIONS] = True
        click.echo(ctx.get_help())
        ctx.exit()
