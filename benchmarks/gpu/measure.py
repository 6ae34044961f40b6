"""Runs one case in a process of its own and says what it took. Imported by parent and child.

The child writes its row to a file as it learns it, so that a process that dies or hangs leaves
what it had measured.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import Case

WARMUP_STEPS = 2
"""The first optimizer step creates the optimizer's state, the second has it from the start."""
MIN_STEPS, MAX_STEPS = 3, 40
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Task:
    """What a child is to do: a case on a device, with `steps_s` seconds of timed steps."""

    case: Case
    device: str
    steps_s: float
    row_path: Path
    log_path: Path


def warm_up() -> None:
    """Import what every child needs. Touches no device, so that children can be forked."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import importlib

    from tuner.trial.training import import_libraries

    import_libraries()
    for family in ("llama", "qwen2", "mistral", "gemma2", "gemma3"):
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def child_main(task: Task) -> None:
    """Run `task` and write its row; the exit code says nothing that the row does not."""
    log = os.open(task.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    row: dict[str, Any] = {"outcome": "crashed"}

    def save() -> None:
        draft = task.row_path.with_suffix(".draft")
        draft.write_text(json.dumps(row))
        draft.replace(task.row_path)

    save()
    _measure(task, row, save)
    save()
    sys.stdout.flush()


def probe_main(device: str, row_path: Path) -> None:
    """Prove that a child can use the device and bitsandbytes on it: writes "ok"."""
    import bitsandbytes.functional as bnb_functional
    import torch

    x = torch.ones(64, 64, device=device)
    packed, state = bnb_functional.quantize_4bit(x, quant_type="nf4")
    back = bnb_functional.dequantize_4bit(packed, state)
    assert torch.allclose(back, x, atol=0.2)
    row_path.write_text("ok")


def calibrate_main(device: str, path: Path, budget_s: float, smoke: bool) -> None:
    """Measure the device as `tuner calibrate` does, and write its profile to `path`."""
    from tuner.predict.measure_device import measure_device

    measure_device(device, budget_s=budget_s, smoke=smoke).save(path)


def _measure(task: Task, row: dict[str, Any], save: Callable[[], None]) -> None:
    from tuner.core.errors import InputError
    from tuner.core.outcome import is_out_of_memory, requested_bytes
    from tuner.trial.device import RealEnvironment

    environment = None
    try:
        _set_up(task, row)
        environment = RealEnvironment(task.device)
        _train(task, environment, row, save)
        row["outcome"] = "ok"
    except InputError as error:
        row |= {"outcome": "invalid", "message": str(error)}
    # The boundary of a trial: whatever it raises is its outcome.
    except Exception as error:  # noqa: BLE001
        text = f"{type(error).__name__}: {error}"
        out_of_memory = is_out_of_memory(text) or isinstance(error, MemoryError)
        row |= {
            "outcome": "oom" if out_of_memory else "crashed",
            "message": text[:500],
            "requested_bytes": requested_bytes(text),
        }
        traceback.print_exc()
    if environment is not None:
        _note_memory(environment, row)
        if row["outcome"] == "oom":
            row["oom_phase"] = str(environment.phase)


def _set_up(task: Task, row: dict[str, Any]) -> None:
    import torch

    from tuner.trial.device import limit_memory
    from tuner.trial.measure import set_allocator

    started = time.perf_counter()
    if task.device.startswith("cuda"):
        if task.case.allocator:
            set_allocator(task.case.allocator)
        torch.zeros(1, device=task.device)
        properties = torch.cuda.get_device_properties(task.device)
        row |= {
            "device": properties.name,
            "device_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
        }
    else:
        # Threads of a busy machine wait for each other, and tiny models gain nothing by them.
        torch.set_num_threads(1)
        row |= {"device": "cpu", "device_memory_bytes": None, "compute_capability": None}
    if task.case.limit_gib is not None:
        limit_memory(task.device, round(task.case.limit_gib * GIB))
    row["context_s"] = time.perf_counter() - started


def _train(task: Task, environment: Any, row: dict[str, Any], save: Callable[[], None]) -> None:
    from tuner.core.records import Configuration
    from tuner.predict.training import get_workload
    from tuner.trial.device import open_session

    configuration = Configuration(task.case.settings)
    started = time.perf_counter()
    session = open_session(
        get_workload("causal_lm"), model_config(task.case), configuration, environment
    )
    environment.synchronize()
    row["load_s"] = time.perf_counter() - started
    row |= {"trainable_params": session.trainable_params, "total_params": session.total_params}
    save()
    micro_steps = int(task.case.settings["grad_accum"])
    for step in range(WARMUP_STEPS):
        before = time.perf_counter()
        session.optimizer_step(micro_steps)
        environment.synchronize()
        if step == 0:
            row["first_step_s"] = time.perf_counter() - before
    environment.note_peak()
    environment.recording = False
    _note_memory(environment, row)
    save()
    times = _timed_steps(session, environment, micro_steps, task.steps_s)
    row |= _speed(times, task.case.settings)
    _note_memory(environment, row)
    row["finite"] = _is_finite(session)
    session.close()


def model_config(case: Case) -> Any:
    """The architecture of the case's model, with the case's changes."""
    from tuner.space.models.catalogue import resolve_config

    config = resolve_config(case.model)
    for name, value in case.model_overrides.items():
        setattr(config, name, value)
    layers = case.model_overrides.get("num_hidden_layers")
    if layers is not None and getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config


def _timed_steps(session: Any, environment: Any, micro_steps: int, budget_s: float) -> list[float]:
    """Seconds of each optimizer step, until `budget_s` is spent, three at least."""
    times: list[float] = []
    while len(times) < MIN_STEPS or (sum(times) < budget_s and len(times) < MAX_STEPS):
        started = time.perf_counter()
        session.optimizer_step(micro_steps)
        environment.synchronize()
        times.append(time.perf_counter() - started)
    return times


def _speed(times: list[float], settings: Mapping[str, Any]) -> dict[str, Any]:
    step_s = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    samples = settings["micro_batch"] * settings["grad_accum"]
    return {
        "timed_steps": len(times),
        "step_s": step_s,
        "step_spread": (high - low) / step_s,
        "it_per_s": settings["grad_accum"] / step_s,
        "samples_per_s": samples / step_s,
        "tokens_per_s": samples * settings["max_length"] / step_s,
    }


def _note_memory(environment: Any, row: dict[str, Any]) -> None:
    """Peaks so far: by phase from the warm-up, in all including the timed steps."""
    allocated, reserved = environment.meter.peaks()
    phases = {str(phase): size for phase, size in environment.phase_peak_bytes.items()}
    row |= {
        "loaded_bytes": environment.loaded_bytes,
        **{f"peak_{phase}_bytes": phases.get(phase) for phase in PHASES},
        "peak_allocated_bytes": max(environment.peak_allocated_bytes, allocated),
        "peak_reserved_bytes": max(environment.peak_reserved_bytes, reserved),
    }
    if environment.device.startswith("cuda"):
        row |= _cuda_memory(environment.device)


PHASES = ("load", "forward", "backward", "optimizer")


def _cuda_memory(device: str) -> dict[str, Any]:
    import torch

    from tuner.core.nvml import device_use

    stats = torch.cuda.memory_stats(device)
    use = device_use(torch.device(device).index or 0)
    snapshot = getattr(torch.cuda.memory, "_snapshot", None)
    settings = snapshot().get("allocator_settings") if snapshot is not None else None
    return {
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "alloc_retries": stats.get("num_alloc_retries"),
        "nvml_process_bytes": use.process_bytes if use else None,
        "nvml_device_bytes": use.used_bytes if use else None,
        "allocator_settings": json.dumps(settings, default=str) if settings else None,
        "allocator_backend": torch.cuda.get_allocator_backend(),
    }


def _is_finite(session: Any) -> bool:
    import torch

    trainable = (p for p in session.model.parameters() if p.requires_grad)
    return all(bool(torch.isfinite(p).all()) for p in trainable)
