"""`tuner completion`: the script that lets a shell complete commands, options and values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from tuner.app.cli.main import COMPLETE_VARIABLE, cli
from tuner.app.cli.options import examples

SHELLS = ("bash", "zsh", "fish")


@click.command(
    "completion",
    epilog=examples(
        "tuner completion bash >> ~/.bashrc",
        "tuner completion zsh >> ~/.zshrc",
        "tuner completion fish > ~/.config/fish/completions/tuner.fish",
    ),
)
@click.argument("shell", type=click.Choice(SHELLS))
def command(*, shell: str) -> None:
    """Print the completion script of SHELL, for commands, options and values.

    It completes search spaces, GPU types, models, knobs and trials too. Open a new shell after
    adding the script.
    """
    found = get_completion_class(shell)
    assert found is not None  # click knows the three
    template = found(cli, {}, "tuner", COMPLETE_VARIABLE)
    # `source()` of bash starts bash to look at its version, which may be another one.
    click.echo(template.source_template % template.source_vars())
