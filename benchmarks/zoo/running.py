"""Runs one program on its emulated GPU, and keeps what came of it."""

from __future__ import annotations

import datetime
import fcntl
import json
import resource
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.environments import named, offer, repository, source
from benchmarks.zoo import data, models
from benchmarks.zoo.entries import PROGRAMS, Entry
from tuner.emulator import Machine
from tuner.emulator.emulation import Emulation
from tuner.space.gpus import get_gpu

STEPS = 3
RESULTS = Path(__file__).with_name("results.jsonl")
_NOT_KEPT = ("kind", "arithmetic_gib", "output")
NEAR = 0.10
"""An emulated peak that is this far from the arithmetic needs an explanation."""

# The versions of packages, and None for those that are missing.
_ASK = """
import importlib.metadata, json, sys
def version(name):
    try: return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: return None
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one program; times in seconds, memory in bytes."""

    name: str
    date: str
    versions: dict[str, str]
    ended: str
    kind: str = ""
    """answered, or the kind of failure: set-up, not emulated, unknown, timeout, wrong.

    It is judged by the entry as it is now, and not kept.
    """
    fits: bool | None = None
    steps: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    device_bytes: int = 0
    step_s: float | None = None
    took_s: float = 0.0
    processor_s: float = 0.0
    reason: str = ""
    arithmetic_gib: float | None = None
    breakdown: dict[str, int] = field(default_factory=dict)
    unknown_calls: dict[str, int] = field(default_factory=dict)
    unknown_values: dict[str, int] = field(default_factory=dict)
    output: list[str] = field(default_factory=list)
    """The last lines that it printed, for those who look for a cause; not kept."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are: `base` is the interpreter of the CUDA environment, `sources` repositories.

    `root` has environments, sources, models and data, which are made once.
    """

    root: Path
    base: Path
    sources: Path | None = None


def run(entry: Entry, places: Places, *, tiny: bool = False) -> Row:
    """Run it until it took three optimizer steps; it writes into a folder of its own."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    entry = entry.shrunk() if tiny else entry
    try:
        python, versions = _environment(entry.packages, places)
        filled = _places_of(entry, places, python, tiny=tiny)
    except Exception as error:  # noqa: BLE001 - whatever fails here is the program's set-up
        return Row(entry.name, today, {}, "not run", "set-up", reason=str(error)[-300:])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output"
        work = Path(folder) / "work"
        work.mkdir()
        with log.open("w", encoding="utf-8") as output:
            variables = {**filled.environment, **OFFLINE}
            if entry.before:
                command = ["env", *(f"{k}={v}" for k, v in variables.items()), *filled.before]
                subprocess.run(command, cwd=work, stdout=output, stderr=output, check=False)
            machine = Machine(get_gpu(entry.gpu), entry.gpus, all_ranks=entry.all_ranks)
            found = machine.run(
                filled.command,
                steps=STEPS,
                timeout_s=entry.timeout_s,
                output=output,
                cwd=work,
                environment=variables,
            )
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-60:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    use = max(found.devices, key=lambda one: one.peak_allocated_bytes, default=None)
    row = Row(
        entry.name,
        today,
        {"torch": found.torch, **versions},
        ended=found.ended,
        kind="",
        fits=found.fits,
        steps=found.steps,
        peak_allocated_bytes=use.peak_allocated_bytes if use else 0,
        peak_reserved_bytes=use.peak_reserved_bytes if use else 0,
        device_bytes=found.used_bytes,
        step_s=found.time.step_s if found.time else None,
        took_s=round(found.duration_s, 1),
        processor_s=round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        reason=_reason(found),
        arithmetic_gib=None if tiny else entry.expected.allocated_gib,
        breakdown=dict(use.breakdown) if use else {},
        unknown_calls=dict(found.unknown_calls),
        unknown_values=_unknown_values(found),
        output=lines,
    )
    return judged(row, entry)


OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TRACKIO_MODE": "disabled",
    "DO_NOT_TRACK": "1",
}


def judged(row: Row, entry: Entry) -> Row:
    """The row with the kind of its end, by what the entry expects."""
    return replace(row, kind=_kind(row, entry), arithmetic_gib=entry.expected.allocated_gib)


def _kind(row: Row, entry: Entry) -> str:
    expected = entry.expected
    if row.ended == "not run":
        return "set-up"
    if row.ended == "timeout":
        return "timeout" if row.fits is None else _right(row, entry)
    if row.ended in {"unsupported", "crash", "fault"}:
        return "not emulated"
    if row.ended == "error" or (row.ended == "end" and not row.steps):
        return "not emulated" if row.unknown_calls else "set-up"
    if row.ended != expected.ended and "oom" in {row.ended, expected.ended}:
        return "wrong"
    return _right(row, entry)


def _right(row: Row, entry: Entry) -> str:
    if row.fits is None or row.unknown_calls:
        return "unknown"
    if row.ended == "oom" or entry.expected.why:
        return "answered"
    difference = difference_of(row, entry)
    if difference is None:  # nobody has reckoned it yet
        return "unknown"
    return "answered" if abs(difference) <= NEAR else "wrong"


def difference_of(row: Row, entry: Entry) -> float | None:
    """The emulated peak over the arithmetic, minus 1; None without one of both."""
    reckoned = entry.expected.allocated_gib
    if not reckoned or not row.peak_allocated_bytes:
        return None
    return row.peak_allocated_bytes / 2**30 / reckoned - 1


def kept() -> dict[str, Row]:
    """The newest row of each program."""
    if not RESULTS.exists():
        return {}
    lines = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
    return {line["name"]: Row(**line) for line in lines}


def keep(row: Row) -> None:
    """Put a row in the place of the program's older one; the others stay as they are."""
    with RESULTS.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # programs may run side by side
        rows = {**kept(), row.name: row}
        plain = [
            {name: value for name, value in asdict(one).items() if name not in _NOT_KEPT}
            for _, one in sorted(rows.items())
        ]
        file.truncate(0)
        file.write("".join(json.dumps(one) + "\n" for one in plain))


def _environment(packages: tuple[str, ...], places: Places) -> tuple[Path, dict[str, str]]:
    """The interpreter that has these packages, and their versions: the base's if it has them."""
    pins = {one.partition("[")[0].partition("=")[0]: one.partition("==")[2] for one in packages}
    python, versions = places.base, _versions(places.base, pins)
    if any(versions[name] != version.lstrip("=") for name, version in pins.items()):
        python = named(packages, places.base).make(places.root / "environments")
        versions = _versions(python, pins)
    return python, {name: version or "missing" for name, version in versions.items()}


def _versions(python: Path, pins: Mapping[str, str]) -> dict[str, str | None]:
    command = [str(python), "-c", _ASK, *pins]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, str | None] = json.loads(ran.stdout)
    return found


def _places_of(entry: Entry, places: Places, python: Path, *, tiny: bool) -> Entry:
    """The entry with paths in place of what stands for them."""
    paths: dict[str, Any] = {"python": python, "here": PROGRAMS, "bin": python.parent}
    root = places.root
    if entry.needs_source:
        if not entry.is_repository:
            paths["source"] = source(root, entry.repository, entry.commit_or_version)
        else:
            commit = entry.commit_or_version
            paths["source"] = repository(root, entry.repository, commit, places.sources)
    if entry.model is not None:
        folder = root / "models"
        folder.mkdir(parents=True, exist_ok=True)
        paths["model"] = models.make(entry.model, folder, tiny=tiny, python=python)
    if entry.data is not None:
        paths["data"] = data.make(entry.data, root / "data")
    hub = root / "hub"
    for model in entry.hub:
        offer(hub, model)

    def fill(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_fill(one, paths) for one in texts)

    variables = {name: _fill(value, paths) for name, value in entry.environment.items()}
    return entry.model_copy(
        update={
            "command": fill(entry.command),
            "before": fill(entry.before),
            "environment": {"HF_HOME": str(hub), **variables},
        }
    )


def _fill(text: str, paths: Mapping[str, Any]) -> str:
    for name, path in paths.items():
        text = text.replace(f"{{{name}}}", str(path))
    return text


def _unknown_values(found: Emulation) -> dict[str, int]:
    """By operator, how often a size rests on what nobody knows, or the program read it.

    Even loads of experts are left out, and so are numbers that a program logs.
    """
    return {
        one.operator: one.times
        for one in found.unknown_values
        if one.kind == "unknown" or (one.decides_shape and one.kind != "assumed")
    }


def _reason(found: Emulation) -> str:
    """Why it did not end after its steps, or what the emulator did not know."""
    said = []
    if found.error is not None:
        at = f" at {found.error.line}" if found.error.line else ""
        text = (found.error.message.strip() or " ").splitlines()[0][:200]
        said.append(f"{found.error.type}{at}: {text}")
    elif found.ended not in {"steps", "end"}:
        said.append(f"{found.ended} after {found.duration_s:.0f} s, exit {found.exit_status}")
    for kind, names in (("call", found.unknown_calls), ("value", _unknown_values(found))):
        if names:
            said.append(f"unknown {kind}s: {', '.join(sorted(names))}")
    return "; ".join(said)
