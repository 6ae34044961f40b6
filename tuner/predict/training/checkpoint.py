"""Real weights: a checkpoint of the hub or of a folder, quantised while it is read."""

from __future__ import annotations

from typing import Any

from tuner.core.errors import InputError
from tuner.predict.training.causal_lm_settings import TrainingSetup
from tuner.predict.training.quantized import quantization_config
from tuner.space.models.catalogue import resolve_config
from tuner.space.models.trainable import (
    attention_by_part,
    require_quantization,
    trained_class,
    trained_config,
)

_SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""Settings in which a checkpoint and the model of a search must agree."""


def load_checkpoint(name: str, model_config: Any, settings: TrainingSetup, *, device: str) -> Any:
    """The model in `name`, a hub id or a folder, on `device`; code in it is never run.

    Raises `InputError` where it is not there or is another model than `model_config`, and what
    transformers raises for a model that it cannot build.
    """
    found = resolve_config(name)
    _require_same(name, found, model_config)
    require_quantization(
        found, settings.precision.weights, double_quant=settings.precision.double_quant
    )
    quantization = None
    if settings.precision.is_quantized:
        quantization = quantization_config(
            settings.precision.weights,
            settings.load_dtype,
            double_quant=settings.precision.double_quant,
            storage=settings.quant_storage,
        )
    try:
        auto = trained_class(
            found, images=settings.examples.images > 0, num_labels=settings.examples.labels
        )
        return auto.from_pretrained(
            name,
            config=trained_config(found, settings.examples.labels),
            dtype=settings.load_dtype,
            attn_implementation=attention_by_part(found, settings.update.attention),
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
        for field in _SHAPE
        if (theirs := getattr(one, field, None)) != (ours := getattr(other, field, None))
    ]
    if differences:
        raise InputError(
            f"the checkpoint {name!r} is not of the model that is trained: "
            f"{'; '.join(differences)}",
            hint="name the checkpoint's own model with --model",
        )
