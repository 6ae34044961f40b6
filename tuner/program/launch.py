"""Starting a program: how its command does it, and how it runs with changed files.

A changed script is compiled from a copy under its own name: folder, arguments and lines of errors
stay. Other changed files are replaced by copies as the program imports or opens them.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from tuner.core.errors import Problem, UnavailableError
from tuner.core.files import scratch_folder
from tuner.core.setup.distributed_knobs import (
    DISTRIBUTED,
    GPUS_PER_TRIAL,
    MACHINES,
    REDUCE_BUCKET,
    RESHARD,
    SYNC,
    ZERO_STAGES,
)
from tuner.program.arguments import EMULATE, file_in, options_of
from tuner.program.edit.notebook import code_cells
from tuner.program.edit.source import NOTEBOOK, PYTHON, SourceFile
from tuner.program.program import Program, tool_words
from tuner.program.trainer import Launch, trainer_named
from tuner.program.trainers import accelerate, deepspeed


def read_launch(program: Program) -> Launch:
    """Reads how `program` is started; unreadable parts become problems."""
    launch = _launch(program)
    visible = program.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return launch
    count = len([device for device in visible.split(",") if device.strip()])
    if launch.processes is None:
        launch.processes = max(1, count)
    elif program.main and not launch.starts_ranks:
        launch.on(max(1, count))
    return launch


def _launch(program: Program) -> Launch:
    words = [Path(word).name for word in program.command]
    place = tool_words(program)
    end = words.index(Path(program.main).name) if program.main else len(words)
    end = place.start if place and not program.main else end
    end -= words[end - 1 : end] in (["-m"], ["--module"])
    for start, word in enumerate(words[:end]):
        module = words[start + 1] if word == "-m" and start + 1 < end else ""
        if word == "torchrun" or module in ("torch.distributed.run", "torch.distributed.launch"):
            options, launch = options_of(program.command[start + 1 : end]), Launch(processes=None)
            per_machine = str(options.get("nproc_per_node", 1))
            if per_machine not in ("gpu", "auto"):  # one for each GPU
                launch.processes = launch.whole("torchrun --nproc-per-node", per_machine)
            machines = str(options.get("nnodes", 1)).rpartition(":")[2]
            launch.set_machines("torchrun --nnodes", machines)
            return launch
        if "accelerate" in (word.removesuffix("-launch"), module.partition(".")[0]):
            return accelerate.launch(program, options_of(program.command[start + 1 : end]))
        if word in ("mpirun", "mpiexec"):
            launch = Launch()
            for name, value in pairwise(words[start:end]):
                if name in ("-np", "-n", "--np"):
                    launch.processes = launch.whole(f"mpirun {name}", value)
            return launch
        if word == "deepspeed":
            return deepspeed.launch(program.command[start + 1 : end])
    tool = trainer_named(program.trainer)
    return tool.launch(program) if tool and tool.launch else Launch(starts_ranks=False)


def ranks_and_knobs(launch: Launch, own: Mapping[str, Any], gpus: int | None) -> dict[str, Any]:
    """Parameters of the ranks: the launcher's, and the program's `own`. Empty on one GPU."""
    ranks = launch.on(gpus)
    said = {name: own[name] for name in (DISTRIBUTED, RESHARD, SYNC, REDUCE_BUCKET) if name in own}
    knobs = {**launch.knobs, **said}
    both = own.get("gradient_checkpointing") and knobs.get("gradient_checkpointing")
    if both:
        text = "and the trainer's own checkpointing are both true, which the trainer refuses"
        launch.problems.append(Problem(text, "accelerate's fsdp activation_checkpointing"))
    if ranks > 1:
        several = {MACHINES: launch.machines} if launch.machines > 1 else {}
        strategy = knobs.get(DISTRIBUTED, "ddp")
        return {**knobs, **several, GPUS_PER_TRIAL: ranks, DISTRIBUTED: strategy}
    if DISTRIBUTED in knobs:
        text = "is of one process: start it with torchrun or accelerate launch"
        if str(knobs[DISTRIBUTED]) in ZERO_STAGES:
            text = f"of one process is not predicted: {EMULATE}"
        if launch.processes is None and gpus is None:
            text = "is of several GPUs: pass their number, e.g. --gpus 8"
        launch.problems.append(Problem(text, str(knobs[DISTRIBUTED])))
    return {name: knobs[name] for name in ("torch_compile",) if name in knobs}


_START = """\
import sys as _sys
with open({start!r}, encoding="utf-8") as _file:
    _start = __import__("json").load(_file)
exec(compile(_start["copies"], "<tuner>", "exec"), {{"COPIES": _start["files"]}})
_sys.argv[0], _sys.path[0] = {name!r}, {folder!r}
if _start["module"]:
    __import__("runpy").run_module(_start["module"], run_name="__main__", alter_sys=True)
else:
    __file__ = {path!r}
    exec(compile(_start["run"], "<tuner>", "exec"))
"""
"""The script that Python runs in place of a changed one."""

_RUN = """\
for _name, _text in _start["parts"]:
    __import__("linecache").cache[_name] = len(_text), None, _text.splitlines(True), _name
for _name, _text in _start["parts"]:
    try:
        _code = __import__("importlib.machinery").machinery.SourceFileLoader(
            "__main__", _name
        ).source_to_code(_text, _name)
    except SyntaxError:
        _code = compile(_text, _name, "exec", _start["flags"], dont_inherit=True)
    _more = eval(_code)
    if _more is not None:
        _loop = globals().get("_loop") or __import__("asyncio").new_event_loop()
        _loop.run_until_complete(_more)
"""
"""Code that runs the parts of a program: no line of it is taken for the program's own."""

_COPIES = """\
import builtins, importlib.machinery, io, os


real_open = io.open
real_code = importlib.machinery.SourceFileLoader.get_code


def copy_of(file):
    if isinstance(file, int):
        return None
    return COPIES.get(os.path.realpath(os.fsdecode(file)))


def opened(file, mode="r", *args, **kwargs):
    copy = copy_of(file) if mode.startswith("r") else None
    return real_open(file if copy is None else copy, mode, *args, **kwargs)


def code(loader, name):
    path = loader.get_filename(name)
    copy = copy_of(path)
    return real_code(loader, name) if copy is None else loader.source_to_code(
        loader.get_data(copy), path
    )


if COPIES:
    io.open = builtins.open = opened
    importlib.machinery.SourceFileLoader.get_code = code
"""
"""Code that opens and imports copies in place of changed files."""

_NOTEBOOK = "def get_ipython():\n    return None\ndisplay = print\n"
"""Names that Jupyter adds to a notebook, as far as a program can provide them."""


@contextlib.contextmanager
def runnable(program: Program) -> Iterator[list[str]]:
    """The command that starts `program`, with copies of the files that it has other texts of."""
    with scratch_folder() as folder:
        changed = [w for w, s in program.files.items() if s.path.read_bytes() != s.data]
        if not program.main and (lost := [w for w in changed if not _is_named(program, w)]):
            raise UnavailableError(
                f"{', '.join(lost)} can't be replaced in a run of {shlex.join(program.command)}",
                hint="name the command of the script itself",
            )
        copied = {
            word: _copy(program.files[word], folder / str(number))
            for number, word in enumerate(changed)
            if word != program.main
        }
        is_script = {word: program.files[word].path.suffix in PYTHON for word in copied}
        read = [word for word in copied if is_script[word] or not _is_named(program, word)]
        inside = read if program.main else []
        main = program.files.get(program.main)
        starts = {}
        if main is not None and (inside or program.main in changed or main.path.suffix == NOTEBOOK):
            replaced = {os.path.realpath(program.files[w].path): copied[w] for w in inside}
            if program.is_module and program.main in changed:
                replaced[os.path.realpath(main.path)] = _copy(main, folder / "module")
            starts[program.main] = _start(program, main, replaced, folder / "start")
        words = {word: copied[word] for word in copied if word not in inside} | starts
        named = ((word, file_in(word)) for word in program.command)
        command = [w.removesuffix(name) + words[name] if name in words else w for w, name in named]
        if program.is_module and program.main in words:
            del command[program.command.index(program.main) - 1]  # the -m before it
        yield command


def _is_named(program: Program, word: str) -> bool:
    return any(file_in(part) == word for part in program.command)


def _copy(source: SourceFile, folder: Path) -> str:
    folder.mkdir()
    copy = folder / source.path.name
    copy.write_bytes(source.data)
    return str(copy)


def _start(program: Program, main: SourceFile, copies: Mapping[str, str], folder: Path) -> str:
    """A script that runs the program's own, with `copies` by path in place of what it reads."""
    folder.mkdir()
    is_module, is_notebook = program.is_module, main.path.suffix == NOTEBOOK
    path, file = main.path.resolve(), folder / "start.json"
    text = main.data.decode("utf-8-sig")
    parts = [(str(path), text)]
    if is_notebook:
        cells = code_cells(text, program.main)
        parts = [("<notebook>", _NOTEBOOK), *((f"{path}[{c.number}]", c.run) for c in cells)]
    told = {
        "module": program.main if is_module else "",
        "parts": [] if is_module else parts,
        "files": copies,
        "copies": _COPIES,
        "run": _RUN,
        "flags": ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if is_notebook else 0,
    }
    file.write_text(json.dumps(told), encoding="utf-8")
    start = folder / f"{path.stem}.py"
    text = _START.format(
        name=str(path) if is_module else program.main,
        folder=str(program.folder.resolve() if is_module else path.parent),
        path=str(path),
        start=str(file),
    )
    start.write_text(text, encoding="utf-8")
    return str(start)
