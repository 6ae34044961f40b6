"""`python -m benchmarks.search.decisions`: time of a decision in the driver, for each sampler.

A decision is what the driver does between two trials: the state takes an outcome, tells the
study, judges what cannot fit, and has the next configuration proposed, with the rule by which
the trial is given up. The time that Ray takes to pass a trial on is not in it; it is measured by
`benchmarks/trial_overhead.py`.

The configurations are those of a space; what is predicted of them is a formula in which all fit,
as else nothing would be left to propose after a few hundred trials.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import optuna

from benchmarks.search.samplers import CLASSES
from tuner.core.records import (
    Configuration,
    Measurement,
    Memory,
    MemoryBudget,
    Outcome,
    Prediction,
    Speed,
    Status,
)
from tuner.core.setup.schemas import memory_order
from tuner.searches.candidates import Candidates
from tuner.searches.proposer import Proposer
from tuner.searches.request import SearchRequest, TrialDevice
from tuner.searches.state import SearchState
from tuner.searches.strategies import Knowledge
from tuner.space import SearchSpace, load_space
from tuner.space.gpus import Gpu, get_gpu
from tuner.trial.base import TrialRunner

DECISIONS = 30
SAMPLERS = ("guided", "tpe", "nsga2", "random", "grid")
"""By the names that the tables have for them."""


def main() -> None:
    """Print milliseconds of CPU time per decision, by sampler and number of trials."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.decisions")
    parser.add_argument("--space", default="qlora27b")
    parser.add_argument("--gpu", default="a100_80gb")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space, gpu = load_space(arguments.space), get_gpu(arguments.gpu)
    number = sum(1 for _ in space.configurations())
    print(f"{number} candidates, {arguments.trials} trials; milliseconds of CPU time per decision")
    for sampler in arguments.samplers:
        found = 1e3 * np.array(decisions_s(space, gpu, sampler, arguments.trials))
        print(
            f"{sampler:8} mean {found.mean():6.1f}, median {np.median(found):6.1f}, "
            f"95th percentile {np.quantile(found, 0.95):6.1f}"
        )


def decisions_s(space: SearchSpace, gpu: Gpu, sampler: str, trials: int) -> list[float]:
    """CPU seconds of each of some decisions, the first of them after `trials` trials."""
    rng = np.random.default_rng(0)
    configurations = list(space.configurations())
    predictions = {c.key: predicted(c, gpu) for c in configurations}
    request = SearchRequest(
        space=space,
        gpu=gpu,
        runner_factory=no_runner,
        trials=trials + 2 * DECISIONS,
        searcher=CLASSES.get(sampler, sampler),
        trial_device=TrialDevice(gpu.name),
        predictions=predictions,
        run_id="r",
    )
    adapter = Proposer(
        Candidates(configurations, tuple(space.knobs)),
        sampler=request.searcher,
        seed=0,
        trials=request.trials,
        knowledge=Knowledge(list(predictions.values()), memory_order(space.workload)),
    )
    state = SearchState(request, adapter, on_record=lambda r: None, on_progress=lambda p: None)
    begin = iter(rng.permutation(len(configurations))[:trials])
    found = []
    for number in range(trials + DECISIONS):
        name = f"t{number}"
        if number < trials:  # the first ones are drawn at random: they cost no decision
            adapter._initial = (configurations[int(next(begin))],)
        started = time.process_time()
        configuration = state.propose(name)
        assert configuration is not None
        state.start(name)
        taken_s = time.process_time() - started
        outcome = _outcome(predictions[configuration.key], rng)
        started = time.process_time()
        state.end(name, outcome)
        if number >= trials:
            found.append(taken_s + time.process_time() - started)
    return found


def no_runner() -> TrialRunner:
    """Outcomes are made up here, and nothing runs."""
    raise NotImplementedError


def predicted(configuration: Configuration, gpu: Gpu) -> Prediction:
    """Memory and speed by a formula in the knobs that every language model's space has."""
    batch, length = (int(str(configuration[name])) for name in ("micro_batch", "max_length"))
    size = gpu.memory_bytes * (0.2 + 0.5 * batch * length / (64 * 8192))
    rate = 10.0 * batch / (batch + 2) * 1024 / length
    size *= 1 + 0.1 * int(configuration.key[:2], 16) / 256
    rate *= 1 + 0.2 * int(configuration.key[2:4], 16) / 256
    step_s = 32 / rate
    memory = Memory(int(size), int(size), int(size), int(size / 2), {}, "backward", {})
    speed = Speed(step_s, 1 / step_s, rate, rate * length, None, {"matmul": step_s})
    return Prediction(MemoryBudget(gpu.memory_bytes), memory, speed, 1, 2, gpu.id, "formula")


def _outcome(prediction: Prediction, rng: np.random.Generator) -> Outcome:
    factor = float(np.exp(rng.normal(0.05, 0.05)))
    speed, memory = prediction.speed, prediction.memory
    rate = speed.samples_per_s / factor
    measurement = Measurement(
        memory=memory,
        speed=Speed(
            speed.step_s * factor, speed.it_per_s / factor, rate, speed.tokens_per_s / factor, None
        ),
        trainable_params=1,
        total_params=2,
        device="a device",
        steps=5,
        loss_finite=True,
        samples_per_s_interval=(0.99 * rate, 1.01 * rate),
    )
    return Outcome(Status.OK, measurement=measurement, duration_s=1.0)


if __name__ == "__main__":
    main()
