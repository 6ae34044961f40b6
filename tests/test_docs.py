"""Every page of the documentation: its commands, links and size.

What a comment before a block can say is in `documents.py`. `tuner` lines run in this process, which
saves the seconds that PyTorch takes to import; everything else runs in a shell.
"""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from documents import (
    ANNOTATIONS,
    CONSOLE,
    NAVIGATION,
    NOTEBOOK,
    PAGES,
    PYTHON,
    ROOT,
    RUNNABLE,
    SHELL,
    Block,
    blocks,
    commands,
    same_output,
    tuner_lines,
)

from tuner.app.cli.main import cli, run

ALL = [block for page in PAGES for block in blocks(page)]
COMMANDS = [
    block
    for page in (*PAGES, *NOTEBOOK)
    for block in blocks(page)
    if block.language in (SHELL, CONSOLE)
]
PLAIN = ("yaml", "json", "toml", "text", "csv", "ini", "mermaid")
"""Languages of blocks that are no commands."""


def place(block: Block) -> str:
    return block.place


@pytest.mark.parametrize("block", ALL, ids=place)
def test_block_is_run_or_says_why_not(block):
    if block.language.startswith("{"):
        return  # a directive of the site's generator
    assert block.language in (SHELL, *RUNNABLE, *PLAIN), f"{block.place}: which language is it?"
    if block.language == "text":
        assert not re.match(r"\$ ", block.text), f"{block.place}: commands are `console` blocks"
    why_not = block.said("not run")
    if why_not is not None:
        assert len(why_not.split()) > 2, f"{block.place}: say why it is not run"
        assert "file" not in block.annotations


@pytest.mark.parametrize("block", COMMANDS, ids=place)
def test_each_line_is_one_that_the_command_line_takes(block):
    for command in commands(block):
        for arguments in tuner_lines(command.line):
            check_arguments(cli, arguments, "tuner")
        for module in re.findall(r"python3? -m (benchmarks[\w.]*)", command.line):
            assert importlib.util.find_spec(module), f"{block.place}: there is no {module}"


def check_arguments(command: click.Command, arguments: list[str], name: str) -> None:
    """Raises where an option or a word is not one of the command's; nothing is run."""
    context = click.Context(command, info_name=name)
    given, rest, _ = command.make_parser(context).parse_args(list(arguments))
    for parameter in command.params:
        value = given.get(parameter.name)
        if isinstance(parameter.type, click.Choice) and isinstance(value, str):
            parameter.type.convert(value, parameter, context)
        missing = isinstance(parameter, click.Option) and parameter.required and not value
        assert not missing or "help" in given, f"{name}: {parameter.opts[0]} is needed"
    if isinstance(command, click.Group):
        if rest:
            found = command.get_command(context, rest[0])
            assert found, f"{name}: there is no command {rest[0]!r}"
            check_arguments(found, rest[1:], rest[0])
    else:
        assert not rest, f"{name}: {rest} is too much"


@dataclass
class Ended:
    """What a command printed on both outputs and on each, and its exit code."""

    both: str
    output: str
    errors: str
    code: int


class Reader:
    """Someone who runs the blocks of a page one after the other, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, object] = {"__name__": "__main__"}

    def take(self, block: Block) -> None:
        """Run a block as its comment says, or write it to the file that it is."""
        for script in block.annotations.get("before", ()):
            self.check(block, script, None)
        name = block.said("file")
        if name:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, "utf-8")
        elif block.said("not run") or block.language not in RUNNABLE:
            return
        elif block.language == PYTHON:
            code = compile(block.text, block.place, "exec")
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, self.names)
        else:
            self.commands(block)

    def commands(self, block: Block) -> None:
        """The command lines of a block."""
        found = commands(block)
        for command in found:
            code = int(block.said("exit") or 0) if command is found[-1] else 0
            self.check(block, command.line, command.printed, code=code)

    def check(self, block: Block, line: str, shown: str | None, *, code: int = 0) -> None:
        """Run `line`, and compare what it prints with what is shown."""
        ended = self.run(line)
        said = f"{block.place}: {line}\nexit code {ended.code}, printed:\n{ended.both}"
        assert ended.code == code, said
        if not shown or (block.said("output") or "numbers") != "numbers":
            return
        exact = block.said("output") is None
        printed = (ended.output, ended.errors, ended.both)
        assert any(same_output(shown, each, numbers=exact) for each in printed), said

    def run(self, script: str) -> Ended:
        """Run each plain `tuner` line of `script` in this process, and others in a shell."""
        lines = script.replace("\\\n", " ").splitlines()
        if not all(re.match(r"tuner [^|&;<>$`()\n]*$", line.partition(" #")[0]) for line in lines):
            return self.shell(script)
        all_of_it = Ended("", "", "", 0)
        for line in lines:
            ended = self.tuner(shlex.split(line, comments=True)[1:])
            all_of_it.both += ended.both
            all_of_it.output += ended.output
            all_of_it.errors += ended.errors
            all_of_it.code = ended.code
            if ended.code:
                break
        return all_of_it

    def tuner(self, arguments: list[str]) -> Ended:
        """One command of `tuner`."""
        both, output, errors = io.StringIO(), io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(Tee(both, output)),
            contextlib.redirect_stderr(Tee(both, errors)),
        ):
            try:
                code = run(arguments)
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
        return Ended(both.getvalue(), output.getvalue(), errors.getvalue(), code)

    def shell(self, script: str) -> Ended:
        """A script, as bash reads it."""
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        both = ended.stdout + ended.stderr
        return Ended(both, ended.stdout, ended.stderr, ended.returncode)


class Tee(io.StringIO):
    """What is written goes to several files."""

    def __init__(self, *files: io.StringIO) -> None:
        super().__init__()
        self.files = files

    def write(self, text: str) -> int:
        for file in self.files:
            file.write(text)
        return len(text)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """In a folder with what a clone has: results, examples, spaces; nothing of the user's own."""
    folder = tmp_path / "clone"
    for name in ("results", "examples", "search_spaces"):
        unread = shutil.ignore_patterns("*.html", "*.png", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=unread)
    for name in ("cluster.yaml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    scripts = sysconfig.get_path("scripts")
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")
    # Python blocks may look for modules beside them, as a script does.
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return Reader(folder)


def runs(page: str) -> bool:
    return any(b.language in RUNNABLE and not b.said("not run") for b in blocks(page))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)])
def test_page_can_be_followed(page, reader):
    for block in blocks(page):
        reader.take(block)


_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of `page`, as a forge and the site make them."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text("utf-8")), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOK])
def test_links_lead_somewhere(page):
    for link in _LINK.findall(_FENCED.sub("", (ROOT / page).read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page}: {link}"


def test_the_code_names_pages_that_there_are():
    # Another project's page is "torchtitan's docs/fsdp.md", "docs/gpu_test.md there", or has a
    # commit before it.
    named = re.compile(r"(?<![\w/.:])(?<!'s )docs/[\w/-]+\.(?:md|html|svg)\b(?! there)")
    places = [*ROOT.glob("*.yaml"), *(ROOT / "search_spaces").glob("*.yaml")]
    for folder in ("tuner", "benchmarks", "tests", "examples"):
        places += [p for p in (ROOT / folder).rglob("*.*") if p.suffix in (".py", ".c", ".h")]
    places += [ROOT / page for page in (*PAGES, *NOTEBOOK)]
    for path in places:
        for page in named.findall(path.read_text("utf-8")):
            assert (ROOT / page).exists(), f"{path}: {page}"


def test_the_navigation_is_short():
    index = (ROOT / "docs/index.md").read_text("utf-8")
    trees = "\n".join(re.findall(r"```{toctree}(.*?)```", index, re.DOTALL))
    entries = re.findall(r"^[\w/-]+$", trees, re.MULTILINE)
    found = {"docs/index.md", *(f"docs/{entry}.md" for entry in entries)}
    assert found == {*NAVIGATION, "docs/reference/index.md"}
    assert len(found) <= 18
    words = [len((ROOT / page).read_text("utf-8").split()) for page in PAGES]
    assert sum(words) <= 25_000
    assert words[0] <= 900, "the README has two screens"


def test_the_home_page_shows_what_the_readme_shows():
    (shown,) = (block for block in blocks("docs/index.md") if block.language == CONSOLE)
    assert shown.text in [block.text for block in blocks("README.md")]


def test_annotations_are_spelled_as_they_are_read():
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8")
        for comment in re.findall(r"<!--(.*?)-->", text, re.DOTALL):
            for line in filter(None, map(str.strip, comment.splitlines())):
                name, colon, value = line.partition(":")
                assert name in ANNOTATIONS, f"{page}: {line}"
                assert colon, f"{page}: {line}"
                assert value.strip(), f"{page}: {line}"


class TestOutputs:
    def test_other_text_is_not_the_same(self):
        assert not same_output("a 1", "a 2", numbers=True)
        assert not same_output("a 1", "b 1", numbers=False)
        assert not same_output("a\n...\nc", "a\nb\nd", numbers=True)

    def test_dots_are_any_lines_and_numbers_can_be_left_out(self):
        assert same_output("a\n...\nc", "a\nb\nb\nc", numbers=True)
        assert same_output("took 1.5 s", "took 30 ms", numbers=False)
        assert same_output("trial 0a1b2c3d-001", "trial ffffffff-001", numbers=True)

    def test_commands_are_found_in_a_line(self):
        line = "python3 -m venv .venv && .venv/bin/tuner gpus a6000 | head  # see"
        assert tuner_lines(line) == [["gpus", "a6000"]]
        assert tuner_lines("tuner best --where 'lora_rank>=256'") == [
            ["best", "--where", "lora_rank>=256"]
        ]

    def test_an_option_that_there_is_not_is_found(self):
        with pytest.raises(click.NoSuchOption):
            check_arguments(cli, ["best", "--spaec", "x"], "tuner")
