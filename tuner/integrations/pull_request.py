"""Checks the programs of [tool.tuner] at a commit and now: `python -I -m ... COMMIT`.

The Action and the pre-commit hook start it. The settings are those of the commit, and all text is
escaped: a pull request decides neither what is checked nor what is shown. Its lines run, as those
of its tests do, with what the job may do and knows: an event that knows your secrets is refused.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner.core.environment import own_python


def main(commit: str) -> int:
    """Returns 1 if a program no longer fits, or can't be checked."""
    if (event := os.environ.get("GITHUB_EVENT_NAME")) in ("pull_request_target", "workflow_run"):
        sys.exit(
            f"error: {event} has your secrets, and lines of the pull request run; use pull_request"
        )
    rows, failed = ["| program | GPU | before | now |", "|-|-|-|-|"], False
    with tempfile.TemporaryDirectory() as folder:
        before, now = Path(folder, "before"), Path(folder, "now")
        _export(commit, before)
        _export(_git("write-tree").decode().strip(), now)
        project = before / "pyproject.toml"
        known = tomllib.loads(project.read_text("utf-8")) if project.is_file() else {}
        settings = known.get("tool", {}).get("tuner", {})
        for program in settings.pop("programs", []):
            words = shlex.split(program)
            file = next((word for word in words if (now / word).is_file()), "pyproject.toml")
            for gpu in _listed(settings.get("gpu") or sys.exit("error: [tool.tuner] names no gpu")):
                given = {**settings, "gpu": gpu}.items()
                options = [f"--{name}={one}" for name, each in given for one in _listed(each)]
                (was, old), (code, new) = (_check(at, options, words) for at in (before, now))
                bad = code != 0 and (code != was or code not in (1, 4))  # no answer, or another
                failed |= bad
                rows.append(f"| {' | '.join(map(_cell, (program, gpu, old, new)))} |")
                text = f"{program} on {gpu}: {new} (before: {old})"
                place = f"file={_escaped(file, ':,')},title=tuner::{_escaped(text)}"
                on_github = f"::{'error' if bad else 'notice'} {place}"
                print(on_github if "GITHUB_ACTIONS" in os.environ else text)
    if len(rows) == 2:
        print("[tool.tuner] of pyproject.toml names no programs at", commit)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        Path(summary).write_text("\n".join(("<!-- tuner -->", "", *rows, "")), "utf-8")
    return int(failed)


def _git(*words: str) -> bytes:
    command = ["git", "-C", os.environ.get("GITHUB_WORKSPACE", "."), *words]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout  # noqa: S603


def _export(tree: str, folder: Path) -> None:
    """Writes the files of a commit, without its links, which may lead out of `folder`."""
    with tempfile.TemporaryFile() as file:
        file.write(_git("archive", "--format=tar", tree))
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            archive.extractall(folder, [one for one in archive if not one.issym()], filter="data")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check(folder: Path, options: Sequence[str], words: Sequence[str]) -> tuple[int, str]:
    """The exit code of `tuner check`, and its answer."""
    command = own_python("tuner", "check", "--predict", "--no-changes", "--json")
    command += [*options, "--", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603
    if not done.stdout:
        said = re.sub(r"\n  read as .*", "", done.stderr)
        return done.returncode, textwrap.shorten(said, 300, placeholder=" ...")
    found = json.loads(done.stdout)
    used = found["program"]["memory"]["device_bytes"] / 2**30
    return done.returncode, f"{found['verdict']}: {used:.1f} GiB"


def _cell(text: str) -> str:
    """Text that Markdown shows as it is, without links, tables, HTML and mentions."""
    return f"<code>{re.sub('[^a-zA-Z0-9 ]', lambda found: f'&#{ord(found[0])};', text)}</code>"


def _escaped(text: str, more: str = "") -> str:
    return "".join(f"%{ord(c):02X}" if c in f"%\r\n{more}" else c for c in text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
