"""Random configurations of shallow models, and how far two predictions of one are apart."""

import copy
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tuner.core.records import Configuration, Prediction
from tuner.predict.predict import check_supported
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import load_catalogue

GPUS = ("t4", "rtx2080ti", "a5000", "rtx4090", "a100_80gb_pcie", "h100_pcie")

ATTENTION_MLP = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "precision": ("fp32", "fp16", "bf16", "nf4", "int8", "tf32"),
    "mixed_precision": ("no", "bf16", "fp16"),
    "gradient_checkpointing": (False, True),
    "attention": ("sdpa", "eager", "flash_attention_2"),
    "full_training": (False, False, False, True),
    "single_sample": (False, False, True),
    "long": (False, True),
    "lora_targets": (("all-linear",), ("q_proj", "v_proj"), ATTENTION_MLP, ("down_proj",)),
    "lora_dropout": (0.0, 0.0, 0.05),
    "double_quant": (True, False),
    "compute_dtype": ("auto", "auto", "fp32", "fp16"),
    "kbit_preparation": ("peft", "trl", "none"),
    "loss": ("transformers",) * 2 + ("transformers_4_46",) * 3,
    "fused_loss": (False, False, False, True),
    "training_loop": ("trainer", "trainer", "function", "loop"),
}
"""What changes the sequence of operators."""

LATER_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "padding": ("none", "none", "max_length"),
    "modules_to_save": (("none",), ("none",), ("lm_head",), ("embed_tokens", "lm_head")),
}
"""The same, drawn apart: what was drawn before they existed stays as it was."""


def shallow_model(folder: Path, name: str, layers: int) -> str:
    """Write the architecture of a catalogue model with fewer layers; returns its path."""
    config = copy.deepcopy(dict(load_catalogue()[name].config))
    config.get("text_config", config)["num_hidden_layers"] = layers
    if "vision_config" in config:
        config["vision_config"]["num_hidden_layers"] = 3
    path = folder / f"{name}-{layers}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def structures(seed: int) -> Iterator[dict[str, Any]]:
    """Endless random choices; each value of a knob comes before any comes twice."""
    draws = ((CHOICES, random.Random(seed)), (LATER_CHOICES, random.Random(f"{seed} later")))
    decks: dict[str, list[Any]] = {name: [] for choices, _ in draws for name in choices}
    while True:
        chosen = {}
        for choices, source in draws:
            for name, values in choices.items():
                if not decks[name]:
                    decks[name] = source.sample(values, len(values))
                chosen[name] = decks[name].pop()
        yield _possible(chosen)


def _possible(chosen: dict[str, Any]) -> dict[str, Any]:
    """The nearest combination that libraries accept."""
    quantized = chosen["precision"] in ("nf4", "int8")
    if quantized:
        chosen["full_training"] = False
    if chosen["full_training"]:
        chosen["modules_to_save"] = ("none",)
        if chosen["precision"] == "fp16":  # whose gradients no scaler takes
            chosen["precision"] = "bf16"
    if chosen["attention"] == "flash_attention_2":
        # Its kernels exist in half precision alone.
        half = chosen["precision"] in ("fp16", "bf16") or quantized
        if not half or chosen["compute_dtype"] == "fp32":
            chosen["attention"] = "sdpa"
    if chosen["attention"] == "flash_attention_2":
        chosen["padding"] = "none"
    return chosen


def configurations(
    structure: Mapping[str, Any], source: random.Random, *, window: int | None, number: int
) -> list[Configuration]:
    """Random sizes, optimizers and numbers of micro-steps for one structure."""
    border = window if window is not None and window < 4096 else 1024
    low, high = (border, 4096) if structure["long"] else (64, border - 1)
    settings = {
        name: value
        for name, value in structure.items()
        if name not in ("full_training", "single_sample", "long")
    }
    found = []
    for place in range(number):
        single = structure["single_sample"]
        length = source.randint(low, high)
        if place % 2:
            length = min(max(low, length // 128 * 128), high)
        if place == number - 1:
            length = low if structure["long"] else high
        sizes = {
            "micro_batch": 1 if single else source.randint(2, 16),
            "max_length": length,
            "lora_rank": 0 if structure["full_training"] else source.randint(4, 256),
            "lora_alpha": 16,
            "grad_accum": source.choice((1, 2, 7)),
            "optimizer": source.choice(
                ("adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "sgd")
            ),
            "max_grad_norm": source.choice((0.0, 1.0)),
        }
        found.append(Configuration({**settings, **sizes}))
    return found


def gpu_for(configuration: Configuration, source: random.Random) -> Any:
    """A random GPU that can run a configuration."""
    return source.choice([g for g in map(get_gpu, GPUS) if not check_supported(configuration, g)])


def differences(ours: Prediction, full: Prediction) -> dict[str, float]:
    """Relative differences of two predictions; of a phase, in parts of the peak."""
    mine, theirs = ours.memory, full.memory
    found = {
        "peak_allocated": _apart(mine.peak_allocated_bytes, theirs.peak_allocated_bytes),
        "reserved": _apart(mine.peak_reserved_bytes, theirs.peak_reserved_bytes),
        "loaded": abs(mine.loaded_bytes - theirs.loaded_bytes) / theirs.peak_allocated_bytes,
        "step_s": _apart(ours.speed.step_s, full.speed.step_s),
    }
    for phase, size in theirs.phase_peak_bytes.items():
        apart = abs(mine.phase_peak_bytes[phase] - size)
        found[f"{phase}_peak"] = apart / theirs.peak_allocated_bytes
    return found


def _apart(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / theirs
