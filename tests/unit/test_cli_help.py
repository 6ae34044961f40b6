"""Help texts: short enough for a screen, with examples that can be typed as they stand."""

import itertools
import re
import shlex

import click
import pytest
from cli_samples import command_of

from tuner.app.cli.main import COMMANDS, cli, run

LINES = {"search": 50, "": 54, "trial": 44, "check": 46}
"""More than a screen of 40 lines only where there is most to say."""


SHOWN = ["", *COMMANDS]


def help_text(capsys, monkeypatch, name: str, flag: str = "--help") -> str:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*name.split(), flag]) == 0
    return capsys.readouterr().out


def examples_of(text: str) -> list[list[str]]:
    """The words of each example, without its comment; lines that end in a backslash go on."""
    block = text.partition("Examples:\n")[2].replace("\\\n", " ")
    return [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("name", SHOWN)
def test_help_fits_a_screen_of_80_columns(capsys, monkeypatch, name):
    lines = help_text(capsys, monkeypatch, name).splitlines()
    assert len(lines) <= LINES.get(name, 40)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", SHOWN)
def test_examples_can_be_typed_as_they_stand(capsys, monkeypatch, name):
    examples = examples_of(help_text(capsys, monkeypatch, name))
    assert examples
    for words in examples:
        program, command, *arguments = itertools.takewhile(lambda w: w not in (">", ">>"), words)
        if program == "ray":
            continue
        assert program == "tuner"
        assert command == name or not name
        # Parses, and checks every option, without running anything.
        command_of(command).make_context(command, arguments, parent=click.Context(cli))


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in SHOWN
        if "--help-all" in {o for p in (command_of(n).params if n else ()) for o in p.opts}
    ],
)
def test_all_options_are_shown_on_request(capsys, monkeypatch, name):
    every = help_text(capsys, monkeypatch, name, "--help-all")
    assert max(map(len, every.splitlines())) <= 80
    few = help_text(capsys, monkeypatch, name)
    options = {opt for p in command_of(name).params for opt in p.opts if opt.startswith("--")}
    assert options <= set(re.findall(r"--[a-z-]+", every))
    assert len(few) < len(every)


@pytest.mark.parametrize("name", SHOWN[1:])
def test_every_option_says_what_it_is_for(name):
    for parameter in command_of(name).params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.opts
