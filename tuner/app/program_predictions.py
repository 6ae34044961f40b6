"""Predicts a program from its settings, as it is and with others, in place of running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.core.errors import InputError, verdict_code
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, KnobValue, Prediction
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL
from tuner.core.units import MIB
from tuner.cost.rank_memory import loaded_whole
from tuner.predict.predictor import PredictionJob, Predictor
from tuner.program.changes import change
from tuner.program.planned import WORKLOAD, ProgramPlan, plan_program
from tuner.program.program import Program
from tuner.program.setting import Setting
from tuner.program.settings import find_settings
from tuner.space.gpus import get_gpu


@dataclass(frozen=True, slots=True)
class PredictedStepTime:
    """The predicted time of an optimizer step, in seconds."""

    step_s: float
    phases_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PredictedProgram:
    """What is predicted of a program; every number in it is *predicted*."""

    command: tuple[str, ...]
    gpu: Gpu
    plan: ProgramPlan
    prediction: Prediction
    ended: str = "predicted"
    inputs: tuple[tuple[int, int], ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether it fits with the margin."""
        return self.prediction.fits

    @property
    def exit_code(self) -> int:
        """The status of `tuner.core.errors` for the verdict."""
        return verdict_code(self.fits)

    @property
    def used_bytes(self) -> int:
        """The device memory."""
        return self.prediction.memory.device_bytes

    @property
    def margin_bytes(self) -> int:
        """What is to stay free."""
        return self.prediction.budget.margin_bytes

    @property
    def settings(self) -> Mapping[str, Any]:
        """What it was predicted with, by knob."""
        return self.plan.settings

    @property
    def time(self) -> PredictedStepTime | None:
        """The time of an optimizer step."""
        speed = self.prediction.speed
        phases = {"optimizer": speed.breakdown_s.get("optimizer", 0.0)}
        return PredictedStepTime(speed.step_s, phases)

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            **self.prediction.to_dict(),
            "command": list(self.command),
            "trainer": self.plan.trainer,
            "model": self.plan.model,
            "configuration": self.plan.configuration.to_dict(),
            "assumed": list(self.plan.assumed),
            "left_out": list(self.plan.left_out),
            "notes": list(self.plan.notes),
        }


@dataclass(slots=True)
class ProgramPredictions:
    """Predictions of one program on one GPU type; `ProgramRuns` without a run.

    `given` are knobs that the user says, and `model` the model, where the program does not.
    `gpus` are those of the machine, None for as many as the program's launcher starts ranks.
    """

    program: Program
    gpu: Gpu
    margin_fraction: float | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    gpus: int | None = None
    count: int = 0
    log_tail: str = ""
    settings: Mapping[str, Setting] = dataclasses.field(init=False)
    _predictor: Predictor | None = None

    def __post_init__(self) -> None:
        self.settings = find_settings(self.program)

    def as_it_is(self, *, roomy: bool = False) -> PredictedProgram:
        """The program as it is; `roomy` is for those that run out of memory."""
        return self._predicted(self.program)

    def with_values(
        self, wanted: Sequence[Mapping[str, KnobValue]], *, roomy: bool
    ) -> list[PredictedProgram | InputError]:
        """The program with each of these changes; in place of one that cannot be, the reason."""
        found: list[PredictedProgram | InputError] = []
        for values in wanted:
            try:
                changed = change(self.program, self.settings, values).after
                found.append(self._predicted(changed))
            except InputError as error:
                found.append(error)
        return found

    def _options(self) -> list[str]:
        """The options of `tuner estimate` for the same GPU and margin."""
        options = ["--gpu", self.gpu.id]
        if self.gpu.memory_bytes != get_gpu(self.gpu.id).memory_bytes:
            options += ["--gpu-memory", f"{self.gpu.memory_bytes / MIB:.0f}MiB"]
        if self.margin_fraction is not None:
            options += ["--margin", f"{self.margin_fraction:.4%}"]
        return options

    def _predicted(self, program: Program) -> PredictedProgram:
        self.count += 1
        plan = plan_program(program, self.given, self.model, gpus=self.gpus, target=self._options())
        if self._predictor is None:
            self._predictor = Predictor(PredictionJob(WORKLOAD, plan.model))
        traced = [plan.configuration]
        if plan.has_whole_model_first:
            traced.append(Configuration({**plan.configuration, GPUS_PER_TRIAL: 1}))
        prediction, *alone = self._predictor.traced(
            traced, self.gpu, margin_fraction=self.margin_fraction
        )
        if alone:
            prediction = loaded_whole(prediction, alone[0])
        return PredictedProgram(tuple(program.command), self.gpu, plan, prediction)
