"""DeepSpeed's ZeRO on two emulated H100s: what each stage takes, beside DeepSpeed's own estimate.

    pip install deepspeed
    python -m benchmarks.zero

The Llama of `benchmarks.several_gpus` (2 sequences of 512 tokens) is
trained by `benchmarks/programs/zero.py`. DeepSpeed's estimate is of weights, gradients and
optimizer states only.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.several_gpus import MODEL, write_model
from tuner.engine.emulating import EmulateOptions, emulate
from tuner.gpus import get_gpu
from tuner.units import MIB

PROGRAM = Path(__file__).parent / "programs" / "zero.py"
RANKS = 2
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SMALL = {"reduce_bucket_size": 5_000_000}
"""A hundredth of DeepSpeed's default."""

CASES: tuple[Mapping[str, Any], ...] = (
    *({"stage": stage} for stage in (1, 2, 3)),
    *({"stage": stage} | OFFLOAD for stage in (1, 2, 3)),
    *({"stage": stage} | SMALL for stage in (1, 2, 3)),
)
HEAD = (
    "| stage | optimizer | `reduce_bucket_size` | allocated MiB | reserved MiB | estimated MiB |",
    "|---:|---|---:|---:|---:|---:|",
)


def estimate_mib(zero: Mapping[str, Any], parameters: int) -> float:
    """What DeepSpeed's own estimator says of one GPU."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    offloads = "offload_optimizer" in zero
    if zero["stage"] < 3:
        found = estimate_zero2_model_states_mem_needs(
            parameters, num_gpus_per_node=RANKS, cpu_offload=offloads
        )
    else:
        found = estimate_zero3_model_states_mem_needs(
            parameters,
            MODEL["vocab_size"] * MODEL["hidden_size"],
            num_gpus_per_node=RANKS,
            cpu_offload=offloads,
            cpu_offload_params=False,
        )
    return float(found[1] / MIB)


def row(zero: Mapping[str, Any], folder: Path, parameters: int) -> str:
    """A line of the table; why there are no numbers, if so."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = [f"--nproc-per-node={RANKS}", str(PROGRAM), str(folder), json.dumps(zero)]
    options = EmulateOptions(gpus=RANKS, steps=3)
    with tempfile.TemporaryFile("w+") as output:
        found = emulate([*torchrun, *program], get_gpu("h100_sxm"), options, output=output)
    where = "host" if "offload_optimizer" in zero else "GPU"
    bucket = f"{zero.get('reduce_bucket_size', 500_000_000):,}"
    start = f"| {zero['stage']} | {where} | {bucket} "
    if found.error is not None or not found.devices:
        return f"{start}| failed: {found.error.message if found.error else found.ended} | | |"
    worst = max(found.devices, key=lambda device: device.peak_allocated_bytes)
    sizes = worst.peak_allocated_bytes / MIB, worst.peak_reserved_bytes / MIB
    shown = [f"{size:,.1f}" for size in (*sizes, estimate_mib(zero, parameters))]
    return f"{start}| {' | '.join(shown)} |"


def main() -> None:
    """Print each row as it is there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    print(*HEAD, sep="\n")
    with tempfile.TemporaryDirectory() as made:
        folder = write_model(Path(made))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        parameters = sum(math.prod(weight.shape) for weight in model.parameters())
        for zero in CASES:
            print(row(zero, folder, parameters), flush=True)


if __name__ == "__main__":
    main()
