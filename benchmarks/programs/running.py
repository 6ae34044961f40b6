"""Runs one program on its emulated GPU, and keeps what came of it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.programs.catalogue import Program
from tuner.emulator import Machine
from tuner.emulator.emulation import Emulation
from tuner.space.gpus import get_gpu

STEPS = 3
# Which of the modules are missing, and the versions of the packages.
_ASK = """
import importlib.util, json, sys
from importlib.metadata import version
modules, packages = json.loads(sys.argv[1])
missing = [name for name in modules if importlib.util.find_spec(name) is None]
print(json.dumps([missing, {} if missing else {name: version(name) for name in packages}]))
"""


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one program; times in seconds, memory in bytes."""

    program: str
    title: str
    gpu: str
    gpus: int
    ended: str
    steps: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    step_s: float | None = None
    took_s: float = 0.0
    unknown_calls: dict[str, int] = field(default_factory=dict)
    unknown_values: dict[str, int] = field(default_factory=dict)
    output: list[str] = field(default_factory=list)
    """The last lines that it printed, for those who look for a cause."""

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return asdict(self)


def run(program: Program, model: Path, *, python: str, tiny: bool, timeout_s: float) -> Row:
    """Run it until it took three optimizer steps; it writes into a folder of its own."""
    missing, versions = _asked(program, python)
    first = (program.name, program.title, program.gpu, program.gpus)
    if missing:
        return Row(*first, "skipped", reason=f"not installed: {program.install}")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output"
        # The program's folder for what it writes; `emulate` starts it where this process is.
        command = ["env", "-C", folder, *program.command(python, model, tiny=tiny)]
        with log.open("w", encoding="utf-8") as output:
            found = _emulated(command, program, output, timeout_s)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]
    use = max(found.devices, key=lambda one: one.peak_allocated_bytes, default=None)
    in_time = found.steps >= STEPS or found.duration_s < timeout_s
    return Row(
        *first,
        ended=found.ended if in_time else "timeout",
        steps=found.steps,
        versions={"torch": found.torch, **versions},
        reason=_reason(found) if in_time else f"not {STEPS} steps within {timeout_s:.0f} s",
        peak_allocated_bytes=use.peak_allocated_bytes if use else 0,
        peak_reserved_bytes=use.peak_reserved_bytes if use else 0,
        step_s=found.time.step_s if found.time else None,
        took_s=found.duration_s,
        unknown_calls=dict(found.unknown_calls),
        unknown_values=_unknown_values(found),
        output=lines,
    )


def _unknown_values(found: Emulation) -> dict[str, int]:
    """By operator, how often a size rests on what nobody knows, or the program read it.

    Even loads of experts are left out, and so are numbers that a program logs.
    """
    return {
        one.operator: one.times
        for one in found.unknown_values
        if one.kind == "unknown" or (one.decides_shape and one.kind != "assumed")
    }


def _emulated(command: list[str], program: Program, output: Any, timeout_s: float) -> Emulation:
    machine = Machine(get_gpu(program.gpu), program.gpus, all_ranks=True)
    return machine.run(command, steps=STEPS, timeout_s=timeout_s, output=output)


def _asked(program: Program, python: str) -> tuple[list[str], dict[str, str]]:
    ran = subprocess.run(
        [python, "-c", _ASK, json.dumps([program.modules, program.packages])],
        capture_output=True,
        text=True,
        check=True,
    )
    missing, versions = json.loads(ran.stdout)
    return missing, versions


def _reason(found: Emulation) -> str:
    """Why it did not end after its steps, or what the emulator did not know."""
    said = []
    if found.error is not None:
        at = f" at {found.error.line}" if found.error.line else ""
        said.append(f"{found.error.type}{at}: {found.error.message.splitlines()[0][:200]}")
    elif found.ended not in {"steps", "end"}:
        said.append(f"{found.ended}, exit status {found.exit_status}")
    for kind, names in (("call", found.unknown_calls), ("value", _unknown_values(found))):
        if names:
            said.append(f"unknown {kind}s: {', '.join(sorted(names))}")
    return "; ".join(said)
