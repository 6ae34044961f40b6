"""A DeepSpeed configuration."""

from __future__ import annotations

from tuner.program.formats.arguments import (
    Settings,
    without_none,
)
from tuner.program.formats.format import Format
from tuner.program.formats.settings_reader import SettingsReader


def deepspeed(chosen: SettingsReader, model: str | None) -> Settings:
    """A DeepSpeed configuration (0.19), with ZeRO where the configuration has it."""
    del model  # named by the script that is launched
    mixed = chosen.text("mixed_precision")
    return without_none(
        {
            "train_batch_size": chosen.get("effective_batch"),
            "train_micro_batch_size_per_gpu": chosen.get("micro_batch"),
            "gradient_accumulation_steps": chosen.get("grad_accum"),
            "gradient_clipping": chosen.get("max_grad_norm"),
            "bf16": {"enabled": mixed == "bf16"},
            "fp16": {"enabled": mixed == "fp16"},
            "zero_optimization": chosen.zero or {"stage": 0},
        }
    )


FORMAT = Format(
    deepspeed,
    suffix=".json",
    use="deepspeed train.py --deepspeed_config FILE",
)
