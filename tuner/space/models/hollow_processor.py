"""The processor of a hollow image-text checkpoint: how images become tokens, without a download.

What the hub's processor files say, for the families whose numbers are in the configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class _ImageTokens:
    """The special tokens of a family of image-text models.

    `fields` has, by the name that the processor asks the tokenizer for, the field of the
    configuration with the id, and the token; `placeholder` is what stands for an image in a
    conversation.
    """

    fields: Mapping[str, tuple[str, str]]
    placeholder: str

    def at(self, config: PreTrainedConfig) -> dict[str, tuple[str, int]]:
        """Token and id by the name that the processor asks for."""
        found = {
            name: (token, getattr(config, f, None)) for name, (f, token) in self.fields.items()
        }
        return {name: (token, id_) for name, (token, id_) in found.items() if id_ is not None}


_QWEN = _ImageTokens(
    {
        "image_token": ("image_token_id", "<|image_pad|>"),
        "video_token": ("video_token_id", "<|video_pad|>"),
        "vision_bos_token": ("vision_start_token_id", "<|vision_start|>"),
        "vision_eos_token": ("vision_end_token_id", "<|vision_end|>"),
    },
    "<|vision_start|><|image_pad|><|vision_end|>",
)
_GEMMA = _ImageTokens(
    {
        "boi_token": ("boi_token_index", "<start_of_image>"),
        "eoi_token": ("eoi_token_index", "<end_of_image>"),
        "image_token": ("image_token_index", "<image_soft_token>"),
    },
    "<start_of_image>",
)
IMAGE_TOKENS = {
    "gemma3": _GEMMA,
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
}
"""By model type."""


def add_processor(folder: Path, config: PreTrainedConfig) -> str | None:
    """Write the processor's files, and say what was written; None for models without images."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return None
    if config.model_type not in IMAGE_TOKENS:
        return f"none: it is not known for {config.model_type}; copy the files of its own"
    if config.model_type == "gemma3":
        image, processor = _gemma_files(config)
    else:
        image, processor = _qwen_files(config)
    for name, fields in (("preprocessor_config.json", image), ("processor_config.json", processor)):
        (folder / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return "made"


def _gemma_files(config: PreTrainedConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    side = config.vision_config.image_size
    shared = {
        "image_seq_length": config.mm_tokens_per_image,
        "processor_class": "Gemma3Processor",
    }
    image = {
        "image_processor_type": "Gemma3ImageProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"height": side, "width": side},
        **shared,
    }
    return image, shared


def _qwen_files(config: PreTrainedConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = config.vision_config
    third = config.model_type.startswith("qwen3")
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}.get(config.model_type, "Qwen3VL")
    # The smallest and the largest image, in pixels, as the hub's files of each family have them.
    fewest, most = (65_536, 16_777_216) if third else (3_136, 12_845_056)
    image = {
        "image_processor_type": "Qwen2VLImageProcessorFast" if third else "Qwen2VLImageProcessor",
        "image_mean": [0.5, 0.5, 0.5] if third else [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.5, 0.5, 0.5] if third else [0.26862954, 0.26130258, 0.27577711],
        "size": {"shortest_edge": fewest, "longest_edge": most},
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "processor_class": f"{name}Processor",
    }
    return image, {"processor_class": f"{name}Processor"}
