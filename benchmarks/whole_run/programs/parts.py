"""The parts that the programs share: the fault that is planted, rows, a tokenizer and a model."""

import os

import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

WORDS = 32_000
ROWS = 400
EVALUATED = 64
LORA = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "embed_tokens"])


def planted(fault):
    """True if this fault is planted."""
    return os.environ.get("FAULT") == fault


def rows(number=ROWS, *, trains=True):
    """Rows of about 100 tokens, and a long one if it is planted."""
    sizes = [100 + index % 20 for index in range(number)]
    if trains and planted("longest row"):
        sizes[number * 3 // 4] = 6_000
    names = ("input_ids", "attention_mask", "labels")
    return [{name: [1] * size for name in names} for size in sizes]


def tokenizer():
    """A tokenizer of a few words."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "<eos>": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def llama():
    """A model of 80 million parameters."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=WORDS,
        max_position_embeddings=8192,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def full_precision(model):
    """A copy of the weights in full precision, where they are."""
    copies = model.state_dict().items()
    return {name: one.to(torch.float32, copy=True) for name, one in copies}  # line: save


def save_on_cpu(model):
    """Write the weights in full precision, by way of the CPU."""
    copies = [
        {name: one.detach().cpu().float() for name, one in model.state_dict().items()}
        for _ in range(8 if planted("host memory") else 1)
    ]
    torch.save(copies[-1], "last.pt")


torch.manual_seed(0)
