"""Predicts every row of a measured table and prints the errors.

    python benchmarks/gpu/compare.py results/measured
    python benchmarks/gpu/compare.py results/measured --profile h200.yaml

Predict with the library versions that measured (the table names them): they decide which
buffers exist. Rows under a memory limit are compared by their outcome as well.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import measure  # noqa: E402
import table  # noqa: E402
from cases import Case  # noqa: E402

GIB = 2**30
QUANTITIES = (
    "loaded", "load", "forward", "backward", "optimizer", "allocated", "reserved", "device",
    "step_s", "step_s_profile",
)  # fmt: skip
_KNOBS = (
    "micro_batch", "grad_accum", "max_length", "lora_rank", "lora_targets", "precision",
    "mixed_precision", "gradient_checkpointing", "attention", "optimizer", "training_loop",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compared:
    """One row with what was measured and predicted, in bytes and seconds; None is unknown."""

    row: Mapping[str, Any]
    measured: Mapping[str, float | None]
    predicted: Mapping[str, float | None]
    fits: bool

    def error(self, quantity: str) -> float | None:
        """Predicted over measured, minus 1."""
        measured, predicted = self.measured.get(quantity), self.predicted.get(quantity)
        if self.row["outcome"] != "ok" or not measured or predicted is None:
            return None
        return predicted / measured - 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the summary, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results/measured"))
    parser.add_argument("--gpu", help="GPU type, for rows of a device that is not recognised")
    parser.add_argument("--profile", type=Path, help="device profile that tuner calibrate wrote")
    parser.add_argument("--csv", type=Path, help="write the errors to this file")
    options = parser.parse_args(arguments)
    measure.warm_up()
    rows = latest(table.read(options.folder))
    compared, left_out = compare(rows, gpu_name=options.gpu, profile_path=options.profile)
    _print_rows(compared)
    print_summary(compared)
    for row, reason in left_out:
        print(f"not compared: {row['name']}: {reason}")
    _print_versions(rows)
    if options.csv:
        write_csv(compared, options.csv)
    return 0


def latest(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last row of each case on each device and version of torch."""
    chosen: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        chosen[(row["name"], row["device"], row["torch"], str(row["model_overrides"]))] = row
    return list(chosen.values())


def compare(
    rows: Sequence[Mapping[str, Any]], *, gpu_name: str | None, profile_path: Path | None
) -> tuple[list[Compared], list[tuple[Mapping[str, Any], str]]]:
    """The rows that can be predicted, with their predictions, and the others with the reason."""
    from tuner.core.errors import InputError

    compared: list[Compared] = []
    left_out: list[tuple[Mapping[str, Any], str]] = []
    for row in rows:
        if row["outcome"] not in ("ok", "oom"):
            left_out.append((row, f"outcome {row['outcome']}: {row['message'] or ''}"))
            continue
        gpu = _gpu(row, gpu_name)
        if gpu is None:
            left_out.append((row, f"device {row['device']!r} is not in the catalogue"))
            continue
        try:
            predicted, fits = _predicted(row, gpu, profile_path)
        except InputError as error:
            left_out.append((row, str(error).splitlines()[0]))
            continue
        compared.append(Compared(row, _measured(row), predicted, fits))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return compared, left_out


def _gpu(row: Mapping[str, Any], gpu_name: str | None) -> Any:
    from tuner.space.gpus import get_gpu, match_device

    if gpu_name is not None:
        return get_gpu(gpu_name)
    if row["device_memory_bytes"] is None:
        return None
    return match_device(row["device"], row["device_memory_bytes"])


def _measured(row: Mapping[str, Any]) -> dict[str, float | None]:
    device = row["nvml_process_bytes"]
    if device is None and None not in (row["nvml_device_bytes"], row["nvml_idle_bytes"]):
        device = row["nvml_device_bytes"] - row["nvml_idle_bytes"]
    return {
        "loaded": row["loaded_bytes"],
        **{phase: row[f"peak_{phase}_bytes"] for phase in measure.PHASES},
        "allocated": row["peak_allocated_bytes"],
        "reserved": row["peak_reserved_bytes"],
        "device": device,
        "step_s": row["step_s"],
        "step_s_profile": row["step_s"],
    }


def _predicted(
    row: Mapping[str, Any], gpu: Any, profile_path: Path | None
) -> tuple[dict[str, Any], bool]:
    """What is predicted of a row, and whether it is to fit."""
    from tuner.core.records import Configuration
    from tuner.cost.allocator import AllocatorSettings, replay
    from tuner.cost.memory import peak_memory
    from tuner.cost.speed.kernel_times import MeasuredKernelTimes
    from tuner.cost.speed.profile import find_profile, load_profile
    from tuner.predict.tracing.trace import trace
    from tuner.predict.training import get_workload

    settings = {name: row[name] for name in _KNOBS if row[name] is not None}
    configuration = Configuration(settings)
    case = Case(row["model"], settings, model_overrides=row["model_overrides"] or {})
    traced = trace(
        get_workload(row["workload"]),
        measure.model_config(case),
        configuration,
        compute_capability=gpu.compute_capability,
    )
    allocator = AllocatorSettings(expandable_segments="expandable" in (row["allocator"] or ""))
    memory = peak_memory(traced.timeline, context_bytes=gpu.context_bytes, settings=allocator)
    # A limit is on reserved memory; without one, the CUDA context takes its part of the device.
    limit = row["limit_bytes"] or gpu.memory_bytes - gpu.context_bytes
    sizes = [0 if block.paged else block.size_bytes for block in traced.timeline.blocks]
    limited = replay(traced.timeline.events, sizes, settings=allocator, limit_bytes=limit)
    profile = load_profile(profile_path) if profile_path else find_profile(gpu)
    times = MeasuredKernelTimes(profile) if profile else None
    predicted = {
        "loaded": memory.loaded_bytes,
        **{phase: memory.phase_peak_bytes[phase] for phase in measure.PHASES},
        "allocated": memory.peak_allocated_bytes,
        "reserved": memory.peak_reserved_bytes,
        "device": memory.device_bytes,
        "step_s": _step_s(traced, gpu, settings, None),
        "step_s_profile": _step_s(traced, gpu, settings, times) if times else None,
    }
    return predicted, limited.out_of_memory_at is None


def _step_s(traced: Any, gpu: Any, settings: Mapping[str, Any], times: Any) -> float:
    import numpy as np

    from tuner.cost.speed.roofline import StepWork, step_times
    from tuner.cost.work_arrays import (
        WorkArrays,
        executions_of,
        optimizer_executions_of,
    )

    works = WorkArrays.of_works(traced.timeline.works)
    work = StepWork(
        passes=works,
        executions=executions_of(traced.timeline, step=1),
        optimizer=works,
        optimizer_executions=optimizer_executions_of(traced.timeline, step=1),
    )
    found = step_times(
        work,
        gpu,
        grad_accum=np.array([settings["grad_accum"]]),
        allow_tf32=settings["precision"] == "tf32",
        kernel_times=times,
    )
    return float(found.step_s[0])


def _print_rows(compared: Sequence[Compared]) -> None:
    print(f"{'case':<72}{'outcome':>9}{'alloc GiB':>11}" + "".join(f"{q:>11}" for q in QUANTITIES))
    for item in compared:
        allocated = item.measured["allocated"]
        shown = f"{allocated / GIB:.2f}" if allocated else "-"
        errors = "".join(f"{_percent(item.error(q)):>11}" for q in QUANTITIES)
        print(f"{item.row['name'][:71]:<72}{item.row['outcome']:>9}{shown:>11}{errors}")


def print_summary(compared: Sequence[Compared]) -> None:
    """Median, 95th percentile and worst absolute error of each quantity; then the verdicts."""
    print()
    for quantity in QUANTITIES:
        errors = [e for item in compared if (e := item.error(quantity)) is not None]
        if errors:
            sizes = sorted(map(abs, errors))
            at_95 = sizes[min(len(sizes) - 1, round(0.95 * (len(sizes) - 1)))]
            print(
                f"{quantity:<16} {len(sizes):3d} rows: median {statistics.median(sizes):.2%}, "
                f"95th percentile {at_95:.2%}, worst {sizes[-1]:.2%}, "
                f"mean of signed errors {statistics.fmean(errors):+.2%}"
            )
    right = sum(item.fits == (item.row["outcome"] == "ok") for item in compared)
    print(f"fits or not: right for {right} of {len(compared)} rows")
    for item in compared:
        if item.fits != (item.row["outcome"] == "ok"):
            predicted = (item.predicted["reserved"] or 0) / GIB
            verdict = "fits" if item.fits else "does not fit"
            print(
                f"  {item.row['name']}: {verdict} at {predicted:.2f} GiB, was {item.row['outcome']}"
            )


def _print_versions(rows: Sequence[Mapping[str, Any]]) -> None:
    from importlib import metadata

    for name in ("torch", "transformers", "peft", "bitsandbytes"):
        measured = {str(row[name]) for row in rows}
        here = metadata.version(name)
        if {here.partition("+")[0]} != {version.partition("+")[0] for version in measured}:
            print(f"versions differ: {name} {', '.join(sorted(measured))} measured, {here} here")


def write_csv(compared: Sequence[Compared], path: Path) -> None:
    """The measured and predicted figures of all compared rows."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [f"{q}_{what}" for q in QUANTITIES for what in ("measured", "predicted", "error")]
        writer.writerow(["name", "device", "outcome", "limit_bytes", "fits", *names])
        for item in compared:
            row = item.row
            cells = [
                cell
                for q in QUANTITIES
                for cell in (item.measured.get(q), item.predicted.get(q), item.error(q))
            ]
            writer.writerow(
                [row["name"], row["device"], row["outcome"], row["limit_bytes"], item.fits, *cells]
            )


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


if __name__ == "__main__":
    sys.exit(main())
