"""The part of a LightningCLI file that is about the trainer."""

from __future__ import annotations

from tuner.program.formats.arguments import (
    Settings,
    without_none,
)
from tuner.program.formats.format import Format
from tuner.program.formats.settings_reader import SettingsReader


def lightning(chosen: SettingsReader, model: str | None) -> Settings:
    """The part `trainer` of a LightningCLI file: arguments of `lightning.Trainer` (2.6)."""
    del model  # the model is the user's own module
    mixed, precision = chosen.text("mixed_precision"), chosen.text("precision")
    known = {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(mixed)
    plain = {"bf16": "bf16-true", "fp16": "16-true", "fp32": "32-true", "tf32": "32-true"}
    if precision not in ("fp32",):
        chosen.leave("precision", "how base weights are kept is up to your LightningModule")
    for name in ("micro_batch", "max_length"):
        chosen.leave(name, "belongs to your data module")
    norm = chosen.get("max_grad_norm")
    return {
        "trainer": without_none(
            {
                "accumulate_grad_batches": chosen.get("grad_accum"),
                "precision": known or plain.get(precision),
                "gradient_clip_val": norm or None,
            }
        )
    }


FORMAT = Format(
    lightning,
    suffix=".yaml",
    use="LightningCLI: python train.py fit --config FILE",
)
