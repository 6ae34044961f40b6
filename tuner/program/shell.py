"""The programs that a shell script starts: bash runs its lines, and skips the commands of others.

Variables, conditions, loops, functions and files that are sourced are bash's own. A trap before
each command decides: what only computes happens, a start of Python or of a launcher is noted, and
everything else is skipped. No file of yours is written: each `> file` is `> /dev/null` before bash
sees it, and what `cat`, `echo` and `printf` write is kept for the programs that it starts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.core.errors import InputError, UnavailableError
from tuner.program.standins import MARK

SHELLS = ("bash", "sh", "zsh")
SUFFIX = ".sh"

_SECONDS = 10

_LINE = re.compile(r"(?:-c: )?line (\d+)")

_END = "\1"
"""Ends a list of words."""

_UNKNOWN = "tuner-does-not-run-this"
"""The output of a command that is skipped where a script takes its text; a number follows."""

_SAID = re.compile(rf"{_UNKNOWN}-\d(\n{_UNKNOWN}-\d)*")
_SKIPPED = f"{MARK}a-skipped-command>"
"""The output of a skipped command, in a file that the script writes."""

_PRELUDE = Path(__file__).with_name("shell.bash")
"""The lines that run before the script's own."""


@dataclass(frozen=True, slots=True)
class Started:
    """A program that a script starts: its words, its folder and the variables that are set."""

    words: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    files: Mapping[str, str]
    """The texts of files that the script has written before, by path."""


def is_shell(words: Sequence[str]) -> bool:
    """True for `train.sh` and `bash train.sh`."""
    return words[0].endswith(SUFFIX) or (
        len(words) > 1 and Path(words[0]).name in SHELLS and not words[1].startswith("-")
    )


def run_shell(
    words: Sequence[str],
    folder: Path,
    text: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> list[Started]:
    """The starts of the script in `words`, whose text may be given, as may more variables.

    A word that follows from a skipped command is one that is unknown.
    Raises `InputError` for a script that fails or never ends, `UnavailableError` without bash.
    """
    script, *arguments = words if words[0].endswith(SUFFIX) else words[1:]
    bash = shutil.which("bash")
    if bash is None:
        raise UnavailableError(
            f"{script} is a shell script, and bash is not installed",
            hint="name the Python program that it starts, with its words",
        )
    text = (folder / script).read_text(encoding="utf-8") if text is None else text
    given = {**os.environ, **(environment or {})}

    def once(seed: int) -> tuple[list[Started], bool]:
        return _once([bash, script, *arguments], folder, text, given, seed)

    starts, skipped = once(1)
    for seed in (2, 3) if skipped else ():
        others: list[Started] = []
        with contextlib.suppress(InputError):  # no arithmetic takes what is unknown
            others, _ = once(seed)
        if len(others) == len(starts):
            pairs = zip(starts, others, strict=True)
            starts = [_joined(one, other) for one, other in pairs]
    return starts


def _joined(one: Started, other: Started) -> Started:
    """The start as both runs have it; words and ends of lines that differ are unknown."""
    files, same = dict[str, str](), os.path.commonprefix
    for path in one.files.keys() | other.files.keys():
        texts = (run.files.get(path, "").splitlines() for run in (one, other))
        lines = itertools.zip_longest(*texts, fillvalue="")
        files[path] = "\n".join(x if x == y else same([x, y]) + _SKIPPED for x, y in lines)
    words = []
    for word, its in itertools.zip_longest(one.words, other.words[: len(one.words)]):
        option = word[: word.find("=") + 1] if word.startswith("-") else ""
        unknown = f"{option}{MARK} {word[len(option) :]} follows from a command that isn't run>"
        words.append(word if word == its or MARK in word else unknown)
    return replace(one, words=tuple(words), files=files)


def _once(
    words: Sequence[str], folder: Path, text: str, given: Mapping[str, str], seed: int
) -> tuple[list[Started], bool]:
    bash, script, *arguments = words
    ours = re.sub(r"\$\{BASH_SOURCE(\[0\])?\}|\$BASH_SOURCE\b", "$0", without_files(text))
    prelude = _PRELUDE.read_text("utf-8")
    lines = prelude.count("\n") + 2
    lines_of = 2 if seed > 2 else 1  # which `wc -l` counts
    said_then = "$'" + "\\n".join([f"{_UNKNOWN}-{seed}"] * lines_of) + "'"
    head = f"RANDOM=1; __unknown={said_then}\n{prelude}"
    folder_made = tempfile.TemporaryDirectory(prefix="tuner-")
    with folder_made as made, tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as said:
        code = f"exec 3>&{told.fileno()}; __made={shlex.quote(made)}\n{head}{ours}\n"
        process = subprocess.Popen(  # noqa: S603
            [bash, "--noprofile", "--norc", "-c", code, script, *arguments],
            cwd=folder,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            pass_fds=(told.fileno(),),
            start_new_session=True,
        )
        try:
            process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            raise InputError(
                f"{script} doesn't end within {_SECONDS} s with its commands skipped",
                hint="name the Python program that it starts, with its words",
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        told.seek(0)
        starts, skipped = _parsed(told.read().decode(errors="replace"))
        if not starts:
            said.seek(0)
            last = said.read().decode(errors="replace").strip().splitlines()[:1]
            last = [_LINE.sub(lambda n: f"line {int(n[1]) - lines}", text) for text in last]
            raise InputError(
                f"{script} starts no Python program" + "".join(f": {line}" for line in last),
                hint="name the Python program, with its words",
            )
    return starts, skipped


def _parsed(text: str) -> tuple[list[Started], bool]:
    """The starts in order, and whether a command was skipped."""
    starts, skipped = [], False
    items = iter(text.split("\0"))
    for kind in items:
        skipped |= kind == "skipped"
        if kind == "start":
            folder, *words = itertools.takewhile(_END.__ne__, items)
            pairs = (item.partition("=") for item in itertools.takewhile(_END.__ne__, items))
            environment = {name: value for name, _, value in pairs}
            named = [*itertools.takewhile(_END.__ne__, items)]
            files = {
                os.path.normpath(name.replace("%", "/")): _SAID.sub(_SKIPPED, text)
                for name, text in zip(named[::2], named[1::2], strict=True)
            }
            starts.append(Started(tuple(words), Path(folder), environment, files))
    return starts, skipped


_TOKEN = re.compile(
    r"""(?P<escape>\\.)|(?P<single>\$?'[^']*')|(?P<comment>(?<![^\s;(])\#[^\n]*)"""
    r"""|(?P<open>\$\(\(|\$\(|\(\(|\[\[|\()|(?P<close>\)\)|\)|\]\])|(?P<quote>")"""
    r"""|(?P<here><<-?\s*(?P<mark>['"]?\w+['"]?))|(?P<job>(?<![&<>|])&(?![&>]))"""
    r"""|(?P<write>(?:\d*|&)>>?\|?(?![&(>])[ \t]*"""
    r"""(?P<target>(?:"[^"]*"|'[^']*'|\$\([^)]*\)|[^\s;&|<>()])+))""",
    re.DOTALL,
)


_KEPT = re.compile(r"\s*(?:(?:then|do|else)\s+)*(?:(?:cat|echo|printf|done)\b|[(}])")
"""The beginning of a command whose output to a file is kept."""


_ENDS = re.compile(r"(?:(?:^|\s)(?:done|\})|\))\s*$")
"""The end of a loop or group, which may be endless."""


def without_files(text: str) -> str:
    """The text of a script that writes no file: each target of `>` is /dev/null, or one of `__to`.

    `>` compares within `[[ ]]` and `(( ))`, and is a character within quotes and the texts of
    `<<`; in `"$(command > file)"` it writes again.
    """
    out: list[str] = []
    inside: list[str] = []  # the openings around the place
    place = 0
    start, starts = 0, list[int]()  # of the command, and of those around it
    marks: list[str] = []  # texts of `<<` that begin with the next line
    while place < len(text):
        if marks and text[place] == "\n":
            mark = marks.pop(0)
            end = re.compile(rf"\n\s*{re.escape(mark)}(?=\n|$)").search(text, place)
            stop = end.end() if end else len(text)
            out.append(text[place:stop])
            place = start = stop
            continue
        quoted = bool(inside) and inside[-1] == '"'
        found = _TOKEN.match(text, place)
        kind = found.lastgroup if found else None
        runs = kind == "open" and text.startswith("$(", place)
        if quoted and kind not in ("escape", "quote") and not runs:
            kind = None
        if found is None or kind is None:
            out.append(text[place])
            place += 1
            start = place if text[place - 1] in "\n;&|{" and not quoted else start
            continue
        part = found[0]
        if kind == "open":
            inside.append(part)
            starts.append(start)
            start = found.end()
        elif kind == "close" and inside and inside[-1] != '"':
            opened, start = inside.pop(), starts.pop()
            if part == "))" and not opened.endswith("(("):
                part = ")"
        elif kind == "quote":
            inside.pop() if quoted else inside.append('"')
        elif kind == "here":
            marks.append(found["mark"].strip("'\""))
        elif kind == "job" and not inside and not _ENDS.search(text, start, place):
            # Jobs that run at once would mix what they tell.
            part, start, place = "; : &", found.end(), found.end() - len("; : &")
        elif kind == "write" and not (inside and inside[-1] in ("[[", "((", "$((")):
            target, sign = found["target"], text[place : found.start("target")]
            part = f"{sign}/dev/null"
            is_own = sign.strip(" \t1") in (">", ">>") and _KEPT.match(text, start, place)
            if is_own and not re.search(r"`|\$\(|^.?/dev/", target):
                more = " more" if ">>" in sign else ""
                part = f'{sign.strip()} "$(__to {target}{more})"'
            place = found.end() - len(part)
        out.append(part)
        place += len(part)
    return "".join(out)
