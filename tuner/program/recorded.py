"""What a program gives its trainer, recorded: it runs with stand-ins, in a process of its own.

A value is unknown if it differs between runs in which the stand-ins answered differently.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.core.environment import LEAST_CHARS, masked, names_secret, your_python
from tuner.core.errors import InputError, TunerError, UnsupportedError
from tuner.core.gpu import Gpu
from tuner.program.edit.notebook import code_cells
from tuner.program.edit.source import NOTEBOOK
from tuner.program.program import Program, read_program, starts_of
from tuner.program.releases import classes, library, releases
from tuner.program.sources import SOURCES

SECONDS = 10.0
MEMORY_BYTES = 2 * 2**30
SEEDS = 6
PLACEHOLDER = "placeholder-for-a-secret"
"""Takes the place of tokens and passwords in the environment of the program."""

_MOST_BYTES = 64 * 2**20
_TAIL = 8192
_GRACE_S = 2.0
"""The child ends by itself when its time is over; it is killed if it has not after this long."""
_EMULATE = "`tuner check` without --predict runs it on an emulated GPU"


@dataclass(frozen=True, slots=True)
class Recorded:
    """The trainings of a program, as plain JSON: T, L, O, V and W of `standins/__init__.py`.

    `unsure` of a training, loop or call has the lines whose answers decide whether it happens; it
    is missing where it certainly does. `releases` are those whose defaults were used, `shipped` the
    libraries among them that are not installed.
    """

    trainings: Sequence[Mapping[str, Any]] = ()
    loops: Sequence[Mapping[str, Any]] = ()
    asked: Sequence[Mapping[str, Any]] = ()
    ended: Mapping[str, Any] | None = None
    files: Sequence[str] = ()
    standins: Sequence[str] = ()
    absent: Sequence[str] = ()
    dropped: Sequence[Mapping[str, Any]] = ()
    releases: Mapping[str, str] = field(default_factory=dict)
    shipped: frozenset[str] = frozenset()


_MOST_KNOWN = 256
_known: dict[tuple[object, ...], tuple[Mapping[str, object], Recorded]] = {}


def record(
    program: Program,
    *,
    gpu: Gpu | None = None,
    count: int = 1,
    seeds: int = SEEDS,
    seconds: float = SECONDS,
) -> Recorded:
    """Runs `program` with stand-ins; it reads the texts of `program.files` in place of its files.

    Raises `InputError` if it ends with an error before it trains, and `UnsupportedError` where this
    can't read it. A process runs the same program once. Of a shell script, the programs that it
    starts are recorded as one, without those that fail.
    """
    starts = [start for start in starts_of(program, gpus=count) if start.main]
    if not starts:
        raise UnsupportedError(
            f"no Python script is seen in: {' '.join(program.command)}",
            hint="name a script or `python -m` a module",
        )
    found, errors = [], []
    for start in starts:
        try:
            found.append(_record(start, gpu, count, seeds, seconds))
        except InputError as error:  # a script may prepare what is not there
            errors.append(error)
    if not any(one.trainings or one.loops for one in found):
        errors += [e for one in found for each in one.dropped if (e := _started(program, each))]
        if errors:
            raise errors[0]
    if not program.shell:
        return found[0]

    def all_of(name: str) -> list[Any]:
        return _unique(each for one in found for each in getattr(one, name))

    script = str(program.files[program.shell].path.resolve())
    return replace(
        found[0],
        trainings=[each for one in found for each in one.trainings],
        loops=[each for one in found for each in one.loops],
        asked=all_of("asked"),
        files=[*all_of("files"), script],
        standins=all_of("standins"),
        absent=all_of("absent"),
        dropped=all_of("dropped"),
    )


def _record(program: Program, gpu: Gpu | None, count: int, seeds: int, seconds: float) -> Recorded:
    request = _request(program, gpu, count, seconds)
    environment = _environment(program)
    key = (json.dumps(request), json.dumps(environment), seeds)
    if key in _known and all(_state(path) == was for path, was in _known[key][0].items()):
        return _known[key][1]
    text = f"{json.dumps(request)[:-1]}, {_libraries()}}}"

    def run(seed: int) -> dict[str, Any]:
        return _run(text, seed, seconds, program.folder, environment)

    runs = [run(0)]
    if runs[0]["asked"]:
        with ThreadPoolExecutor(2) as pool:
            runs += pool.map(run, range(1, seeds))
    known = releases()
    shipped = frozenset(name for name in known if (lib := library(name)) and not lib.is_installed)
    recorded = replace(join(runs), releases=known, shipped=shipped)
    is_empty = not recorded.trainings and not recorded.loops
    if is_empty and (error := _error(program, recorded.ended, seconds)):
        raise error
    if len(_known) >= _MOST_KNOWN:
        del _known[next(iter(_known))]
    _known[key] = {path: _state(path) for path in recorded.files}, recorded
    return recorded


@functools.cache
def _libraries() -> str:
    """The classes and the releases of the libraries that have stand-ins, as a part of JSON."""
    return json.dumps({"classes": classes(SOURCES), "releases": releases()})[1:-1]


def _state(path: str) -> object:
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _request(program: Program, gpu: Gpu | None, count: int, seconds: float) -> dict[str, Any]:
    source = program.files[program.main]
    files = {str(each.path.resolve()): each.data for each in program.sources}
    texts = {path: data.decode() for path, data in files.items() if _bytes(path) != data}
    parts = None
    if source.path.suffix == NOTEBOOK:
        cells = code_cells(source.data.decode(), str(source.path))
        parts = [(f"{source.path}: cell {cell.number}", cell.text) for cell in cells]
    words = program.command[program.command.index(program.main) :]
    return {
        "main": "" if program.is_module else str(source.path.resolve()),
        "module": program.main if program.is_module else "",
        "argv": list(words),
        "folder": str(program.folder.resolve()),
        "parts": parts,
        "files": texts,
        "gpu": gpu and _card(gpu, count),
        "seconds": seconds,
        "memory_bytes": MEMORY_BYTES,
    }


def _bytes(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


def _card(gpu: Gpu, count: int) -> dict[str, Any]:
    return {
        "name": gpu.device_names[0] if gpu.device_names else gpu.name,
        "total_memory_bytes": gpu.memory_bytes,
        "capability": list(gpu.compute_capability),
        "processors": gpu.sm_count,
        "count": count,
        "has_bf16": "bf16" not in gpu.unsupported,
    }


def _environment(program: Program) -> dict[str, str]:
    """The environment of the program, without its secrets."""
    given = {"OPENBLAS_NUM_THREADS": "1", **os.environ, **program.environment}
    for name, value in given.items():
        if names_secret(name) and len(value) >= LEAST_CHARS and not value.isdigit():
            given[name] = PLACEHOLDER
    return {**given, "PYTHONIOENCODING": "utf-8"}


def _run(
    request: str, seed: int, seconds: float, folder: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """The record of one run, also of one that had to be killed."""
    with tempfile.TemporaryDirectory(prefix="tuner-", ignore_cleanup_errors=True) as scratch:
        text = f'{request[:-1]}, "seed": {seed}, "scratch": {json.dumps(scratch)}}}'
        return _ran(text, seconds, folder, environment)


def _ran(
    request: str, seconds: float, folder: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    process = subprocess.Popen(  # noqa: S603
        your_python("tuner.program.standins"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment,
        start_new_session=True,  # a group of its own; nothing on Windows
    )
    tail: deque[bytes] = deque(maxlen=_TAIL // 256)
    found: list[bytes] = []
    readers = [
        threading.Thread(target=_keep, args=(process.stdout, found, _MOST_BYTES)),
        threading.Thread(target=_keep, args=(process.stderr, tail)),
        threading.Thread(target=_send, args=(process.stdin, request)),
    ]
    for reader in readers:
        reader.start()
    try:
        readers[0].join(seconds + _GRACE_S)  # to the end of its output
        is_late = readers[0].is_alive()
    finally:
        _kill(process)
    for reader in readers:
        reader.join()
    said = b"".join(tail).decode("utf-8", "replace").strip()
    try:
        run: dict[str, Any] = json.loads(b"".join(found))
    except ValueError:
        kind = "time" if is_late else "died"
        run = {"ended": {"kind": kind, "text": said.rpartition("\n")[2], "where": None}}
    lists = dict.fromkeys(
        ("trainings", "loops", "asked", "files", "standins", "absent", "dropped"), ()
    )
    run = {**lists, "ended": None, **run}
    if run["ended"] and run["ended"]["kind"] == "exit":
        run["ended"] = {**run["ended"], "said": said[-400:]}
    return run


def _send(pipe: Any, text: str) -> None:
    try:
        with pipe:
            pipe.write(text.encode())
    except OSError:  # it has ended before it read all
        pass


def _keep(pipe: Any, parts: Any, most: float = float("inf")) -> None:
    """Reads all of a pipe, of which `parts` keeps the first `most` bytes."""
    size = 0
    with pipe:
        while part := pipe.read1(256 if most == float("inf") else 2**16):
            size += len(part)
            if size <= most:
                parts.append(part)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the process with all of its group. Its id is not reused: it is not reaped before."""
    if sys.platform == "win32":
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -- joining ------------------------------------------------------------------------------------


def join(runs: Sequence[Mapping[str, Any]]) -> Recorded:
    """One record of several runs: what differs between them is unknown."""
    asked = _unique(each for run in runs for each in run["asked"])
    # An answer with which the program fails is no answer that it gets.
    good = [run for run in runs if (run["ended"] or {"kind": "exit"})["kind"] == "exit"]
    some = good or [run for run in runs if run["trainings"] or run["loops"]] or [runs[0]]
    lines = _unique(each["where"] for each in asked if each["where"])

    def seen(name: str) -> list[Any]:
        return _unique(each for run in some for each in run[name])

    return Recorded(
        _joined_by_place([run["trainings"] for run in some], "trainer", lines),
        _joined_by_place([run["loops"] for run in some], "", lines),
        asked,
        next((run["ended"] for run in some if run["ended"]), None),
        files=seen("files"),
        standins=seen("standins"),
        absent=seen("absent"),
        dropped=seen("dropped"),
    )


def _unique(values: Iterable[Any]) -> list[Any]:
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


def _joined_by_place(runs: Sequence[Any], at: str, lines: list[Any]) -> list[dict[str, Any]]:
    """The trainings of all runs; those of one line belong together, in their order."""
    places: dict[object, list[Any]] = {}
    for run in runs:
        seen: dict[str, int] = {}
        for each in run:
            made = each[at] if at else each
            made = made.get("$object", made) if isinstance(made, dict) else {"class": made}
            place = json.dumps((made.get("class"), made.get("where")))
            seen[place] = seen.get(place, 0) + 1
            places.setdefault((place, seen[place]), []).append(each)
    return [
        {**_joined(same, lines), **({"unsure": lines} if len(same) < len(runs) else {})}
        for same in places.values()
    ]


_MISSING = {"$missing": True}


def _joined(values: Sequence[Any], lines: list[Any], name: str = "") -> Any:
    """The value that all runs agree in; else what they agree in of it, and the rest unknown."""
    first = values[0]
    if len({json.dumps(value, sort_keys=True) for value in values}) == 1:  # 1 is not True
        return first
    if name == "where":
        return first
    if name in ("calls", "callbacks") and all(isinstance(value, list) for value in values):
        return _joined_by_place(values, "", lines)
    if all(isinstance(value, dict) and "$unknown" not in value for value in values) and (
        _MISSING not in values and len({_kind(value) for value in values}) == 1
    ):
        return {
            key: _joined([value.get(key, _MISSING) for value in values], lines, key)
            for key in {key: None for value in values for key in value}
        }
    if all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [_joined(one, lines) for one in zip(*values, strict=True)]
    known = [value for value in values if isinstance(value, dict) and "$unknown" in value]
    what = known[0]["$unknown"] if known else f"{name or 'value'} differs with the answers"
    own = [place for value in known for place in value["where"]]
    return {"$unknown": what, "where": _unique([*own, *lines])}


def _kind(value: Mapping[str, Any]) -> object:
    """Only objects of the same class have settings that can be compared."""
    return value.get("class"), value.get("$name"), "$object" in value


# -- errors -------------------------------------------------------------------------------------


def _error(program: Program, ended: Any, seconds: float) -> TunerError | None:
    """The error of a program that ended before it trained; None if it just had nothing to do."""
    if ended is None:
        return None
    kind, text, where = ended["kind"], masked(str(ended["text"])), ended["where"]
    title = Path(program.main).name
    at = f"{_shown(where, program)}: " if where else f"{title}: "
    if kind == "exit":
        if text in ("", "0", "None"):
            return None
        last = masked(str(ended.get("said", ""))).rpartition("\n")[2]
        why = last if text.isdigit() and last else f"it exits with {text}"
        return InputError(f"{at}{why}", hint="pass the arguments that it needs")
    if kind == "error":
        return InputError(
            f"{at}{text}",
            hint="make the program start as it is, or name its settings with --set and --model",
        )
    reasons = {
        "time": f"no training is seen within {seconds:g} s",
        "memory": f"it needs more than {MEMORY_BYTES // 2**30} GiB before it trains",
        "refused": f"{text} is refused when a program is only read",
        "died": f"its process died when it was read{f': {text}' if text else ''}",
    }
    return UnsupportedError(f"{at}{reasons[kind]}", hint=_EMULATE)


def _started(program: Program, dropped: Mapping[str, Any]) -> InputError | None:
    """The error of a program that has another one train, by the command that it didn't start."""
    words = dropped.get("words", ())
    try:
        started = read_program(words, program.folder, is_run=False)
    except TunerError:
        return None
    if not (started.main or started.shell or started.trainer):
        return None
    return InputError(
        f"{_shown(dropped['where'], program)}: the training is another program, which this one "
        f"starts: {shlex.join(words)}",
        hint="name that command after --",
    )


def _shown(where: Mapping[str, Any], program: Program) -> str:
    file = str(where["file"])
    near = os.path.relpath(file, program.folder.resolve()) if Path(file).is_absolute() else file
    return f"{file if near.startswith('..') else near}:{where['line']}"
