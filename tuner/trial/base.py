"""The seam between searching and running: what a search asks of whoever runs a trial.

A search knows nothing of how a trial comes to its numbers. It hands one configuration to a
`TrialRunner` and gets an `Outcome` back, whether a model of the GPU predicted it or a GPU
measured it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Literal, Protocol

from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Outcome, Source
from tuner.cost.speed.profile import DeviceProfile
from tuner.space.command import Command
from tuner.space.data import DataFacts

OUTCOME_LIBRARIES = ("tuner", "torch", "transformers", "peft", "bitsandbytes")
"""Distributions whose version can change what a trial comes to.

Ray and Optuna are not among them: they choose and place trials, and change none.
"""


@dataclass(frozen=True, slots=True)
class TrialJob:
    """What is the same for all trials of one search; plain data, so that it can be pickled.

    `gpu` may carry a memory size of the user's. `margin_fraction` is the part of the GPU's
    memory to keep free; None leaves it to the runner. `profile` is what was measured of the GPU
    on this machine, if it was. `data` describes the training data for trials that train on its
    lengths. `model` is None where code of the user's own brings its model: a workload
    "package.module:object", found from `code_path` too, or the `command` that trials then run.
    """

    workload: str
    model: str | None
    gpu: Gpu
    margin_fraction: float | None = None
    profile: DeviceProfile | None = None
    data: DataFacts | None = None
    command: Command | None = None
    code_path: str | None = None

    @property
    def body(self) -> str:
        """What the processes of its trials do: a `tuner.trial.messages.TrialBody`, by name."""
        if self.command is not None:
            return "tuner.trial.command:COMMAND_TRIAL"
        return "tuner.trial.training:TRAINING"


@dataclass(frozen=True, slots=True)
class GiveUp:
    """When a trial that runs cannot win any more; settled before it starts, and frozen.

    - `usable_bytes` is the device memory that a configuration may take to be recommended. Peaks
      only grow, so that one step beyond it says enough.
    - `front` holds device memory in bytes and samples per second of trials that fitted: a trial
      that takes no less memory than one of them, and is surely slower, is dominated.
    """

    usable_bytes: int | None = None
    front: tuple[tuple[int, float], ...] = ()

    def is_too_large(self, device_bytes: int) -> bool:
        """Whether a trial that took `device_bytes` so far cannot be recommended."""
        return self.usable_bytes is not None and device_bytes > self.usable_bytes

    def is_dominated(self, device_bytes: int, at_most_samples_per_s: float) -> bool:
        """Whether a trial of this memory so far and at most this throughput is dominated."""
        return any(
            size <= device_bytes and rate > at_most_samples_per_s for size, rate in self.front
        )


@dataclass(frozen=True, slots=True)
class Instructions:
    """What is particular to one trial beside its configuration.

    `verify` asks for the longest lengths, more steps, an evaluation and a checkpoint.
    """

    give_up: GiveUp | None = None
    verify: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> Instructions:
        """Itself: nothing in it can change. Ray Tune copies what it is given for each trial."""
        return self


PLAIN = Instructions()


class TrialRunner(Protocol):
    """Runs one configuration at a time, in the process that built it.

    A runner may keep what is expensive to make between two trials; a search builds it once
    per worker and uses it for all trials of that worker.
    """

    source: Source

    def run(self, configuration: Configuration, instructions: Instructions = PLAIN) -> Outcome:
        """What came of the trial. Out of memory, a crash or a hang of the trial are outcomes.

        A runner that cannot give up a trial early, or cannot verify one, runs it in full.
        Raises only for what is not the trial's doing, and then a `TunerError`.
        """
        ...


class RunnerFactory(Protocol):
    """Builds the runner inside the worker, so that only this small object travels there.

    Must be picklable: a frozen dataclass with `__call__`, a module-level function, or a
    `functools.partial` of one.
    """

    def __call__(self) -> TrialRunner:
        """A runner, ready to use. Raises `TunerError` when the worker lacks what it needs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """How real trials are run: where, for how long, under which limit. Plain data.

    - `device` is a torch device string, "cuda:0" or "cpu".
    - `budget_s` is spent on timed steps after `warmup_steps`; it ends earlier when the 95 %
      confidence interval of the rate is within `relative_error` of it, and never before
      `min_steps`.
    - `whole_steps` times whole steps however long they are (`tuner.trial.step_plan`).
    - `short_steps` times no whole step, even of a verification: for an emulated device, of which
      every micro-step after the first takes the same.
    - `timeout_s` is for the whole trial; what runs longer is killed. None leaves it to the pace
      of the first step (`tuner.trial.stop_rule`).
    - `memory_limit_bytes` lets a large device stand in for a smaller one.
    - `weights` is "synthetic", "hub" or the path of a checkpoint.
    - `lengths` is "full" (every sequence has the longest length, as predictions assume) or "data"
      (the job's lengths in the timed steps; the warm-up has the longest all the same, so that
      the peak is that of the worst batch).
    - `wait_for_device_s` is how long a device that others use is waited for.
    - `instructions` are those of the trial that runs.
    """

    device: str = "cuda:0"
    budget_s: float = 20.0
    min_steps: int = 3
    warmup_steps: int = 2
    relative_error: float = 0.02
    whole_steps: bool = False
    short_steps: bool = False
    timeout_s: float | None = None
    memory_limit_bytes: int | None = None
    weights: str = "synthetic"
    lengths: Literal["full", "data"] = "full"
    wait_for_device_s: float = 0.0
    instructions: Instructions = PLAIN


def outcome_versions() -> dict[str, str]:
    """The installed version of each of `OUTCOME_LIBRARIES`; one that is missing is left out."""
    versions = {}
    for name in OUTCOME_LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
