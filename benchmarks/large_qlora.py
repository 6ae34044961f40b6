"""QLoRA of 70 billion parameters on several emulated GPUs, beside what was published.

    python -m benchmarks.large_qlora [--only NAME] [--fsdp-qlora CHECKOUT --packages FOLDER]

Each row is one command as a user types it: `tuner emulate` of TRL's trainer under accelerate
(`programs/fsdp_qlora.py`) on a hollow checkpoint. With CHECKOUT, a clone of AnswerDotAI/fsdp_qlora
at 05ed9f2, its own `train.py` runs too, unchanged; it needs packages of its time, in FOLDER:

    pip install --target FOLDER --no-deps transformers==4.44.2 tokenizers==0.19.1
    pip install --target FOLDER --no-deps huggingface_hub==0.34.4 accelerate==0.34.2 peft==0.12.0
    pip install --target FOLDER --no-deps fastcore==1.7.29 datasets==2.21.0

All memory is emulated, of one GPU, in GiB; "host" is the largest process on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.core.units import GIB
from tuner.space.models.hollow import write_hollow

PROGRAM = Path(__file__).parent / "programs" / "fsdp_qlora.py"
SCRIPT = Path(sys.executable).parent / "accelerate"
ASKED_S, ASKED_HOST_GIB = 300.0, 20.0

ANSWER_AI = (
    "--precision=bf16",
    "--train_type=qlora",
    "--use_gradient_checkpointing=true",
    "--dataset=dummy",
    "--reentrant_checkpointing=true",
    "--dataset_samples=96",
    "--log_to=stdout",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One training: its model, GPUs, and the arguments of the program.

    `published_gib` is what PyTorch's allocator had reserved at most: benchmarks_03_2024.md of
    AnswerDotAI/fsdp_qlora, on two RTX 3090 or 4090. `fsdp` are arguments of `accelerate launch`;
    empty for Answer.AI's own program, which starts its ranks itself.
    """

    name: str
    model: str
    gpu: str
    gpus: int
    arguments: tuple[str, ...]
    fsdp: tuple[str, ...] = ()
    published_gib: float | None = None

    def command(self, folder: Path, checkout: Path | None) -> list[str]:
        """What is typed after `tuner emulate ... --`."""
        if not self.fsdp:
            program = [sys.executable, str(checkout and checkout / "train.py")]
            return [*program, f"--model_name={folder}", *ANSWER_AI, *self.arguments]
        launch = [str(SCRIPT), "launch", "--use_fsdp", "--num_processes", str(self.gpus)]
        launch += ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--mixed_precision", "bf16"]
        return [*launch, *self.fsdp, str(PROGRAM), str(folder), *self.arguments]


FSDP2 = ("--fsdp_version", "2")
OFFLOAD = ("--fsdp_version", "1", "--fsdp_offload_params", "true")
NEW, OLD = "llama-3.1-70b", "llama-2-70b"
ROWS = (
    Row("TRL, FSDP2", NEW, "h100_sxm", 8, ("512", "1"), FSDP2),
    Row("TRL, FSDP1", NEW, "h100_sxm", 8, ("512", "1"), ("--fsdp_version", "1")),
    Row("TRL, loaded on the GPU", NEW, "rtx4090", 2, ("512", "1"), OFFLOAD),
    Row("TRL, offloaded", NEW, "rtx4090", 2, ("512", "1", "cpu"), OFFLOAD),
    Row("TRL, offloaded", NEW, "a10g", 4, ("3072", "1", "cpu"), OFFLOAD),
    Row("TRL, offloaded", OLD, "rtx4090", 2, ("2048", "2", "cpu"), OFFLOAD, 14.92),
)
_7B = "llama-2-7b"
_SHARDED, _OFFLOADED = "--use_cpu_offload=false", "--use_cpu_offload=true"
OWN = tuple(
    Row(
        f"train.py{', offloaded' * (offload == _OFFLOADED)}",
        model,
        "rtx4090",
        2,
        (f"--context_length={length}", f"--batch_size={batch}", offload),
        published_gib=published,
    )
    for model, length, batch, offload, published in (
        (_7B, 512, 1, _SHARDED, 4.98),
        (_7B, 2048, 1, _SHARDED, 5.21),
        (_7B, 2048, 4, _SHARDED, 11.22),
        (_7B, 2048, 10, _SHARDED, 20.97),
        (_7B, 2048, 12, _OFFLOADED, 22.38),
        (OLD, 2048, 2, _OFFLOADED, 14.92),
        (NEW, 512, 1, _OFFLOADED, None),
    )
)
HEAD = (
    "| program | model | GPUs | arguments | ended | load | training | reserved | published | "
    "| took | host |",
    "|---|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
)


@dataclass(frozen=True, slots=True)
class Found:
    """What `tuner emulate --json` said, the seconds that it took, and its largest process."""

    emulation: Mapping[str, Any]
    duration_s: float
    host_bytes: int


def run(row: Row, model: Path, options: argparse.Namespace) -> Found:
    """Emulate one row. Raises `RuntimeError` where nothing came of it."""
    command = [sys.executable, "-m", "tuner", "emulate", "--json", "--gpu", row.gpu]
    command += ["--gpus", str(row.gpus), "--", *row.command(model, options.fsdp_qlora)]
    here = os.environ.get("PYTHONPATH", "")
    places = [str(Path(__file__).parents[1]), here]
    if not row.fsdp:
        places.append(str(options.packages))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    started = time.monotonic()
    with tempfile.TemporaryFile() as said, tempfile.TemporaryDirectory() as folder:
        cwd = folder if row.fsdp else options.fsdp_qlora
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.DEVNULL, env=environment, cwd=cwd
        )
        _, _, used = os.wait4(process.pid, 0)
        said.seek(0)
        text = said.read()
    if not text:
        raise RuntimeError(f"nothing came of {command}")
    # What it waited for is counted with it; Linux counts in KiB.
    return Found(json.loads(text), time.monotonic() - started, used.ru_maxrss * 1024)


def shown(row: Row, found: Found) -> str:
    """The line of the table."""
    emulation = found.emulation
    use = max(emulation["devices"], key=lambda one: one["device_bytes"])
    phases = dict(use["phase_peak_bytes"])
    load, training = phases.pop("load", 0), max(phases.values(), default=0)
    reserved = use["peak_reserved_bytes"] / GIB
    published = difference = ""
    if row.published_gib is not None:
        published = f"{row.published_gib:.2f}"
        difference = f"{reserved / row.published_gib - 1:+.1%}"
    how = emulation["ended"]
    ended = f"{emulation['steps']} steps" if how in {"steps", "end"} else how
    arguments = " ".join(word.removeprefix("--") for word in row.arguments)
    return (
        f"| {row.name} | {row.model} | {row.gpus} x {row.gpu} | {arguments} | {ended} "
        f"| {load / GIB:.2f} | {training / GIB:.2f} | {reserved:.2f} | {published} | {difference} "
        f"| {found.duration_s:.0f} s | {found.host_bytes / GIB:.1f} |"
    )


def rows(options: argparse.Namespace) -> Iterator[tuple[Row, Found]]:
    """Each row that is asked for, with what came of it."""
    chosen = [*ROWS, *(OWN if options.fsdp_qlora else ())]
    with tempfile.TemporaryDirectory() as folder:
        for row in chosen:
            if options.only in f"{row.name} {row.model} {row.gpus} x {row.gpu}":
                model = Path(folder) / row.model
                if not model.is_dir():
                    write_hollow(row.model, model)
                yield row, run(row, model, options)


def main() -> int:
    """Print each row as it is there. 1 where one takes more time or memory than was asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", default="", help="rows with this in their name")
    parser.add_argument("--fsdp-qlora", type=Path, metavar="CHECKOUT", help="Answer.AI's clone")
    parser.add_argument("--packages", type=Path, metavar="FOLDER", help="what its program imports")
    options = parser.parse_args()
    if options.fsdp_qlora and not options.packages:
        parser.error("--fsdp-qlora needs --packages")
    print(*HEAD, sep="\n")
    holds = True
    for row, found in rows(options):
        holds &= found.duration_s <= ASKED_S and found.host_bytes <= ASKED_HOST_GIB * GIB
        print(shown(row, found), flush=True)
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
