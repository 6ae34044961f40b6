"""How long it takes to predict every configuration of a space: cold, warm, for more GPU types.

    python -m benchmarks.whole_space
    python -m benchmarks.whole_space --space qlora27b --gpus a6000,rtx3090,a100-40gb,h100-sxm,l40s

Cold starts with an empty cache, warm in a process of its own with what the cold run left. Full
traces of some configurations, in the same run, say what compiling saves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GPUS = "a6000,rtx3090,a100-40gb,h100-sxm,l40s"
TRACED = 4
"""Configurations that are traced at full depth as well."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps one after the other, each in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--space", default="qlora27b")
    parser.add_argument("--gpus", default=GPUS, help="the first is predicted alone as well")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.step:
        print(json.dumps(_step(options)))
        return 0
    with tempfile.TemporaryDirectory() as cache:
        cold = _run(options, "predict", cache, options.gpus.partition(",")[0])
        warm = _run(options, "predict", cache, options.gpus.partition(",")[0])
        traced = _run(options, "trace", cache, options.gpus.partition(",")[0])
    with tempfile.TemporaryDirectory() as cache:
        several = _run(options, "predict", cache, options.gpus)
    number = cold["configurations"]
    print(f"{options.space}: {number} configurations, {options.workers} processes that compile")
    print(f"cold, one GPU type:        {cold['seconds']:8.1f} s")
    print(f"warm, one GPU type:        {warm['seconds']:8.1f} s")
    types = options.gpus.count(",") + 1
    ratio = several["seconds"] / cold["seconds"]
    print(f"cold, {types} GPU types:        {several['seconds']:8.1f} s = {ratio:.2f} times one")
    each = traced["seconds"] / TRACED
    print(
        f"one full trace:            {each:8.1f} s; all of them would take {each * number:,.0f} s"
    )
    print(f"compiled against traced:   {each * number / cold['seconds']:8.0f} times faster, cold")
    return 0


def _run(options: argparse.Namespace, step: str, cache: str, gpus: str) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "benchmarks.whole_space", "--step", step, "--gpus", gpus,
        "--space", options.space, "--workers", str(options.workers),
    ]  # fmt: skip
    environment = {**os.environ, "TUNER_CACHE": cache}
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        command, env=environment, cwd=root, check=True, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _step(options: argparse.Namespace) -> dict[str, Any]:
    from tuner.predict.predict import predict, resolve_subject
    from tuner.predict.predictor import PredictionJob, Predictor
    from tuner.space import load_space
    from tuner.space.gpus import get_gpu

    space = load_space(options.space)
    gpus = [get_gpu(name) for name in options.gpus.split(",")]
    configurations = list(space.configurations(use_floors=False))
    started = time.perf_counter()
    if options.step == "trace":
        subject = resolve_subject(space.workload, space.model)
        started = time.perf_counter()
        for configuration in configurations[:: len(configurations) // TRACED][:TRACED]:
            predict(subject, configuration, gpus[0])
    else:
        predictor = Predictor(PredictionJob(space.workload, space.model), workers=options.workers)
        for gpu in gpus:
            predictor.predict(configurations, gpu)
    return {"configurations": len(configurations), "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    sys.exit(main())
