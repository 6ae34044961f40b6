"""How soon a search tries something: `python -m benchmarks.search.start [REPEATS]`.

Each repeat imports torch and transformers in a new process, predicts the 288 configurations of
`tiny_cpu` without a cache, and searches it with two trials; the journal says when the first began.
The lines are ratios to the mean of such an import before and one after the search, and the median
of each.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPACE = "tiny_cpu"
IMPORT = [sys.executable, "-c", "import torch, transformers"]
SEARCH = [sys.executable, "-m", "tuner", "search", "--space", SPACE, "--gpu", "cpu"]


def main() -> None:
    """Print a line for each repeat."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as scratch:
        started_after_s(Path(scratch) / "first")  # measures a processor without a profile
        found = []
        for number in range(repeats):
            before_s = _seconds(IMPORT)
            first_s, predicted_s = started_after_s(Path(scratch) / str(number))
            import_s = (before_s + _seconds(IMPORT)) / 2
            found.append((predicted_s / import_s, first_s / import_s))
            print(
                f"import {import_s:5.1f} s   predicted after {found[-1][0]:4.1f} imports   "
                f"first trial after {found[-1][1]:4.1f}",
                flush=True,
            )
    predicted, first = (statistics.median(column) for column in zip(*found, strict=True))
    print(
        f"median          predicted after {predicted:4.1f} imports   first trial after {first:4.1f}"
    )


def _seconds(command: list[str]) -> float:
    started_s = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - started_s


def started_after_s(folder: Path) -> tuple[float, float]:
    """Seconds until the first trial of a search began, and until all was predicted."""
    environment = {**os.environ, "TUNER_CACHE": str(folder / "cache")}
    started_s, predicted_s = time.time(), 0.0
    command = [*SEARCH, "--trials", "2", "--no-verify", "--results", str(folder)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("predicted all"):
                predicted_s = time.time() - started_s
    assert process.returncode == 0
    record = json.loads((folder / SPACE / "cpu" / "trials.jsonl").read_text().splitlines()[0])
    began = datetime.datetime.fromisoformat(record["started_at"])
    return began.timestamp() - started_s, predicted_s


if __name__ == "__main__":
    main()
