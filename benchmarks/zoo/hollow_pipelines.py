"""Writes folders of diffusion pipelines with holes in place of weights: python ... NAME FOLDER.

It runs in an environment with diffusers and transformers, and imports nothing of tuner: the parts
are built on the meta device from the published configurations, and each weight file is a header
with a hole behind it.
"""

import json
import struct
import sys
from pathlib import Path

import diffusers
import torch
import transformers

# The config.json files of stable-diffusion-v1-5, stable-diffusion-xl-base-1.0 and FLUX.1-dev on
# huggingface.co; what is left out is the default of the class.
_CLIP_L = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
    "hidden_act": "quick_gelu",
    "eos_token_id": 2,
}
_CLIP_G = {
    "vocab_size": 49408,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
    "eos_token_id": 2,
}
_VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 512,
}
_DDPM = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
_SD15_UNET = {"cross_attention_dim": 768, "sample_size": 64}
_SDXL_UNET = {
    "cross_attention_dim": 2048,
    "sample_size": 128,
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "use_linear_projection": True,
}
_FLUX = {"guidance_embeds": True}
_FLUX_VAE = {
    **_VAE,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "sample_size": 1024,
}
_T5_XXL = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
PIPELINES = {
    "diffusers-sd15": (
        "StableDiffusionPipeline",
        {
            "text_encoder": ("CLIPTextModel", _CLIP_L),
            "tokenizer": ("CLIPTokenizer", {}),
            "unet": ("UNet2DConditionModel", _SD15_UNET),
            "vae": ("AutoencoderKL", _VAE),
            "scheduler": ("DDPMScheduler", _DDPM),
        },
    ),
    "diffusers-sdxl": (
        "StableDiffusionXLPipeline",
        {
            "text_encoder": ("CLIPTextModel", _CLIP_L),
            "text_encoder_2": ("CLIPTextModelWithProjection", _CLIP_G),
            "tokenizer": ("CLIPTokenizer", {}),
            "tokenizer_2": ("CLIPTokenizer", {}),
            "unet": ("UNet2DConditionModel", _SDXL_UNET),
            "vae": ("AutoencoderKL", {**_VAE, "sample_size": 1024, "scaling_factor": 0.13025}),
            "scheduler": ("DDPMScheduler", _DDPM),
        },
    ),
    "diffusers-flux": (
        "FluxPipeline",
        {
            "text_encoder": ("CLIPTextModel", _CLIP_L),
            "text_encoder_2": ("T5EncoderModel", _T5_XXL),
            "tokenizer": ("CLIPTokenizer", {}),
            "tokenizer_2": ("T5TokenizerFast", {}),
            "transformer": ("FluxTransformer2DModel", _FLUX),
            "vae": ("AutoencoderKL", _FLUX_VAE),
            "scheduler": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
        },
    ),
}


def main(name: str, folder: Path) -> None:
    pipeline, parts = PIPELINES[name]
    index = {"_class_name": pipeline, "_diffusers_version": diffusers.__version__}
    for part, (kind, config) in parts.items():
        library = "diffusers" if hasattr(diffusers, kind) else "transformers"
        index[part] = [library, kind]
        (folder / part).mkdir(parents=True, exist_ok=True)
        if "Tokenizer" in kind:
            write_tokenizer(folder / part, kind)
        else:
            write_part(folder / part, library, kind, config)
    if pipeline == "StableDiffusionPipeline":
        index |= {"feature_extractor": [None, None], "safety_checker": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")


def write_part(folder: Path, library: str, kind: str, config: dict) -> None:
    made = getattr(diffusers if library == "diffusers" else transformers, kind)
    if kind.endswith("Scheduler"):
        made(**config).save_pretrained(folder)
        return
    with torch.device("meta"):
        if library == "diffusers":
            model = made.from_config(config)
            model.save_config(folder)
            file = "diffusion_pytorch_model.safetensors"
        else:
            model = made(made.config_class(**config))
            model.config.architectures = [kind]
            model.config.save_pretrained(folder)
            file = "model.safetensors"
    bytes_each = 2 if kind in {"FluxTransformer2DModel", "T5EncoderModel"} else 4
    write_holes(folder / file, model, bytes_each)


def write_holes(path: Path, model: torch.nn.Module, bytes_each: int) -> None:
    """A safetensors file: the length of the header, the header, and a hole."""
    header, start = {"__metadata__": {"format": "pt"}}, 0
    shared = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in shared or not tensor.is_floating_point():
            continue
        shared.add(id(tensor))
        end = start + tensor.numel() * bytes_each
        header[name] = {
            "dtype": {2: "BF16", 4: "F32"}[bytes_each],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + start)


def write_tokenizer(folder: Path, kind: str) -> None:
    """A tokenizer of one token per character, with the special tokens of the real one."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = [chr(i) for i in range(32, 127)]
    start, end = (
        ("<|startoftext|>", "<|endoftext|>") if kind == "CLIPTokenizer" else ("<pad>", "</s>")
    )
    if kind == "CLIPTokenizer":
        vocabulary = {
            one: i for i, one in enumerate([*letters, *(f"{one}</w>" for one in letters)])
        }
        vocabulary |= {start: 49406, end: 49407}
        (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
        (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
        made = {"bos_token": start, "eos_token": end, "pad_token": end, "unk_token": end}
        settings = {"tokenizer_class": kind, "model_max_length": 77, **made}
    else:
        vocabulary = [
            ("<pad>", 0.0),
            ("</s>", 0.0),
            ("<unk>", 0.0),
            *((one, -1.0) for one in letters),
        ]
        tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
        made = {"eos_token": end, "pad_token": start, "unk_token": "<unk>"}
        settings = {"tokenizer_class": kind, "model_max_length": 512, "extra_ids": 0, **made}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
