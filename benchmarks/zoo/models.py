"""Hollow checkpoints of the models that the programs train: of real sizes, or tiny for tests.

What the catalogue does not have is written as the published config.json has it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.space.models.hollow import is_hollow, write_hollow

# https://huggingface.co/facebook/bart-large/blob/main/config.json: the class's defaults
_BART_LARGE: dict[str, Any] = {
    "model_type": "bart",
    "architectures": ["BartForConditionalGeneration"],
    "dtype": "float32",
}
# https://huggingface.co/openai/whisper-small/blob/main/config.json
_WHISPER_SMALL: dict[str, Any] = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "d_model": 768,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "vocab_size": 51865,
    "num_mel_bins": 80,
    "dtype": "float32",
}

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SMALL_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_SMALL_EXPERTS: dict[str, Any] = {
    **_SMALL,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_SMALL_ENCODER_DECODER: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
_SMALL_LLAMA: dict[str, Any] = {**_SMALL, "model_type": "llama", "dtype": "bfloat16"}

# https://huggingface.co/google-t5/t5-small/blob/main/config.json: the class's defaults
_T5_SMALL: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "decoder_start_token_id": 0,
    "dtype": "float32",
}
# https://huggingface.co/google/vit-base-patch16-224-in21k/blob/main/config.json: the defaults
_VIT_BASE: dict[str, Any] = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "vocab_size": 1000,  # for the tokenizer that each hollow checkpoint gets
    "dtype": "float32",
}
# Files that lie beside the weights, by model.
_FILES: dict[str, dict[str, Any]] = {
    "vit": {
        "preprocessor_config.json": {
            "image_processor_type": "ViTImageProcessor",
            "size": {"height": 224, "width": 224},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
    }
}

REAL: dict[str, str | Mapping[str, Any]] = {
    "llama": "llama-3.2-1b",
    "qwen_vl": "qwen2.5-vl-3b",
    "gemma": "medgemma-4b",
    "qwen_moe": "qwen3-30b-a3b",
    "gpt_oss": "gpt-oss-20b",
    "pythia": "pythia-160m",
    "bart": _BART_LARGE,
    "whisper": _WHISPER_SMALL,
    "small": _SMALL_LLAMA,
    "t5-small": _T5_SMALL,
    "vit": _VIT_BASE,
}
TINY: dict[str, str | Mapping[str, Any]] = {
    "llama": _SMALL_LLAMA,
    "small": _SMALL_LLAMA,
    "qwen_vl": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {
            **_SMALL,
            "model_type": "qwen2_5_vl_text",
            "pad_token_id": 0,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 64,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": 2040,
        "video_token_id": 2041,
        "vision_start_token_id": 2042,
        "vision_end_token_id": 2043,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "gemma": {
        "model_type": "gemma3",
        "text_config": {**_SMALL, "model_type": "gemma3_text", "pad_token_id": 0},
        "vision_config": {
            **_SMALL_VISION,
            "model_type": "siglip_vision_model",
            "image_size": 112,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 16,
        "boi_token_index": 2040,
        "eoi_token_index": 2041,
        "image_token_index": 2042,
        "dtype": "bfloat16",
    },
    "bart": {**_BART_LARGE, **_SMALL_ENCODER_DECODER, "vocab_size": 2048},
    "whisper": {**_WHISPER_SMALL, **_SMALL_ENCODER_DECODER},
    "qwen_moe": {
        **_SMALL_EXPERTS,
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
    },
    "gpt_oss": {
        **_SMALL_EXPERTS,
        "model_type": "gpt_oss",
        "pad_token_id": 0,
        "dtype": "bfloat16",
    },
}


def make(name: str, folder: Path, *, tiny: bool, python: Path | None = None) -> Path:
    """The hollow checkpoint of a model, under `folder`; made where it is not there yet.

    `name` is one of this module, a model of the catalogue, or a pipeline of diffusers, which
    `python`, an interpreter with that package, writes (hollow_pipelines.py).
    """
    target = folder / (f"tiny-{name}" if tiny else name)
    if is_hollow(target) or (target / "complete").exists():
        return target
    if name.startswith("diffusers-"):
        script = Path(__file__).with_name("hollow_pipelines.py")
        subprocess.run([str(python), str(script), name, str(target)], check=True)
        (target / "complete").touch()
        return target
    model = (TINY if tiny else REAL).get(name, name)
    if not isinstance(model, str):
        config = folder / f"config-of-{target.name}"
        config.mkdir(parents=True, exist_ok=True)
        (config / "config.json").write_text(json.dumps(model, indent=2), encoding="utf-8")
        model = str(config)
    write_hollow(model, target)
    _for_older_readers(target / "tokenizer_config.json")
    for file, content in _FILES.get(name, {}).items():
        (target / file).write_text(json.dumps(content), encoding="utf-8")
    return target


def _for_older_readers(path: Path) -> None:
    """Name the special tokens of a tokenizer as transformers 4 does, which 5 reads too."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    tokens = settings.pop("extra_special_tokens", [])
    if tokens:
        settings["additional_special_tokens"] = tokens
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
