"""Commands that messages show: each is one that runs as it stands."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import tuner
from tuner.app.cli.main import COMMANDS, cli

FOLDER = Path(tuner.__file__).parent
_SHOWN = re.compile(r"`tuner ([^`]+)`|(?:^|[ :(])tuner ([a-z-]+ [^`;]*--[^`;]*)")
_IMPORTS = re.compile(r"^\s*(?:from|import) .*$", re.MULTILINE)
_STANDS_IN = re.compile(r"^[A-Z]{2,}$")


def _texts(tree: ast.Module) -> Iterator[str]:
    """The texts of a module that messages are made of; the examples of help have their own test."""
    nodes = list(ast.walk(tree))
    others = [node.value for node in nodes if isinstance(node, ast.Expr)]  # docstrings
    others += [v for node in nodes if isinstance(node, ast.JoinedStr) for v in node.values]
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        if getattr(call.func, "id", "") in ("examples", "subcommand"):
            others += call.args
    hidden = {id(node) for node in others}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield _filled(node)
        elif isinstance(node, ast.Constant) and id(node) not in hidden:
            yield str(node.value)


def _filled(text: ast.JoinedStr) -> str:
    """A text with "x" for each word that is put in, and nothing for what is put behind one."""
    filled = ""
    for value in text.values:
        own = str(value.value) if isinstance(value, ast.Constant) else ""
        filled += own or ("x" if filled.endswith((" ", "=", "'")) else "")
    return filled


def _commands() -> Iterator[tuple[str, str]]:
    """The module and the words of each command that has more than a name."""
    for path in sorted(FOLDER.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "tuner " not in _IMPORTS.sub("", source):
            continue
        for text in _texts(ast.parse(source)):
            for match in _SHOWN.finditer(text):
                words = match[1] or match[2]
                if words.split()[0] in COMMANDS and len(words.split()) > 1:
                    yield str(path.relative_to(FOLDER)), words


FOUND = list(dict.fromkeys(_commands()))


def test_commands_are_found_where_they_are_written():
    assert {"app/cli/catalogues.py", "space/models/trainable.py"} <= {module for module, _ in FOUND}


@pytest.mark.parametrize(("module", "words"), FOUND)
def test_a_command_in_a_message_names_all_that_it_needs(module, words):
    words = words.replace("\\\n", " ").partition("#")[0].splitlines()[0]
    name, *arguments = shlex.split(words)
    if not arguments:
        return
    command = cli.get_command(click.Context(cli), name)
    assert not [word for word in arguments if _STANDS_IN.match(word)]
    context = click.Context(command, info_name=name)
    given, rest, _ = command.make_parser(context).parse_args(list(arguments))
    missing = [p.name for p in command.params if p.required and given.get(p.name) in (None, ())]
    assert not missing, words
    assert not rest or isinstance(command, click.Group), words
