"""Workload `multitask`: task heads, LoRA sets and a router on one frozen encoder, in phases.

Phase "adapters" trains the heads (and LoRA sets) of some tasks, "router" the network that
weights the tasks, with everything else frozen but every head run, and "joint" both.
"""

from __future__ import annotations

from typing import Any

import torch

from tuner.core.records import Configuration, Phase
from tuner.predict.training.base import Environment, Machine
from tuner.predict.training.encoders import (
    LossSession,
    add_adapter,
    initialise_positions,
    lora_config,
    names,
    require_positions,
)
from tuner.predict.training.multitask_model import MultiTaskModel, MultiTaskSettings


class MultiTask:
    """Opens sessions that train several tasks on one encoder."""

    name = "multitask"

    def open(
        self, model_config: Any, configuration: Configuration, environment: Environment
    ) -> LossSession:
        """Build encoder, LoRA sets, heads, router and optimizer on the environment's device.

        Raises `InputError` for what cannot be built or trained as the configuration says.
        """
        settings = MultiTaskSettings.of(configuration)
        require_positions(model_config, settings.step.encoder.length, "max_length")
        environment.enter(Phase.LOAD, 0)
        model = _build(model_config, settings, environment)
        # The variables of a function are gone when it returns, those of a loop's body are not.
        returns = settings.knobs.training_loop == "function"
        return LossSession(
            model,
            settings.step,
            environment,
            vocab_size=model_config.vocab_size,
            fields=settings.fields,
            sample_tokens=settings.step.encoder.length,
            after_backward=model.free_outputs if returns else lambda: None,
        )


def _build(
    model_config: Any, settings: MultiTaskSettings, environment: Environment
) -> MultiTaskModel:
    with torch.device("meta"):
        model = MultiTaskModel(model_config, settings)
    environment.materialize(model)
    if isinstance(environment, Machine):
        initialise_positions(model.backbone)
    for task in settings.tasks if settings.adapted else ():
        adapters = lora_config(
            names(settings.knobs.lora_targets),
            rank=task.lora_rank,
            alpha=settings.knobs.lora_alpha,
            dropout=settings.step.lora_dropout,
            skip_pooler=True,
        )
        model.backbone = add_adapter(model.backbone, adapters, environment, task.name)
    model.set_trained()
    model.train()
    return model
