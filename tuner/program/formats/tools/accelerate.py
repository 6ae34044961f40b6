"""The file of `accelerate launch --config_file`."""

from __future__ import annotations

from tuner.program.formats.arguments import (
    Settings,
    without_none,
)
from tuner.program.formats.format import Format
from tuner.program.formats.settings_reader import SettingsReader


def accelerate(chosen: SettingsReader, model: str | None) -> Settings:
    """A file of `accelerate launch --config_file`, for all its GPUs (accelerate 1.15)."""
    del model  # named by the script that is launched
    chosen.leave("grad_accum", "belongs to Accelerator(gradient_accumulation_steps=...)")
    ranks = chosen.get("gpus_per_trial") or 1
    return {
        "compute_environment": "LOCAL_MACHINE",
        **_distributed(chosen),
        "mixed_precision": chosen.text("mixed_precision") or "no",
        "num_machines": chosen.get("machines") or 1,
        "num_processes": ranks,
        "machine_rank": 0,
        "use_cpu": False,
        "debug": False,
    }


def _distributed(chosen: SettingsReader) -> Settings:
    """How its processes share the work."""
    parallelism = chosen.parallelism
    chosen.get("distributed")
    if parallelism.ranks == 1:
        return {"distributed_type": "NO"}
    if parallelism.is_sharded:
        sharding = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": chosen.get("reshard_after_forward") is not False,
        }
        found: Settings = {"distributed_type": "FSDP", "fsdp_config": sharding}
        chosen.get("dp_shard_size")
        if parallelism.group < parallelism.ranks:
            found["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": parallelism.ranks // parallelism.group,
                "parallelism_config_dp_shard_size": parallelism.group,
            }
        return found
    if not parallelism.zero_stage:
        return {"distributed_type": "MULTI_GPU"}
    chosen.leave("reduce_bucket_size", "belongs to a file of DeepSpeed's: deepspeed_config_file")
    zero = {
        "zero_stage": parallelism.zero_stage,
        "zero3_init_flag": parallelism.shares_weights,
        "gradient_accumulation_steps": chosen.get("grad_accum"),
        "gradient_clipping": chosen.get("max_grad_norm"),
    }
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": without_none(zero)}


FORMAT = Format(
    accelerate,
    suffix=".yaml",
    use="accelerate launch --config_file FILE",
)
