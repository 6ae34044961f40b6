"""The file of `accelerate launch --config_file`."""

from __future__ import annotations

from tuner.export.arguments import (
    Settings,
)
from tuner.export.format import Format
from tuner.export.settings_reader import SettingsReader
from tuner.records import KnobValue
from tuner.space.distributed_knobs import (
    DISTRIBUTED,
    GPUS_PER_TRIAL,
    MACHINES,
    RESHARD,
    SHARD_SIZE,
    Parallelism,
)


def accelerate(chosen: SettingsReader, model: str | None) -> Settings:
    """A file of `accelerate launch --config_file`: a process for each GPU (accelerate 1.15)."""
    del model  # named by the script that is launched
    chosen.leave("grad_accum", "belongs to Accelerator(gradient_accumulation_steps=...)")
    for name in (GPUS_PER_TRIAL, DISTRIBUTED, RESHARD, MACHINES, SHARD_SIZE):
        chosen.get(name)
    parallelism = Parallelism.of(chosen.configuration)
    kind = "FSDP" if parallelism.is_sharded else "MULTI_GPU" if parallelism.ranks > 1 else "NO"
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        **_sharding(parallelism, reshard=chosen.configuration.get(RESHARD, True)),
        "mixed_precision": chosen.text("mixed_precision") or "no",
        "num_machines": parallelism.machines,
        "num_processes": parallelism.ranks,
        "machine_rank": 0,
        "use_cpu": False,
        "debug": False,
    }


def _sharding(parallelism: Parallelism, *, reshard: KnobValue) -> Settings:
    """What says how FSDP2 shards: all ranks together, or groups of them that have copies."""
    if not parallelism.is_sharded:
        return {}
    settings: Settings = {
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": reshard,
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    }
    if parallelism.group < parallelism.ranks:
        settings["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": parallelism.ranks // parallelism.group,
            "parallelism_config_dp_shard_size": parallelism.group,
        }
    return settings


FORMAT = Format(
    accelerate,
    suffix=".yaml",
    use="accelerate launch --config_file FILE",
)
