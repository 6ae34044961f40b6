"""How long the commands take that only read files: `python -m benchmarks.cli_start`.

Each is timed as a whole process, beside a bare Python start in the same run. They are meant to
answer in less than half a second on a small machine.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = (
    ("--help",),
    ("gpus",),
    ("models",),
    ("spaces",),
    ("best", "--space", "qlora27b", "--gpu", "a6000"),
    ("show", "--space", "qlora27b", "--gpu", "a6000"),
)
REPEATS = 7


def seconds(arguments: tuple[str, ...]) -> float:
    """The median duration of a process."""
    durations = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        durations.append(time.perf_counter() - started)
    return statistics.median(durations)


def main() -> None:
    """Print the table. Run it where `results/` is, so that `best` has something to read."""
    bare_s = seconds(("-c", "pass"))
    print(f"{'python -c pass':<44} {bare_s:6.3f} s")
    for command in COMMANDS:
        took_s = seconds(("-m", "tuner", *command))
        print(f"{'tuner ' + ' '.join(command):<44} {took_s:6.3f} s  {took_s / bare_s:5.1f} x")


if __name__ == "__main__":
    main()
