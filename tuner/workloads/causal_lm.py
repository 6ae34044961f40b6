"""Workload `causal_lm`: supervised fine-tuning of a causal language model, full or LoRA.

The model is built from its architecture configuration by transformers and adapted by peft,
in the order in which a training script does it: load, k-bit preparation, adapters,
optimizer. Nothing is approximated here; a trace and a real run execute this same code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tuner.errors import InputError
from tuner.records import Configuration, Phase
from tuner.workloads.base import Environment
from tuner.workloads.losses import use_loss
from tuner.workloads.optimizers import build_optimizer
from tuner.workloads.quantized import logical_numel, quantize_linears

_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class CausalLMSettings:
    """The knobs of this workload, checked and typed."""

    micro_batch: int
    max_length: int
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_targets: tuple[str, ...]
    precision: str
    mixed_precision: str
    compute_dtype: str
    double_quant: bool
    kbit_preparation: str
    loss: str
    fused_loss: bool
    gradient_checkpointing: bool
    optimizer: str
    attention: str
    max_grad_norm: float
    training_loop: str

    @classmethod
    def from_configuration(cls, values: Configuration) -> CausalLMSettings:
        """Read the knobs. Raises KeyError when one of the required ones is missing."""
        rank = int(_number(values["lora_rank"]))
        return cls(
            micro_batch=int(_number(values["micro_batch"])),
            max_length=int(_number(values["max_length"])),
            lora_rank=rank,
            lora_alpha=_number(values.get("lora_alpha", 2 * rank)),
            lora_dropout=_number(values.get("lora_dropout", 0.0)),
            lora_targets=_names(values.get("lora_targets", ())),
            precision=str(values["precision"]),
            mixed_precision=str(values.get("mixed_precision", "no")),
            compute_dtype=str(values.get("compute_dtype", "auto")),
            double_quant=bool(values.get("double_quant", True)),
            kbit_preparation=str(values.get("kbit_preparation", "peft")),
            loss=str(values.get("loss", "transformers")),
            fused_loss=bool(values.get("fused_loss", False)),
            gradient_checkpointing=bool(values["gradient_checkpointing"]),
            optimizer=str(values["optimizer"]),
            attention=str(values["attention"]),
            max_grad_norm=_number(values.get("max_grad_norm", 1.0)),
            training_loop=str(values.get("training_loop", "trainer")),
        )

    @property
    def is_quantized(self) -> bool:
        """Whether the base model is loaded in 4 or 8 bits."""
        return self.precision in ("nf4", "int8")

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast, or None without mixed precision."""
        return None if self.mixed_precision == "no" else _DTYPES[self.mixed_precision]

    @property
    def load_dtype(self) -> torch.dtype:
        """The dtype of weights that are not quantised.

        Beside quantised layers it is the compute dtype: unless `compute_dtype` names one, that
        of autocast, else bfloat16.
        """
        if not self.is_quantized:
            return _DTYPES[self.precision]
        if self.compute_dtype != "auto":
            return _DTYPES[self.compute_dtype]
        return self.autocast_dtype or torch.bfloat16


class CausalLMSession:
    """A causal language model ready to train on full batches of random tokens."""

    def __init__(self, model: Any, settings: CausalLMSettings, environment: Environment) -> None:
        self.model = model
        self._settings = settings
        self._environment = environment
        parameters = list(model.parameters())
        self._trainable = [p for p in parameters if p.requires_grad]
        self.trainable_params = sum(p.numel() for p in self._trainable)
        self.total_params = sum(map(logical_numel, parameters))
        self.optimizer = build_optimizer(settings.optimizer, self._trainable)
        self._outputs: Any = None

    def optimizer_step(self, micro_steps: int) -> None:
        """Run `micro_steps` forward and backward passes, clip, and update once."""
        for micro_step in range(micro_steps):
            self.micro_step(micro_step)
        self._environment.enter(Phase.OPTIMIZER, micro_steps)
        if self._settings.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(self._trainable, self._settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def micro_step(self, micro_step: int) -> None:
        """Run one forward and backward pass; gradients accumulate."""
        shape = (self._settings.micro_batch, self._settings.max_length)
        device = self._environment.device
        self._environment.enter(Phase.FORWARD, micro_step)
        vocab_size = self.model.get_input_embeddings().weight.shape[0]
        tokens = torch.randint(0, vocab_size, shape, device=device)
        batch = {
            "input_ids": tokens,
            "attention_mask": torch.ones(shape, dtype=torch.long, device=device),
            "labels": tokens.clone(),
        }
        if self._settings.training_loop != "trainer":
            # A hand-written loop holds `outputs`, and with it the logits, during backward.
            self._outputs = self._forward(batch)
            self._environment.enter(Phase.BACKWARD, micro_step)
            torch.autograd.backward(self._outputs.loss)
            if self._settings.training_loop == "function":
                self._outputs = None
            return
        loss = self._loss_as_trainer(batch)
        self._environment.enter(Phase.BACKWARD, micro_step)
        torch.autograd.backward(loss)

    def _forward(self, batch: dict[str, torch.Tensor]) -> Any:
        dtype = self._settings.autocast_dtype
        precision = self._environment.autocast(dtype) if dtype else contextlib.nullcontext()
        with precision:
            return self.model(**batch, use_cache=False)

    def _loss_as_trainer(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss as transformers' Trainer computes it: outputs die before backward.

        Under mixed precision accelerate converts the outputs to fp32
        (`convert_outputs_to_fp32`), so a second fp32 copy of the logits exists until here.
        """
        outputs = self._forward(batch)
        if self._settings.autocast_dtype is not None:
            outputs["logits"] = outputs.logits.float()
        loss: torch.Tensor = outputs.loss
        return loss


class CausalLM:
    """Opens sessions that fine-tune a causal language model."""

    name = "causal_lm"

    def open(
        self, model_config: Any, configuration: Configuration, environment: Environment
    ) -> CausalLMSession:
        """Build model, adapters and optimizer on the environment's device.

        Raises `InputError` when LoRA targets do not exist in the model.
        """
        settings = CausalLMSettings.from_configuration(configuration)
        environment.enter(Phase.LOAD, 0)
        model = _skeleton(model_config, settings)
        environment.materialize(model)
        model = _prepare(model, settings, environment)
        model.train()
        return CausalLMSession(model, settings, environment)


def _skeleton(model_config: Any, settings: CausalLMSettings) -> Any:
    """The model on the meta device, with quantised layers, before k-bit preparation."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=settings.load_dtype, attn_implementation=settings.attention
        )
        use_loss(model, settings.loss, fused=settings.fused_loss)
        if settings.is_quantized:
            quantize_linears(
                model,
                precision=settings.precision,
                compute_dtype=settings.load_dtype,
                double_quant=settings.double_quant,
            )
    return model


def _prepare(model: Any, settings: CausalLMSettings, environment: Environment) -> Any:
    """K-bit preparation, gradient checkpointing and adapters, as training scripts do."""
    checkpointing = {
        "use_reentrant": False,
        "context_fn": partial(environment.checkpoint_contexts, settings.autocast_dtype),
    }
    if settings.lora_rank and settings.is_quantized and settings.kbit_preparation != "none":
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=settings.gradient_checkpointing,
            gradient_checkpointing_kwargs=checkpointing,
        )
        if settings.kbit_preparation == "trl":
            _narrow_embeddings(model, settings.load_dtype)
    elif settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    if not settings.lora_rank:
        if settings.is_quantized:
            raise InputError(
                f"full fine-tuning (lora_rank 0) of a {settings.precision} model is not possible",
                hint="set lora_rank to 1 or more, or precision to bf16, fp16 or fp32",
            )
        return model
    return _with_adapters(model, settings)


def _narrow_embeddings(model: Any, dtype: torch.dtype) -> None:
    """Undo the widening of embeddings and output head, as trl's SFTTrainer does.

    Its peft_module_casting_to_bf16 leaves only the norms in fp32.
    """
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.to(dtype)


def _with_adapters(model: Any, settings: CausalLMSettings) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=_targets_as_peft_reads_them(settings.lora_targets),
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config, low_cpu_mem_usage=True)
    except ValueError as error:
        if "not found in the base model" not in str(error):
            raise
        raise InputError(
            f"lora_targets {', '.join(settings.lora_targets)} do not exist in the model",
            hint=f"its linear layers are: {', '.join(linear_names(model))}",
        ) from error


def _targets_as_peft_reads_them(targets: tuple[str, ...]) -> list[str] | str:
    return "all-linear" if targets == ("all-linear",) else list(targets)


def linear_names(model: nn.Module) -> list[str]:
    """The last name parts of all linear layers but the output head, sorted."""
    names: Iterable[str] = (
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    )
    return sorted(set(names) - {"lm_head"})


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{value!r} is not a number")
    return value


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
