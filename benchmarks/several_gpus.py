"""FSDP2 predicted by rank, beside PyTorch's own `fully_shard` on an emulated GPU.

    python -m benchmarks.several_gpus [--markdown FILE] [--only NAME] [--ranks 2,4,8]

Each case is trained by `benchmarks/zoo/programs/sharded.py`, which knows nothing of tuner, in one
process that takes PyTorch's fake process group for the other ranks; CUDA's real caching allocator
says what it took. The same case is predicted from a trace. Memory of both is that of one rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.app.estimate import one_configuration
from tuner.app.listener import quiet_libraries
from tuner.core.units import MIB
from tuner.emulator import Machine
from tuner.emulator.toolchain import unavailable
from tuner.predict.predict import predict, resolve_subject
from tuner.space.gpus import get_gpu
from tuner.space.models.hollow import write_hollow

PROGRAM = Path(__file__).parent / "zoo" / "programs" / "sharded.py"
GPU = "h100_sxm"
RANKS = (2, 4, 8)
ASKED = 0.01
"""Share by which a prediction may miss the peak of allocated memory."""

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""124 million parameters in layers wide enough that what is gathered, kept and freed shows."""

SHAPE = (2, 512)
"""Sequences of a micro-batch, and tokens of each."""


@dataclass(frozen=True, slots=True)
class Case:
    """One training, for any number of ranks, as settings of tuner that the program knows too.

    `accelerate` leaves the wrapping to accelerate, as Trainer does; without it, it is by hand.
    """

    name: str
    precision: str = "bf16"
    mixed: bool = False
    lora_rank: int = 0
    checkpointing: bool = False
    accelerate: bool = False
    reshard: bool = True
    grad_accum: int = 1
    group: int = 0
    """Ranks that share a copy of the model (HSDP); 0 for all."""
    ranks: tuple[int, ...] = RANKS

    def settings(self, ranks: int) -> dict[str, Any]:
        """What tuner predicts."""
        return {
            "gpus_per_trial": ranks,
            **({"dp_shard_size": self.group} if self.group else {}),
            "distributed": "hsdp" if self.group else "fsdp2",
            "reshard_after_forward": self.reshard,
            "precision": self.precision,
            "mixed_precision": "bf16" if self.mixed else "no",
            "lora_rank": self.lora_rank,
            **({"lora_targets": ["all-linear"]} if self.lora_rank else {}),
            **({"kbit_preparation": "none"} if self.precision == "nf4" else {}),
            "micro_batch": SHAPE[0],
            "max_length": SHAPE[1],
            "grad_accum": self.grad_accum,
            "gradient_checkpointing": self.checkpointing,
            "optimizer": "adamw_torch",
            "attention": "sdpa",
            "training_loop": "trainer" if self.accelerate else "loop",
        }

    def for_program(self, ranks: int) -> dict[str, Any]:
        """What the program trains."""
        return {
            "ranks": ranks,
            "group": self.group or ranks,
            "dtype": "float32" if self.precision == "fp32" else "bfloat16",
            "nf4": self.precision == "nf4",
            "mixed": self.mixed,
            "lora_rank": self.lora_rank,
            "checkpointing": self.checkpointing,
            "accelerate": self.accelerate,
            "reshard": self.reshard,
            "micro_batch": SHAPE[0],
            "length": SHAPE[1],
            "grad_accum": self.grad_accum,
        }


CASES = (
    Case("all weights, bf16"),
    Case("all weights, fp32 under bf16, checkpointed", "fp32", mixed=True, checkpointing=True),
    Case("LoRA, bf16, checkpointed", lora_rank=16, mixed=True, checkpointing=True),
    Case("LoRA, NF4, checkpointed", "nf4", lora_rank=16, mixed=True, checkpointing=True),
)
"""The twelve that were asked for: four, each on 2, 4 and 8 ranks."""

MORE = (
    Case("LoRA, bf16", lora_rank=16, mixed=True, ranks=(4,)),
    Case("all weights, kept after forward", reshard=False, ranks=(4,)),
    Case("all weights, two micro-steps", grad_accum=2, ranks=(4,)),
    Case("accelerate: all weights, bf16", accelerate=True, ranks=(2, 8)),
    Case("accelerate: all weights, mixed", mixed=True, accelerate=True, ranks=(2, 8)),
    Case("HSDP in groups of 2: all weights, bf16", group=2, ranks=(4, 8)),
    Case(
        "HSDP in groups of 4: all weights, fp32 under bf16, checkpointed",
        "fp32",
        mixed=True,
        checkpointing=True,
        group=4,
        ranks=(8,),
    ),
    Case("HSDP in groups of 2: two micro-steps", grad_accum=2, group=2, ranks=(4,)),
    Case(
        "HSDP in groups of 2: LoRA, NF4, checkpointed",
        "nf4",
        lora_rank=16,
        mixed=True,
        checkpointing=True,
        group=2,
        ranks=(4,),
    ),
    Case(
        "accelerate: HSDP in groups of 2: all weights, mixed",
        mixed=True,
        accelerate=True,
        group=2,
        ranks=(4,),
    ),
    Case("accelerate: LoRA, mixed", lora_rank=16, mixed=True, accelerate=True, ranks=(2,)),
    Case(
        "accelerate: LoRA, mixed, checkpointed",
        lora_rank=16,
        mixed=True,
        checkpointing=True,
        accelerate=True,
        ranks=(2, 8),
    ),
    Case(
        "accelerate: LoRA, NF4, checkpointed",
        "nf4",
        lora_rank=16,
        mixed=True,
        checkpointing=True,
        accelerate=True,
        ranks=(2, 8),
    ),
)
"""What else people do."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a case on so many ranks, in bytes of one; why there is nothing, if so."""

    case: Case
    ranks: int
    predicted: Mapping[str, int] = field(default_factory=dict)
    emulated: Mapping[str, int] = field(default_factory=dict)
    failure: str = ""

    def share(self, name: str) -> float:
        """By how much the prediction is larger, as a share of what was emulated."""
        return self.predicted[name] / self.emulated[name] - 1

    @property
    def holds(self) -> bool:
        """Whether the peak of allocated memory is as near as was asked."""
        return not self.failure and abs(self.share("allocated")) <= ASKED


def compare(case: Case, ranks: int, folder: Path) -> Answer:
    """Predict the case and train it on an emulated GPU. `folder` has the model's checkpoint."""
    space, configuration = one_configuration(None, str(folder), case.settings(ranks))
    subject = resolve_subject(space.workload, space.predicted_model())
    gpu = get_gpu(GPU)
    memory = predict(subject, configuration, gpu).memory
    program = [sys.executable, "-W", "ignore", str(PROGRAM), str(folder)]
    settings = json.dumps(case.for_program(ranks))
    with tempfile.TemporaryFile("w+") as output:
        found = Machine(gpu).run([*program, settings], output=output)
    if found.error is not None or not found.devices:
        return Answer(case, ranks, failure=found.error.message if found.error else found.ended)
    (device,) = found.devices
    return Answer(
        case,
        ranks,
        {"allocated": memory.peak_allocated_bytes, "reserved": memory.peak_reserved_bytes},
        {"allocated": device.peak_allocated_bytes, "reserved": device.peak_reserved_bytes},
    )


def write_model(folder: Path) -> Path:
    """A hollow checkpoint of the model, in `folder`."""
    config = folder / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    write_hollow(str(config), folder / "model")
    return folder / "model"


HEAD = (
    "| training | ranks | predicted MiB | emulated MiB | difference | reserved, difference |",
    "|---|---:|---:|---:|---:|---:|",
)


def rows(answers: Iterable[Answer]) -> Iterator[str]:
    """The lines of the table."""
    for answer in answers:
        if answer.failure:
            yield f"| {answer.case.name} | {answer.ranks} | | | failed: {answer.failure[:200]} | |"
            continue
        sizes = [size["allocated"] / MIB for size in (answer.predicted, answer.emulated)]
        mark = "" if answer.holds else " **misses**"
        yield (
            f"| {answer.case.name} | {answer.ranks} | {sizes[0]:,.1f} | {sizes[1]:,.1f} "
            f"| {answer.share('allocated'):+.2%}{mark} | {answer.share('reserved'):+.1%} |"
        )


def run(cases: Sequence[Case], ranks: Sequence[int] | None) -> Iterator[Answer]:
    """Every case on its numbers of ranks, or on those of them that are in `ranks`."""
    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
        model = write_model(Path(folder))
        for case in cases:
            for count in case.ranks:
                if ranks is None or count in ranks:
                    yield compare(case, count, model)


def main() -> int:
    """Compare what was asked for, and print each row as it is there. 1 where one misses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--only", metavar="NAME", default="", help="cases with this in their name")
    parser.add_argument("--ranks", help="numbers of ranks, with commas between them")
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        print(f"nothing can be emulated here: {reason}", file=sys.stderr)
        return 3
    ranks = [int(count) for count in options.ranks.split(",")] if options.ranks else None
    cases = [case for case in (*CASES, *MORE) if options.only in case.name]
    answers: list[Answer] = []
    for answer in run(cases, ranks):
        answers.append(answer)
        print(next(rows([answer])), flush=True)
        if options.markdown:
            text = "\n".join((*HEAD, *rows(answers))) + "\n"
            options.markdown.write_text(text, encoding="utf-8")
    return int(not all(answer.holds for answer in answers))


if __name__ == "__main__":
    raise SystemExit(main())
