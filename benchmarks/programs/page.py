"""The page of what came of the programs."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.programs.catalogue import PROGRAMS
from benchmarks.programs.running import Row
from tuner.core.units import GIB

INTRODUCTION = """\
# Programs on an emulated GPU

Written by `python -m benchmarks.programs`. Each program is a script as people write it, under
[`benchmarks/programs/`](../../benchmarks/programs/), run unchanged by `tuner emulate` until its
third optimizer step, with a hollow checkpoint and data made in place. All memory and step times are
*emulated*; "took" is what the whole run cost on two shared cores without a GPU. "Steps" under
"ended" means: ran to the third step, and the emulator knew every call and every value that decided
a shape.
"""
# What was asked about the numbers above.
NOTES = """
## Notes

- **Mixtures of experts.** What they take above their weights is mostly the whole logits and their
  gradients. Without `model.train()` the same programs took 14.8 GiB (Qwen3-30B-A3B) and 17.8 GiB
  (gpt-oss-20b) more: `from_pretrained` leaves a model in evaluation mode, where transformers
  checkpoints nothing, and the activations of all layers stay, as they would on a device.
- **Losses that TRL logs** (loss 0, accuracy 1) come from a Triton kernel, and none writes here:
  its sums keep the zeros and infinities that TRL filled them with. No size depends on them.
- **Unsloth** moves checkpoints to the host and computes the logits in parts, as many as the memory
  that its release allows for them; most of its peak are the weights.
- **Axolotl** and **LLaMA-Factory** run by their own commands, from a file of settings that the
  script writes.
- **torchtitan** 0.3.0 takes its first step on eight GPUs, and then calls a function that PyTorch
  2.13 does not have.
"""
_HEAD = (
    "| program | script | versions | GPU | ended | steps | peak allocated | step | took | reason |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def page(rows: Mapping[str, Row]) -> str:
    """Markdown: a row for each program, in the order of the catalogue."""
    lines = [INTRODUCTION, *_HEAD]
    for program in PROGRAMS:
        row = rows.get(program.name)
        if row is None:
            row = Row(program.name, program.title, program.gpu, program.gpus, "not run")
        lines.append(_line(row, program.script))
    return "\n".join(lines) + "\n" + NOTES


def _line(row: Row, script: str) -> str:
    ran = row.ended not in {"skipped", "not run"}
    versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
    gpu = f"{row.gpus} x {row.gpu}" if row.gpus > 1 else row.gpu
    cells = (
        row.title,
        f"[{script}](../../benchmarks/programs/{script})",
        versions,
        gpu,
        row.ended,
        str(row.steps) if ran else "",
        f"{row.peak_allocated_bytes / GIB:.3f} GiB" if ran else "",
        f"{row.step_s:.2f} s" if row.step_s is not None else "",
        f"{row.took_s:.0f} s" if ran else "",
        row.reason.replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"
