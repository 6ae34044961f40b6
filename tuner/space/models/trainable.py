"""Limits on training a model, from its class and its checkpoint.

Imports transformers where a model is not of the catalogue: to be called late.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tuner.core.errors import InputError
from tuner.space.models.catalogue import NF4, auto_class, get_entry, resolve_config, stored_format

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EMULATE = "emulate the program that trains it: tuner emulate --gpu rtx4090 -- python train.py"
"""Advice if nothing is predicted."""

_CATALOGUE_WITHOUT_SDPA = frozenset(
    {"bloom", "deepseek_v4", "gemma2", "gpt_neo", "gpt_oss", "gptj", "mimo_v2_flash", "xglm"}
)
"""Types of models in the catalogue whose classes have no fused attention (transformers 5.23)."""

LIGER_TYPES = ("gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "qwen2", "qwen3",
               "smollm3")  # fmt: skip
"""Types of models whose training with Liger's kernels is predicted."""


def model_defaults(name: str) -> Mapping[str, Any]:
    """Settings that replace the vocabulary's defaults, where the model's class knows no others.

    transformers takes eager attention by itself where a class has no sdpa, and a training script
    must leave gradient checkpointing off where a class has none. Raises `InputError` as
    `resolve_config` does.
    """
    entry = get_entry(name)
    if entry is not None:
        sdpa = entry.config["model_type"] not in _CATALOGUE_WITHOUT_SDPA
        stored = {"precision": NF4} if stored_format(name) == NF4 else {}
        return stored if sdpa else {"attention": "eager", **stored}
    config = resolve_config(name)
    classifier = _classifier_class(config)
    is_classifier = classifier is not None and classifier.__name__ in (config.architectures or [])
    model_class = classifier if is_classifier else _causal_class(config) or _image_class(config)
    if model_class is None:
        return {}
    found: dict[str, Any] = {"num_labels": config.num_labels} if is_classifier else {}
    if not model_class._supports_sdpa:
        found["attention"] = "eager"
    if not model_class.supports_gradient_checkpointing:
        found["gradient_checkpointing"] = False
    return found


def require_trained(config: PreTrainedConfig, *, num_labels: int = 0) -> None:
    """Raise `InputError` unless a checkpoint of this architecture is trained as it is asked for.

    With `num_labels` as a classifier, else as a causal language model: `AutoModelForCausalLM`
    makes one of whatever it has a class for, of the decoder of an encoder-decoder, of a classifier
    without its head.
    """
    from transformers import AutoModelForCausalLM

    names = config.architectures or []
    classifier = _classifier_class(config)
    if num_labels:
        if classifier is None:
            raise InputError(
                f"transformers has no classifier of texts of type {config.model_type!r} that is "
                "predicted",
                hint=EMULATE,
            )
        return
    model_class = _causal_class(config)
    image_class = _image_class(config)
    if image_class is not None and (model_class is None or image_class.__name__ in names):
        return
    kind = f"{config.model_type} model" + (f" ({names[0]})" if names else "")
    if model_class is None:
        raise InputError(
            f"transformers has no causal language model of type {config.model_type!r}", hint=EMULATE
        )
    own = auto_class(config)
    if own is AutoModelForCausalLM or model_class.__name__ in names:
        return
    if own._model_mapping.get(type(config), None) is model_class:
        return  # a model of images and text, trained on text
    if getattr(config, "is_encoder_decoder", False):
        hint = EMULATE
    elif classifier is not None:
        hint = f"set num_labels to 1 or more to train {classifier.__name__}"
    else:
        hint = (
            f"AutoModelForCausalLM would train {model_class.__name__}; for that, give a folder "
            f'whose config.json says "architectures": ["{model_class.__name__}"]'
        )
    raise InputError(
        f"this {kind} is no causal language model: its whole step is not what would be predicted",
        hint=hint,
    )


def _causal_class(config: PreTrainedConfig) -> Any:
    """The class that `AutoModelForCausalLM` takes for a configuration, or None."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def _image_class(config: PreTrainedConfig) -> Any:
    """The class of images and text for a configuration that has a language model, or None.

    Encoder-decoders are none: their text is another's input.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if getattr(config, "is_encoder_decoder", False) or config.get_text_config() is config:
        return None
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)


def _classifier_class(config: PreTrainedConfig) -> Any:
    """The class that labels texts for a configuration, or None.

    Encoder-decoders look for the end of a text in its values.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if getattr(config, "is_encoder_decoder", False):
        return None
    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)


def trained_class(config: PreTrainedConfig, *, images: bool, num_labels: int) -> Any:
    """The Auto class that a training script takes.

    That of images and text where there are images, or no other; that of classifiers for labels.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    if num_labels:
        return AutoModelForSequenceClassification
    if _image_class(config) is not None and (images or _causal_class(config) is None):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def attention_by_part(config: PreTrainedConfig, attention: str) -> str | dict[str, str]:
    """`attention`, with eager for the parts (an audio tower) whose classes have no sdpa.

    That is what transformers takes where no attention is given; asked for, it is an error.
    """
    from transformers import MODEL_MAPPING

    parts = {
        name: "eager"
        for name in config.sub_configs
        if (part := MODEL_MAPPING.get(type(getattr(config, name, None)), None)) is not None
        and not part._supports_sdpa
    }
    return {"": attention, **parts} if parts and attention == "sdpa" else attention


def trained_config(config: PreTrainedConfig, num_labels: int) -> PreTrainedConfig:
    """A copy of the configuration, which some classes keep and change, with these labels.

    Classifiers that read the last token of a text need one of padding, which scripts set.
    """
    found = copy.deepcopy(config)
    if num_labels:
        found.num_labels = num_labels
        if found.get_text_config().pad_token_id is None:
            found.get_text_config().pad_token_id = 0
    return found


def checkpoint_quantization(config: PreTrainedConfig) -> Mapping[str, Any]:
    """The quantisation of a checkpoint's own weights; empty if there is none."""
    text = config.get_text_config()
    found = getattr(config, "quantization_config", None)
    found = found or getattr(text, "quantization_config", None)
    if not found:
        return {}
    fields: Mapping[str, Any] = found if isinstance(found, Mapping) else found.to_dict()
    return fields


def require_quantization(
    config: PreTrainedConfig, precision: str, *, double_quant: bool
) -> tuple[str, ...] | None:
    """Modules that the checkpoint itself keeps out of its quantisation; None where it says none.

    Raises `InputError` unless its weights are what `precision` says: those of bitsandbytes are
    nf4 or int8, all other ways of quantising are not known.
    """
    own = checkpoint_quantization(config)
    if not own:
        return None
    method = own.get("quant_method", "an unknown method")
    method = str(getattr(method, "value", method))  # transformers has an enumeration of them
    if method != "bitsandbytes":
        raise InputError(
            f"the weights of this checkpoint are quantised with {method}, which is not predicted",
            hint="name the model that it was made from, with precision=nf4 or int8 for a "
            "quantised base",
        )
    theirs = "nf4" if own.get("load_in_4bit") or own.get("_load_in_4bit") else "int8"
    if precision != theirs:
        raise InputError(
            f"the weights of this checkpoint are {theirs} already, and precision is {precision}",
            hint=f"set precision to {theirs}, or name the model that it was made from",
        )
    nested = bool(own.get("bnb_4bit_use_double_quant", False))
    if theirs == "nf4" and nested != double_quant:
        raise InputError(
            f"the scales of this checkpoint are {'' if nested else 'not '}quantised, and "
            f"double_quant is {str(double_quant).lower()}",
            hint=f"set double_quant to {str(nested).lower()}",
        )
    skipped = own.get("llm_int8_skip_modules")
    return tuple(skipped) if skipped else None
