"""Trials of trainings that have stages: one configuration is tried in each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tuner.core.records import (
    Configuration,
    Measurement,
    Outcome,
    Speed,
    Status,
    hardest_stage,
    most_known,
)
from tuner.predict.stages import StageWork, mean_speed, numbers_of, stage_work
from tuner.space.searchspace import SearchSpace
from tuner.trial.base import PLAIN, GiveUp, Instructions, RunnerFactory, TrialRunner, call_if_there
from tuner.trial.ranks import if_all_known

Orders = Mapping[str, tuple[str, ...]]
"""Names of stages in the order in which they are to run, by the key of the configuration."""


class StagedRunner:
    """Runs a configuration in every stage of a space through another runner; see `TrialRunner`.

    Stages that are alike are run once. A real trial is over with the first stage that does not
    end well, or leaves too little memory free: `orders` lets the hardest one begin. Otherwise
    the outcome has the memory of the stage that needs most and the speed of all together.
    """

    def __init__(
        self, runner: TrialRunner, space: SearchSpace, orders: Orders | None = None
    ) -> None:
        self.source = runner.source
        self._runner = runner
        self._space = space
        self._orders = orders or {}
        self._interrupted = False

    def start(self) -> None:
        """Let the runner prepare what it keeps, where it can."""
        call_if_there(self._runner, "start")

    def interrupt(self) -> None:
        """Give up the trial that runs: the stage that it is in, and those that would follow."""
        self._interrupted = True
        call_if_there(self._runner, "interrupt")

    def close(self) -> None:
        """Let the runner end what it keeps."""
        call_if_there(self._runner, "close")

    def run(self, configuration: Configuration, instructions: Instructions = PLAIN) -> Outcome:
        """See `TrialRunner.run`. `duration_s` is that of all stages that were run.

        No stage is given up for its speed, which is not that of all stages together.
        """
        self._interrupted = False
        usable_bytes = instructions.give_up.usable_bytes if instructions.give_up else None
        rule = GiveUp(usable_bytes)
        instructions = replace(instructions, give_up=None if usable_bytes is None else rule)
        stages = self._space.stage_configurations(configuration)
        found: dict[Configuration, Outcome] = {}
        for name in self._orders.get(configuration.key, tuple(stages)):
            values = stages[name]
            if values in found:
                continue
            if self._interrupted:
                ended = Outcome(Status.INTERRUPTED, message="interrupted between two stages")
            else:
                ended = self._runner.run(values, instructions)
            found[values] = ended
            too_large = ended.ran is not None and rule.is_too_large(ended.ran.memory.device_bytes)
            if ended.status is not Status.OK or too_large:
                return _ended_by(name, ended, sum(o.duration_s for o in found.values()))
        by_name = {name: found[values] for name, values in stages.items()}
        together = _together(by_name, stage_work(self._space))
        return replace(together, duration_s=sum(o.duration_s for o in found.values()))


@dataclass(frozen=True, slots=True)
class StagedFactory:
    """Makes runners that try every stage of `space`; see `RunnerFactory`.

    `orders` says with which stage to begin; without it they are run in the order of the space.
    """

    runners: RunnerFactory
    space: SearchSpace
    orders: Orders = field(default_factory=dict)

    def __call__(self) -> TrialRunner:
        """See `RunnerFactory`."""
        return StagedRunner(self.runners(), self.space, self.orders)


def _ended_by(name: str, outcome: Outcome, duration_s: float) -> Outcome:
    """The outcome of a trial that ended with a stage, of which alone it then tells."""
    ran = outcome.ran
    if ran is not None:
        ran = replace(
            ran,
            stages={name: numbers_of(ran)},
            notes=(*ran.notes, f"memory and speed of stage {name} alone"),
        )
    return replace(
        outcome.with_ran(ran),
        message=f"in stage {name}: {outcome.message}".removesuffix(": "),
        stage=name,
        duration_s=duration_s,
    )


def _together(outcomes: Mapping[str, Outcome], work: Mapping[str, StageWork | None]) -> Outcome:
    """One outcome of stages that were all run to their end."""
    ran = {n: o.ran for n, o in outcomes.items() if o.ran is not None}
    if len(ran) == len(outcomes):
        return Outcome.of(Status.OK, _measured(ran, work))
    return Outcome(Status.OK)  # a runner that has no numbers to give


def _measured(
    stages: Mapping[str, Measurement], work: Mapping[str, StageWork | None]
) -> Measurement:
    """The measurement of the stage that needs most memory, with the speed of all stages.

    What was measured of one stage's rate alone is unknown of all together.
    """
    numbers = {name: numbers_of(found) for name, found in stages.items()}
    limiting = hardest_stage(numbers)
    assert limiting is not None
    every = list(stages.values())
    distinct = list({id(found): found for found in every}.values())
    speed = mean_speed({name: found.speed for name, found in stages.items()}, work)
    return replace(
        stages[limiting],
        speed=speed,
        steps=sum(found.steps for found in distinct),
        timed_micro_steps=if_all_known(sum, (found.timed_micro_steps for found in distinct)),
        loss_finite=all(found.loss_finite for found in every),
        samples_per_s_interval=_interval(stages, speed, work),
        padded_tokens_per_s=None,
        data_wait_fraction=None,
        gpu_utilization=None,
        evaluation_peak_bytes=most_known(found.evaluation_peak_bytes for found in every),
        checkpoint_bytes=most_known(found.checkpoint_bytes for found in every),
        notes=(
            *dict.fromkeys(note for found in every for note in found.notes),
            f"memory of stage {limiting}, speed of {len(stages)} stages",
        ),
        stages=numbers,
    )


def _interval(
    stages: Mapping[str, Measurement], speed: Speed, work: Mapping[str, StageWork | None]
) -> tuple[float, float] | None:
    """The interval of the rate of all stages, where that of each is known.

    As if all stages were at the lower, and all at the upper end: no narrower than it is.
    """
    ends: list[float] = []
    for end in (0, 1):
        rates: dict[str, Speed] = {}
        for name, found in stages.items():
            if found.samples_per_s_interval is None:
                return None
            rates[name] = replace(found.speed, samples_per_s=found.samples_per_s_interval[end])
        ends.append(mean_speed(rates, work).samples_per_s)
    return min(ends[0], speed.samples_per_s), max(ends[1], speed.samples_per_s)
