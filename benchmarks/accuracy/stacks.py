"""`python -m benchmarks.accuracy.stacks`: published rows, predicted with their own releases.

Each row is traced in the environment that `tuner check --stack` builds for its releases, and in the
one that runs this. The rows are not in the table of `benchmarks.accuracy`, which uses the installed
releases: environments are installed from the package index, which takes minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
CHILD = "--child"


@dataclass(frozen=True, slots=True)
class StackRow:
    """A published run: its releases, its settings by knob, and its peak of allocated memory.

    A row of `one_step` measured a single step, before which there is no state of the optimizer.
    """

    source: str
    releases: tuple[str, ...]
    model: str
    gpu: str
    settings: Mapping[str, Any]
    allocated_gib: float
    name: str
    one_step: bool = False


_FMS = "foundation-model-stack/fms-acceleration@{}:scripts/benchmarks/refs/a100_80gb.csv"
_MIXTRAL = {
    "precision": "nf4",
    "mixed_precision": "bf16",
    "max_length": 4096,
    "lora_rank": 16,
    "lora_dropout": 0.1,
    "lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "attention": "sdpa",  # flash attention, which has the same memory, is refused before 4.48
    "kbit_preparation": "trl",
}
_FMS_RELEASES = ("torch==2.4.1", "peft==0.13.2", "bitsandbytes==0.43.3", "accelerate==1.0.1")
_FMS_ROWS = (
    ("9239802", "transformers==4.45.2", 4, 43550249472),
    ("9239802", "transformers==4.45.2", 8, 61492521984),
    ("24bdadb", "transformers==4.48.1", 4, 42794268160),
    ("24bdadb", "transformers==4.48.1", 8, 60545920512),
)
"""Commit, release, micro-batch and peak in bytes of `baseline-peft-bnb` on one GPU."""

_FAKEGPU = "FanBB2333/FakeGPU@7d5cf83:docs/llm-sft-memory-estimation.md"
_QWEN = {
    "precision": "bf16",
    "mixed_precision": "no",
    "max_grad_norm": 0,
    "training_loop": "function",
    "attention": "sdpa",
    "micro_batch": 1,
    "optimizer": "adamw_loop",
}
_FULL = {"lora_rank": 0, "max_length": 16, "effective_batch": 2, "gradient_checkpointing": False}
_LORA = {
    "lora_rank": 8,
    "lora_targets": ["all-linear"],
    "max_length": 128,
    "effective_batch": 1,
    "gradient_checkpointing": False,
}
_CHECKPOINTED = {**_FULL, "max_length": 128, "effective_batch": 1, "gradient_checkpointing": True}
_FAKEGPU_ROWS = (
    ("qwen3.5-0.8b", "full, 2 x 16 tokens", _FULL, 6.626),
    ("qwen3.5-0.8b", "full, checkpointing, 128 tokens", _CHECKPOINTED, 6.679),
    ("qwen3.5-0.8b", "LoRA, 128 tokens", _LORA, 2.696),
    ("qwen3.5-2b", "full, 2 x 16 tokens", _FULL, 15.939),
    ("qwen3.5-2b", "LoRA, 128 tokens", _LORA, 4.959),
)

ROWS = (
    *(
        StackRow(
            _FMS.format(commit),
            (release, *_FMS_RELEASES),
            "mixtral-8x7b",
            "a100_80gb",
            {**_MIXTRAL, "micro_batch": batch, "effective_batch": batch},
            allocated / GIB,
            f"QLoRA, {batch} x 4,096 tokens",
        )
        for commit, release, batch, allocated in _FMS_ROWS
    ),
    *(
        StackRow(
            _FAKEGPU,
            ("torch==2.8.0", "transformers==5.12.1"),
            model,
            "rtx_pro_5000_72gb",
            {**_QWEN, **settings},
            allocated,
            name,
            one_step=True,
        )
        for model, name, settings, allocated in _FAKEGPU_ROWS
    ),
)


def predict(row: StackRow) -> float:
    """The peak of allocated memory in GiB, with the releases of this process."""
    from benchmarks.accuracy.traces import GPUS
    from tuner.app.estimate import one_configuration
    from tuner.core.setup.optimizers import OPTIMIZERS, Optimizer
    from tuner.core.setup.schemas import SCHEMAS
    from tuner.cost.memory import memory_history
    from tuner.predict.compiler.deepening import trace_deep
    from tuner.predict.training import get_workload
    from tuner.space.gpus import get_gpu
    from tuner.space.models.catalogue import resolve_config

    assert isinstance(OPTIMIZERS, dict)
    OPTIMIZERS.setdefault("adamw_loop", Optimizer("torch.optim:AdamW", {"foreach": False}))
    SCHEMAS["causal_lm"].allow("optimizer", "adamw_loop")
    _, configuration = one_configuration(None, row.model, row.settings)
    config = resolve_config(row.model)
    if row.one_step:  # the language model alone, as FakeGPU's worker makes it
        config = config.get_text_config()
        config.architectures = ["Qwen3_5ForCausalLM"]
        config.tie_word_embeddings = True
    capability = get_gpu(row.gpu, extra=GPUS).compute_capability
    found = trace_deep(
        get_workload("causal_lm"), config, configuration, compute_capability=capability
    )
    history = memory_history(found.timeline).allocated
    second = (mark.event for mark in found.timeline.marks if mark.step == 1)
    return max(history[: next(second) if row.one_step else None]) / GIB


def child() -> None:
    """Predict the rows on stdin."""
    from tuner.predict.older import use_todays_names

    use_todays_names()
    for row in json.load(sys.stdin):
        try:
            print(json.dumps(predict(StackRow(**row))), flush=True)
        except Exception as error:  # noqa: BLE001 - any: a release that cannot be traced
            print(json.dumps(f"{type(error).__name__}: {error}"[:200]), flush=True)


def predicted(rows: Sequence[StackRow], python: Path) -> Iterator[float | str]:
    """The predictions of rows by an interpreter, or why there is none."""
    done = subprocess.run(
        [python, "-m", "benchmarks.accuracy.stacks", CHILD],
        input=json.dumps([dataclasses.asdict(row) for row in rows]),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    yield from map(json.loads, done.stdout.splitlines())


def main() -> None:
    """Predict all rows, and print them as a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.stacks")
    parser.add_argument(CHILD, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="only rows whose model contains this")
    arguments = parser.parse_args()
    if arguments.child:
        child()
        return
    from tuner.app.in_stack import environment_of, wanted_releases

    rows = [row for row in ROWS if arguments.only in row.model]
    installed = list(predicted(rows, Path(sys.executable)))
    own: dict[int, float | str] = {}
    for releases in dict.fromkeys(row.releases for row in rows):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "requirements.txt")
            file.write_text("\n".join(releases))
            python = environment_of(wanted_releases(file))
        alike = [number for number, row in enumerate(rows) if row.releases == releases]
        own |= dict(zip(alike, predicted([rows[n] for n in alike], python), strict=True))
    print("| model | training | releases | measured, GiB | installed releases | own releases |")
    print("|---|---|---|---:|---:|---:|")
    for number, row in enumerate(rows):
        cells = [_cell(found, row) for found in (installed[number], own[number])]
        names = ", ".join(row.releases).replace("==", " ")
        print(
            f"| {row.model} | {row.name} | {names} | {row.allocated_gib:.3f} | "
            f"{' | '.join(cells)} |"
        )


def _cell(found: float | str, row: StackRow) -> str:
    if isinstance(found, str):
        return found
    return f"{found:.3f} ({found / row.allocated_gib - 1:+.2%})"


if __name__ == "__main__":
    main()
