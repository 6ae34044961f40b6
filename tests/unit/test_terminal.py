"""What reaches a screen: a display that is drawn over where there is one, plain lines elsewhere.

Run as real programs under a real pseudo-terminal, with the environments that CI and Jupyter set.
"""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_samples import make_trial, write_samples
from started import run_python

from tuner.app.cli.main import run
from tuner.report.terminal.render import is_interactive, wrapped
from tuner.searches.store import ResultsFolder

ROOT = Path(__file__).parents[2]
SHOWS = """
from tuner.report.terminal.progress import compiling, reporting
from tuner.searches.progress import Progress
with compiling(err=False, quiet=False) as report:
    for done in range(4):
        report(done, 3)
with reporting(err=False, quiet=False) as report:
    for done in range(0, 41):
        report({"a6000": Progress(done=done, running=2, oom=1, failed=0, reused=0, total=40,
                                  best=None, elapsed_s=3.0, eta_s=9.0)})
"""


def environment(**more: str) -> dict[str, str]:
    unset = ("CI", "TERM", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "JPY_PARENT_PID", "TTY_COMPATIBLE")
    plain = {name: value for name, value in os.environ.items() if name not in unset}
    return {**plain, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **more}


def in_terminal(*arguments: str, **more: str) -> str:
    """Everything that a program writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, True)
    child = subprocess.Popen(
        [sys.executable, *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
        env=environment(COLUMNS="80", **more),
    )  # fmt: skip
    os.close(theirs)
    found = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not part:
            break
        found += part
    os.close(ours)
    assert child.wait(timeout=120) == 0, found
    return found.decode("utf-8").replace("\r\n", "\n")


def screen(text: str) -> list[str]:
    """The lines that stay on a terminal that was written to; it has no last line."""
    lines, row, column = [""], 0, 0
    for control, clears, ups, plain in re.findall(
        r"(\r|\n)|\x1b\[(2K)|\x1b\[(\d+)A|\x1b\[[?\d;]*[a-zA-Z]|([^\x1b\r\n]+)", text
    ):
        row = max(0, row + (control == "\n") - int(ups or 0))
        lines += [""] * (row + 1 - len(lines))
        column = 0 if control else column
        if clears:
            lines[row] = ""
        lines[row] = lines[row][:column].ljust(column) + plain + lines[row][column + len(plain) :]
        column += len(plain)
    return [line.rstrip() for line in lines]


def in_pipe(*arguments: str, **more: str) -> str:
    done = run_python(*arguments, env=environment(**more), timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_plain(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


@pytest.mark.parametrize(
    ("place", "is_drawn_over"),
    [
        ({}, True),
        ({"CI": "true"}, False),
        ({"TERM": "dumb"}, False),
        ({"JPY_PARENT_PID": "1"}, False),
    ],
    ids=str,
)
def test_a_screen_is_drawn_over_where_somebody_looks_at_it(monkeypatch, place, is_drawn_over):
    for name in ("CI", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **place}.items():
        monkeypatch.setenv(name, value)
    assert is_interactive(SimpleNamespace(isatty=lambda: True)) is is_drawn_over


class TestProgress:
    def test_in_a_terminal_it_is_drawn_over_and_leaves_nothing(self):
        text = in_terminal("-c", SHOWS)
        assert "\x1b[" in text
        assert "40/40 done" in text

    @pytest.mark.parametrize("err", [True, False])
    def test_a_line_that_is_said_meanwhile_stays_on_the_screen(self, err):
        said = f"""
        if done % 10 == 5:
            time.sleep(0.4)  # it is drawn
            echo("dashboard: http://127.0.0.1:%d" % done, err={err})
"""
        imported = "import time; from tuner.report.terminal.render import echo"
        shown = screen(in_terminal("-c", imported + SHOWS + said))
        for done in (5, 15, 25, 35):
            assert f"dashboard: http://127.0.0.1:{done}" in shown

    def test_in_a_terminal_that_is_not_drawn_over_it_is_lines(self):
        text = in_terminal("-c", SHOWS, CI="true")
        assert is_plain(text)
        lines = text.splitlines()
        assert lines[0].startswith("predicting the space: 3 of 3")
        assert lines[-1].startswith("40/40 done")
        assert len(lines) <= 4  # and no wall of them
        assert max(map(len, lines)) <= 80

    @pytest.mark.parametrize("place", [{}, {"FORCE_COLOR": "1"}], ids=str)
    def test_in_a_pipe_it_is_lines(self, place):
        text = in_pipe("-c", SHOWS, **place)
        assert is_plain(text)
        assert text.splitlines()[-1].startswith("40/40 done")

    def test_no_line_is_left_open_when_it_is_cut_off(self):
        broken = SHOWS.replace("range(4)", "range(2)")
        text = in_terminal("-c", broken, TERM="xterm")
        assert "1 of 3 structures traced" in text
        assert re.search(r"1 of 3 .*, about \S+ \w+ left", text)
        assert not re.search(r"0 of 3 [^\r]* left", text)
        first = text.split("40 done")[0]
        assert "\n" in first[first.rindex("1 of 3") :]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    with ResultsFolder(Path("results"), "tiny", "a6000").writer() as writer:
        for gib, speed, micro_batch in ((20, 100, 1), (40, 300, 2), (60, 500, 4)):
            writer.append(
                make_trial(tmp_path, gib, speed, micro_batch=micro_batch, precision="bf16")
            )
    return tmp_path


SHOW = ["-m", "tuner", "show", "--space", "tiny.yaml", "--gpu", "a6000"]


class TestAnswers:
    def test_a_terminal_shows_bold_headers(self, folder):
        assert "\x1b[1m" in in_terminal(*SHOW)

    def test_an_encoding_without_lines_gets_ascii(self, folder):
        text = in_pipe(*SHOW, PYTHONIOENCODING="ascii", COLUMNS="60")
        assert text.isascii()
        assert "* recommended" in text


ESCAPES = "\x1b]0;owned\x07\x1b[31mred\x9b2J\u202etxt"


class TestNames:
    """Escape sequences in names and messages are spelled out, wherever they come from."""

    def test_in_a_space_and_its_results(self, folder, capsys):
        spelled = "\\x1b]0;owned\\x07"
        text = (folder / "tiny.yaml").read_text()
        (folder / "evil.yaml").write_text(
            text.replace("name: tiny", 'name: "e\\e]0;owned\\avil"', 1), "utf-8"
        )
        code = run(["show", "--space", "evil.yaml", "--gpu", "a6000"])
        captured = capsys.readouterr()
        assert code in (2, 3)
        assert is_plain(captured.out + captured.err)
        assert spelled in captured.err or "name" in captured.err

    @pytest.mark.parametrize(
        "arguments",
        [
            ["show", "--space", ESCAPES, "--gpu", "a6000"],
            ["best", "--space", "tiny.yaml", "--gpu", ESCAPES],
            ["best", "--space", "tiny.yaml", "--gpu", "a6000", "--where", ESCAPES],
            ["best", "--space", "tiny.yaml", "--gpu", "a6000", "--objective", ESCAPES],
            ["best", "--space", "tiny.yaml", "--gpu", "a6000", "--max-memory", ESCAPES],
            ["show", "--space", "tiny.yaml", "--gpu", "a6000", ESCAPES],
            ["show", "--space", "tiny.yaml", "--gpu", "a6000", "--results", ESCAPES],
            ["gpus", ESCAPES],
            ["models", ESCAPES],
            ["spaces", ESCAPES],
            [ESCAPES],
            ["best", f"--{ESCAPES}"],
        ],
        ids=lambda words: " ".join(words[:1] + words[-2:-1]).encode("ascii", "replace").decode(),
    )
    def test_on_the_command_line(self, folder, capsys, arguments):
        assert run(arguments) in (2, 3)
        captured = capsys.readouterr()
        assert captured.err
        assert is_plain(captured.out + captured.err)

    def test_in_the_message_and_settings_of_a_trial(self, folder, capsys):
        import dataclasses

        record = make_trial(folder, 30, 200, micro_batch=4, precision="bf16")
        record = dataclasses.replace(
            record,
            trial_id=f"run9-{ESCAPES}",
            outcome=dataclasses.replace(record.outcome, message=ESCAPES),
            device=ESCAPES,
            versions={ESCAPES: ESCAPES, **record.versions},
        )
        with ResultsFolder(Path("results"), "tiny", "a6000").writer() as writer:
            writer.append(record)
        assert run(["show", "--space", "tiny.yaml", "--gpu", "a6000", record.trial_id]) == 0
        text = capsys.readouterr().out
        assert is_plain(text)
        assert "\\x1b[31mred" in text


def test_no_command_prints_text_past_the_one_place_that_makes_it_safe():
    """`click.echo` would hand a name to the terminal as it is; `render.echo` spells it out."""
    own = {
        "render.py",  # the place
        "__init__.py",  # click's help
        "verdict.py",  # lines that are coloured after they were spelled out
        "progress.py",  # the return to the start of a line
        "results.py",  # a file for another tool
    }
    found = {p.name for p in (ROOT / "tuner").rglob("*.py") if "click.echo(" in p.read_text()}
    assert found == own


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_screen_breaks_prose_between_words_and_never_a_command(columns):
    command = "tuner check --gpu rtx4090 --headroom 5% -- torchrun --nproc-per-node 2 train.py"
    quoted = "`tuner search --space qlora27b --gpu a6000`"
    long = f"unknown: {'what it depends on is known only when it runs, ' * 4}or {quoted}"
    lines = wrapped(f"{long}\n  hint: run it: {command}", columns).split("\n")
    assert " ".join(" ".join(lines).split()) == f"{long} hint: run it: {command}"
    assert any(command in line for line in lines)
    assert any(quoted in line for line in lines)
    assert all(len(line) <= columns for line in lines if command not in line)
