"""The programs of tests/programs: the commands that start them, and what is expected of each.

tests/programs/expected.txt has a section for each command: the settings that are found, and what
two changes do. `python tests/program_samples.py` prints it anew; every line of it is to be read
before it is kept.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tuner.core.errors import InputError
from tuner.core.records import KnobValue
from tuner.program.changes import change
from tuner.program.program import Program, read_program
from tuner.program.settings import Setting, Settings, settings_of

FOLDER = Path(__file__).with_name("programs")
EXPECTED = FOLDER / "expected.txt"
TOOLS = (
    "axolotl", "llamafactory-cli", "tune", "trl", "accelerate", "deepspeed", "torchrun", "uv",
    "poetry", "python",
)  # fmt: skip


def sections() -> dict[str, str]:
    """By command: its expected section."""
    texts = EXPECTED.read_text(encoding="utf-8").split("==== ")[1:]
    return {text.partition("\n")[0]: text.partition("\n")[2].strip() for text in texts}


def make_tools(folder: Path) -> None:
    """Programs with the names of the trainers, that do nothing."""
    folder.mkdir()
    for name in TOOLS:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)


def program(command: str) -> Program:
    """What `command` starts, in the current folder."""
    return read_program(command.split())


def described(command: str) -> str:
    """The section of a command: its settings, and what two changes do to it."""
    settings = settings_of(program(command))
    lines = [_shown(setting) for setting in settings.values() if setting.is_given]
    if settings.trial.error is not None:
        lines.append(str(settings.trial.error))
    checkpointing = settings.get("gradient_checkpointing")
    other = not (checkpointing is not None and checkpointing.value)
    for values in ({"micro_batch": 3, "grad_accum": 7}, {"gradient_checkpointing": other}):
        lines += ["", " ".join(f"{n}={v}" for n, v in values.items())]
        lines += _changed(settings, values)
    return "\n".join(lines)


def _shown(setting: Setting) -> str:
    value = setting.problem or repr(setting.value)
    return f"{setting.knob} [{setting.name}] {setting.where}: {value}"


def _changed(settings: Settings, values: Mapping[str, KnobValue]) -> list[str]:
    try:
        text = change(settings, values).difference
    except InputError as error:
        return str(error).splitlines()
    lines = text.replace(sys.executable, "python").splitlines()
    return [line for line in lines if line[:1] in "+-" and line[:4] not in ("--- ", "+++ ")]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        make_tools(Path(scratch, "bin"))
        os.environ["PATH"] = f"{scratch}/bin:{os.environ['PATH']}"
        os.chdir(FOLDER)
        for command in sys.argv[1:] or sections():
            print(f"==== {command}\n{described(command)}\n")
