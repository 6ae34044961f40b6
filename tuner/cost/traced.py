"""One traced training: its timeline, and the parameters that it has; and what prices it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tuner.cost.memory import Course
from tuner.cost.operators.timeline import Timeline
from tuner.cost.speed.roofline import StepWork
from tuner.cost.work_arrays import WorkArrays, executions_of, optimizer_executions_of

EMBEDDING = " embedding"
"""Behind the dtype of a parameter whose state an optimizer in 8 bits keeps in fp32."""


class Parameter(NamedTuple):
    """Elements of a parameter, as the weights that it stands for, and its kind.

    A kind is a dtype ("bfloat16"), with `EMBEDDING` behind it where the optimizer is told so.
    `is_reached` if a pass gives it a gradient: adapters in a vision tower that runs on no image
    have none.
    """

    numel: int
    kind: str
    is_trained: bool
    is_reached: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """Two optimizer steps of one configuration, for GPUs of one attention capability.

    The first step has one micro-step and creates the optimizer state. The second has two
    where gradients accumulate: the second of them runs with all gradients in memory, as do
    all further ones. Under DeepSpeed the first step has up to `ZERO_ROUNDS`.
    """

    timeline: Timeline
    micro_steps: int
    """Micro-steps of the traced second optimizer step, 1 or 2."""
    trainable_params: int
    total_params: int
    gradient_bytes: tuple[int, ...] = ()
    """Size of each trainable parameter's gradient, or of its shard if GPUs share it."""
    remarks: tuple[str, ...] = ()
    """Differences between the model and its configuration; see `predict.training.quantized`."""
    parameters: tuple[Parameter, ...] = ()
    """In the model's order, which is the optimizer's."""


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """Memory and time of one configuration follow from it; other fields are those of a `Trace`.

    `work` is that of the second step.
    """

    course: Course
    work: StepWork
    micro_steps: int
    trainable_params: int
    total_params: int
    gradient_bytes: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(cls, trace: Trace) -> Training:
        """The training that was traced."""
        timeline = trace.timeline
        works = WorkArrays.of_works(timeline.works)
        return cls(
            course=Course.of(timeline),
            work=StepWork(
                passes=works,
                executions=executions_of(timeline),
                optimizer=works,
                optimizer_executions=optimizer_executions_of(timeline),
                trained=len(trace.gradient_bytes),
            ),
            micro_steps=trace.micro_steps,
            trainable_params=trace.trainable_params,
            total_params=trace.total_params,
            gradient_bytes=trace.gradient_bytes,
            remarks=trace.remarks,
        )
