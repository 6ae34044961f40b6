"""What a trial costs beside its training steps: `python -m benchmarks.trial_overhead`.

Side by side in one run, the same tiny model and the same steps on this machine's processor:

- the product's runner (a warm process forks a child for each trial),
- the same runner inside the class actor with which `tuner search` uses Ray,
- a plain Ray Tune function trainable that builds the model with `from_config` each time,
- the same with `reuse_actors=True`: one process for all trials, in which nothing is given back
  for sure and the first crash ends everything.

One trial at a time, one thread of PyTorch in each. What is paid once (starting Ray, importing
the libraries into the first process) is not a trial's cost and is left out: a trial counts from
the end of the one before it. The runner is timed before and after the others, so that a change
of the machine's load shows. Target: at most 0.3 s a trial, and 5 times less than plain Ray.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

MODEL = "tiny-llama-3m"
STEPS = 3
SETTINGS: Mapping[str, Any] = {
    "micro_batch": 2,
    "max_length": 64,
    "grad_accum": 1,
    "lora_rank": 8,
    "lora_alpha": 16,
    "lora_targets": ("q_proj", "v_proj"),
    "precision": "fp32",
    "gradient_checkpointing": False,
    "optimizer": "adamw_torch",
    "attention": "sdpa",
}
TARGET_S, TARGET_RATIO = 0.3, 5.0
QUIET = {"RAY_AIR_NEW_OUTPUT": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1"}


@dataclass(frozen=True, slots=True)
class Timed:
    """Trials of one way to run them: seconds of each, and of its training steps."""

    name: str
    trial_s: tuple[float, ...]
    steps_s: tuple[float, ...]

    @property
    def beside_s(self) -> float:
        """The median of what a trial takes beside its steps."""
        pairs = zip(self.trial_s, self.steps_s, strict=True)
        return statistics.median(trial - steps for trial, steps in pairs)


def main() -> int:
    """Print the table, and return 0 when both targets are met, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=6, help="trials of each way [6]")
    trials: int = parser.parse_args().trials
    os.environ.update({"OMP_NUM_THREADS": "1", **QUIET})
    before = in_runner("runner", trials)
    actor, plain, reused = in_ray(trials)
    after = in_runner("runner, again", trials)
    print(f"{trials} trials each of {MODEL}, {STEPS + 1} steps; medians, in seconds")
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[1]:.1f} over the last 5 minutes\n")
    print(f"{'':<28} {'trial':>7} {'steps':>7} {'beside':>7} {'ratio':>7}")
    both = (before.trial_s + after.trial_s, before.steps_s + after.steps_s)
    ours_s = Timed("runner", *both).beside_s
    for timed in (before, after, actor, plain, reused):
        print(
            f"{timed.name:<28} {statistics.median(timed.trial_s):>7.3f} "
            f"{statistics.median(timed.steps_s):>7.3f} {timed.beside_s:>7.3f} "
            f"{timed.beside_s / ours_s:>6.1f}x"
        )
    met = ours_s <= TARGET_S and plain.beside_s >= TARGET_RATIO * ours_s
    print(f"\ntargets ({TARGET_S} s, {TARGET_RATIO:g}x): {'met' if met else 'MISSED'}")
    return 0 if met else 1


def in_runner(name: str, trials: int) -> Timed:
    """Trials of the product's runner, without Ray."""
    from tuner.core.records import Configuration
    from tuner.trial.isolated import IsolatedRunner

    trial_s, steps_s = [], []
    with IsolatedRunner(job(), options()) as runner:
        runner.start()
        for _ in range(trials):
            started = time.perf_counter()
            outcome = runner.run(Configuration(SETTINGS))
            trial_s.append(time.perf_counter() - started)
            steps_s.append(steps_of(outcome))
    return Timed(name, tuple(trial_s), tuple(steps_s))


def job() -> Any:
    from tuner.app.device import CPU, find_gpu
    from tuner.trial.base import TrialJob

    return TrialJob("causal_lm", MODEL, find_gpu(CPU))


def options() -> Any:
    """One step to warm up and as many timed ones as the plain trainable has."""
    from tuner.trial.base import MeasureOptions

    return MeasureOptions(device="cpu", budget_s=0.0, min_steps=STEPS, warmup_steps=1)


def steps_of(outcome: Any) -> float:
    """Seconds of all optimizer steps of a trial that went well."""
    measured = outcome.measurement
    if measured is None:
        raise SystemExit(f"a trial ended as {outcome.status}: {outcome.message}")
    return float(measured.first_step_s + measured.steps * measured.speed.step_s)


def in_ray(trials: int) -> tuple[Timed, Timed, Timed]:
    """Trials of the class actor with the runner inside, then of the plain function, twice."""
    import ray

    from tuner.searches.ray.worker import CONFIGURATION, OUTCOME, WorkerPlan, trainable_of
    from tuner.trial.factories import MeasuredFactory

    factory = MeasuredFactory(job(), options())
    actor = trainable_of((WorkerPlan(factory),))
    settings = {CONFIGURATION: dict(SETTINGS)}
    logging.getLogger("ray").setLevel(logging.ERROR)
    environment = {"PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": environment},
    )
    try:
        results = run_in_tune(actor, settings, trials, reuse_actors=True)
        in_actor = timed("runner in Ray's class actor", results, lambda r: steps_of(r[OUTCOME]))
        results = run_in_tune(plain_trainable, {}, trials, reuse_actors=None)
        plain = timed("plain Ray Tune function", results, lambda r: float(r["steps_s"]))
        results = run_in_tune(plain_trainable, {}, trials, reuse_actors=True)
        reused = timed("  with reused actors", results, lambda r: float(r["steps_s"]))
    finally:
        ray.shutdown()
    return in_actor, plain, reused


def run_in_tune(
    trainable: Any, settings: Mapping[str, Any], trials: int, *, reuse_actors: bool | None
) -> list[tuple[float, dict[str, Any]]]:
    """When each trial ended, and its result; one more trial than asked for comes first."""
    from ray import tune

    ended: list[tuple[float, dict[str, Any]]] = []

    class Clock(tune.Callback):  # type: ignore[misc]
        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            ended.append((time.perf_counter(), trial.last_result))

    with tempfile.TemporaryDirectory() as folder:
        tune.run(
            trainable,
            config={**settings, "trial": tune.grid_search(list(range(trials + 1)))},
            max_concurrent_trials=1,
            reuse_actors=reuse_actors,
            resources_per_trial={"cpu": 1},
            storage_path=folder,
            callbacks=[Clock()],
            verbose=0,
        )
    return ended


def timed(name: str, ended: list[tuple[float, dict[str, Any]]], steps: Any) -> Timed:
    pairs = list(pairwise(ended))
    return Timed(
        name,
        tuple(now - then for (then, _), (now, _) in pairs),
        tuple(steps(result) for _, (_, result) in pairs),
    )


def plain_trainable(config: dict[str, Any]) -> dict[str, Any]:
    """What people write: model, adapters and optimizer anew in each trial."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from tuner.space.models.catalogue import resolve_config

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(
        resolve_config(MODEL), dtype=torch.float32, attn_implementation=SETTINGS["attention"]
    )
    lora = LoraConfig(
        r=SETTINGS["lora_rank"],
        lora_alpha=SETTINGS["lora_alpha"],
        target_modules=list(SETTINGS["lora_targets"]),
    )
    model = get_peft_model(model, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    return {"steps_s": sum(_plain_steps(model, optimizer))}


def _plain_steps(model: Any, optimizer: Any) -> Iterator[float]:
    import torch

    model.train()
    shape = (SETTINGS["micro_batch"], SETTINGS["max_length"])
    for _ in range(STEPS + 1):
        started = time.perf_counter()
        tokens = torch.randint(0, model.config.vocab_size, shape)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())
        yield time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
