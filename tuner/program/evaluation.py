"""The evaluation between the steps of a program, from its settings.

Read from transformers 5.23 (`Trainer.evaluation_loop`, `EvalLoopContainer`) and TRL 1.16
(`SFTTrainer.prediction_step`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL
from tuner.program.arguments import Argument, Arguments, ProgramTraining

DEFAULT_BATCH = 8
"""`per_device_eval_batch_size` of TrainingArguments, whatever the training's is."""

_PRICED = ("Trainer", "SFTTrainer")
"""Trainers whose evaluation is predicted, as `read_training` names them."""

_ASKING = (
    "eval_strategy", "evaluation_strategy", "eval_on_start", "do_eval", "val_set_size",
    "test_datasets", "val_size", "evals_per_epoch", "run_val_every_n_steps", "dataset_val",
)  # fmt: skip
"""Settings that make a trainer evaluate."""

_OFF = (None, False, 0, "", "no", "none", "false")


def evaluation_of(
    training: ProgramTraining, knobs: Mapping[str, Any]
) -> tuple[dict[str, int], str]:
    """The knobs of the evaluation of a training, and what of it they do not say; both may be empty.

    `knobs` are those of the training; an `eval_batch` of theirs takes the place of the program's.
    """
    arguments, said = training["arguments"], knobs.get("eval_batch")
    none = {} if said is None else {"eval_batch": 0}
    says = any(_is_on(arguments, name) for name in _ASKING if not _is_bare(training, name))
    if said == 0 or (said is None and not (says or training.evaluates)):
        return none, ""
    if training.trainer not in _PRICED:
        return none, f"evaluation isn't priced: {training.trainer}'s isn't known"
    if knobs.get(GPUS_PER_TRIAL, 1) > 1:
        return none, "evaluation isn't priced on several GPUs"
    size = arguments.values.get("per_device_eval_batch_size", Argument(DEFAULT_BATCH, ""))
    size = size if said is None else Argument(said, "")
    if size.problem is not None or not isinstance(size.value, int):
        why = size.problem or f"is {size.value}"
        return (
            none,
            f"evaluation isn't priced: per_device_eval_batch_size {why}; --set eval_batch=N",
        )
    kept, unknown = _kept(training, knobs)
    return {"eval_batch": size.value, **({"eval_kept": kept} if kept else {})}, unknown


def _kept(training: ProgramTraining, knobs: Mapping[str, Any]) -> tuple[int, str]:
    """The least number of batches whose logits stay on the GPU; what is unknown about it."""
    arguments, trainer = training["arguments"], training["trainer"]
    lossless = not _is_on(trainer, "compute_metrics")
    if lossless or _is_on(arguments, "prediction_loss_only") or knobs.get("num_labels"):
        return 0, ""
    if _is_on(trainer, "preprocess_logits_for_metrics") or _is_on(arguments, "batch_eval_metrics"):
        return 1, ""
    steps = arguments.values.get("eval_accumulation_steps")
    if steps is not None and isinstance(steps.value, int) and steps.value > 0:
        return steps.value, ""
    return 1, (
        "set eval_accumulation_steps: compute_metrics makes the evaluation keep the logits of all "
        "its batches on the GPU, and their number isn't known"
    )


def _is_bare(training: ProgramTraining, name: str) -> bool:
    """True for `do_eval` of a script, where evaluation is a call of its own."""
    return name == "do_eval" and training.trainer in _PRICED


def _is_on(arguments: Arguments, name: str) -> bool:
    """True for a setting that is neither absent nor off; an unreadable one may be on."""
    argument = arguments.values.get(name)
    if argument is None:
        return False
    value = argument.value
    word = value.rpartition(".")[2].lower() if isinstance(value, str) else value
    return argument.problem is not None or word not in _OFF
