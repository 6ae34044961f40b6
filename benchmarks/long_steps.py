"""Long steps timed whole and put together from parts: `python -m benchmarks.long_steps`.

Trials of one configuration on this machine's processor, in turn with `whole_steps` and without:
what each says of the rate, with its 95 % interval, and how long it took. The step must be longer
than `tuner.trial.step_plan.LONG_STEP_S`, or nothing is put together: `--micro-batch` makes it
longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from tuner.core.records import Configuration, Measurement, Outcome

MODEL = "tiny-llama-3m"
GRAD_ACCUM = 16
SETTINGS: Mapping[str, Any] = {
    "max_length": 256,
    "grad_accum": GRAD_ACCUM,
    "lora_rank": 8,
    "lora_alpha": 16,
    "lora_targets": ("q_proj", "v_proj"),
    "precision": "fp32",
    "gradient_checkpointing": False,
    "optimizer": "adamw_torch",
    "attention": "sdpa",
}


def main() -> int:
    """Print the table; 0 when the two ways agree within the intervals' width, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=3, help="trials of each way [3]")
    parser.add_argument("--micro-batch", type=int, default=16, help="sequences [16]")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of timed steps [1]")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    found = run(arguments.trials, arguments.micro_batch, arguments.budget)
    print(f"{MODEL}, steps of {GRAD_ACCUM} micro-steps of {arguments.micro_batch} sequences")
    print(f"{'':<10} {'trial':>8} {'micro-steps':>12} {'samples/s':>10}   95 % interval")
    for name, outcome in found:
        print(line(name, outcome))
    micro_steps = {name: measured(outcome).timed_micro_steps for name, outcome in found}
    if micro_steps["parts"] == micro_steps["whole"]:
        raise SystemExit("no step was long enough to be put together: raise --micro-batch")
    rates = {
        way: statistics.median(speed(outcome) for name, outcome in found if name == way)
        for way in ("whole", "parts")
    }
    ratio = rates["parts"] / rates["whole"]
    agrees = abs(ratio - 1) <= margin([outcome for _, outcome in found])
    print(f"\nmedian rate by parts over whole: {ratio:.3f}; {'agree' if agrees else 'DISAGREE'}")
    return 0 if agrees else 1


def run(trials: int, micro_batch: int, budget_s: float) -> list[tuple[str, Outcome]]:
    """Outcomes in the order in which they ran, one way after the other."""
    from tuner.app.device import CPU, find_gpu
    from tuner.trial.base import MeasureOptions, TrialJob
    from tuner.trial.isolated import IsolatedRunner

    job = TrialJob("causal_lm", MODEL, find_gpu(CPU))
    parts = MeasureOptions(device="cpu", budget_s=budget_s)
    whole = dataclasses.replace(parts, whole_steps=True)
    configuration = Configuration({**SETTINGS, "micro_batch": micro_batch})
    found = []
    for _ in range(trials):
        for name, options in (("whole", whole), ("parts", parts)):
            with IsolatedRunner(job, options) as runner:
                runner.start()
                found.append((name, runner.run(configuration)))
    return found


def measured(outcome: Outcome) -> Measurement:
    if outcome.measurement is None:
        raise SystemExit(f"a trial ended as {outcome.status}: {outcome.message}")
    return outcome.measurement


def speed(outcome: Outcome) -> float:
    return measured(outcome).speed.samples_per_s


def line(name: str, outcome: Outcome) -> str:
    low, high = measured(outcome).samples_per_s_interval or (0.0, float("inf"))
    return (
        f"{name:<10} {outcome.duration_s:>7.1f}s {measured(outcome).timed_micro_steps:>12} "
        f"{speed(outcome):>10.2f}   {low:.2f} to {high:.2f}"
    )


def margin(outcomes: list[Outcome]) -> float:
    """The widest half interval of all trials, relative to its rate; 5 % at least."""
    halves = [
        (ends[1] - ends[0]) / 2 / speed(outcome)
        for outcome in outcomes
        if (ends := measured(outcome).samples_per_s_interval)
    ]
    return max([0.05, *halves])


if __name__ == "__main__":
    sys.exit(main())
