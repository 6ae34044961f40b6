"""Plants faults in programs of five kinds, and writes which of them `tuner check` finds.

    python -m benchmarks.whole_run [--only PROGRAM] [--fault FAULT] [--folder FOLDER]

Each program fits on an RTX 4090 with the memory that stands here, and does not with its fault. The
memory of the host is stated as 15 % more than the program without a fault takes. The Markdown table
goes to the standard output; FOLDER keeps the answers, and those in it are not run again. The
programs need TRL, Lightning and sentence-transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.core.errors import EXIT_BAD_INPUT

PROGRAMS = Path(__file__).with_name("programs")

MEMORY_MIB: Mapping[str, int] = {
    "trl_sft": 680,
    "trainer_generation": 780,
    "accelerate_loop": 840,
    "lightning_module": 800,
    "sentence_pairs": 810,
}
"""The memory of the emulated GPU: little more than the program without a fault takes."""

HOST = "host memory"

PHASES: Mapping[str, str] = {
    "longest row": "largest batch",
    "evaluation": "evaluation",
    "save": "save",
    "merge": "merge",
    "resume": "resume",
    "leak": "growth",
    HOST: "host, save",
}
"""The phase in which each fault ends the run."""

NO_FAULT = "none"


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a program with a fault: its verdict, and the phase and line that it names."""

    fits: bool | None
    phase: str
    lines: tuple[str, ...]
    failure: str

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Found:
        """The answer from the JSON of `tuner check`."""
        run = answer["program"]
        growing = [one["line"] for device in run["devices"] for one in device["growth"]]
        error = run["error"] or {}
        failure = run["later_error"] or (run["error"] if answer["fits"] is None else None) or {}
        grows = bool(growing) and run["ended"] != "oom"
        lines = growing if grows else [error.get("line") or ""]
        host = run["host"] or {}
        is_host = host.get("is_stated") and host["is_killed"]
        fatal = [one["phase"] for one in run["refusals"] if one["afterwards"] == "fatal"]
        refused_in = f"host, {host['peak_phase']}" if is_host else "".join(fatal[-1:])
        return cls(
            fits=answer["fits"],
            phase="growth" if grows else refused_in,
            lines=tuple(line.rpartition("/")[2] for line in lines),
            failure=failure.get("message", ""),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=MEMORY_MIB)
    parser.add_argument("--fault", choices=[NO_FAULT, *PHASES])
    parser.add_argument("--folder", type=Path)
    told = parser.parse_args()
    folder = told.folder or Path(tempfile.mkdtemp(prefix="whole-run-"))
    programs = [told.only] if told.only else list(MEMORY_MIB)
    faults = [told.fault] if told.fault else [NO_FAULT, *PHASES]
    rows = []
    for program in programs:
        for fault in faults:
            rows.append((program, fault, Found.of(check(program, fault, folder))))
            print(*rows[-1], file=sys.stderr, flush=True)
    print("\n".join(table(rows)))


def check(program: str, fault: str, folder: Path) -> Mapping[str, Any]:
    """The answer of `tuner check` to the program with this fault."""
    kept = folder / f"{program}-{fault.replace(' ', '-')}.json"
    if not kept.exists():
        words = f"--gpu rtx4090 --gpu-memory {MEMORY_MIB[program]}MiB --no-changes --json"
        if fault == HOST:
            usual = check(program, NO_FAULT, folder)["program"]["host"]["peak_bytes"]
            words += f" --host-memory {usual * 115 // 100}B"
        path = PROGRAMS / f"{program}.py"
        with tempfile.TemporaryDirectory(prefix="whole-run-") as empty:
            ran = subprocess.run(
                [sys.executable, "-m", "tuner", "check", *words.split(), str(path)],
                capture_output=True,
                text=True,
                check=False,
                cwd=empty,
                env={**os.environ, "FAULT": fault},
            )
        if not ran.stdout or ran.returncode > EXIT_BAD_INPUT + 2:
            sys.exit(f"{program}, {fault}: {ran.stderr}")
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_text(ran.stdout)
    found: Mapping[str, Any] = json.loads(kept.read_text())
    return found


def planted_at(program: str, fault: str) -> set[str]:
    """The lines, of a program or of what the programs share, on which a fault may be named."""
    return {
        f"{path.name}:{number}"
        for path in (PROGRAMS / f"{program}.py", PROGRAMS / "parts.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if fault in line.partition("# line: ")[2].split(", ")
    }


def table(rows: Iterable[tuple[str, str, Found]]) -> Iterable[str]:
    """The Markdown table, and the counts."""
    yield "| program | fault | found | phase | line |"
    yield "|---|---|---|---|---|"
    count: Counter[str] = Counter()
    for program, fault, found in rows:
        where = ", ".join(found.lines)
        if fault == NO_FAULT:
            count["false alarms"] += found.fits is not True
            verdict = {True: "fits", False: "false alarm"}.get(found.fits, "unknown")
            yield f"| {program} | none | {verdict} | {found.phase} | {found.failure or where} |"
            continue
        is_found = found.fits is False
        phase = is_found and found.phase == PHASES[fault]
        line = is_found and bool(set(found.lines) & planted_at(program, fault))
        count["faults"] += 1
        count["found"] += is_found
        count["with phase"] += phase
        count["with phase and line"] += phase and line
        phase_text = "yes" if phase else found.phase or "no"
        line_text = "yes" if line else where or found.failure or "no"
        yield (
            f"| {program} | {fault} | {'yes' if is_found else 'no'} | {phase_text} | {line_text} |"
        )
    yield ""
    yield ", ".join(f"{name}: {number}" for name, number in count.items())


if __name__ == "__main__":
    main()
