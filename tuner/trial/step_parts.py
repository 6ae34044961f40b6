"""An optimizer step by its parts: how long each micro-step took, and the update after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from tuner.core.records import Phase


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of the parts of one optimizer step; the update is all that follows micro-steps."""

    micro_steps_s: tuple[float, ...]
    update_s: float

    def whole_s(self, micro_steps: int) -> float:
        """Seconds of a step of `micro_steps`, at least as many as there are here.

        Those that are missing take as long as the mean of those after the first, which alone
        finds no gradients to add to.
        """
        measured_s = sum(self.micro_steps_s) + self.update_s
        missing = micro_steps - len(self.micro_steps_s)
        later_s = self.micro_steps_s[1:] or self.micro_steps_s
        return measured_s + missing * fmean(later_s) if missing else measured_s


class PartClock:
    """Takes the time whenever a part of a step begins, when the device has done what was before.

    `synchronize` waits for the device, and `now` is the clock (`tuner.trial.clock`). A part
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

    def stop(self, micro_steps: int) -> StepParts | None:
        """The parts of the step that ends now, once the device has been waited for.

        None where the session did not announce each of `micro_steps` micro-steps and one update:
        then it is not known what the times are of.
        """
        self._times_s.append(self._now())
        if self._announced != [*range(1, micro_steps), None]:
            return None
        *micro_s, update_s = (
            after - before for before, after in zip(self._times_s, self._times_s[1:], strict=False)
        )
        return StepParts(tuple(micro_s), update_s)
