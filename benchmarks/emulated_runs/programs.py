"""How each published program is started for a row, and what it says that it measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.accuracy.rows import Row
from benchmarks.emulated_runs.environments import (
    CANIFINETUNE,
    FITSCOUT,
    TORCH_2_10,
    TORCH_2_14,
    Environment,
    source,
)
from benchmarks.emulated_runs.program import Program, Values


def program_of(row: Row) -> Program | str:
    """The program that a row was measured with, or why it is not run here."""
    for prefix, program in _PROGRAMS.items():
        if row.framework.startswith(prefix):
            return program
    for prefix, reason in REASONS.items():
        if row.framework.startswith(prefix):
            return reason
    return "not a program that can be installed by name"


def _fitcheck_command(row: Row, root: Path, results: Path) -> list[str]:
    script = source(root, "fitcheck-llm", "0.3.1") / "scripts" / "measure.py"
    command = [str(script), row.model, "--json", "--no-predict", "--gpu", "t4"]
    command += ["--precision", "fp16", "--lora-r", str(row.lora_rank)]
    command += ["--batch-size", str(row.micro_batch), "--seq-len", str(row.length)]
    command += ["--grad-checkpoint"] if row.checkpointing else []
    command += ["--quant", "nf4"] if row.method == "qlora" else []
    # As the package's own sweep asks for it.
    return command + (["--flash-attn", "--attn-impl", "sdpa"] if row.attention == "sdpa" else [])


def _fitcheck_read(row: Row, printed: str, results: Path) -> Values:
    found = re.search(r"^\{$.*?^\}$", printed, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError("it printed no result")
    measured = json.loads(found[0])["measured"]
    names = {
        "allocated": "peak_allocated_mib",
        "reserved": "peak_reserved_mib",
        "loaded": "after_load_allocated_mib",
        "forward": "peak_forward_mib",
    }
    return {quantity: measured[name] / 1024 for quantity, name in names.items()}


def _canifinetune_command(row: Row, root: Path, results: Path) -> list[str]:
    steps = row.notes["steps"]
    command = ["-m", "canifinetune.cli", "bench", "--model", row.model, "--method", row.method]
    command += ["--seq-len", str(row.length), "--micro-batch-size", str(row.micro_batch)]
    command += ["--steps", steps, "--lora-rank", str(row.lora_rank)]
    command += [] if row.checkpointing else ["--no-gradient-checkpointing"]
    return [*command, "--out-dir", str(results)]


def _canifinetune_read(row: Row, printed: str, results: Path) -> Values:
    written = list(results.glob("*.json"))
    if not written:
        raise ValueError("it wrote no result")
    result = json.loads(written[0].read_text())
    if not result["success"]:
        raise ValueError("; ".join(result["notes"])[-400:])
    stages = {stage["stage"]: stage for stage in result["snapshots"]}
    return {
        "allocated": result["measured"]["peak_allocated_gb"],
        "reserved": result["measured"]["peak_reserved_gb"],
        "loaded": stages["after_lora_attach"]["allocated_gb"],
        "forward": stages["after_first_forward"]["max_allocated_gb"],
    }


def _fitscout_command(row: Row, root: Path, results: Path) -> list[str]:
    script = source(root, "fitscout", "0.1.1") / "validation" / "measure.py"
    command = [str(script), "--models", row.model, "--method", "qlora", "--opt-8bit"]
    return [*command, "--grad-ckpt", "--seq-len", str(row.length), "--batch", str(row.micro_batch)]


def _fitscout_read(row: Row, printed: str, results: Path) -> Values:
    found = re.search(r"^\| \S+/\S+ \| [^|]+\| [^|]+\| ([\d.]+) \|", printed, re.MULTILINE)
    if found is None:
        raise ValueError("it printed no result")
    return {"allocated": float(found[1])}


def _by_torch(row: Row) -> Environment:
    return TORCH_2_14 if row.notes["torch"].startswith("2.14") else TORCH_2_10


_PROGRAMS = {
    "transformers+peft single-step harness": Program(
        "fitcheck-llm 0.3.1, scripts/measure.py", _by_torch, _fitcheck_command, _fitcheck_read
    ),
    "transformers+peft (canifinetune bench)": Program(
        "canifinetune 0.2.0, bench",
        lambda row: CANIFINETUNE,
        _canifinetune_command,
        _canifinetune_read,
    ),
    "transformers+peft single-step (validation": Program(
        "fitscout 0.1.1, validation/measure.py",
        lambda row: FITSCOUT,
        _fitscout_command,
        _fitscout_read,
        decimals=1,
    ),
}
REASONS = {
    "HF SFTTrainer (fms-hf-tuning)": "fms-acceleration's rows are of torch 2.4 and 2.6, older than"
    " the emulator knows (2.8)",
    "PEFT method_comparison": "peft's method comparison is in no package, and its lengths are"
    " those of a data set of the hub",
    "universal-llm-trainer": "universal-llm-trainer is in no package, and of torch 2.5",
    "NeuSight": "NeuSight is in no package",
    "Lit-GPT": "Lit-GPT's rows are of torch 2.1",
    "torchtune": "torchtune's rows name no versions",
    "ms-swift": "ms-swift's rows are of torch 2.1",
}
