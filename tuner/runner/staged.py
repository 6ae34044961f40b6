"""Trials of trainings that have stages: one configuration is tried in each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tuner.estimate.stages import Work, combine, mean_speed, stage_work
from tuner.records import Configuration, Measurement, Outcome, Status
from tuner.runner.base import PLAIN, Instructions, RunnerFactory, TrialRunner
from tuner.space.searchspace import SearchSpace


class StagedRunner:
    """Runs a configuration in every stage of a space through another runner; see `TrialRunner`.

    Stages that are alike are run once. The first stage that does not end well ends the trial:
    its outcome is the trial's, with the stage's name. Otherwise the outcome has the memory of
    the stage that needs most and the speed of all stages together.
    """

    def __init__(self, runner: TrialRunner, space: SearchSpace) -> None:
        self.source = runner.source
        self._runner = runner
        self._space = space

    def run(self, configuration: Configuration, instructions: Instructions = PLAIN) -> Outcome:
        """See `TrialRunner.run`. `duration_s` is that of all stages.

        No stage is given up early: its speed is not that of all stages together.
        """
        instructions = replace(instructions, give_up=None)
        found: dict[Configuration, Outcome] = {}
        stages = self._space.stage_configurations(configuration)
        for name, values in stages.items():
            if values not in found:
                found[values] = self._runner.run(values, instructions)
            outcome = found[values]
            if outcome.status is not Status.OK:
                message = f"in stage {name}: {outcome.message}".removesuffix(": ")
                return replace(outcome, message=message, duration_s=_duration_s(found))
        by_name = {name: found[values] for name, values in stages.items()}
        return replace(_together(by_name, stage_work(self._space)), duration_s=_duration_s(found))


@dataclass(frozen=True, slots=True)
class StagedFactory:
    """Makes runners that try every stage of `space`; see `RunnerFactory`."""

    runners: RunnerFactory
    space: SearchSpace

    def __call__(self) -> TrialRunner:
        """See `RunnerFactory`."""
        return StagedRunner(self.runners(), self.space)


def _duration_s(found: Mapping[Configuration, Outcome]) -> float:
    return sum(outcome.duration_s for outcome in found.values())


def _together(outcomes: Mapping[str, Outcome], work: Mapping[str, Work | None]) -> Outcome:
    """One outcome of stages that all ended well."""
    measured = {n: o.measurement for n, o in outcomes.items() if o.measurement is not None}
    predicted = {n: o.prediction for n, o in outcomes.items() if o.prediction is not None}
    measurement = _measured(measured, work) if len(measured) == len(outcomes) else None
    prediction = combine(predicted, work).overall if len(predicted) == len(outcomes) else None
    return Outcome(Status.OK, prediction=prediction, measurement=measurement)


def _measured(stages: Mapping[str, Measurement], work: Mapping[str, Work | None]) -> Measurement:
    """The measurement of the stage that needs most memory, with the speed of all stages.

    What was measured of one stage's rate alone is unknown of all together.
    """
    limiting = max(stages, key=lambda name: stages[name].memory.device_bytes)
    return replace(
        stages[limiting],
        speed=mean_speed({name: found.speed for name, found in stages.items()}, work),
        loss_finite=all(found.loss_finite for found in stages.values()),
        samples_per_s_interval=None,
        padded_tokens_per_s=None,
        data_wait_fraction=None,
        notes=(
            *dict.fromkeys(note for found in stages.values() for note in found.notes),
            f"memory of stage {limiting}, speed of {len(stages)} stages",
        ),
    )
