"""Tiny models, run on the CPU and on an emulated GPU: prints the sizes and counts that they meet.

Usage: values_models.py DEVICE. All run in one process, which imports PyTorch once.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

VOCABULARY, IMAGE = 1000, 990
PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Notes:
    """What a program met: sizes, counts and integers, in order."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(1)
        self.met: list[Any] = []

    def draw(self, *shape: int, below: int = 900) -> torch.Tensor:
        """Random integers, on the CPU."""
        return torch.randint(0, below, shape, generator=self.generator)

    def note(self, *values: Any) -> None:
        """Keeps the shapes of tensors, and other values as they are."""
        self.met.append([list(v.shape) if isinstance(v, torch.Tensor) else v for v in values])

    def watch_masks(self, layer: torch.nn.Module) -> None:
        """Notes the size of each attention mask, and how many places it leaves open."""

        def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            mask = kwargs.get("attention_mask")
            if mask is None:
                self.note("no mask")
            else:
                open_places = mask if mask.dtype == torch.bool else mask > -1
                self.note("mask", mask, int(open_places.sum()))

        layer.register_forward_pre_hook(look, with_kwargs=True)


def padded(notes: Notes, attention: str) -> None:
    """Padded batches, packed rows and sampling."""
    from transformers import LlamaConfig, LlamaForCausalLM

    device = notes.device
    model = LlamaForCausalLM(LlamaConfig(**PLAIN, attn_implementation=attention)).to(device)
    notes.watch_masks(model.model.layers[0].self_attn)
    lengths = [30, 17, 25]
    ids = notes.draw(3, 30)
    mask = torch.tensor([[1] * length + [0] * (30 - length) for length in lengths])
    labels = ids.masked_fill(mask == 0, -100)
    for tokens in (mask, torch.ones_like(mask)):
        out = model(
            input_ids=ids.to(device), attention_mask=tokens.to(device), labels=labels.to(device)
        )
        out.loss.backward()
        notes.note(out.logits, int((labels.to(device) != -100).sum()))
    positions = torch.cat([torch.arange(length) for length in (10, 12, 8)])[None]
    out = model(input_ids=ids[:1].to(device), position_ids=positions.to(device))
    notes.note(out.logits)
    tokens = model.generate(
        input_ids=ids[:2].to(device),
        attention_mask=mask[:2].to(device),
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=True,
        top_k=5,
        top_p=0.9,
        pad_token_id=0,
        eos_token_id=VOCABULARY - 1,
    )
    notes.note(tokens)


def experts(notes: Notes, implementation: str) -> None:
    """Qwen3-MoE with checkpointing: what is computed again must choose the same experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **PLAIN,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=32,
        num_experts_per_tok=4,
        output_router_logits=True,
        experts_implementation=implementation,
    )
    model = Qwen3MoeForCausalLM(config).to(notes.device).to(torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.train()
    ids = notes.draw(4, 256).to(notes.device)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    notes.note(out.logits, bool(torch.isfinite(out.loss)))


def gpt_oss(notes: Notes) -> None:
    """gpt-oss: experts with sinks in attention."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**PLAIN, head_dim=16, num_local_experts=8, num_experts_per_tok=2)
    model = GptOssForCausalLM(config).to(notes.device).to(torch.bfloat16)
    ids = notes.draw(2, 256).to(notes.device)
    out = model.train()(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    notes.note(out.logits, bool(torch.isfinite(out.loss)))


def qwen_vl(notes: Notes) -> None:
    """Two images of different sizes: their tokens are found in the text, and decide positions."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    config = Qwen2_5_VLConfig(
        text_config={**PLAIN, "rope_parameters": rope},
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [2],
            "window_size": 56,
        },
        image_token_id=IMAGE,
        video_token_id=991,
        vision_start_token_id=992,
        vision_end_token_id=993,
    )
    device = notes.device
    model = Qwen2_5_VLForConditionalGeneration(config).to(device).to(torch.bfloat16)
    grid = torch.tensor([[1, 8, 12], [1, 4, 6]])
    places = [8 * 12 // 4, 4 * 6 // 4]
    rows = [
        [5] * 4 + [992] + [IMAGE] * count + [993] + notes.draw(40 - count).tolist()
        for count in places
    ]
    ids = torch.tensor(rows)
    mask = torch.ones_like(ids)
    mask[1, -9:] = 0
    model.model.visual.blocks[0].attn.register_forward_pre_hook(
        lambda module, args, kwargs: notes.note(kwargs["cu_seqlens"].tolist()), with_kwargs=True
    )
    where = {
        "image_grid_thw": grid.to(device),
        "attention_mask": mask.to(device),
        "mm_token_type_ids": (ids == IMAGE).int().to(device),
    }
    pixels = torch.randn(8 * 12 + 4 * 6, 3 * 2 * 14 * 14)
    out = model(
        input_ids=ids.to(device), pixel_values=pixels.to(device), labels=ids.to(device), **where
    )
    out.loss.backward()
    notes.note(out.logits, bool(torch.isfinite(out.loss)))
    positions, _ = model.model.get_rope_index(ids.to(device), **where)
    notes.note(positions, positions.cpu().tolist())


def gemma3(notes: Notes) -> None:
    """Images that see all of themselves: their places decide the mask."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**PLAIN, "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 16}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=991,
        eoi_token_index=992,
    )
    device = notes.device
    model = Gemma3ForConditionalGeneration(config).to(device).to(torch.bfloat16).train()
    notes.watch_masks(model.model.language_model.layers[0].self_attn)
    start = [2, 991, IMAGE, IMAGE, IMAGE, IMAGE, 992]
    ids = torch.tensor([start + notes.draw(23).tolist(), start + notes.draw(23).tolist()])
    mask = torch.ones_like(ids)
    mask[1, 25:] = 0
    out = model(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        token_type_ids=(ids == IMAGE).long().to(device),
        pixel_values=torch.randn(2, 3, 56, 56).to(device, torch.bfloat16),
        labels=ids.to(device),
    )
    out.loss.backward()
    notes.note(out.logits, bool(torch.isfinite(out.loss)))


MODELS: dict[str, Callable[[Notes], None]] = {
    "padded-eager": lambda notes: padded(notes, "eager"),
    "experts-grouped": lambda notes: experts(notes, "grouped_mm"),
    "gpt-oss": gpt_oss,
    "qwen-vl": qwen_vl,
    "gemma-3": gemma3,
}


def met(programs: dict[str, Callable[[Notes], None]], device: str) -> dict[str, list[Any]]:
    """What each of the programs meets."""
    found = {}
    for name, program in programs.items():
        torch.manual_seed(0)
        random.seed(0)
        notes = Notes(device)
        program(notes)
        found[name] = notes.met
    return found


if __name__ == "__main__":
    print(json.dumps(met(MODELS, sys.argv[1])))
