"""Which programs are run, with what, on which GPU type."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Program:
    """One program with one model.

    `modules` are what it imports that an environment may lack, `install` brings them. `size` is
    the program's own argument: tokens of a sample, or pixels of an image's side; `tiny_size` for
    tests.
    """

    name: str
    title: str
    script: str
    model: str
    gpu: str = "rtx4090"
    gpus: int = 1
    size: int = 1024
    tiny_size: int = 128
    packages: tuple[str, ...] = ("transformers",)
    modules: tuple[str, ...] = ()
    install: str = ""

    def command(self, python: str, model: Path, *, tiny: bool) -> list[str]:
        """What is run; several GPUs are started with torchrun."""
        start = [python]
        if self.gpus > 1:
            start += ["-m", "torch.distributed.run", "--standalone"]
            start += ["--nproc-per-node", str(self.gpus)]
        return [
            *start,
            str(HERE / self.script),
            str(model),
            str(self.tiny_size if tiny else self.size),
        ]


_TRL = ("trl", "peft", "transformers")

PROGRAMS = (
    Program("trl_sft", "TRL SFTTrainer, LoRA r 32", "trl_sft.py", "llama", packages=_TRL),
    Program("trl_dpo", "TRL DPOTrainer, LoRA r 16", "trl_dpo.py", "llama", packages=_TRL),
    Program(
        "trl_reward",
        "TRL RewardTrainer, all weights",
        "trl_reward.py",
        "llama",
        "a6000",
        packages=_TRL,
    ),
    Program("hf_trainer", "Trainer, all weights in bf16", "hf_trainer.py", "llama"),
    Program(
        "peft_lora",
        "peft's example loop, Accelerate",
        "peft_lora.py",
        "llama",
        packages=("peft", "accelerate", "transformers"),
    ),
    Program("plain_loop", "plain loop, fp32 and scaled fp16", "plain_loop.py", "llama"),
    Program("packing", "TRL SFTTrainer, packed", "packing.py", "llama", packages=_TRL),
    Program(
        "qwen_vl",
        "Qwen2.5-VL-3B with images, LoRA",
        "vision.py",
        "qwen_vl",
        size=448,
        tiny_size=56,
        packages=("torchvision", "transformers"),
        modules=("torchvision",),
        install="pip install torchvision",
    ),
    Program("bart", "Seq2SeqTrainer, BART-large", "seq2seq.py", "bart", size=512),
    Program("whisper", "Seq2SeqTrainer, Whisper-small", "whisper.py", "whisper", size=224),
    Program("gemma", "Gemma-3-4B with images, LoRA", "vision.py", "gemma", size=896, tiny_size=112),
    Program("qwen_moe", "Qwen3-30B-A3B, LoRA", "experts.py", "qwen_moe", "h100_sxm"),
    Program("gpt_oss", "gpt-oss-20b in bf16, LoRA", "experts.py", "gpt_oss", "h100_sxm"),
    Program("compiled", "torch.compile, all weights", "compiled.py", "llama"),
    Program("ddp", "DDP on 2 GPUs, all weights", "ddp.py", "llama", gpus=2),
    Program("fsdp", "FSDP2 on 2 GPUs, all weights", "fsdp.py", "llama", gpus=2),
    Program(
        "liger",
        "TRL SFTTrainer with Liger",
        "liger.py",
        "llama",
        packages=("liger-kernel", *_TRL),
        modules=("liger_kernel",),
        install="pip install liger-kernel",
    ),
    Program(
        "unsloth",
        "Unsloth, LoRA r 32",
        "unsloth_lora.py",
        "llama",
        packages=("unsloth", *_TRL),
        modules=("unsloth",),
        install="pip install unsloth",
    ),
    Program(
        "axolotl",
        "Axolotl, LoRA r 16, packed",
        "axolotl_lora.py",
        "llama",
        packages=("axolotl", *_TRL),
        modules=("axolotl",),
        install="pip install axolotl",
    ),
    Program(
        "llamafactory",
        "LLaMA-Factory, LoRA r 8",
        "llamafactory_lora.py",
        "llama",
        packages=("llamafactory", *_TRL),
        modules=("llamafactory",),
        install="pip install llamafactory",
    ),
    Program(
        "titan",
        "torchtitan on 8 GPUs, llama3 debugmodel",
        "titan.py",
        "small",
        "a100_80gb",  # on Hopper its attention is a package that PyPI does not have
        gpus=8,
        size=2048,
        packages=("torchtitan",),
        modules=("torchtitan",),
        install="pip install torchtitan",
    ),
)


def programs(names: str | None) -> list[Program]:
    """Those named, with commas between them, or all."""
    if names is None:
        return list(PROGRAMS)
    known = {program.name: program for program in PROGRAMS}
    return [known[name] for name in names.split(",")]
