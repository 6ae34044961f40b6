"""The file of `accelerate launch --config_file`."""

from __future__ import annotations

from tuner.export.arguments import (
    Settings,
)
from tuner.export.format import Format
from tuner.export.settings_reader import SettingsReader


def accelerate(chosen: SettingsReader, model: str | None) -> Settings:
    """A file of `accelerate launch --config_file` for one process on one GPU (accelerate 1.15)."""
    del model  # named by the script that is launched
    chosen.leave("grad_accum", "belongs to Accelerator(gradient_accumulation_steps=...)")
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": chosen.text("mixed_precision") or "no",
        "num_machines": 1,
        "num_processes": 1,
        "machine_rank": 0,
        "use_cpu": False,
        "debug": False,
    }


FORMAT = Format(
    accelerate,
    suffix=".yaml",
    use="accelerate launch --config_file FILE",
)
