"""The model of workload `causal_lm`: loaded, prepared and adapted as a training script does it.

Built by transformers from the architecture's configuration, or from a checkpoint, and adapted
by peft. A trace and a real run execute this same code; where they differ, a machine has weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import nn

from tuner.core.errors import InputError, unknown
from tuner.core.setup.causal_lm import (
    BLOCKS,
    LORA_FA,
    PEFT_METHODS,
    PEFT_OPTIONS,
    WITHOUT_CHECKPOINTING,
)
from tuner.core.setup.schemas import ALL_LINEAR, is_pattern
from tuner.predict.training import Environment, Machine, losses, parallel, program_ways, quantized
from tuner.predict.training.causal_lm_settings import TrainingSetup
from tuner.space.models import trainable
from tuner.space.models.catalogue import resolve_config


def build_model(model_config: Any, settings: TrainingSetup, environment: Environment) -> Any:
    """Model and adapters on the environment's device, in training mode.

    A model that ranks will share stays on the meta device, or on the host with the weights of a
    checkpoint: no device has to hold all of it.

    Raises `InputError` for what the libraries cannot build.
    """
    if not isinstance(environment, Machine):
        model = build_skeleton(model_config, settings)
        if not settings.parallelism.shares_weights:
            environment.materialize(model)
        _share_weights(model, settings, environment)
        model = _prepare(model, settings, environment, environment.device)
        model.train()
        return model
    settings.check_machine(environment.device)
    model, on_host = _with_weights(model_config, settings, environment)
    if settings.process.liger:
        losses.apply_liger(model)
    _share_weights(model, settings, environment)
    # Adapters are made where they will be, or beside what will be sharded.
    made_on = environment.device
    if settings.parallelism.is_sharded:
        made_on = "meta" if environment.checkpoint is None else "cpu"
    model = _prepare(model, settings, environment, made_on)
    parallel.keep_on_host(on_host, environment.device)
    model.train()
    if settings.process.compile:
        model.compile()
    return model


def _share_weights(model: Any, settings: TrainingSetup, environment: Environment) -> None:
    """Under ZeRO's third stage, before there are adapters: as models are loaded for Trainer."""
    if settings.parallelism.zero_stage and settings.parallelism.shares_weights:
        parallel.share_weights(model, environment, settings.zero)


def _with_weights(
    model_config: Any, settings: TrainingSetup, machine: Machine
) -> tuple[Any, list[nn.Module]]:
    """The model with its weights, and those of its layers whose weights are on the host."""
    if machine.checkpoint is None:
        model = build_skeleton(model_config, settings, real=True)
        if settings.parallelism.shares_weights:
            return model, []
        on_host = _offloaded(model, settings)
        machine.materialize(model, on_host)
        return model, on_host

    # What stays on the host, or is sharded, must not pass through a device too small for it.
    first = (
        "cpu" if settings.process.offload or settings.parallelism.shares_weights else machine.device
    )
    try:
        model = _load_checkpoint(machine.checkpoint, model_config, settings, device=first)
    except (ValueError, ImportError) as error:
        raise _build_error(error, settings.update.attention) from error
    _use_loss(model, settings, real=True)
    on_host = _offloaded(model, settings)
    if settings.process.offload:
        parallel.move_all_but(model, on_host, machine.device)
    return model, on_host


def _offloaded(model: nn.Module, settings: TrainingSetup) -> list[nn.Module]:
    layers = parallel.decoder_layers(model) if settings.process.offload else []
    return layers[len(layers) - round(settings.process.offload * len(layers)) :]


def build_skeleton(model_config: Any, settings: TrainingSetup, *, real: bool = False) -> Any:
    """The model on the meta device, with quantised layers, before k-bit preparation.

    Raises `InputError` as `build_model` does.
    """
    skipped = trainable.require_quantization(
        model_config, settings.precision.weights, double_quant=settings.precision.double_quant
    )
    if settings.update.attention in program_ways.ATTENTIONS:
        program_ways.register_attentions()
    with torch.device("meta"):
        try:
            model = _class_of(model_config, settings).from_config(
                trainable.trained_config(model_config, settings.examples.labels),
                dtype=settings.load_dtype,
                attn_implementation=trainable.attention_by_part(
                    model_config, settings.update.attention
                ),
            )
        except (ValueError, ImportError) as error:
            raise _build_error(error, settings.update.attention) from error
        _use_loss(model, settings, real=real)
        if "fused_norms" in settings.ways or (settings.process.liger and not real):
            losses.use_liger_shapes(model, gated=settings.process.liger)
        if "fused_attention" in settings.ways:
            program_ways.with_fused_attention(model)
        if settings.precision.is_quantized:
            quantized.quantize_linears(
                model,
                precision=settings.precision.weights,
                dtype=settings.load_dtype,
                double_quant=settings.precision.double_quant,
                skipped=skipped,
                storage=settings.quant_storage,
            )
    return model


def _class_of(model_config: Any, settings: TrainingSetup) -> Any:
    import transformers

    for way in settings.ways:
        if way in program_ways.HEADS:
            return getattr(transformers, program_ways.HEADS[way])
    return trainable.trained_class(
        model_config, images=settings.examples.images > 0, num_labels=settings.examples.labels
    )


def _build_error(error: Exception, attention: str) -> InputError:
    """The user's error for a model that transformers can't build.

    It raises ValueError for an attention that the model does not have, ImportError for one whose
    package is missing.
    """
    if isinstance(error, InputError):
        return error
    text = " ".join(str(error).split())
    return InputError(
        f"transformers cannot build this model with attention {attention}: {text[:300]}",
        hint="eager works for every model" if attention != "eager" else None,
    )


def _use_loss(model: Any, settings: TrainingSetup, *, real: bool) -> None:
    if settings.examples.labels:
        return
    if settings.loss.kind == "chunked":
        losses.use_chunked_loss(model, real=real)
        return
    if settings.loss.kind == "liger":
        losses.use_liger_loss(model)
        return
    kernel = losses.fused_cross_entropy() if real and settings.loss.fused else None
    losses.use_loss(model, settings.loss.kind, fused=settings.loss.fused, kernel=kernel)


def _prepare(
    model: Any, settings: TrainingSetup, environment: Environment, adapters_on: str
) -> Any:
    """K-bit preparation, gradient checkpointing and adapters, as training scripts do."""
    if settings.recompute.enabled and not model.supports_gradient_checkpointing:
        raise InputError(
            f"{type(model).__name__} of transformers has no gradient checkpointing",
            hint=WITHOUT_CHECKPOINTING,
        )
    checkpointing: dict[str, Any] = {"use_reentrant": settings.recompute.reentrant}
    # Reentrant checkpoints take no other options.
    if (
        settings.process.offload
        and environment.device != "meta"
        and not settings.recompute.reentrant
    ):
        # Recomputation that stops early skips the hooks that take a layer's last weights off the
        # device again.
        checkpointing["early_stop"] = False
    if environment.device == "meta" and not settings.recompute.reentrant:
        # Not on a machine: PyTorch restores autocast by itself there, and torch.compile takes no
        # contexts of one's own.
        checkpointing["context_fn"] = partial(
            environment.checkpoint_contexts, settings.autocast_dtype
        )
    if (
        settings.adapter.rank
        and settings.precision.is_quantized
        and settings.precision.preparation != "none"
    ):
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=settings.recompute.enabled,
            gradient_checkpointing_kwargs=checkpointing,
        )
        if settings.precision.preparation == "trl":
            _narrow_embeddings(model, settings.load_dtype)
    elif settings.recompute.enabled:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    if environment.device == "meta" and settings.recompute.reentrant:
        _restore_autocast(model, environment, settings.autocast_dtype)
    if not settings.adapter.rank:
        given = {
            "modules_to_save": settings.adapter.saved,
            "adapter": settings.adapter.kind != "lora",
        }
        for name in [name for name, is_given in given.items() if is_given]:
            raise InputError(
                f"{name} has no effect in full fine-tuning (lora_rank 0)",
                hint=f"set lora_rank to 1 or more, or leave {name} out",
            )
        if settings.precision.is_quantized:
            raise InputError(
                f"full fine-tuning (lora_rank 0) of a {settings.precision.weights} model is not "
                "possible",
                hint="set lora_rank to 1 or more, or precision to bf16, fp16 or fp32",
            )
        return model
    if settings.adapter.kind in PEFT_METHODS:
        return _with_method(model, settings)
    return _with_adapters(model, settings, adapters_on)


def _restore_autocast(model: Any, environment: Environment, dtype: torch.dtype | None) -> None:
    """Recompute reentrant checkpoints under autocast, which PyTorch does on a real device only."""

    def around(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def run(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            def in_context(*inputs: Any, **keywords: Any) -> Any:
                # The first pass keeps no graph; the second, in the backward pass, makes one.
                first, again = environment.checkpoint_contexts(dtype)
                with again if torch.is_grad_enabled() else first:
                    return function(*inputs, **keywords)

            return checkpoint(in_context, *arguments, **options)

        return run

    for module in model.modules():
        own = module.__dict__.get("_gradient_checkpointing_func")
        if own is not None:
            module._gradient_checkpointing_func = around(own)


def _narrow_embeddings(model: Any, dtype: torch.dtype) -> None:
    """Undo the widening of embeddings and output head, as trl's SFTTrainer does.

    Its peft_module_casting_to_bf16 leaves only the norms in fp32.
    """
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is not None:  # classifiers have no output head
            module.to(dtype)


def _with_method(model: Any, settings: TrainingSetup) -> Any:
    """The model with another of peft's methods than LoRA; for traces.

    Raises `InputError` for what peft cannot build of it.
    """
    import peft

    adapter = settings.adapter
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[adapter.kind.upper()]
    taken = {field.name for field in fields(kind)}
    given = {"r": adapter.rank, "target_modules": list(adapter.targets), **adapter.arguments}
    if adapter.targets == ALL_LINEAR:
        given["target_modules"] = ALL_LINEAR[0]
    if adapter.kind in ("adaption_prompt", "trainable_tokens"):
        del given["target_modules"]  # attention and the embeddings, whatever their names
    if adapter.kind == "oft":  # one of both follows from the other
        given = {"oft_block_size": 0, **given, "r": 0 if "oft_block_size" in given else given["r"]}
    unknown_names = adapter.arguments.keys() - taken
    if unknown_names:
        raise InputError(
            f"adapter_options {', '.join(sorted(unknown_names))} are none of peft's {adapter.kind}",
            hint=f"it takes {', '.join(sorted(taken & PEFT_OPTIONS.keys()))}",
        )
    try:
        config = kind(task_type="CAUSAL_LM", **{n: v for n, v in given.items() if n in taken})
        adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    except (ValueError, TypeError, NotImplementedError) as error:
        said = " ".join(str(error).split())[:300]
        raise InputError(f"peft cannot make adapters of kind {adapter.kind}: {said}") from error
    adapted.without_adapters = ()
    return adapted


def _with_adapters(model: Any, settings: TrainingSetup, device: str) -> Any:
    from peft import LoraConfig, get_peft_model

    every = settings.adapter.targets == ALL_LINEAR
    first, *others = settings.adapter.targets
    in_one_word = every or (not others and is_pattern(first))
    bare = quantized.unadaptable(model) if every else ()
    config = LoraConfig(
        r=settings.adapter.rank,
        lora_alpha=settings.adapter.alpha,
        lora_dropout=settings.adapter.dropout,
        target_modules=first if in_one_word else [first, *others],
        bias="none",
        use_rslora=settings.adapter.kind == "rslora",
        use_dora=settings.adapter.kind == "dora",
        **({"use_bdlora": settings.adapter.arguments} if settings.adapter.kind == BLOCKS else {}),
        # peft trains a classifier's head whole.
        task_type="SEQ_CLS" if settings.examples.labels else "CAUSAL_LM",
        modules_to_save=list(settings.adapter.saved) or None,
        **({"exclude_modules": list(bare)} if bare else {}),  # peft has it since 0.14
    )
    _check_saved(model, settings.adapter.saved)
    try:
        if device == "meta":
            adapted = get_peft_model(model, config, low_cpu_mem_usage=True)
        else:
            # Made where they will be: on the processor that takes 10 s for 900 million.
            with torch.device(device):
                adapted = get_peft_model(model, config)
    except ValueError as error:
        targets = ", ".join(settings.adapter.targets)
        missing = "not found in the base model" in str(error)
        said = " ".join(str(error).split())[:300]
        linears = (name for name, m in model.named_modules() if isinstance(m, nn.Linear))
        names = sorted({name.rpartition(".")[2] for name in linears} - {"lm_head"})
        raise InputError(
            f"lora_targets {targets} do not exist in the model"
            if missing
            else f"peft cannot put adapters on lora_targets {targets}: {said}",
            hint=f"its linear layers are: {', '.join(names)}",
        ) from error
    adapted.without_adapters = bare
    if settings.adapter.kind == LORA_FA:  # peft's create_lorafa_optimizer
        for name, parameter in adapted.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and "lora_A" not in name)
    if settings.adapter.dtype == "bf16":
        # As TRL's trainers do it, afterwards: peft has no choice for quantised models.
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return adapted


def _check_saved(model: nn.Module, names: tuple[str, ...]) -> None:
    """Raise `InputError` for modules that do not exist or cannot be trained.

    peft only warns of the first, and finds modules by the ends of their names, as here.
    """
    modules = dict(model.named_modules())
    for name in names:
        found = [module for key, module in modules.items() if key.endswith(name)]
        if not any(True for module in found for _ in module.parameters()):
            with_weights = {
                key.rpartition(".")[2]
                for key, module in modules.items()
                if any(True for _ in module.parameters(recurse=False))
            }
            raise unknown("module", name, with_weights)
        if any(type(part).__name__ in quantized.QUANTIZED for m in found for part in m.modules()):
            raise InputError(
                f"modules_to_save {name} is quantised, and quantised weights cannot be trained",
                hint="give it an adapter, or set precision to bf16, fp16 or fp32",
            )


_SAME = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size",
)  # fmt: skip
"""Settings in which a checkpoint and the model of a search must agree."""


def _load_checkpoint(name: str, model_config: Any, settings: TrainingSetup, *, device: str) -> Any:
    """The model in `name`, a hub id or a folder, on `device`; code in it is never run.

    Raises `InputError` where it is not there or is another model than `model_config`, and what
    transformers raises for a model that it cannot build.
    """
    found = resolve_config(name)
    _require_same(name, found, model_config)
    trainable.require_quantization(
        found, settings.precision.weights, double_quant=settings.precision.double_quant
    )
    quantization = None
    if settings.precision.is_quantized:
        quantization = quantized.quantization_config(
            settings.precision.weights,
            settings.load_dtype,
            double_quant=settings.precision.double_quant,
            storage=settings.quant_storage,
        )
    try:
        auto = trainable.trained_class(
            found, images=settings.examples.images > 0, num_labels=settings.examples.labels
        )
        return auto.from_pretrained(
            name,
            config=trainable.trained_config(found, settings.examples.labels),
            dtype=settings.load_dtype,
            attn_implementation=trainable.attention_by_part(found, settings.update.attention),
            quantization_config=quantization,
            device_map={"": device},
            trust_remote_code=False,
        )
    except OSError as error:
        text = " ".join(str(error).split())
        raise InputError(f"the weights of {name!r} cannot be read: {text[:300]}") from error


def _require_same(name: str, found: Any, wanted: Any) -> None:
    pairs = [
        ("", found.get_text_config(), wanted.get_text_config()),
        ("the vision tower's ", *(getattr(c, "vision_config", None) for c in (found, wanted))),
    ]
    differences = [
        f"{where}{field} is {theirs}, not {ours}"
        for where, one, other in pairs
        for field in _SAME
        if (theirs := getattr(one, field, None)) != (ours := getattr(other, field, None))
    ]
    if differences:
        raise InputError(
            f"the checkpoint {name!r} is not of the model that is trained: "
            f"{'; '.join(differences)}",
            hint="name the checkpoint's own model with --model",
        )
