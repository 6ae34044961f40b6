"""The knobs of workload `multitask`, checked and typed."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.core.errors import InputError
from tuner.core.records import Configuration
from tuner.predict.training.encoders import EncoderSettings, Field, names, number, whole


@dataclass(frozen=True, slots=True)
class Task:
    """One task: its `kind` is "classification", "extraction" or "generation"."""

    name: str
    kind: str
    lora_rank: int
    targets: int
    """Target numbers a sample: a class, two positions, or the tokens to generate."""


@dataclass(frozen=True, slots=True)
class MultiTaskSettings:
    """Which tasks there are, and which of their parts a step trains."""

    step: EncoderSettings
    tasks: tuple[Task, ...]
    trained: tuple[str, ...]
    """Tasks that run in a step."""
    phase: str
    adapted: bool
    """Whether the LoRA sets are inside the encoder."""
    lora_targets: tuple[str, ...]
    lora_alpha: float
    lora_dropout: float
    training_loop: str
    """Who holds the tasks' outputs, and until when."""

    @classmethod
    def from_configuration(cls, values: Configuration) -> MultiTaskSettings:
        """Read the knobs. Raises KeyError for a missing one, `InputError` for contradictions."""
        tasks = _tasks(values)
        known = [task.name for task in tasks]
        phase = str(values["phase"])
        trained = names(values["trained_tasks"])
        if trained == ("all",) or phase != "adapters":
            trained = tuple(known)
        strange = [name for name in trained if name not in known]
        if strange or not trained:
            raise InputError(
                f"trained_tasks {', '.join(strange) or 'none'}: no such tasks",
                hint=f"the tasks are {', '.join(known)}",
            )
        return cls(
            step=EncoderSettings.from_configuration(values),
            tasks=tasks,
            trained=trained,
            phase=phase,
            adapted=values["backbone"] == "adapted",
            lora_targets=names(values["lora_targets"]),
            lora_alpha=number(values.get("lora_alpha", 2 * whole(values["lora_rank"]))),
            lora_dropout=number(values.get("lora_dropout", 0.0)),
            training_loop=str(values.get("training_loop", "frees")),
        )

    @property
    def running(self) -> tuple[Task, ...]:
        """The tasks that run in a step, in their order."""
        return tuple(task for task in self.tasks if task.name in self.trained)

    @property
    def routed(self) -> bool:
        """Whether the router weights the tasks' outputs."""
        return self.phase != "adapters"

    @property
    def fields(self) -> tuple[Field, ...]:
        """The sample's tokens, then the targets of each task that runs."""
        return (Field(1, self.step.max_length), *(Field(1, task.targets) for task in self.running))


def _tasks(values: Configuration) -> tuple[Task, ...]:
    short = names(values["short_target_tasks"])
    generated = names(values["generation_tasks"])
    strange = [name for name in short if name not in generated]
    if strange:
        raise InputError(f"short_target_tasks {', '.join(strange)} are not generation tasks")
    lengths = {
        name: whole(values["short_target_length" if name in short else "target_length"])
        for name in generated
    }
    tasks = (
        *(
            Task(name, "classification", whole(values["classification_rank"]), 1)
            for name in names(values["classification_tasks"])
        ),
        *(
            Task(name, "extraction", whole(values["extraction_rank"]), 2)
            for name in names(values["extraction_tasks"])
        ),
        *(
            Task(name, "generation", whole(values["lora_rank"]), lengths[name])
            for name in generated
        ),
    )
    known = [task.name for task in tasks]
    twice = sorted({name for name in known if known.count(name) > 1})
    if twice or not tasks:
        raise InputError(f"a task is named twice: {twice[0]}" if twice else "there is no task")
    return tasks
