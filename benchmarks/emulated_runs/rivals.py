"""Runs that FakeGPU and torch-preflight measured, with the programs that they measured with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from benchmarks.accuracy.harnesses import GIB
from benchmarks.accuracy.rows import Row, read_rows
from benchmarks.emulated_runs.program import Program, Values
from benchmarks.environments import Environment, offer, repository

TABLE = Path(__file__).parent / "rivals.csv"
FIRST = 1000
"""Number of the first row, after those of benchmarks/accuracy/measured_runs.csv."""

GPUS = {
    "RTX PRO 5000 Blackwell 72GB": "rtx_pro_5000_72gb",
    "RTX 3090 Ti": "rtx3090ti",
    "Tesla T4": "t4",
}
_QWEN = ("transformers==5.12.1", "peft", "numpy")
ENVIRONMENTS = {
    "2.8.0+cu128": Environment("rivals-torch-2.8", ("torch===2.8.0", *_QWEN)),
    "2.12.1+cu130": Environment("rivals-torch-2.12", ("torch===2.12.1", *_QWEN)),
    "2.11.0+cu128": Environment(
        "rivals-torch-2.11",
        ("torch===2.11.0", "torchvision", "transformers==5.14.1", "numpy"),
        note="torch 2.11 for CUDA 13.0, which the package index has, and the row's for 12.8;"
        " the row names no release of transformers, and 5.14.1 was taken",
    ),
}

_DISTILBERT = {
    "architectures": ["DistilBertForMaskedLM"],
    "model_type": "distilbert",
    "vocab_size": 30522,
    "dim": 768,
    "hidden_dim": 3072,
    "n_layers": 6,
    "n_heads": 12,
    "max_position_embeddings": 512,
    "activation": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "tie_weights_": True,
    "torch_dtype": "float32",
}
"""As Sanh et al. (arXiv 1910.01108) describe the model: BERT with half of the layers."""


def rival_rows() -> list[Row]:
    """The rows of both, numbered from `FIRST`."""
    return [dataclasses.replace(row, number=FIRST + row.number) for row in read_rows(TABLE)]


def _source(row: Row, root: Path) -> Path:
    name, _, rest = row.source_url.partition("@")
    return repository(root, name, rest.partition(":")[0])


def _environment(row: Row) -> Environment:
    return ENVIRONMENTS[row.notes["torch"]]


def _measured(row: Row) -> tuple[str, Values]:
    given = {"allocated": row.peak_gib, "reserved": row.note("peak_reserved_gib")}
    return GPUS[row.gpu], {name: value for name, value in given.items() if value is not None}


def _ranks(row: Row) -> int:
    return int(row.notes["num_gpus"])


def _fakegpu_command(row: Row, root: Path, results: Path) -> list[str]:
    worker = row.framework.partition(" ")[2]
    command = [str(_source(row, root) / "verification" / f"{worker}.py")]
    if _ranks(row) > 1:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(_ranks(row))]
        command = [*launcher, *command, "--report-dir", str(results)]
    else:
        command += ["--mode", "real", "--output", str(results / "rank_0.json")]
        command += ["--training-method", row.method]
        command += ["--gradient-accumulation-steps", str(row.grad_accum)]
    hub = root / "models" / "hub" / f"models--{row.model.replace('/', '--')}"
    command += ["--model-dir", str(next((hub / "snapshots").iterdir()))]
    command += ["--sequence-length", str(row.length)]
    command += ["--lora-rank", str(row.lora_rank)] if row.lora_rank else []
    command += ["--gradient-checkpointing"] if row.checkpointing else []
    # Quantization runs on the host, where smaller pieces are faster.
    command += ["--quantization-chunk-blocks", "512"] if row.method == "qlora" else []
    nested = row.notes.get("scales") == "nested"
    return command + (["--quantization-double-quantization"] if nested else [])


def _fakegpu_read(row: Row, printed: str, results: Path) -> Values:
    written = results / "rank_0.json"
    report = json.loads(written.read_text()) if written.exists() else {"error": "no report"}
    if report.get("status") != "success":
        raise ValueError(str(report.get("error") or report.get("exception_message")))
    return {"allocated": report["memory_phases"]["overall_peak_bytes"] / GIB}


def _preflight_command(row: Row, root: Path, results: Path) -> list[str]:
    script = _source(row, root) / "tests" / "calibration" / "measure_cuda.py"
    return [str(script), "--models", "--out", str(results / "measured.json")]


def _preflight_read(row: Row, printed: str, results: Path) -> Values:
    written = results / "measured.json"
    runs = json.loads(written.read_text())["runs"] if written.exists() else []
    for run in runs:
        if run["model"] == row.model and run["config"]["batch_size"] == row.micro_batch:
            allocated, reserved = run["measured_allocated_bytes"], run["measured_reserved_bytes"]
            return {"allocated": allocated / GIB, "reserved": reserved / GIB}
    raise ValueError("it wrote no result of this model")


def _preflight_prepare(row: Row, models: Path) -> None:
    """The script loads three models whichever row is wanted."""
    offer(models, "gpt2")
    offer(models, "bert-base-uncased")
    described = models / "distilbert-base-uncased"
    described.mkdir(parents=True, exist_ok=True)
    (described / "config.json").write_text(json.dumps(_DISTILBERT))
    offer(models, "distilbert-base-uncased", described)


PROGRAMS = {
    "FakeGPU": Program(
        "FakeGPU 1.5.5, verification/qwen_*_memory_worker.py",
        _environment,
        _fakegpu_command,
        _fakegpu_read,
        decimals=3,
        measured=_measured,
        gpus=_ranks,
    ),
    "torch-preflight": Program(
        "torch-preflight 0.5.0, tests/calibration/measure_cuda.py",
        _environment,
        _preflight_command,
        _preflight_read,
        measured=_measured,
        prepare=_preflight_prepare,
    ),
}
