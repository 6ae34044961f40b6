"""The interface between a search and the runners of its trials.

A search doesn't know how a trial gets its numbers. It hands one configuration to a `TrialRunner`
and gets an `Outcome` back, either predicted by a model of the GPU or measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from tuner import __version__
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Outcome, Source
from tuner.cost.speed.profile import DeviceProfile
from tuner.space.command import Command
from tuner.space.data import DataFacts

OUTCOME_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
"""Libraries whose version can change the outcome of a trial, as tuner's own can.

Ray and Optuna are not among them: they choose and place trials, but don't change them.
"""


@dataclass(frozen=True, slots=True)
class TrialJob:
    """The settings shared by all trials of one search; plain data, so that it can be pickled.

    `gpu` may carry a memory size set by the user. `margin_fraction` is the part of the GPU's
    memory to keep free; None leaves it to the runner. `profile` is the GPU's profile measured on
    this machine, if there is one. `data` describes the training data for trials that train on its
    lengths. `model` is None if the user's own code brings its model: a workload
    "package.module:object", also found from `code_path`, or the `command` that trials then run.
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
        """The name of the `tuner.trial.messages.TrialBody` that its trials run."""
        if self.command is not None:
            return "tuner.trial.command:COMMAND_TRIAL"
        return "tuner.trial.training:TRAINING"


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The conditions for ending a trial early because it can't win; fixed before it starts.

    - `usable_bytes` is the most device memory that a recommended configuration may take. Peaks
      only grow, so one step above it is enough to decide.
    - `front` holds device memory in bytes and samples per second of trials that fitted: a trial
      that takes no less memory than one of them, and is surely slower, is dominated.
    """

    usable_bytes: int | None = None
    front: tuple[tuple[int, float], ...] = ()

    def is_too_large(self, device_bytes: int) -> bool:
        """True if a trial that took `device_bytes` so far can't be recommended."""
        return self.usable_bytes is not None and device_bytes > self.usable_bytes

    def is_dominated(self, device_bytes: int, at_most_samples_per_s: float) -> bool:
        """True if a trial with this memory so far and at most this throughput is dominated."""
        return any(
            size <= device_bytes and rate > at_most_samples_per_s for size, rate in self.front
        )


@dataclass(frozen=True, slots=True)
class Instructions:
    """The instructions for one trial, in addition to its configuration.

    `verify` asks for the longest lengths, more steps, an evaluation and a checkpoint.
    """

    give_up: GiveUp | None = None
    verify: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> Instructions:
        """Itself, because it is immutable. Ray Tune copies its arguments for each trial."""
        return self


PLAIN = Instructions()


class TrialRunner(Protocol):
    """Runs one configuration at a time, in the process that built it.

    A runner may keep expensive objects between two trials. A search builds it once per worker
    and uses it for all trials of that worker.
    """

    source: Source

    def run(self, configuration: Configuration, instructions: Instructions = PLAIN) -> Outcome:
        """The outcome of a trial. Running out of memory, a crash and a hang are outcomes, too.

        A runner that can't give up a trial early, or can't verify one, runs it in full.
        Raises `TunerError` for problems that the trial did not cause, and nothing else.
        """
        ...


def call_if_there(runner: TrialRunner | None, name: str) -> None:
    """Call a method that a runner may have beside `run`: "start", "interrupt" or "close"."""
    getattr(runner, name, lambda: None)()


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
    """The options of real trials: device, time limits, memory limit. Plain data.

    - `device` is a torch device string, "cuda:0" or "cpu".
    - `budget_s` is the time for timed steps after `warmup_steps`. Timing ends earlier once the
      95 % confidence interval of the rate is within `relative_error` of it, but not before
      `min_steps`.
    - `whole_steps` times whole steps however long they are (`tuner.trial.stop_rule`).
    - `short_steps` times no whole step, not even in a verification: on an emulated device, every
      micro-step after the first takes the same time.
    - `timeout_s` is for the whole trial; a trial that runs longer is killed. None sets it by the
      pace of the first step (`tuner.trial.stop_rule`).
    - `memory_limit_bytes` lets a large device stand in for a smaller one.
    - `weights` is "synthetic", "hub" or the path of a checkpoint.
    - `lengths` is "full" (every sequence has the longest length, as predictions assume) or "data"
      (the job's lengths in the timed steps; the warm-up has the longest all the same, so that
      the peak is that of the worst batch).
    - `instructions` are those of the current trial.
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
    instructions: Instructions = PLAIN

    @property
    def gpu_index(self) -> int | None:
        """The number of the CUDA device; None on the CPU."""
        return None if self.device == "cpu" else int(self.device.partition(":")[2] or 0)


def outcome_versions(*, ran: bool = True) -> dict[str, str]:
    """The releases of tuner and of each of `OUTCOME_LIBRARIES`, without missing ones.

    They are those of the timelines that ship where nothing `ran`, and nothing can be traced.
    """
    from tuner.predict.shipped import can_trace, installed_version, shipped  # numpy

    known = {name: installed_version(name) for name in OUTCOME_LIBRARIES}
    if not ran and not can_trace():
        known |= shipped().versions
    return {"tuner": __version__} | {name: known[name] or "" for name in known if known[name]}
