"""What a journal of many trials costs: `python -m benchmarks.large_journal [TRIALS]`.

Makes distinct trials of `qlora27b` on an A6000 from the shipped ones, each with a rank, a speed and
a memory of its own, and runs `tuner best`, `show`, `show --levels` and `report` on them. Prints
processor time (user and system), the time on the clock and the peak of memory of each.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHIPPED = Path(__file__).parent.parent / "results" / "qlora27b" / "a6000" / "trials.jsonl"
COMMANDS = (("best",), ("show",), ("show", "--levels"), ("report",))


def write_journal(path: Path, trials: int) -> None:
    """Write `trials` distinct records, each one of the shipped with numbers drawn anew."""
    rows = [json.loads(line) for line in SHIPPED.read_text().splitlines()]
    dice = random.Random(1)  # noqa: S311 - a draw, no secret
    path.parent.mkdir(parents=True)
    with path.open("w") as file:
        for number in range(trials):
            row = json.loads(json.dumps(rows[number % len(rows)]))
            rank = 8 + number
            row["configuration"] |= {"lora_rank": rank, "lora_alpha": 2 * rank}
            row["trial_id"] = f"large-{number:06}"
            if predicted := row["predicted"]:
                predicted["samples_per_s"] *= dice.uniform(0.5, 1.5)
                memory = predicted["memory"]
                memory["device_bytes"] = int(memory["device_bytes"] * dice.uniform(0.5, 1.5))
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def main() -> None:
    """Print a line for each command."""
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory(prefix="large-journal-") as folder:
        journal = Path(folder) / "qlora27b" / "a6000" / "trials.jsonl"
        write_journal(journal, trials)
        print(f"{trials:,} trials, {journal.stat().st_size >> 20} MiB")
        for words in COMMANDS:
            command = [sys.executable, "-m", "tuner", *words, "--space", "qlora27b"]
            command += ["--gpu", "a6000", "--results", folder]
            started = time.monotonic()
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            _, status, used = os.wait4(process.pid, 0)
            print(
                f"{' '.join(words):14} exit code {os.waitstatus_to_exitcode(status)}, "
                f"{used.ru_utime + used.ru_stime:5.1f} s of processor time, "
                f"{time.monotonic() - started:5.1f} s, {used.ru_maxrss >> 10} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
