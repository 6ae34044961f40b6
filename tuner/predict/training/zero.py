"""DeepSpeed's ZeRO: its engine takes the model and its optimizer, and does the update itself.

The engine is asked for as accelerate does it for Trainer (`Accelerator._prepare_deepspeed` and
`DeepSpeedEngineWrapper.backward`, accelerate 1.15): with an optimizer of PyTorch's or of
bitsandbytes, and told of the last micro-step.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tuner.core.errors import UnavailableError
from tuner.predict.training.base import Environment, Machine

PACKAGE = "deepspeed"


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """What DeepSpeed is told; the rest is as DeepSpeed leaves it."""

    stage: int
    micro_batch: int
    grad_accum: int
    max_grad_norm: float
    mixed_precision: str
    reduce_bucket_size: int

    def as_json(self) -> dict[str, Any]:
        """DeepSpeed's settings (`deepspeed_config`)."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.grad_accum,
            "gradient_clipping": self.max_grad_norm,
            "bf16": {"enabled": self.mixed_precision == "bf16"},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": self.reduce_bucket_size,
            },
            # As accelerate sets it where a program brings its optimizer.
            "zero_allow_untested_optimizer": True,
        }


def require_deepspeed() -> Any:
    """The package. Raises `UnavailableError` where it is not installed."""
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as error:
        raise UnavailableError(
            f"ZeRO is DeepSpeed's, which is not here: {error}",
            hint="pip install deepspeed; a program of yours can be emulated (tuner emulate)",
        ) from error


def share_weights(model: nn.Module, environment: Environment, settings: ZeroSettings) -> None:
    """Leave each rank its share of the weights, as `deepspeed.zero.Init` does for Trainer.

    They are in the type that will run. A model on the meta device gets its weights in host memory
    first, module by module; in a trace it gets them nowhere.
    """
    deepspeed = require_deepspeed()
    if settings.mixed_precision == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    if not isinstance(environment, Machine):
        environment.materialize(nn.Module())
    elif any(parameter.is_meta for parameter in model.parameters()):
        environment.materialize(model, [m for m in model.modules() if not [*m.children()]])
    deepspeed.zero.Init(module=model, config_dict_or_path=settings.as_json())
    for buffer in model.buffers():
        buffer.data = buffer.data.to(environment.device)


class ZeroEngine:
    """DeepSpeed's engine around `model`, from when there is an optimizer on."""

    def __init__(self, model: nn.Module, settings: ZeroSettings) -> None:
        self._deepspeed = require_deepspeed()
        self._model = model
        self._settings = settings
        self._engine: Any = None

    def take(self, optimizer: Any) -> Any:
        """Share model and optimizer between the ranks; what is called in the model's place."""
        self._engine, *_ = self._deepspeed.initialize(
            model=self._model, optimizer=optimizer, config=self._settings.as_json()
        )
        return self._engine

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Gradients, which the engine exchanges."""
        self._engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        self._engine.backward(loss)

    def step(self) -> None:
        """Clip, update, and forget the gradients."""
        self._engine.step()
