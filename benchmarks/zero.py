"""DeepSpeed's ZeRO predicted by rank, beside DeepSpeed itself on an emulated H100.

    pip install deepspeed
    python -m benchmarks.zero [--markdown FILE] [--only NAME] [--ranks 2,4,8]

Each case is trained by `zoo/programs/zero.py`, which knows nothing of tuner, in one process
that takes PyTorch's fake process group for the other ranks. The same case is predicted from a
trace. Beside them stands what DeepSpeed's own estimator says of weights, gradients and optimizer
states. The model and its batch are those of `benchmarks.several_gpus`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.several_gpus import GPU, MODEL, SHAPE, write_model
from tuner.app.estimate import one_configuration
from tuner.app.listener import quiet_libraries
from tuner.core.units import MIB
from tuner.emulator import Machine
from tuner.emulator.toolchain import unavailable
from tuner.predict.predict import predict, resolve_subject
from tuner.space.gpus import get_gpu

PROGRAM = Path(__file__).parent / "zoo" / "programs" / "zero.py"
ASKED = 0.03
"""Share by which a prediction may miss the peak of allocated memory."""

SMALL = 5_000_000
"""A hundredth of DeepSpeed's `reduce_bucket_size`."""


@dataclass(frozen=True, slots=True)
class Case:
    """One training, for the stages and numbers of ranks that it is asked on."""

    name: str
    lora_rank: int = 0
    precision: str = "bf16"
    checkpointing: bool = False
    grad_accum: int = 1
    bucket: int = 500_000_000
    optimizer: str = "adamw_torch"
    stages: tuple[int, ...] = (1, 2, 3)
    ranks: tuple[int, ...] = (2,)

    def settings(self, stage: int, ranks: int) -> dict[str, Any]:
        """What tuner predicts."""
        return {
            "gpus_per_trial": ranks,
            "distributed": f"zero{stage}",
            "reduce_bucket_size": self.bucket,
            "precision": self.precision,
            "mixed_precision": "bf16",
            "lora_rank": self.lora_rank,
            **({"lora_targets": ["all-linear"]} if self.lora_rank else {}),
            **({"kbit_preparation": "none"} if self.precision == "nf4" else {}),
            "micro_batch": SHAPE[0],
            "max_length": SHAPE[1],
            "grad_accum": self.grad_accum,
            "gradient_checkpointing": self.checkpointing,
            "optimizer": self.optimizer,
            "attention": "sdpa",
        }

    def for_program(self, stage: int, ranks: int) -> dict[str, Any]:
        """What the program trains."""
        return {
            "ranks": ranks,
            "zero": {"stage": stage, "reduce_bucket_size": self.bucket},
            "lora_rank": self.lora_rank,
            "nf4": self.precision == "nf4",
            "checkpointing": self.checkpointing,
            "grad_accum": self.grad_accum,
            "optimizer": self.optimizer,
        }


CASES = (
    Case("all weights", ranks=(2, 8)),
    Case("all weights, small buckets", bucket=SMALL, ranks=(2, 4, 8)),
    Case("all weights, checkpointed, small buckets", checkpointing=True, bucket=SMALL),
    Case("all weights, four micro-steps, small buckets", grad_accum=4, bucket=SMALL),
    Case("all weights, AdamW in 8 bits", optimizer="adamw_8bit", bucket=SMALL, stages=(2,)),
    Case("LoRA", lora_rank=16, bucket=SMALL, ranks=(2, 4)),
    Case("LoRA, checkpointed", lora_rank=16, checkpointing=True, ranks=(2, 8)),
    Case("LoRA, NF4", lora_rank=16, precision="nf4", checkpointing=True, stages=(1, 2)),
)
HEAD = (
    "| training | stage | ranks | predicted MiB | emulated MiB | difference "
    "| reserved, difference | DeepSpeed's estimate MiB |",
    "|---|---:|---:|---:|---:|---:|---:|---:|",
)


def estimate_mib(stage: int, ranks: int, parameters: int) -> float:
    """What DeepSpeed's own estimator says of one GPU that trains all weights."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    if stage < 3:
        found = estimate_zero2_model_states_mem_needs(
            parameters, num_gpus_per_node=ranks, cpu_offload=False
        )
    else:
        found = estimate_zero3_model_states_mem_needs(
            parameters,
            MODEL["vocab_size"] * MODEL["hidden_size"],
            num_gpus_per_node=ranks,
            cpu_offload=False,
            cpu_offload_params=False,
        )
    return float(found[1] / MIB)


@dataclass(frozen=True, slots=True)
class Answer:
    """A line of the table, and whether the prediction is as near as was asked."""

    line: str
    holds: bool


def compare(case: Case, stage: int, ranks: int, folder: Path, parameters: int) -> Answer:
    """Predict the case and train it on an emulated GPU."""
    space, configuration = one_configuration(None, str(folder), case.settings(stage, ranks))
    subject = resolve_subject(space.workload, space.predicted_model())
    gpu = get_gpu(GPU)
    memory = predict(subject, configuration, gpu).memory
    program = [sys.executable, "-W", "ignore", str(PROGRAM), str(folder)]
    settings = json.dumps(case.for_program(stage, ranks))
    with tempfile.TemporaryFile("w+") as output:
        found = Machine(gpu).run([*program, settings], steps=3 * case.grad_accum, output=output)
    start = f"| {case.name} | {stage} | {ranks} "
    if found.error is not None or not found.devices:
        why = found.error.message if found.error else found.ended
        return Answer(f"{start}| failed: {why[:200]} | | | | |", holds=False)
    (device,) = found.devices
    share = memory.peak_allocated_bytes / device.peak_allocated_bytes - 1
    reserved = memory.peak_reserved_bytes / device.peak_reserved_bytes - 1
    sizes = memory.peak_allocated_bytes / MIB, device.peak_allocated_bytes / MIB
    mark = "" if abs(share) <= ASKED else " **misses**"
    theirs = "" if case.lora_rank else f"{estimate_mib(stage, ranks, parameters):,.1f}"
    return Answer(
        f"{start}| {sizes[0]:,.1f} | {sizes[1]:,.1f} | {share:+.2%}{mark} | {reserved:+.1%} "
        f"| {theirs} |",
        holds=not mark,
    )


def run(options: argparse.Namespace) -> Iterator[Answer]:
    """Every case on its stages and numbers of ranks, or on those that were asked for."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    ranks = [int(count) for count in options.ranks.split(",")] if options.ranks else None
    with tempfile.TemporaryDirectory() as made, quiet_libraries():
        folder = write_model(Path(made))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        parameters = sum(math.prod(weight.shape) for weight in model.parameters())
        for case in CASES:
            if options.only not in case.name:
                continue
            for stage in case.stages:
                for count in case.ranks:
                    if ranks is None or count in ranks:
                        yield compare(case, stage, count, folder, parameters)


def main() -> int:
    """Print each row as it is there. 1 where one misses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--only", metavar="NAME", default="", help="cases with this in their name")
    parser.add_argument("--ranks", help="numbers of ranks, with commas between them")
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        print(f"nothing can be emulated here: {reason}", file=sys.stderr)
        return 3
    lines, holds = list(HEAD), True
    for answer in run(options):
        print(answer.line, flush=True)
        lines.append(answer.line)
        holds &= answer.holds
        if options.markdown:
            options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
