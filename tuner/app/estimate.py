"""The memory and speed of one configuration on one GPU, without running it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.app.target import Target, comparable, with_model
from tuner.core.errors import InputError
from tuner.core.gpu import Gpu
from tuner.core.records import (
    Configuration,
    Doubt,
    Memory,
    MemoryCategory,
    Prediction,
    Source,
    Speed,
    TrialRecord,
)
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL, SYNC
from tuner.core.setup.schemas import SCHEMAS
from tuner.core.units import format_size, significant
from tuner.cost.speed.profile import DeviceProfile
from tuner.predict.releases import predicted_stack
from tuner.predict.stages import StagedPrediction
from tuner.program.loops import OWN, loop_of, plan_settings
from tuner.program.planned import read_as
from tuner.program.vocabulary import settings_for, translate
from tuner.searches.store import ResultsFolder
from tuner.space import SearchSpace, configure, default_space, load_space
from tuner.space.load import DEFAULT_WORKLOAD
from tuner.space.models.catalogue import stored_format
from tuner.space.models.trainable import model_defaults
from tuner.space.settings import default_values


@dataclass(frozen=True, slots=True, repr=False)
class Estimate:
    """The prediction of one configuration, and of each of its `stages`.

    `corrected_by` is the number of trials whose measurements corrected the prediction;
    `prediction.corrections` has the factors. `read_as` and `findings` are those of `Asked`.
    """

    space: SearchSpace
    configuration: Configuration
    gpu: Gpu
    prediction: Prediction
    stages: StagedPrediction | None = None
    corrected_by: int = 0
    read_as: str = ""
    findings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """True when its memory leaves the margin free, in every stage."""
        return self.prediction.fits

    @property
    def memory(self) -> Memory:
        """Peak memory of the stage that needs most, in bytes, by purpose."""
        return self.prediction.memory

    @property
    def speed(self) -> Speed | None:
        """Seconds per optimizer step, samples and tokens per second; None when unknown."""
        return None if self.prediction.is_compiled else self.prediction.speed

    def __repr__(self) -> str:
        """In short: a space and all its settings would fill the screen."""
        return f"<Estimate of {self.space.name} on {self.gpu.id}: {self}>"

    def __str__(self) -> str:
        used, limit = self.memory.device_bytes, self.prediction.budget.limit_bytes
        fits = "fits" if self.fits else "does not fit" if self.speed else "unknown, at most"
        rate = significant(self.speed.samples_per_s) if self.speed else "unknown"
        return f"{fits}, {format_size(used)} of {format_size(limit)}, {rate} samples/s (predicted)"

    def to_dict(self) -> dict[str, Any]:
        """As `tuner estimate --json` prints it."""
        values: dict[str, Any] = {
            "space": self.space.name if self.space.path is not None else None,
            "model": self.space.model,
            "read_as": self.read_as,
            "findings": list(self.findings),
            "verdict": str(self.prediction.verdict),
            **self.prediction.to_answer(),
            "corrected_by": self.corrected_by,
            "configuration": self.configuration.to_dict(),
            "versions": predicted_stack(),
        }
        if self.stages is None:
            return values
        return {
            **values,
            "limiting_stage": self.stages.limiting,
            "misfits": list(self.stages.misfits),
            "epoch_s": self.stages.epoch_s,
            "run_s": self.stages.run_s,
            "stages": {name: one.to_dict() for name, one in self.stages.stages.items()},
        }


def one_configuration(
    named: str | SearchSpace | None, model: str | None, settings: Mapping[str, Any]
) -> tuple[SearchSpace, Configuration]:
    """The space and configuration for a space or model name and settings.

    Without a space it is a LoRA training, with a default for every value that is not set.
    """
    if named is not None:
        space = with_model(load_space(named) if isinstance(named, str) else named, model)
        settings = settings_for(space, settings)
    elif model is not None:
        usual = model_defaults(model)
        given = settings_for(default_space(model, usual), settings)
        settings = _in_whole_batches({**usual, **given})
        space = default_space(model, settings)
    else:
        raise InputError("no search space and no model is named", hint="name one of them")
    return space, configure(space, settings, strict=False)


def _in_whole_batches(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings, with an effective batch of whole micro-batches where none is asked for."""
    if "micro_batch" not in settings or {"effective_batch", "grad_accum"} & settings.keys():
        return settings
    terms = SCHEMAS[DEFAULT_WORKLOAD].terms
    asked = (settings["micro_batch"], settings.get(GPUS_PER_TRIAL, 1))
    names = ("micro_batch", GPUS_PER_TRIAL)
    values = (terms[name].read(value) for name, value in zip(names, asked, strict=True))
    step = math.prod(int(str(value)) for value in values)
    least = int(str(terms["effective_batch"].default))
    return {**settings, "effective_batch": math.ceil(least / step) * step}


@dataclass(frozen=True, slots=True)
class Asked:
    """The training that an estimate is about.

    `read_as` says it in ten words, with its loop and loss; `doubts` are those about its memory that
    the configuration does not raise, and `findings` changes that the GPU type requires.
    """

    space: SearchSpace
    configuration: Configuration
    read_as: str
    doubts: frozenset[Doubt] = frozenset()
    findings: tuple[str, ...] = ()


def asked(
    named: str | SearchSpace | None,
    model: str | None,
    settings: Mapping[str, Any],
    *,
    loop: str | None = None,
    gpu: Gpu | None = None,
) -> Asked:
    """The training that a space or a model and settings name.

    Without a space it is the training of a plain script for `loop`, with the defaults of its
    trainer; on a GPU type without bf16 in fp16, as `tuner check` plans it. A space has a loop.
    """
    if named is not None and loop is not None:
        raise InputError("a space has its own loop", hint="leave out --loop, or name a model alone")
    if named is None and model is not None:
        usual = model_defaults(model)
        empty = default_space(model, usual)
        given = translate(settings, empty.terms, default_values(empty))
        given = {**usual, **given}
        loop = loop_of(loop, given)
        if loop != OWN:
            plan = plan_settings(model, given, loop, gpu=gpu)
            configuration = plan.configuration
            if stored_format(model) is not None and "precision" in given:
                # The plan has the checkpoint's format: another one is refused, not replaced.
                configuration = configuration.replace(precision=given["precision"])
            space = default_space(model, configuration)
            space = dataclasses.replace(space, fixed={**space.fixed, **configuration})
            doubts = frozenset(plan.doubts)
            return Asked(space, configuration, plan.read_as, doubts, plan.findings)
    space, configuration = one_configuration(named, model, settings)
    return Asked(space, configuration, read_as(configuration, "own loop"))


def estimate_configuration(
    space: SearchSpace,
    configuration: Configuration,
    gpu: Gpu,
    *,
    margin_fraction: float | None = None,
    profile: DeviceProfile | None = None,
) -> Estimate:
    """Predict one configuration, in all stages, from traces at full depth.

    Raises `InputError`, with everything that is wrong, when the GPU cannot run it.
    """
    from tuner.app.search.supported import require_supported
    from tuner.predict.predictor import SpacePredictor  # numpy

    stages = [*space.stage_configurations(configuration).values()]
    for values in stages or [configuration]:
        require_supported(values, gpu)
    predictor = SpacePredictor(space, gpu, margin_fraction=margin_fraction, profile=profile)
    (found,) = predictor.trace([configuration])
    return Estimate(space, configuration, gpu, found.prediction, found.staged)


def estimate_asked(
    asked: Asked,
    gpu: Gpu,
    *,
    margin_fraction: float | None = None,
    profile: DeviceProfile | None = None,
) -> Estimate:
    """As `estimate_configuration`, with the doubts about the training that is asked for."""
    from tuner.cost.calibrate import widened  # numpy
    from tuner.predict.predict import doubts_of

    found = estimate_configuration(
        asked.space, asked.configuration, gpu, margin_fraction=margin_fraction, profile=profile
    )
    more = asked.doubts - doubts_of(asked.space.workload, asked.configuration)
    return dataclasses.replace(
        found,
        prediction=widened(found.prediction, more),
        read_as=asked.read_as,
        findings=asked.findings,
    )


def exchanging_each(found: Estimate, profile: DeviceProfile | None) -> Estimate | None:
    """The estimate with gradients exchanged in each micro-step; None where all are sharded."""
    if not found.memory.breakdown.get(str(MemoryCategory.UNSHARDED_GRADIENTS)):
        return None
    return estimate_configuration(
        found.space, found.configuration.replace(**{SYNC: True}), found.gpu, profile=profile
    )


def corrected(found: Estimate, results: Path) -> Estimate:
    """`found`, corrected by the trials in `results` of its space that ran on its GPU type.

    Predicted trials and those of other devices and memory sizes don't count. Raises `InputError`
    for a journal that cannot be read.
    """
    from tuner.cost.calibrate import calibrations_from

    folder = ResultsFolder(results, found.space.name, found.gpu.id)
    target = Target(found.space, found.gpu, folder, ())
    ran = _on_device(comparable(folder.read().records, target), found.gpu)
    if not ran:
        return found
    prediction = calibrations_from(ran).apply(found.prediction, found.space.name)
    if not prediction.corrections:
        return found
    return dataclasses.replace(found, prediction=prediction, corrected_by=len(ran))


def _on_device(records: Sequence[TrialRecord], gpu: Gpu) -> list[TrialRecord]:
    """The trials that ran on such a device itself, or on an emulated one."""
    names = {gpu.name, *gpu.device_names}
    return [
        record
        for record in records
        if record.source is not Source.PREDICTED
        and record.memory_limit_bytes is None
        and (record.emulated_device is not None or record.device in names)
    ]
