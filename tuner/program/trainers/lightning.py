"""Lightning: the part of a LightningCLI file about the trainer."""

from __future__ import annotations

from tuner.program.trainer import Format, Trainer
from tuner.program.writing import Settings, SettingsReader


def _settings(chosen: SettingsReader, model: str | None) -> Settings:
    del model  # the model is the user's own module
    mixed, precision = chosen.text("mixed_precision"), chosen.text("precision")
    known = {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(mixed)
    plain = {"bf16": "bf16-true", "fp16": "16-true", "fp32": "32-true", "tf32": "32-true"}
    if precision != "fp32":
        chosen.leave("precision", "how base weights are kept is up to your LightningModule")
    for name in ("micro_batch", "max_length"):
        chosen.leave(name, "belongs to your data module")
    trainer = {
        **chosen.under("accumulate_grad_batches gradient_clip_val"),
        "precision": known or plain.get(precision),
    }
    return {"trainer": trainer}


TRAINER = Trainer(
    "Lightning",
    format=Format(
        "lightning", _settings, "LightningCLI: python train.py fit --config FILE", workloads=()
    ),
)
