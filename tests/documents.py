"""Fenced blocks of Markdown pages, and what a comment before one says about running it.

    <!-- before: COMMAND -->     this is run first, for what a reader would have by then
    <!-- not run: WHY -->        nothing is run, and why
    <!-- file: NAME -->          the block is written to this file, for the blocks after it
    <!-- exit: CODE -->          the exit code of the block's last command, 0 by default
    <!-- output: numbers -->     numbers differ each time: those of the page are not compared
    <!-- output: WHY NOT -->     anything else: what is shown is not compared, and why

Several lines may stand in one comment. A `console` block (lines that begin with `$`, followed by
what they print) and a `python` block are run; a `sh` block shows commands without their output, and
is only parsed. A page's blocks share a folder, and its Python blocks their names.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
NAVIGATION = tuple(sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md")))
PAGES = (
    "README.md",
    *NAVIGATION,
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/reference/*.md")),
)
NOTEBOOK = tuple(sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/notebook/*.md")))
"""Evidence, which scripts write: its commands are parsed, and never run."""

SHELL, CONSOLE, PYTHON = "sh", "console", "python"
RUNNABLE = (CONSOLE, PYTHON)
ANNOTATIONS = ("before", "not run", "file", "exit", "output")

_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
_ANNOTATION = re.compile(rf"\s*({'|'.join(ANNOTATIONS)}):\s*(.+?)\s*")
_TUNER = re.compile(r"(?:^|(?<=[\s/(;&|]))tuner(?=\s|$)")
_END_OF_COMMAND = (";", "&", "&&", "|", "||", ">", ">>", "2>", ")", "do", "done")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, its text, and what is said of running it."""

    page: str
    line: int
    language: str
    text: str
    annotations: dict[str, tuple[str, ...]]

    @property
    def place(self) -> str:
        """Where a person finds it."""
        return f"{self.page}:{self.line}"

    def said(self, name: str) -> str | None:
        """The last annotation `name`, or None."""
        return self.annotations[name][-1] if name in self.annotations else None


@dataclass(frozen=True)
class Command:
    """A command line of a block, and what the page says that it prints (None: nothing is said)."""

    line: str
    printed: str | None


def blocks(page: str) -> list[Block]:
    """The fenced blocks of `page`, in order."""
    return list(_blocks(page, (ROOT / page).read_text("utf-8")))


def _blocks(page: str, text: str) -> Iterator[Block]:
    said: dict[str, tuple[str, ...]] = {}
    for token in MarkdownIt().parse(text):
        if token.type == "html_block":
            for name, value in _annotations(token.content):
                said[name] = (*said.get(name, ()), value)
        elif token.type == "fence":
            words = token.info.split()
            language = words[0] if words else ""
            yield Block(page, token.map[0] + 1, language, token.content, said)
            said = {}


def _annotations(html: str) -> Iterator[tuple[str, str]]:
    for comment in _COMMENT.findall(html):
        for line in comment.splitlines():
            found = _ANNOTATION.fullmatch(line)
            if found:
                yield found[1], found[2]


def commands(block: Block) -> list[Command]:
    """The command lines of a `sh` or `console` block, with lines that a backslash goes on with."""
    if block.language == SHELL:
        return [Command(block.text.strip("\n"), None)]
    found: list[tuple[list[str], list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append(([line[2:]], []))
        elif found and not found[-1][1] and found[-1][0][-1].endswith("\\"):
            found[-1][0].append(line)
        elif found:
            found[-1][1].append(line)
        else:
            raise AssertionError(f"{block.place}: a console block begins with `$ `")
    return [Command("\n".join(line), "\n".join(printed)) for line, printed in found]


def tuner_lines(script: str) -> list[list[str]]:
    """The arguments of each `tuner` in a shell script."""
    found = []
    for line in script.replace("\\\n", " ").splitlines():
        for match in _TUNER.finditer(line):
            lexer = shlex.shlex(line[match.end() :], posix=True, punctuation_chars=";&|()<>")
            lexer.whitespace_split = True
            lexer.commenters = "#"
            arguments: list[str] = []
            for word in lexer:
                if word in _END_OF_COMMAND:
                    break
                arguments.append(word)
            found.append(arguments)
    return found


_IDS = re.compile(r"\b[0-9a-f]{8}-\d{3}\b")
_DATES = re.compile(r"\b20\d\d-?\d\d-?\d\d(?:[T-]\d{2}:?\d{2}:?\d{2}\S*)?")
_RUN_TIME = re.compile(r"(new trials? in|already done, in) .*")
_NUMBERS = re.compile(r"\d[\d.,]*")
_UNITS = re.compile(r"\b(?:ms|us|s|min|h|d|KiB|MiB|GiB)\b")


def same_output(shown: str, printed: str, *, numbers: bool) -> bool:
    """Whether a command printed what is shown: a line `...` stands for any lines.

    Ids of trials, dates and how long a search took are never compared, and without `numbers` no
    number, its unit, nor the width of a column.
    """
    pattern = "\n".join(
        r"(?:.*\n)*?.*" if line.strip() == "..." else re.escape(line)
        for line in _plain(shown, numbers=numbers)
    )
    return re.fullmatch(pattern, "\n".join(_plain(printed, numbers=numbers))) is not None


def _plain(text: str, *, numbers: bool) -> list[str]:
    text = _RUN_TIME.sub(r"\1 TIME", _DATES.sub("DATE", _IDS.sub("TRIAL", text)))
    if not numbers:
        text = _UNITS.sub("UNIT", _NUMBERS.sub("N", text))
        text = re.sub(r"─+", "─", text)
        # Words wrap elsewhere where numbers are longer.
        text = re.sub(r"(?:N UNIT ?)+", "N UNIT ", text)
        return [" ".join(line.split()) for line in text.strip().splitlines()]
    return [line.rstrip() for line in text.strip("\n").splitlines()]
