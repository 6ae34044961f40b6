"""The table of measured rows: one JSON object a line, and the same as CSV, appended at once."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLUMNS = (
    "run_id", "measured_at", "name", "workload", "model", "micro_batch", "grad_accum",
    "max_length", "lora_rank", "lora_targets", "precision", "mixed_precision",
    "gradient_checkpointing", "attention", "optimizer", "training_loop", "weights",
    "limit_bytes", "allocator", "outcome", "oom_phase", "requested_bytes", "message",
    "loaded_bytes", "peak_load_bytes", "peak_forward_bytes", "peak_backward_bytes",
    "peak_optimizer_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "reserved_bytes",
    "nvml_process_bytes", "nvml_device_bytes", "nvml_idle_bytes", "alloc_retries",
    "step_s", "step_spread", "timed_steps", "it_per_s", "samples_per_s", "tokens_per_s",
    "trainable_params", "total_params", "finite", "context_s", "load_s", "first_step_s",
    "wall_s", "device", "device_memory_bytes", "compute_capability", "driver", "cuda", "torch",
    "transformers", "peft", "bitsandbytes", "python", "allocator_backend",
    "allocator_settings", "model_overrides",
)  # fmt: skip

JSON_NAME, CSV_NAME = "runs.jsonl", "runs.csv"


def append(folder: Path, row: Mapping[str, Any]) -> None:
    """Add a row to both files, and make sure that it is on the disk.

    Raises ValueError for a key that is no column, and for a CSV file with other columns.
    """
    unknown = row.keys() - set(COLUMNS)
    if unknown:
        raise ValueError(f"not columns: {sorted(unknown)}")
    folder.mkdir(parents=True, exist_ok=True)
    full = {name: row.get(name) for name in COLUMNS}
    with (folder / JSON_NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(full) + "\n")
        _to_disk(file)
    path = folder / CSV_NAME
    is_new = not path.exists() or path.stat().st_size == 0
    if not is_new:
        with path.open(encoding="utf-8", newline="") as file:
            if next(csv.reader(file)) != list(COLUMNS):
                raise ValueError(f"{path} has other columns")
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow({name: _cell(value) for name, value in full.items()})
        _to_disk(file)


def read(folder: Path) -> list[dict[str, Any]]:
    """All rows. A last line that was cut off by a crash is left out."""
    lines = (folder / JSON_NAME).read_text("utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, (list, tuple, dict)) else value


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
