"""transformers' Trainer, with and without peft.

Read from transformers 5.23 (trainer.py, training_args.py, `_activation_checkpointing_enable`) and
peft 0.21 (`prepare_model_for_kbit_training`).
"""

from __future__ import annotations

from tuner.program.trainers.behaviour import (
    WITHOUT_MEMORY,
    Behaviour,
    Planned,
    adapters,
    enabled_by_call,
    loaded_model,
    trainer_arguments,
    unset,
)
from tuner.program.training import ProgramTraining

_VERSIONS = {"transformers": "5.23", "peft": "0.21"}


def _plan(training: ProgramTraining) -> Planned:
    arguments, preparation = training["arguments"], training["preparation"]
    model, loaded = loaded_model(training, "fp32")
    knobs = {**trainer_arguments(arguments, checkpoints=False, precision="no"), **loaded}
    knobs |= {"loss": "transformers", "lora_rank": 0, "kbit_preparation": "none"}
    if not knobs["gradient_checkpointing"]:
        knobs |= enabled_by_call(training)
    if training.has("preparation"):
        knobs["kbit_preparation"] = "peft"
        enables = preparation.take("use_gradient_checkpointing", True, quietly=True)
        if enables and not knobs["gradient_checkpointing"]:
            # Without a word about it PyTorch's own default counts, which is reentrant.
            inner = "gradient_checkpointing_kwargs.use_reentrant"
            reentrant = bool(preparation.take(inner, True, quietly=True))
            knobs |= {"gradient_checkpointing": True, "use_reentrant": reentrant}
    if training.has("adapted") or training.has("lora"):
        knobs |= adapters(training["lora"], {})
        training["lora"].leave_out(("task_type", "bias", "use_rslora", "init_lora", "inference"))
    known = [length.value for length in training.lengths if length.problem is None]
    lengths = dict(zip(map(repr, known), known, strict=True))
    if len(lengths) == 1:
        knobs["max_length"] = next(iter(lengths.values()))
    trainer = training["trainer"]
    unset(trainer, {"compute_loss_func": "a loss of one's own"})
    trainer.leave_out(("0", "1", "model", "args", "optimizers", *WITHOUT_MEMORY))
    arguments.leave_out((*WITHOUT_MEMORY, "tf32", "model_max_length"))
    return Planned(model, knobs)


BEHAVIOURS = (Behaviour("transformers' Trainer", "Trainer", _VERSIONS, _plan),)
