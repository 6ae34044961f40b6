"""Two oracles for a program and changes of its settings: emulated runs, and predictions."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from tuner.app.pinned import Wanted, pinned_doubts, wanted_releases
from tuner.core.errors import TunerError, UnavailableError, verdict_code
from tuner.core.expressions import show
from tuner.core.gpu import Gpu
from tuner.core.records import (
    Configuration,
    KnobValue,
    Memory,
    MemoryBudget,
    Phase,
    Prediction,
    RunTime,
    Speed,
    Verdict,
)
from tuner.core.setup.common import QUANTIZED
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL
from tuner.core.supervised import Tail
from tuner.cost.calibrate import widened
from tuner.cost.parallel import loaded_whole
from tuner.emulator import Machine
from tuner.emulator.emulation import STEPS, Emulation
from tuner.predict.predict import doubts_of
from tuner.predict.predictor import Predictor
from tuner.program.changes import change
from tuner.program.edit.place import is_same
from tuner.program.launch import read_launch, runnable
from tuner.program.planned import WORKLOAD, ProgramPlan, knows, not_predicted, plan_program
from tuner.program.program import Program
from tuner.program.settings import Setting, Settings, settings_of
from tuner.searches.facts import counted_gpus

AT_ONCE = 2
"""Number of programs that run side by side; each keeps about one processor busy."""


@dataclass(frozen=True, slots=True)
class PredictedProgram:
    """The prediction for a program, with the attributes of an `Emulation`."""

    command: tuple[str, ...]
    gpu: Gpu
    plan: ProgramPlan
    prediction: Prediction
    others: tuple[PredictedProgram, ...] = ()
    """The program's other trainings, which take less memory."""
    steps_fit: bool = False
    """The program fits without its evaluation, and not with it."""
    examples: int | None = None
    """The examples of its data, as far as they are given."""
    source = ended = "predicted"
    inputs: ClassVar[tuple[tuple[int, int], ...]] = ()
    host_is_full = False
    generates = False
    compares = ""

    @property
    def fits(self) -> bool | None:
        """The verdict with the margin; unknown where a bound on the memory decides nothing."""
        more = self.plan.keeps_all or bool(self.plan.at_least)
        undecided = more if self.prediction.fits else bool(self.plan.at_most)
        return None if undecided else self.prediction.fits

    @property
    def verdict(self) -> Verdict:
        """The verdict with the interval of the prediction."""
        return Verdict.UNKNOWN if self.fits is None else self.prediction.verdict

    @property
    def is_upper_bound(self) -> bool:
        """True if the memory is no more than this, which is too much: a smaller one may fit."""
        return self.fits is None and bool(self.plan.at_most) and not self.prediction.fits

    @property
    def exit_code(self) -> int:
        """The status of `tuner.core.errors` for the verdict."""
        return verdict_code(self.fits)

    @property
    def used_bytes(self) -> int:
        """The device memory."""
        return self.prediction.memory.device_bytes

    @property
    def memory(self) -> Memory:
        """Its peak memory, in bytes."""
        return self.prediction.memory

    @property
    def budget(self) -> MemoryBudget:
        """The memory that there is, and the margin."""
        return self.prediction.budget

    @property
    def interval(self) -> tuple[float, float] | None:
        """The ends of the 90 % interval of the device memory."""
        return self.prediction.intervals.get("device_bytes")

    @property
    def ranks(self) -> int:
        """The number of GPUs."""
        return counted_gpus(self.plan.configuration)

    @property
    def phases(self) -> dict[str, int]:
        """Peak allocated bytes of the steps and of the evaluation; empty without a priced one."""
        peaks = dict(self.prediction.memory.phase_peak_bytes)
        evaluation = peaks.pop(str(Phase.EVALUATION), None)
        return {"evaluation": evaluation, "steps": max(peaks.values())} if evaluation else {}

    @property
    def not_priced(self) -> str:
        """The part of the evaluation that is in no number; else empty."""
        missing = self.plan.configuration.get("eval_batch") and not self.phases
        text = "evaluation isn't priced: no timeline that is known has its forward pass"
        return text if missing else self.plan.evaluation

    @property
    def ends_in(self) -> str | None:
        """The phase that takes too much memory where the steps alone would fit."""
        return "evaluation" if self.steps_fit and not self.prediction.fits else None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the prediction, by knob."""
        return self.plan.settings

    @property
    def time(self) -> Speed | None:
        """The time of an optimizer step; None when unknown."""
        return None if self.prediction.is_compiled else self.prediction.speed

    @property
    def run_time(self) -> RunTime | None:
        """The time of the training, each example at full length; None if its steps aren't known.

        The rows that examples are packed into aren't counted.
        """
        plan, time = self.plan, self.time
        is_packed = plan.configuration.get("padding") == "packed"
        if time is None:
            return None
        batch = round(time.samples_per_s * time.step_s / plan.sequences)
        found = plan.schedule.steps(None if is_packed else self.examples, batch)
        if found is None:
            return None
        steps, is_whole = found
        ends = self.prediction.intervals.get("step_s", (time.step_s, time.step_s))
        least_s, most_s = (steps * end for end in ends)
        return RunTime(steps, 0, is_whole, steps * time.step_s, (least_s, most_s))

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            **self.prediction.to_answer(),
            "command": list(self.command),
            "trainer": self.plan.trainer,
            "model": self.plan.model,
            "read_as": self.plan.read_as,
            "configuration": self.plan.configuration.to_dict(),
            "assumed": list(self.plan.assumed),
            "left_out": list(self.plan.left_out),
            "at_least": list(self.plan.at_least),
            "others": [
                {"where": one.plan.where, "read_as": one.plan.read_as, "verdict": str(one.verdict)}
                for one in self.others
            ],
            "notes": list(self.plan.notes),
            "ends_in": self.ends_in,
            "not_priced": self.not_priced or None,
            "run_time": None if (run := self.run_time) is None else dataclasses.asdict(run),
        }


Answer = TypeVar("Answer", Emulation, PredictedProgram)
RunAnswer = Emulation | PredictedProgram
Values = Mapping[str, KnobValue]
Ways = Sequence[tuple[Values, RunAnswer]]
"""Parameters to set, with the answer that they lead to."""


@dataclass(slots=True)
class ProgramOracle(ABC, Generic[Answer]):
    """Answers how much memory and time a program takes on one GPU type.

    `gpus` are those of the machine, None for one per process that the program's launcher starts.
    `given` are parameters that count more than the program's, for a prediction, and `model` that of
    a program that does not specify it. `count` is the number of answers so far, `log_tail` the end
    of the last output.
    """

    program: Program
    gpu: Gpu
    gpus: int | None = None
    margin_fraction: float | None = None
    model: str | None = field(default=None, kw_only=True)
    given: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    count: int = field(default=0, init=False)
    log_tail: str = field(default="", init=False)
    settings: Settings = field(init=False)
    doing: ClassVar[str]

    def __post_init__(self) -> None:
        self.settings = settings_of(self.program)

    def as_it_is(self, *, on_larger_gpu: bool = False) -> Answer:
        """The unchanged program; `on_larger_gpu` gives it a GPU with more memory."""
        return self._ask(self.program, on_larger_gpu=on_larger_gpu)

    def with_values(
        self, wanted: Sequence[Values], *, on_larger_gpu: bool
    ) -> Sequence[Answer | TunerError]:
        """The program with each of these changes; the reason for a change that is impossible."""
        return [self._changed(values, on_larger_gpu=on_larger_gpu) for values in wanted]

    def smaller_evaluation(self, found: Answer) -> Ways:
        """The batch of an evaluation with which it fits, where the evaluation alone does not."""
        return ()

    def other_methods(self, found: Answer) -> Ways:
        """A method of training, and a length of examples, with which it fits; predicted."""
        of = found.settings
        adapters = {} if of.get("lora_rank") else {"lora_rank": 16}
        in_bits = {} if of.get("precision") in QUANTIZED else {"precision": "nf4"}
        kinds: list[Values] = [adapters, {**adapters, **in_bits}]
        length = of.get("max_length")
        shorter = [{"max_length": int(str(length)) // part} for part in (2, 4)] if length else []
        oracle = ProgramPredictions(
            self.program, self.gpu, self.gpus, self.margin_fraction, model=self.model
        )

        def fits_with(values: Values) -> tuple[Values, PredictedProgram] | None:
            oracle.given = {**self.given, **values}
            with contextlib.suppress(TunerError):
                answer = oracle.as_it_is()
                return (values, answer) if answer.fits else None
            return None

        return tuple(
            way
            for several in (filter(None, kinds), shorter)
            if (way := next(filter(None, map(fits_with, several)), None)) is not None
        )

    def with_environment(self, environment: Mapping[str, str]) -> Answer:
        """The program with these variables."""
        given = {**self.program.environment, **environment}
        return self._ask(dataclasses.replace(self.program, environment=given), on_larger_gpu=False)

    def _changed(self, values: Values, *, on_larger_gpu: bool) -> Answer | TunerError:
        try:
            return self._ask(change(self.settings, values).after, on_larger_gpu=on_larger_gpu)
        except TunerError as error:
            return error

    @abstractmethod
    def _ask(self, program: Program, *, on_larger_gpu: bool) -> Answer: ...


@dataclass(slots=True)
class ProgramPredictions(ProgramOracle[PredictedProgram]):
    """Predictions from the settings of a program, which never runs.

    `examples` are in its data, `largest` is the place of the training that takes the most memory.
    """

    examples: int | None = None
    predictor: Predictor | None = None
    _wanted: Wanted | None = field(default=None, init=False)
    _others: tuple[PredictedProgram, ...] = field(default=(), init=False)
    _lost: dict[str, TunerError] = field(default_factory=dict, init=False)
    largest: int | None = field(default=None, init=False)
    doing: ClassVar[str] = "predicting"

    @property
    def wanted(self) -> Wanted:
        """The releases that the program's environment pins, which changed programs share."""
        if self._wanted is None:
            self._wanted = wanted_releases(self.program)
        return self._wanted

    def _ask(self, program: Program, *, on_larger_gpu: bool) -> PredictedProgram:
        (found,) = self.predicted([(program, self.plan(program))])
        return dataclasses.replace(found, others=self._others)

    def plan(self, program: Program) -> ProgramPlan:
        """The training of `program` that takes the most memory.

        Raises `InputError` as `plan_program` does.
        """
        plan = plan_program(program, self.given, self.model, gpus=self.gpus, gpu=self.gpu)
        every = (plan, *plan.others)
        if len(every) == 1:
            return plan
        if self.largest is None:
            each: dict[int, PredictedProgram] = {}
            for at, one in enumerate(every):
                alone = dataclasses.replace(self)  # a predictor has one model
                try:
                    (each[at],) = alone.predicted([(program, one)])
                except TunerError as error:
                    self._lost[not_predicted(one.where, error)] = error
            if not each:
                raise next(iter(self._lost.values()))
            *rest, self.largest = sorted(each, key=lambda at: each[at].used_bytes)
            self._others = tuple(each[at] for at in rest)
        chosen = every[: self.largest + 1][-1]  # a change may make two alike
        return dataclasses.replace(chosen, at_least=(*chosen.at_least, *self._lost))

    def smaller_evaluation(self, found: PredictedProgram) -> Ways:
        """As in `ProgramOracle`: the program's own number, halved until it fits."""
        size = int(str(found.plan.configuration.get("eval_batch", 0))) if found.ends_in else 0
        while size := size // 2:
            other = Configuration({**found.plan.configuration, "eval_batch": size})
            plan = dataclasses.replace(found.plan, configuration=other)
            (smaller,) = self.predicted([(self.program, plan)])
            if smaller.fits and smaller.phases:
                return (({"per_device_eval_batch_size": size}, smaller),)
        return ()

    def predicted(self, planned: Sequence[tuple[Program, ProgramPlan]]) -> list[PredictedProgram]:
        """The predictions of programs with their plans."""
        self.count += len(planned)
        if self.predictor is None:
            self.predictor = Predictor(WORKLOAD, planned[0][1].model)
        how = self.predictor.traced
        configurations = [plan.configuration for _, plan in planned]
        alone = [
            Configuration({**plan.configuration, GPUS_PER_TRIAL: 1})
            for _, plan in planned
            if plan.loads_full_model_first
        ]
        first = planned[0][1]
        with knows(first.model, lambda: first.read_as):
            found = how([*configurations, *alone], self.gpu, margin_fraction=self.margin_fraction)
        whole = iter(found[len(planned) :])
        pinned = pinned_doubts(self.wanted)
        answers = []
        for (program, plan), alike in zip(planned, found, strict=False):
            loaded = loaded_whole(alike, next(whole)) if plan.loads_full_model_first else alike
            more = (plan.doubts | pinned) - doubts_of(WORKLOAD, plan.configuration)
            prediction = widened(loaded, more)
            command = tuple(program.command)
            answers.append(
                PredictedProgram(command, self.gpu, plan, prediction, examples=self.examples)
            )
        for place, one in enumerate(answers):
            if one.prediction.memory.peak_phase == Phase.EVALUATION and not one.prediction.fits:
                without = Configuration({**one.plan.configuration, "eval_batch": 0})
                with contextlib.suppress(UnavailableError):
                    (steps,) = how([without], self.gpu, margin_fraction=self.margin_fraction)
                    answers[place] = dataclasses.replace(one, steps_fit=steps.fits)
        return answers


@dataclass(slots=True)
class ProgramRuns(ProgramOracle[Emulation]):
    """Emulated runs of a program; a context manager that ends those still running.

    A run is stopped after `timeout_s`, if it is set. A `whole` one goes on to its end, shortened,
    and is judged by the memory of the host too, if that is given.
    """

    timeout_s: float | None = None
    whole: bool = False
    host_memory_bytes: int | None = None
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    doing: ClassVar[str] = "running"

    def __enter__(self) -> ProgramRuns:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()

    def with_values(
        self, wanted: Sequence[Values], *, on_larger_gpu: bool
    ) -> Sequence[Emulation | TunerError]:
        """As in `ProgramOracle`, several programs side by side."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            futures = [
                pool.submit(self._changed, values, on_larger_gpu=on_larger_gpu) for values in wanted
            ]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self._stop.set()
                raise

    def _ask(self, program: Program, *, on_larger_gpu: bool) -> Emulation:
        """One run, judged by the memory that the GPU really has."""
        self.count += 1
        launch = read_launch(program)
        machine = Machine(
            self.gpu,
            self.gpus or launch.processes or 1,
            machines=launch.machines,
            margin_fraction=self.margin_fraction,
        )
        tail = Tail()
        with runnable(program) as command:
            found = machine.run(
                command,
                steps=STEPS,
                timeout_s=self.timeout_s,
                whole=self.whole,
                host_memory_bytes=self.host_memory_bytes,
                on_larger_gpu=on_larger_gpu,
                output=tail,
                stopped=self._stop.is_set,
                cwd=program.folder,
                environment=program.environment,
            )
        self.log_tail = tail.text
        return dataclasses.replace(found, command=tuple(program.command))


def ignored(
    settings: Mapping[str, Setting], found: RunAnswer, given: Mapping[str, Any]
) -> list[str]:
    """Settings that have no effect, with the value that reached the trainer.

    A value that is `given` in place of the program's is left out.
    """
    given = {"grad_accum": 0, **given} if "effective_batch" in given else given
    return [
        f"{setting.where}: {setting.name}={show(setting.value)} has no effect, the training has "
        f"{show(found.settings[knob])}"
        for knob, setting in settings.items()
        if setting.value is not None
        and knob not in given
        and setting.is_given
        and knob in found.settings
        and not is_same(setting.value, found.settings[knob])
    ]
