"""The steps of a real trial: the warm-up, the timed steps, and their results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from tuner.core.errors import UnavailableError
from tuner.core.records import Phase
from tuner.emulator.here import emulated_clock, is_emulated
from tuner.predict.training import TrainingSession
from tuner.trial.device import GpuWatch, RealEnvironment, alloc_retries, parse_device
from tuner.trial.stop_rule import MeanInterval, RunningMean, StepPlan, StopRule


@dataclass(frozen=True, slots=True)
class _StepParts:
    """Seconds of the parts of one optimizer step; the update is all work after the micro-steps."""

    micro_steps_s: tuple[float, ...]
    update_s: float

    def whole_s(self, micro_steps: int) -> float:
        """Seconds of a step of `micro_steps`, at least as many as were timed.

        Each missing micro-step counts as the mean of those after the first. The first is
        different: it has no gradients to add to.
        """
        measured_s = sum(self.micro_steps_s) + self.update_s
        missing = micro_steps - len(self.micro_steps_s)
        later_s = self.micro_steps_s[1:] or self.micro_steps_s
        return measured_s + missing * fmean(later_s) if missing else measured_s


class _PartClock:
    """Takes the time whenever a part of a step begins, once the device has finished the last one.

    `synchronize` waits for the device, and `now` is the clock (`tuner.trial.steps`). A part
    begins where the session announces it (`Environment.enter`); the first one with `start`.
    """

    def __init__(self, synchronize: Callable[[], None], now: Callable[[], float]) -> None:
        self._now = now
        self._synchronize = synchronize
        self._times_s: list[float] = []
        self._announced: list[int | None] = []

    def start(self) -> None:
        """The first micro-step begins now."""
        self._announced = []
        self._times_s = [self._now()]

    def enter(self, phase: Phase, micro_step: int) -> None:
        """A phase begins: perhaps the next micro-step, or the update."""
        if phase is Phase.OPTIMIZER:
            self._announced.append(None)
        elif phase is Phase.FORWARD and micro_step > 0:
            self._announced.append(micro_step)
        else:
            return
        self._synchronize()
        self._times_s.append(self._now())

    def stop(self, micro_steps: int) -> _StepParts | None:
        """Wait for the device, and return the parts of the step that ends now.

        None if the session didn't announce each of `micro_steps` micro-steps and one update: the
        times can't be assigned then.
        """
        self._times_s.append(self._now())
        if self._announced != [*range(1, micro_steps), None]:
            return None
        *micro_s, update_s = (
            after - before for before, after in zip(self._times_s, self._times_s[1:], strict=False)
        )
        return _StepParts(tuple(micro_s), update_s)


@dataclass(frozen=True, slots=True)
class _StepTime:
    """One timed step. `whole_s` extrapolates its time to the full number of micro-steps."""

    spent_s: float
    whole_s: float
    parts_known: bool


class Stepper:
    """Runs optimizer steps of `session` and times them; a whole one has `micro_steps`."""

    def __init__(
        self, session: TrainingSession, environment: RealEnvironment, micro_steps: int
    ) -> None:
        self.session = session
        self.environment = environment
        self.micro_steps = micro_steps
        is_real = environment.device == "cpu" or not is_emulated()
        self._now = time.perf_counter if is_real else emulated_clock()
        self._clock = _PartClock(environment.synchronize, self._now)

    def whole(self) -> _StepTime:
        """Run a whole step, and wait for the device only at its end."""
        started = self._now()
        self.session.optimizer_step(self.micro_steps)
        self.environment.synchronize()
        spent_s = self._slowest_s(self._now() - started)
        return _StepTime(spent_s, spent_s, parts_known=False)

    def by_parts(self, micro_steps: int) -> _StepTime:
        """Run a step of `micro_steps`, and wait for the device at the end of each micro-step.

        If the session doesn't announce them, `whole_s` counts the update as part of each.
        """
        self.environment.on_enter = self._clock.enter
        self._clock.start()
        started = self._now()
        try:
            self.session.optimizer_step(micro_steps)
        finally:
            self.environment.on_enter = None
        self.environment.synchronize()
        parts = self._clock.stop(micro_steps)
        spent_s = self._slowest_s(self._now() - started)
        if parts is None:
            return _StepTime(spent_s, spent_s * self.micro_steps / micro_steps, parts_known=False)
        whole_s = self._slowest_s(parts.whole_s(self.micro_steps))
        return _StepTime(spent_s, whole_s, parts_known=True)

    def _slowest_s(self, seconds: float) -> float:
        """The time of the slowest rank: with it, all ranks decide alike how to go on."""
        return self.environment.rank.most(seconds)


@dataclass(frozen=True, slots=True)
class _WarmUp:
    """The results of the warm-up: seconds of the first step, micro-steps of each timed step."""

    first_step_s: float
    timed_micro_steps: int


def warm_up(
    stepper: Stepper, plan: StepPlan, rule: StopRule, on_pace: Callable[[float], None]
) -> _WarmUp:
    """Run steps that are not timed, and note the peak memory of each phase.

    After the first step, `on_pace` gets the seconds that all steps of the trial may take. If the
    session does not announce its micro-steps, every further step is a whole one. Raises
    `UnavailableError` if an emulated device has no clock.
    """
    environment, counts = stepper.environment, stepper.session.counts
    ranks = environment.rank.count
    first: _StepTime | None = None
    ended = False
    while not ended:
        micro_steps = plan.first if first is None else plan.warm_up
        before = counts.samples
        if first is None or first.parts_known:
            step = stepper.by_parts(micro_steps)
        else:
            micro_steps, step = plan.micro_steps, stepper.whole()
        if step.whole_s <= 0:
            raise UnavailableError("the emulated device's clock stands still: nothing is priced")
        if first is None:
            first = step
            on_pace(plan.needed_s(step.whole_s))
        samples = (stepper.session.counts.samples - before) * plan.micro_steps // micro_steps
        samples *= ranks
        ended = rule.ends_warm_up(samples, step.whole_s)
    assert first is not None
    environment.note_peak()
    environment.recording = False
    timed = plan.timed(step.whole_s) if first.parts_known else plan.micro_steps
    return _WarmUp(first.spent_s, timed)


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """The results of the timed steps. Amounts are per whole optimizer step.

    On several GPUs, `samples` and tokens count all ranks; everything else is of this rank.

    `interval` is that of the time of a whole step. `micro_steps` is the number of timed
    micro-steps, and a whole step has `micro_steps_per_step`.
    """

    interval: MeanInterval
    micro_steps: int
    micro_steps_per_step: int
    samples: float
    tokens: float
    padded_tokens: float
    model_flops: float | None
    data_wait_s: float
    loss_finite: bool
    stopped_by: str
    alloc_retries: int | None
    gpu_utilization: float | None

    @property
    def step_s(self) -> float:
        """Seconds of a whole step."""
        return self.interval.mean_s

    @property
    def is_composed(self) -> bool:
        """True if the time of a whole step is composed from the parts of short steps."""
        return self.micro_steps < self.interval.count * self.micro_steps_per_step

    @property
    def flops_per_s(self) -> float | None:
        """Model FLOPs per second."""
        return None if self.model_flops is None else self.model_flops / self.step_s

    @property
    def note(self) -> str | None:
        """A note on the composition of the step time; None if whole steps were timed."""
        if not self.is_composed:
            return None
        count = self.interval.count
        return (
            f"steps of {self.micro_steps_per_step} micro-steps are put together from "
            f"{self.micro_steps} micro-steps and {count} updates that were timed"
        )


def time_steps(stepper: Stepper, plan: StepPlan, rule: StopRule, micro_steps: int) -> TimedSteps:
    """Time steps of `micro_steps` until the mean of whole ones is known, or the budget is spent."""
    session, environment = stepper.session, stepper.environment
    rank = environment.rank
    device = parse_device(environment.device)
    before, retries = replace(session.counts), alloc_retries(device)
    mean, spent_s, stopped_by = RunningMean(), 0.0, None
    share = plan.micro_steps / micro_steps
    watched = device.type == "cuda" and not is_emulated()  # an emulated one draws no power
    with GpuWatch(device.index if watched else None) as watch:
        while stopped_by is None:
            whole = micro_steps == plan.micro_steps
            step = stepper.whole() if whole else stepper.by_parts(micro_steps)
            mean.add(step.whole_s)
            spent_s += step.spent_s
            # Checked between steps: reading the loss waits for the device.
            finite = rank.all(math.isfinite(float(session.loss)))
            count = mean.interval().count
            samples = (session.counts.samples - before.samples) * share / count * rank.count
            stopped_by = rule.reason_to_stop(mean, samples, spent_s) if finite else "loss"
    after, end_retries = session.counts, alloc_retries(device)
    share /= count
    flops = None
    if after.model_flops is not None and before.model_flops is not None:
        flops = (after.model_flops - before.model_flops) * share
    return TimedSteps(
        interval=mean.interval(),
        micro_steps=count * micro_steps,
        micro_steps_per_step=plan.micro_steps,
        samples=rank.total((after.samples - before.samples) * share),
        tokens=rank.total((after.tokens - before.tokens) * share),
        padded_tokens=rank.total((after.padded_tokens - before.padded_tokens) * share),
        model_flops=flops,
        data_wait_s=(after.data_wait_s - before.data_wait_s) * share,
        loss_finite=finite,
        stopped_by=stopped_by,
        alloc_retries=None if end_retries is None else end_retries - (retries or 0),
        gpu_utilization=watch.utilization,
    )
