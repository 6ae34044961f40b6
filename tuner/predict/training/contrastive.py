"""Workload `contrastive`: an embedder trained on anchors, positives and negatives.

Each channel of a sample (title, description, ...) has an encoder of its own with LoRA
adapters; their pooled outputs are joined, mixed by experts and projected. One micro-step is
three calls of the encoders, and samples x (2 + n_negatives) x channels sequences.
"""

from __future__ import annotations

from typing import Any

import torch

from tuner.core.records import Configuration, Phase
from tuner.predict.training.base import Environment, Machine
from tuner.predict.training.contrastive_model import ContrastiveModel
from tuner.predict.training.contrastive_settings import ContrastiveSettings
from tuner.predict.training.encoders import (
    LossSession,
    add_adapter,
    enable_checkpointing,
    initialise_positions,
    lora_config,
    require_positions,
)


class Contrastive:
    """Opens sessions that train an embedder by comparison."""

    name = "contrastive"

    def open(
        self, model_config: Any, configuration: Configuration, environment: Environment
    ) -> LossSession:
        """Build encoders, adapters, heads and optimizer on the environment's device.

        Raises `InputError` for what cannot be built or trained as the configuration says.
        """
        settings = ContrastiveSettings.from_configuration(configuration)
        require_positions(model_config, max(settings.lengths), "max_length")
        environment.enter(Phase.LOAD, 0)
        return LossSession(
            _build(model_config, settings, environment),
            settings.step,
            environment,
            vocab_size=model_config.vocab_size,
            fields=settings.fields,
            sample_tokens=sum(field.texts * field.length for field in settings.fields),
        )


def _build(
    model_config: Any, settings: ContrastiveSettings, environment: Environment
) -> ContrastiveModel:
    with torch.device("meta"):
        model = ContrastiveModel(model_config, settings)
    environment.materialize(model)
    if isinstance(environment, Machine):
        initialise_positions(model)
    adapters = lora_config(
        settings.lora_targets,
        rank=settings.lora_rank,
        alpha=settings.lora_alpha,
        dropout=settings.lora_dropout,
    )
    for number, encoder in enumerate(model.encoders):
        if settings.gradient_checkpointing:
            enable_checkpointing(encoder, environment, settings.step.autocast_dtype)
        # Poolers are among all linear layers; their adapters never get a gradient.
        model.encoders[number] = add_adapter(encoder, adapters, environment, "default")
    model.train()
    return model
