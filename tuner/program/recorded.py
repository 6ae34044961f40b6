"""Records what a program gives its trainer: it runs with stand-ins, in a process of its own.

A value is unknown if it differs between runs in which the stand-ins answered differently.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.core.environment import LEAST_CHARS, masked, names_secret, your_python
from tuner.core.errors import InputError, TunerError, UndecidedError, UnsupportedError
from tuner.core.gpu import Gpu
from tuner.program.edit.notebook import code_cells
from tuner.program.edit.source import NOTEBOOK
from tuner.program.launch import read_launch
from tuner.program.places import Places
from tuner.program.program import Program, beside, read_program
from tuner.program.releases import RENAMED, classes, exports, releases
from tuner.program.sources import SOURCES
from tuner.program.standins import PLACEHOLDER
from tuner.space.models.catalogue import entry_like

SECONDS = 10.0
MEMORY_BYTES = 2 * 2**30
SEEDS = 6
MOST_BRANCHES = 8
"""Further runs, in which single questions are answered otherwise."""

_GRACE_S = 2.0
_MOST_KNOWN = 64
_MOST_KEYS = 12
_KEY_ERROR = re.compile(r"KeyError: '(.*)'$")
_HINTS = {
    "exit": "pass the arguments that it needs",
    "error": "correct it so that the program starts; its arguments go behind --",
}
_LACKS_ARGUMENT = "IndexError: list index out of range", "argv["
"""The end of a program that gets fewer arguments than it reads, and what the line has."""
_OF_STANDINS = re.compile(r"\bUnknown\b|'\*\*'|<unknown:|\bTooLong\b")
"""In the text of an error: a value that only the real library knows, or a time limit of ours."""
_OF_ANSWERS = re.compile(
    r"(raise|assert|if)\b|.*\b(IndexError|ZeroDivisionError|m(in|ax)\(\) .*empty|Sample larger)"
)
"""A line, and the text of its error: the answer of a stand-in may have led there."""
_EMULATE = "`tuner check` without --predict runs it on an emulated GPU"


@dataclass(frozen=True, slots=True)
class Recorded:
    """The trainings of a program, as plain JSON: T, L, O, V and W of `standins/__init__.py`.

    `unsure` of a training, loop or call has the lines whose answers decide whether it happens; it
    is missing where it certainly does.
    """

    trainings: Sequence[Mapping[str, Any]] = ()
    loops: Sequence[Mapping[str, Any]] = ()
    asked: Sequence[Mapping[str, Any]] = ()
    ended: Mapping[str, Any] | None = None
    files: Sequence[str] = ()
    standins: Sequence[str] = ()
    absent: Sequence[str] = ()
    dropped: Sequence[Mapping[str, Any]] = ()
    allocators: Sequence[str] = ()
    """PYTORCH_ALLOC_CONF at the end of each run: yours, the command's or the program's own."""


_LISTS = ("trainings", "loops", "asked", "files", "standins", "absent", "dropped", "allocators")
_known: dict[tuple[str, str, int], tuple[list[object], Recorded]] = {}


def record(
    program: Program, *, gpu: Gpu | None = None, seeds: int = SEEDS, seconds: float = SECONDS
) -> Recorded:
    """Runs `program` with stand-ins; it reads the texts of `program.files` in place of its files.

    It is one of `starts_of`. Raises `InputError` if it ends with an error before it trains, or has
    another program train, and `UnsupportedError` where this can't read it. A process runs the same
    program once.
    """
    if not program.main:
        text = f"no Python script is seen in: {' '.join(program.command)}"
        raise UnsupportedError(text, hint="name a script or `python -m` a module")
    recorded = _recorded(program, gpu, seeds, seconds)
    for dropped in () if recorded.trainings or recorded.loops else recorded.dropped:
        if (error := _started(program, dropped)) is not None:
            raise error
    return recorded


def _recorded(program: Program, gpu: Gpu | None, seeds: int, seconds: float) -> Recorded:
    given = {"OPENBLAS_NUM_THREADS": "1", **os.environ, **_of_rank_0(program)}
    given |= {**program.environment, "PYTHONHASHSEED": "0"}  # sets have one order in all runs
    for name, value in given.items():
        if names_secret(name) and len(value) >= LEAST_CHARS and not value.isdigit():
            given[name] = PLACEHOLDER
    request = json.dumps({**_request(program, gpu), "seconds": seconds})
    key = (request, json.dumps(given), seeds)
    known = _known.get(key)  # other threads keep and forget
    if known is not None and _states(known[1].files) == known[0]:
        return known[1]

    keys: list[str] = []  # that the program takes from a mapping which is unknown
    configs: dict[str, Any] = {}  # of models that it names
    order: list[str] = []  # of its questions

    def run(seed: int, fixed: Mapping[str, Any] | None = None) -> dict[str, Any]:
        own = {"seed": seed, "fixed": fixed or {}, "order": order, "keys": keys, "configs": configs}
        more = f"{json.dumps(own)[1:-1]}, {_libraries()}"
        return _run(f"{request[:-1]}, {more}", seconds, program.folder, given)

    runs = [run(0)]
    while True:
        fails = runs[0]["ended"] and not runs[0]["trainings"] and not runs[0]["loops"]
        lacking = _KEY_ERROR.findall(runs[0]["ended"]["text"]) if fails else []
        lacking = [key for key in lacking if key not in keys]
        named = {n: entry_like(str(beside(program, n))) for n in runs[0].get("models", ())}
        new = {n: {**entry.config} for n, entry in named.items() if entry and n not in configs}
        if not new and (not lacking or len(keys) >= _MOST_KEYS):
            break
        keys += lacking
        configs |= new
        runs = [run(0)]
    order += dict.fromkeys(what for what, *_ in runs[0].get("branches", ()))
    is_late = (runs[0]["ended"] or {}).get("kind") == "time"
    if not is_late or runs[0]["trainings"]:  # a loop of one's own that takes its time
        if runs[0]["asked"]:
            with ThreadPoolExecutor(2) as pool:
                runs += pool.map(run, range(1, seeds))
        if seeds > 1:
            runs += _other_branches(runs, run)
    recorded = join(runs)
    is_empty = not recorded.trainings and not recorded.loops
    if is_empty and (error := _error(program, recorded, seconds, gpu)):
        raise error
    if len(_known) > _MOST_KNOWN:
        _known.clear()
    _known[key] = _states(recorded.files), recorded
    return recorded


def _other_branches(
    runs: Sequence[dict[str, Any]], run: Callable[[int, Mapping[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Runs in which a line asks a question that had one answer there, and gets the other.

    What stands behind several conditions is reached so, each of which is met in some run. A line
    that has had both answers gets them beside other sizes too, as far as `MOST_BRANCHES` go. In a
    run that ends well an answer counts that another such run has had: with it others may fail.
    """
    tried = [(seed, dict[str, Any](), found) for seed, found in enumerate(runs)]
    seen = {
        well: {key for found in runs if _ends_well(found) or not well for key in _answered(found)}
        for well in (True, False)
    }
    for numbers in (False, True):
        while len(tried) < len(runs) + MOST_BRANCHES:
            asked = (
                (well, str([what, where, not answer, *([found["numbers"]] if numbers else [])]),
                 seed, {**fixed, what: not answer})
                for well in (True, False)
                for seed, fixed, found in tried
                if _ends_well(found) is well
                for what, where, answer in found.get("branches", ())
            )  # fmt: skip
            new = next((one for one in asked if one[1] not in seen[one[0]]), None)
            if new is None:
                break
            well, key, seed, fixed = new
            other = run(seed, fixed)
            tried.append((seed, fixed, other))
            seen[well].add(key)
            for each in {False, _ends_well(other)}:
                seen[each] |= _answered(other)
    times = Counter(place for *_, found in tried for place in _reached(found))
    again = [(seed, fixed) for seed, fixed, found in tried if 1 in map(times.get, _reached(found))]
    # A value that one run alone has, has nothing to differ from: the same answers, other sizes.
    others = [run(seed + SEEDS, fixed) for seed, fixed in again]
    return [*(found for *_, found in tried[len(runs) :]), *others]


def _ends_well(run: Mapping[str, Any]) -> bool:
    return not run["ended"] or run["ended"]["kind"] == "exit"


def _reached(run: Mapping[str, Any]) -> set[str]:
    """The places of a run's trainings and of their calls; none of one that fails."""
    rows = run["trainings"] if _ends_well(run) else ()
    found = [each for row in rows for each in (row["trainer"], *row["calls"])]
    return {json.dumps((each["class"], each["where"])) for each in found}


def _answered(run: Mapping[str, Any]) -> set[str]:
    """The questions of each line with their answers; also with the run's sizes beside them."""
    branches = run.get("branches", ())
    return {str(each) for one in branches for each in (one, [*one, run["numbers"]])}


def _of_rank_0(program: Program) -> dict[str, str]:
    """The variables that a launcher sets for the first of its processes."""
    launch = read_launch(program)
    if not launch.starts_ranks:
        return {}
    processes = launch.processes or 1
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(processes * launch.machines),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


@functools.cache
def _libraries() -> str:
    """The part of a request that is the same for every program, without its brackets."""
    found = {"classes": classes(SOURCES), "releases": releases(), "renamed": RENAMED}
    found["exports"] = exports()
    return json.dumps(found)[1:-1]


def _states(files: Iterable[str]) -> list[object]:
    found = [path.stat() if (path := Path(file)).exists() else None for file in files]
    return [one and (one.st_mtime_ns, one.st_size, one.st_ino) for one in found]


def _request(program: Program, gpu: Gpu | None) -> dict[str, Any]:
    source, changed, parts = program.files[program.main], {}, None
    if source.path.suffix == NOTEBOOK:
        cells = code_cells(source.data.decode(), str(source.path))
        parts = [(f"{source.path}: cell {cell.number}", cell.run) for cell in cells]
        words = [Path(word).name for word in program.command]
        if "papermill" in words and any(word.startswith("-") for word in words):
            how = "set them in the notebook, and name that alone"
            raise UnsupportedError("parameters of papermill aren't read", hint=how)
    for each in program.sources:
        if not each.path.is_file() or each.path.read_bytes() != each.data:
            changed[str(each.path.resolve())] = each.data.decode()
    card = gpu and {
        "name": next(iter(gpu.device_names), gpu.name), "capability": gpu.compute_capability,
        "total_memory_bytes": gpu.memory_bytes, "processors": gpu.sm_count, "count": 1,
        "has_bf16": "bf16" not in gpu.unsupported,
    }  # fmt: skip
    return {
        "main": "" if program.is_module else str(source.path.resolve()),
        "module": program.main if program.is_module else "",
        "argv": program.command[program.command.index(program.main) :],
        "folder": str(program.folder.resolve()),
        "parts": parts, "files": changed, "gpu": card, "memory_bytes": MEMORY_BYTES,
    }  # fmt: skip


def _run(request: str, seconds: float, folder: Path, given: Mapping[str, str]) -> dict[str, Any]:
    """The record of one run, also of one that had to be killed."""
    kind, record = "died", b""
    made = tempfile.TemporaryDirectory(prefix="tuner-", ignore_cleanup_errors=True)
    with made as scratch, tempfile.TemporaryFile() as output:
        with contextlib.suppress(subprocess.TimeoutExpired):
            kind = "time"
            record = subprocess.run(  # noqa: S603
                your_python("tuner.program.standins"),
                input=f'{request}, "scratch": {json.dumps(scratch)}}}'.encode(),
                stdout=subprocess.PIPE, stderr=output, cwd=folder, check=False,
                env={**given, "PYTHONIOENCODING": "utf-8"}, start_new_session=True,
                timeout=seconds + _GRACE_S,
            ).stdout  # fmt: skip
            kind = "died"
        output.seek(max(0, output.seek(0, os.SEEK_END) - 400))
        last = output.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
    run: dict[str, Any] = dict.fromkeys(_LISTS, ())
    run["ended"] = {"kind": kind, "text": last, "where": None}
    with contextlib.suppress(ValueError):
        run |= json.loads(record)
    if run["ended"]:
        run["ended"]["said"] = last
    return run


# -- joining ------------------------------------------------------------------------------------


def join(runs: Sequence[Mapping[str, Any]]) -> Recorded:
    """One record of several runs: what differs between them is unknown."""
    # An answer with which the program fails is no answer that it gets.
    good = [run for run in runs if _ends_well(run)]
    some = good or [run for run in runs if run["trainings"] or run["loops"]] or [runs[0]]
    found: dict[str, Any] = {
        n: _unique(each for run in some for each in run[n]) for n in _LISTS[3:]
    }
    for loop in (loop for run in some for loop in run["loops"]):
        passes = loop["rounds"]  # the rest of an epoch may be a step of its own
        loop["rounds"] = max(passes, key=lambda each: (passes.count(each), each), default=None)
    for name in ("trainings", "loops"):
        found[name] = _joined_by_place([run[name] for run in some], some)
    ended = next((run["ended"] for run in some if run["ended"]), None)
    found["asked"] = _unique(each for run in runs for each in run["asked"])
    return Recorded(**found, ended=ended)


def _unique(values: Iterable[Any]) -> list[Any]:
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


def _deciding(values: Sequence[Any], runs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The lines of the questions whose answers tell the values of these runs apart; else of all."""
    answers = [{str(what)[:200]: its for what, _, its in run.get("branches", ())} for run in runs]
    texts = [json.dumps(value, sort_keys=True) for value in values]
    lines = {one["what"]: one["where"] for run in runs for one in run["asked"] if one["where"]}
    pairs = {what: {*zip((its.get(what) for its in answers), texts, strict=True)} for what in lines}
    alone = [w for w, found in pairs.items() if len({its for its, _ in found}) == len(found)]
    return _unique(map(lines.get, alone or lines))


def _joined_by_place(lists: Sequence[Any], runs: Sequence[Any]) -> list[dict[str, Any]]:
    """The trainings of all runs; those of one line belong together, in their order."""
    places: dict[object, dict[int, Any]] = {}
    for index, rows in enumerate(lists):
        seen: list[str] = []
        for each in rows:
            made = each.get("trainer", each)
            made = made.get("$object", made) if isinstance(made, dict) else {"class": made}
            seen.append(json.dumps((made.get("class"), made.get("where"))))
            places.setdefault((seen[-1], seen.count(seen[-1])), {})[index] = each
    found = []
    for same in places.values():
        found.append(_joined([*same.values()], [runs[index] for index in same]))
        if len(same) < len(runs):
            happens = [index in same for index in range(len(runs))]
            found[-1] = {**found[-1], "unsure": _deciding(happens, runs)}
    return found


_MISSING = {"$missing": True}


def _joined(values: Sequence[Any], runs: Sequence[Mapping[str, Any]], name: str = "") -> Any:
    """The value that all runs agree in; else what they agree in of it, and the rest unknown."""
    first = values[0]
    if name == "where" or len(_unique(values)) == 1:  # 1 is not True
        return first
    if all(isinstance(value, list) for value in values):
        if name == "calls":
            return _joined_by_place(values, runs)
        if len({len(value) for value in values}) == 1:
            return [_joined(one, runs) for one in zip(*values, strict=True)]
    known = [value for value in values if isinstance(value, dict) and "$unknown" in value]
    # Only objects of the same class have settings that can be compared.
    if not known and all(isinstance(value, dict) and value != _MISSING for value in values):
        kinds = {(value.get("class"), value.get("$name"), "$object" in value) for value in values}
        if len(kinds) == 1:
            keys = {key: each for value in values for key, each in value.items()}
            has_lines = name == "assigned"  # a value, and the line that sets it
            lacks = {k: [_MISSING, v[1]] if has_lines else _MISSING for k, v in keys.items()}
            below = {k: [v.get(k, lacks[k]) for v in values] for k in keys}
            found = {k: _joined(v, runs, name if k[0] == "$" else k) for k, v in below.items()}
            one = found.get("$object", found)  # of several classes it is unknown
            return one if "$unknown" in one else found
    what = known[0]["$unknown"] if known else f"{name or 'value'} differs with the answers"
    own = [place for value in known for place in value["where"]]
    return {"$unknown": what, "where": _unique([*own, *_deciding(values, runs)])}


# -- errors -------------------------------------------------------------------------------------


def _error(program: Program, run: Recorded, seconds: float, gpu: Gpu | None) -> TunerError | None:
    """The error of a program that ended before it trained; None if it just had nothing to do."""
    if (ended := run.ended) is None:
        return None
    kind, text, last = ended["kind"], masked(str(ended["text"])), masked(str(ended.get("said", "")))
    if kind == "exit" and text in ("", "0", "None"):
        return None
    says = {
        "exit": last if text.isdigit() and last else f"it exits with {text}",
        "time": f"no training is seen within {seconds:g} s",
        "memory": f"it needs more than {MEMORY_BYTES // 2**30} GiB before it trains",
        "refused": f"{text} is refused when a program is only read",
        "died": f"its process died when it was read{f': {text}' if text else ''}",
    }
    places, hint = Places(program), _HINTS.get(kind, _EMULATE)
    where = places.at(ended["where"]) if ended["where"] else Path(program.main).name
    error = InputError if kind in _HINTS else UnsupportedError
    if text == _LACKS_ARGUMENT[0] and _LACKS_ARGUMENT[1] in places.line(ended["where"]):
        text = "the program needs an argument that the command lacks"
        start = shlex.join(["tuner", "check", *(["--gpu", gpu.id] if gpu else []), "--"])
        hint = f"pass it: {start} {shlex.join(program.typed)} ARGUMENT"
    is_made_up = run.asked and _OF_ANSWERS.match(f"{places.line(ended['where']).strip()} {text}")
    if kind == "error" and (is_made_up or _OF_STANDINS.search(text)):
        says[kind] = f"needs a value that only a run knows: {text}"
        error, hint = UndecidedError, _EMULATE
    if program.started_by and text.startswith("FileNotFoundError"):
        error, hint = UnsupportedError, _EMULATE
        text += f": {program.started_by} may make it with a command that isn't run"
    return error(f"{where}: {says.get(kind, text)}", hint=hint)


def _started(program: Program, dropped: Mapping[str, Any]) -> InputError | None:
    """The error of a program that has another one train, by the command that it didn't start."""
    words = dropped.get("words", ())
    try:
        started = read_program(words, program.folder, is_run=False)
    except TunerError:
        return None
    lost = [w for w in words if w.endswith(".py") and not (program.folder / w).exists()]
    if not (started.main or started.shell or started.trainer or lost):
        return None
    lacks = f", and there is no {lost[0]}" if lost else ""
    where = Places(program).at(dropped["where"])
    text = f"the training is another program, which this one starts: {shlex.join(words)}{lacks}"
    return InputError(f"{where}: {text}", hint="name that command after --")
