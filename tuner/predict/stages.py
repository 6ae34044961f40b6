"""Predictions of trainings that have stages: what is hardest, and how long they take together.

One configuration serves all stages, so it fits only where every stage fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tuner.core.records import Configuration, Measurement, Prediction, Speed, StageNumbers
from tuner.space.searchspace import SearchSpace

Predict = Callable[[Sequence[Configuration]], Sequence[Prediction]]
"""Predictions of configurations, in their order: `Predictor.predict` on some GPU."""


class StageWork(NamedTuple):
    """The work of a stage: samples in one pass over its data, and the number of passes."""

    examples: float
    epochs: float


@dataclass(frozen=True, slots=True)
class StagedPrediction:
    """One configuration in every stage of a training.

    `overall` has the memory of the stage that needs most, and the mean speed of all stages
    weighted by their samples. `epoch_s` is one pass over the data of every stage, `run_s` all
    passes; both are None where the data of a stage is not known, and `overall` then gives every
    stage as many samples.
    """

    stages: Mapping[str, Prediction]
    limiting: str
    overall: Prediction
    epoch_s: float | None
    run_s: float | None

    @property
    def misfits(self) -> tuple[str, ...]:
        """The stages that do not fit."""
        return tuple(name for name, prediction in self.stages.items() if not prediction.fits)


def predict_stages(
    space: SearchSpace, configurations: Sequence[Configuration], predict: Predict
) -> list[StagedPrediction]:
    """Every configuration in every stage of `space`, with one call of `predict`.

    The space must have stages. Stages that are alike are predicted once.
    """
    staged = [space.stage_configurations(configuration) for configuration in configurations]
    distinct = list(dict.fromkeys(c for stages in staged for c in stages.values()))
    found = dict(zip(distinct, predict(distinct), strict=True))
    work = stage_work(space)
    return [combine({name: found[c] for name, c in stages.items()}, work) for stages in staged]


def stage_work(space: SearchSpace) -> dict[str, StageWork | None]:
    """The work of each stage; None if the space does not give its number of examples."""
    work: dict[str, StageWork | None] = {}
    for stage in space.stages:
        examples = stage.examples if stage.examples is not None else space.data.examples
        epochs = stage.epochs if stage.epochs is not None else space.data.epochs
        known = examples is not None
        work[stage.name] = (
            StageWork(examples or 0, 1.0 if epochs is None else epochs) if known else None
        )
    return work


def combine(
    stages: Mapping[str, Prediction], work: Mapping[str, StageWork | None]
) -> StagedPrediction:
    """One prediction for all stages; see `StagedPrediction`."""
    limiting = max(stages, key=lambda name: stages[name].memory.device_bytes)
    hardest = stages[limiting]
    speed = mean_speed({name: p.speed for name, p in stages.items()}, work)
    epoch = {n: w.examples / stages[n].speed.samples_per_s for n, w in work.items() if w}
    run = {n: epoch[n] * w.epochs for n, w in work.items() if w}
    complete = len(epoch) == len(stages)
    return StagedPrediction(
        stages=dict(stages),
        limiting=limiting,
        overall=replace(
            hardest,
            speed=speed,
            method=f"{hardest.method}; memory of stage {limiting}, speed of {len(stages)} stages",
            intervals=_intervals(stages, speed, limiting),
            stages={name: numbers_of(prediction) for name, prediction in stages.items()},
        ),
        epoch_s=sum(epoch.values()) if complete else None,
        run_s=sum(run.values()) if complete else None,
    )


def numbers_of(evidence: Prediction | Measurement) -> StageNumbers:
    """Numbers of one stage, kept beside those of all."""
    speed = evidence.speed
    return StageNumbers(evidence.memory.device_bytes, speed.samples_per_s, speed.step_s)


def hardest_first(prediction: Prediction) -> tuple[str, ...]:
    """The stages of a prediction by the memory that they need, the most first."""
    stages = prediction.stages
    return tuple(sorted(stages, key=lambda name: -stages[name].device_bytes))


def mean_speed(speeds: Mapping[str, Speed], work: Mapping[str, StageWork | None]) -> Speed:
    """The speed of stages that are trained one after another.

    Weighted by their samples; where those of a stage are not known, each counts alike.
    """
    samples = {name: one.examples * one.epochs for name, one in work.items() if one is not None}
    if len(samples) != len(speeds):  # not known of all
        samples = dict.fromkeys(speeds, 1.0)
    return _mean_speed([(s, samples[n], samples[n] / s.samples_per_s) for n, s in speeds.items()])


def _mean_speed(parts: Sequence[tuple[Speed, float, float]]) -> Speed:
    """The speed of parts that were trained one after another: (speed, samples, seconds) each."""
    total_s = sum(seconds for _, _, seconds in parts)
    steps = [seconds / speed.step_s for speed, _, seconds in parts]
    mfus = [speed.mfu for speed, _, _ in parts]
    kinds = dict.fromkeys(kind for speed, _, _ in parts for kind in speed.breakdown_s)

    def over_time(values: Sequence[float]) -> float:
        return sum(v * s for v, (_, _, s) in zip(values, parts, strict=True)) / total_s

    return Speed(
        step_s=total_s / sum(steps),
        it_per_s=over_time([speed.it_per_s for speed, _, _ in parts]),
        samples_per_s=sum(samples for _, samples, _ in parts) / total_s,
        tokens_per_s=over_time([speed.tokens_per_s for speed, _, _ in parts]),
        mfu=over_time([m for m in mfus if m is not None]) if None not in mfus else None,
        breakdown_s={
            kind: sum(
                number * speed.breakdown_s.get(kind, 0.0)
                for number, (speed, _, _) in zip(steps, parts, strict=True)
            )
            / sum(steps)
            for kind in kinds
        },
    )


def _intervals(
    stages: Mapping[str, Prediction], speed: Speed, limiting: str
) -> dict[str, tuple[float, float]]:
    """Memory: those of the hardest stage. Time: the widest of the stages' relative errors.

    Errors of one model of one GPU go together, so they do not average out over stages.
    """
    found = dict(stages[limiting].intervals)
    for name in ("step_s", "tokens_per_s"):
        ratios = [
            (p.intervals[name][0] / centre, p.intervals[name][1] / centre)
            for p in stages.values()
            if name in p.intervals and (centre := getattr(p.speed, name))
        ]
        if ratios:
            value = getattr(speed, name)
            low, high = min(r[0] for r in ratios), max(r[1] for r in ratios)
            found[name] = (low * value, high * value)
    return found
