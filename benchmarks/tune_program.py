"""A search of a TRL script's settings, timed: `python -m benchmarks.tune_program`.

`tuner tune` on examples/programs/sft.py with the shape of Llama-3.2-1B: 60 configurations of three
knobs, all emulated. Asked are 5 minutes on two cores, at most 12 runs, and that nothing runs out
of memory that is recommended. Nothing is downloaded; the program runs in a folder of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.space.models.hollow import is_hollow, write_hollow

PROGRAM = Path(__file__).parents[1] / "examples/programs/sft.py"
KNOBS = (
    "micro_batch=1,2,4,8,16",
    "gradient_checkpointing",
    "lora_rank=4,8,16,32,64,128",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpu", default="rtx4090")
    parser.add_argument("--trials", help="as of `tuner tune`")
    parser.add_argument("--model", type=Path, help="folder of a hollow checkpoint")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with CUDA's torch")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = (options.model or folder / "llama-3.2-1b").absolute()
        if not is_hollow(model):
            write_hollow("llama-3.2-1b", model)
        shutil.copy(PROGRAM, folder)
        words = ["--gpu", options.gpu, "--json"]
        words += [word for knob in KNOBS for word in ("--knob", knob)]
        words += ["--trials", options.trials] if options.trials else []
        started = time.monotonic()
        ran = subprocess.run(
            [options.python, "-m", "tuner", "tune", *words, "--", PROGRAM.name, str(model)],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        took_s = time.monotonic() - started
        if ran.returncode:
            print(ran.stderr, file=sys.stderr)
            return ran.returncode
        journal = folder / f"results/tune-{PROGRAM.stem}/{options.gpu}/trials.jsonl"
        lines = journal.read_text(encoding="utf-8").splitlines()
        trials = [found for line in lines if "configuration" in (found := json.loads(line))]
    print("\n".join(_told(trials, json.loads(ran.stdout), took_s)))
    return 0


def _told(
    trials: Sequence[Mapping[str, Any]], answer: Mapping[str, Any], took_s: float
) -> Iterator[str]:
    """What was asked, and how far the prediction was off where a trial showed it."""
    predicted = next(trial["predicted"] for trial in trials if trial["predicted"])
    prior = re.search(r"(\d+) emulated runs", str(predicted["method"]))
    assert prior is not None
    runs = (1, int(prior.group(1)), len(trials))
    oom = sum(trial["status"] == "oom" for trial in trials)
    yield f"{took_s:.0f} s, {sum(runs)} runs (as it is, for the prediction, trials: {runs})"
    yield f"{oom} trials out of memory; recommended: {answer['best']['configuration']}"
    for trial in trials:
        if trial["emulated"] and trial["predicted"]:
            yield f"{trial['configuration']}: {_off(trial['predicted'], trial['emulated'])}"


def _off(predicted: Mapping[str, Any], emulated: Mapping[str, Any]) -> str:
    memory = predicted["memory"]["device_bytes"] / emulated["memory"]["device_bytes"] - 1
    speed = predicted["samples_per_s"] / emulated["samples_per_s"] - 1
    return f"memory predicted {memory:+.1%}, samples/s {speed:+.1%}"


if __name__ == "__main__":
    sys.exit(main())
