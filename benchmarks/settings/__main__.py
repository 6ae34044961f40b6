"""Compares predictions from settings with the emulated programs that have them.

    python -m benchmarks.settings
    python -m benchmarks.settings --emulate --python /an/environment/bin/python --only axolotl

Emulated peaks are kept in benchmarks/settings/emulated.json: programs of several environments come
together there. Predictions are made anew each time; rows of a Markdown table are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.settings.cases import CASES, Case
from tuner.app.program_oracle import PredictedProgram, ProgramPredictions
from tuner.core.errors import InputError
from tuner.core.units import GIB
from tuner.emulator import Machine
from tuner.program.launch import read_launch
from tuner.program.program import read_program
from tuner.space.gpus import get_gpu
from tuner.space.models.hollow import is_hollow, write_hollow

EMULATED = Path(__file__).with_name("emulated.json")

STEPS = 2
"""Optimizer steps: the second finds the optimizer's state, and has the peak of all after it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One case: its prediction, or why there is none, and the emulated peak in bytes."""

    case: Case
    found: PredictedProgram | InputError
    emulated_bytes: int

    @property
    def error(self) -> float | None:
        """By how much the prediction is off; None where one of the two is not there."""
        if isinstance(self.found, InputError) or not self.emulated_bytes:
            return None
        return self.found.prediction.memory.peak_allocated_bytes / self.emulated_bytes - 1

    @property
    def line(self) -> str:
        """The row of the table."""
        emulated_gib = f"{self.emulated_bytes / GIB:.3f}" if self.emulated_bytes else "-"
        if isinstance(self.found, InputError):
            reasons = "; ".join(p.message for p in self.found.problems) or self.found.message
            predicted_gib, error = "refused", reasons
        else:
            peak_bytes = self.found.prediction.memory.peak_allocated_bytes
            predicted_gib = f"{peak_bytes / GIB:.3f}"
            error = "-" if self.error is None else f"{self.error:+.2%}"
        case = self.case
        start = f"| {case.trainer} | {case.settings} | {case.model} |"
        return f"{start} {emulated_gib} | {predicted_gib} | {error} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose names begin so, commas between")
    parser.add_argument("--emulate", action="store_true", help="run the programs first")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs them")
    parser.add_argument("--models", type=Path, help="folder for the hollow checkpoints")
    parser.add_argument("--log", type=Path, help="file for what the programs print")
    options = parser.parse_args(arguments)
    wanted = [c for c in CASES if c.name.startswith(tuple(options.only.split(",")))]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.models or Path(temporary)
        for case in wanted if options.emulate else ():
            row = run(case, model_of(case, folder), options.python, options.log)
            rows = {**emulated(), case.name: row}
            EMULATED.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(case.name, row, flush=True)
        for case in () if options.emulate else wanted:
            print(compared(case, model_of(case, folder)).line, flush=True)
    return 0


def compared(case: Case, model: Path) -> Comparison:
    """The prediction of a case beside what was emulated of it."""
    peak_bytes = int(emulated().get(case.name, {}).get("peak_allocated_bytes", 0))
    try:
        return Comparison(case, predicted(case, model), peak_bytes)
    except InputError as error:
        return Comparison(case, error, peak_bytes)


def predicted(case: Case, model: Path) -> PredictedProgram:
    """The prediction of a case. Raises `InputError` where its numbers would be of another run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared(case, model, folder)
        program = read_program((*case.launcher, *case.words), folder, is_run=False)
        return ProgramPredictions(program, get_gpu(case.gpu)).as_it_is()


def emulated() -> dict[str, Any]:
    """What was emulated before, by case."""
    return json.loads(EMULATED.read_text(encoding="utf-8")) if EMULATED.exists() else {}


def model_of(case: Case, folder: Path) -> Path:
    """The hollow checkpoint of the model of a case; made where it is not there yet."""
    target = (folder / case.model).absolute()
    if not is_hollow(target):
        write_hollow(case.model, target)
    return target


def prepared(case: Case, model: Path, folder: Path) -> None:
    """Write the files of a case; its model is the folder `model` there."""
    for name, text in case.files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "model").symlink_to(model)


_COMMANDS = {
    "Axolotl": ("axolotl", "train"),
    "LLaMA-Factory": ("llamafactory-cli", "train"),
}


def run(case: Case, model: Path, python: str, log: Path | None) -> dict[str, Any]:
    """The emulated peak of a case: bytes allocated and reserved, by `STEPS` optimizer steps."""
    bin_folder = Path(python).parent
    os.environ["PATH"] = os.pathsep.join([str(bin_folder), os.environ["PATH"]])
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
    command = (
        [str(bin_folder / _COMMANDS[case.trainer][0]), *_COMMANDS[case.trainer][1:]]
        if case.trainer in _COMMANDS
        else [*case.launcher] or [python]
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared(case, model, folder)
        started = read_launch(read_program([*command, *case.words], folder)).processes or 1
        with (log or folder / "log").open("a", encoding="utf-8") as output:
            found = Machine(get_gpu(case.gpu), started).run(
                [*command, *case.words], steps=STEPS, timeout_s=900, output=output, cwd=folder
            )
    use = found.limiting
    return {
        "ended": found.ended,
        "error": None
        if found.error is None
        else f"{found.error.type}: {found.error.message}"[:300],
        "versions": versions(case, python),
        "peak_allocated_bytes": use.peak_allocated_bytes if use else 0,
        "peak_reserved_bytes": use.peak_reserved_bytes if use else 0,
        "peak_phase": use.peak_phase if use else "",
        "phase_peak_bytes": dict(use.phase_peak_bytes) if use else {},
        "trainable_params": use.trainable_params if use else 0,
        "step_s": found.time.step_s if found.time else None,
        "inputs": found.inputs,
        "settings": dict(found.settings),
        "took_s": round(found.duration_s, 1),
    }


def versions(case: Case, python: str) -> dict[str, str]:
    """The versions of what the program ran with."""
    packages = ["torch", "transformers", "peft", "trl", "axolotl", "llamafactory"]
    ask = (
        "import json, sys; from importlib.metadata import distributions\n"
        "found = {}\n"
        "for d in distributions():\n"
        "    found.setdefault(d.name.lower().replace('_', '-'), d.version)\n"
        "print(json.dumps({n: found[n] for n in sys.argv[1:] if n in found}))"
    )
    wanted = [p for p in packages if p not in ("axolotl", "llamafactory") or p == case.environment]
    ran = subprocess.run([python, "-c", ask, *wanted], capture_output=True, text=True, check=True)
    return dict(json.loads(ran.stdout))


if __name__ == "__main__":
    sys.exit(main())
