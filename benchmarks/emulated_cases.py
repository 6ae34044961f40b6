"""What the oracle compares: shipped spaces as they are recommended, and models of each family."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tuner.app.estimate import one_configuration
from tuner.core.errors import InputError
from tuner.core.records import Configuration
from tuner.space import SearchSpace
from tuner.space.models.catalogue import get_entry

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"

QUICK_LAYERS = 3
"""Layers of a model where `--quick` is asked for: enough for one of each kind and one between."""

LOADER = {"num_workers": 0, "persistent_workers": False}
"""Loader processes take no memory of a GPU, and processors that others want."""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration on one GPU type; `stage` is of a space that has some."""

    name: str
    gpu: str
    space: str | None = None
    model: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    stage: str | None = None

    def opened(self, layers: int | None, folder: Path) -> tuple[SearchSpace, Configuration]:
        """The space and the configuration, of a model of at most `layers` where that is given.

        The shallower model's configuration is written into `folder`.
        """
        model = self.model if layers is None else _shallow(self._model_name(), layers, folder)
        space, configuration = one_configuration(self.space, model, self.settings)
        if self.stage is not None:
            configuration = space.stage_configurations(configuration)[self.stage]
        known = {name: value for name, value in LOADER.items() if name in configuration}
        return space, Configuration({**configuration, **known})

    def _model_name(self) -> str:
        if self.model is not None:
            return self.model
        space, _ = one_configuration(self.space, None, {})
        return space.predicted_model()


LORA = {"precision": "bf16", "mixed_precision": "bf16", "lora_rank": 16, "grad_accum": 4}
"""LoRA of a bf16 model, more than one micro-step a step."""

TURING = {**LORA, "precision": "fp16", "mixed_precision": "fp16"}
"""The same where there is no bf16."""

NF4 = {**LORA, "precision": "nf4", "optimizer": "paged_adamw_8bit", "gradient_checkpointing": True}
"""QLoRA as most do it."""

SIZES = {"micro_batch": 2, "max_length": 512}

_MODELS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("llama-3.2-1b", "rtx4090", {**LORA, "gradient_checkpointing": True}),
    ("llama-3.2-1b", "t4", {**TURING, "gradient_checkpointing": True}),
    ("llama-3.2-1b", "h100_sxm", {**LORA, "attention": "eager", "gradient_checkpointing": False}),
    ("qwen2.5-1.5b", "t4", {**NF4, "mixed_precision": "fp16"}),
    ("qwen3-1.7b", "l4", {**LORA, "gradient_checkpointing": False, "optimizer": "adamw_8bit"}),
    ("gemma-3-1b", "a100_80gb", {**LORA, "gradient_checkpointing": False}),
    ("gemma-2-2b", "rtx3090", {**NF4, "attention": "eager"}),
    ("phi-2", "rtx5090", {**LORA, "gradient_checkpointing": True}),
    ("phi-3-mini-4k", "h100_sxm", {**NF4}),
    ("mistral-7b-v0.3", "rtx3090", {**NF4}),
    ("falcon-7b", "a100_80gb", {**LORA, "gradient_checkpointing": True}),
    ("llama-3.1-8b", "h100_sxm", {**LORA, "gradient_checkpointing": True}),
    ("opt-1.3b", "rtx4090", {**LORA, "gradient_checkpointing": False}),
    ("gpt2-large", "t4", {**TURING, "gradient_checkpointing": False}),
    ("bloom-1b7", "a100_80gb", {**LORA, "attention": "eager", "gradient_checkpointing": False}),
    ("qwen2.5-0.5b", "rtx3090", {**LORA, "precision": "int8", "gradient_checkpointing": True}),
    ("granite-3.0-3b-a800m", "h100_sxm", {**LORA, "gradient_checkpointing": True}),
)


def all_cases() -> Iterator[Case]:
    """Every case: small models first, then the spaces."""
    for model, gpu, settings in _MODELS:
        parts = (str(settings["precision"]), str(settings.get("attention", "sdpa")))
        plain = settings.get("gradient_checkpointing") is False
        name = " ".join((model, *parts, *(["not checkpointed"] if plain else [])))
        yield Case(name, gpu, model=model, settings={**SIZES, **settings})
    yield from _of_spaces()


def _of_spaces() -> Iterator[Case]:
    """Each space's baseline, on its first and last GPU type, and what was found best for each."""
    for file in sorted((ROOT / "search_spaces").glob("*.yaml")):
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
        gpus = [gpu for gpu in document.get("gpus", ()) if gpu != "cpu"]
        stage = next((stage["name"] for stage in document.get("stages", ())), None)
        for gpu in dict.fromkeys((*gpus[:1], *gpus[-1:])):
            settings = document.get("baseline", {})
            yield Case(f"{file.stem} baseline", gpu, file.stem, None, settings, stage)
        for gpu in gpus:
            best = RESULTS / file.stem / gpu / "best.yaml"
            if best.exists():
                settings = _knobs(document, yaml.safe_load(best.read_text(encoding="utf-8")))
                yield Case(f"{file.stem} best", gpu, file.stem, None, settings, stage)


def _knobs(document: Mapping[str, Any], best: Mapping[str, Any]) -> dict[str, Any]:
    """What a search chose: the space's own knobs, from which the rest follows."""
    found = best["configuration"]
    return {name: found[name] for name in document["knobs"] if name in found}


def _shallow(model: str, layers: int, folder: Path) -> str:
    """A folder with the model's configuration, with fewer layers of everything in it."""
    entry = get_entry(model)
    if entry is None:
        raise InputError(f"{model!r} is not a model of the catalogue", hint="--quick needs one")
    config = copy.deepcopy(dict(entry.config))
    for part in (config, config.get("text_config"), config.get("vision_config")):
        if isinstance(part, dict):
            _cut(part, layers)
    place = folder / model.replace("/", "_")
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(place)


def _cut(config: dict[str, Any], layers: int) -> None:
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"):
        if name in config:
            config[name] = min(layers, int(config[name]))
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:layers]
