"""Runs a row's program on its emulated GPU, and keeps what came of it."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.predictions import GPUS
from benchmarks.accuracy.rows import Row
from benchmarks.emulated_runs.environments import Environment, offer
from benchmarks.emulated_runs.program import Program, measured
from tuner.core.meanwhile import environment
from tuner.emulator import Machine
from tuner.space.gpus import get_gpu

TIME_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one row: GiB by quantity, or why there is none."""

    row: int
    environment: str
    emulated: dict[str, float]
    measured: dict[str, float]
    torch: str
    note: str
    unknown_calls: dict[str, int]
    duration_s: float
    failure: str = ""


def run(row: Row, program: Program, root: Path, made: Environment) -> Outcome:
    """Run the program of a row in an environment; a failure of it is an outcome too."""
    gpu, values = measured(row)
    usual = program.environment(row)
    note = made.note if made is usual else f"{made.name} in place of {usual.name}"
    python = made.make(root)
    offer(root / "models", row.model)
    offline = {"HF_HOME": str(root / "models"), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder, environment(offline):
        results = Path(folder) / "results"
        results.mkdir()
        command = [str(python), *program.command(row, root, results)]
        with (Path(folder) / "printed").open("w+", encoding="utf-8") as output:
            machine = Machine(get_gpu(gpu, extra=GPUS))
            found = machine.run(command, steps=0, timeout_s=TIME_LIMIT_S, output=output)
            output.seek(0)
            printed = output.read()
        failure, emulated = "", {}
        try:
            emulated = dict(program.read(row, printed, results))
        except ValueError as error:
            said = found.error.message if found.error else printed[-400:]
            failure = f"{error}; {found.ended}: {said}"
    return Outcome(
        row=row.number,
        environment=made.name,
        emulated=emulated,
        measured=dict(values),
        torch=found.torch,
        note=note,
        unknown_calls=dict(found.unknown_calls),
        duration_s=found.duration_s,
        failure=failure,
    )


def save(outcome: Outcome, path: Path) -> None:
    """Add an outcome to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")


def saved(path: Path) -> dict[tuple[int, str], Outcome]:
    """The newest outcome of each row and environment in such a file."""
    if not path.exists():
        return {}
    lines: Iterator[dict[str, Any]] = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {(line["row"], line["environment"]): Outcome(**line) for line in lines}
