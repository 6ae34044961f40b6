"""Runs real training steps on this machine's GPU and appends what they took to a table.

    python benchmarks/gpu/run.py --check              one tiny configuration, and a verdict
    python benchmarks/gpu/run.py                      all of them, in less than nine minutes
    python benchmarks/gpu/run.py --calibrate          the same, after tuner calibrate's figures
    python benchmarks/gpu/run.py --device cpu --smoke the same code on tiny models, without a GPU

Needs neither Ray nor a hub: weights are synthetic. Every configuration runs in a process of
its own; running out of memory is a row like any other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# The package need not be installed: beside this folder it can be imported as it is.
for folder in (HERE, HERE.parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import measure  # noqa: E402
import table  # noqa: E402
from cases import Case, full_list, smoke_list  # noqa: E402

DEFAULT_BUDGET_S = 530.0
CALIBRATION_S = 75.0
CASE_TIMEOUT_S = 75.0
STEPS_S = 2.5
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
NEEDED = (*LIBRARIES, "numpy", "nvidia-ml-py", "pyyaml")


@dataclass(frozen=True, slots=True)
class Settings:
    """How the whole run goes. `start` is how children begin: "fork" or "spawn"."""

    device: str
    output: Path
    budget_s: float
    steps_s: float
    start: str
    folder: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit code: 0 well, 1 when the check fails, 3 without the device."""
    options = _parser().parse_args(arguments)
    started = time.monotonic()
    missing = [name for name in NEEDED if _version(name) is None]
    if missing:
        print(f"missing: {', '.join(missing)} (see README.md beside this script)")
        return 3
    measure.warm_up()
    _say(started, "libraries imported")
    with tempfile.TemporaryDirectory() as folder:
        start = options.start or _choose_start(options.device, Path(folder))
        if start is None:
            print(f"no process can use {options.device}: see the message above")
            return 3
        _say(started, f"children {start} and can use {options.device}")
        settings = Settings(
            device=options.device,
            output=options.output,
            budget_s=options.budget,
            steps_s=0.2 if options.smoke or options.check else STEPS_S,
            start=start,
            folder=Path(folder),
        )
        if options.check:
            return _check(settings, started)
        if options.calibrate:
            _calibrate(settings, started, smoke=options.smoke)
        cases = smoke_list() if options.smoke else full_list()
        chosen = [c for c in cases if options.only in c.name]
        rows = run_cases(chosen, settings, started)
    _summarise(rows, chosen, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--output", type=Path, default=Path("results/measured"))
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET_S, help="seconds in all")
    parser.add_argument("--smoke", action="store_true", help="tiny models")
    parser.add_argument("--check", action="store_true", help="one tiny configuration, a verdict")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure the device too, into profile.yaml"
    )
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--start", choices=("fork", "spawn"), help="how children begin")
    return parser


def run_cases(cases: Sequence[Case], settings: Settings, started: float) -> list[dict[str, Any]]:
    """Run the cases in their order, and append each row as soon as it is there."""
    run_id = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    common = {"run_id": run_id, **_versions(settings.device)}
    rows = []
    for number, case in enumerate(cases, 1):
        left_s = settings.budget_s - (time.monotonic() - started)
        if left_s < case.expected_s:
            _say(started, f"{number}/{len(cases)} left out, {left_s:.0f} s left: {case.name}")
            continue
        row = {**common, **_described(case), **run_one(case, settings, left_s)}
        table.append(settings.output, row)
        rows.append(row)
        _say(started, f"{number}/{len(cases)} {case.name}: {_in_short(row)}")
    return rows


def run_one(case: Case, settings: Settings, left_s: float) -> dict[str, Any]:
    """What came of one case in a process of its own, whatever happened to that process."""
    task = measure.Task(
        case=case,
        device=settings.device,
        steps_s=settings.steps_s,
        row_path=settings.folder / "row.json",
        log_path=settings.folder / "log.txt",
    )
    task.row_path.unlink(missing_ok=True)
    idle_bytes = _device_bytes(settings.device)
    started = time.monotonic()
    exit_code = _in_child(
        settings.start, measure.child_main, (task,), min(CASE_TIMEOUT_S, max(left_s, 10.0))
    )
    row: dict[str, Any] = {"outcome": "crashed"}
    if task.row_path.exists():
        row = json.loads(task.row_path.read_text())
    if exit_code is None:
        row["outcome"] = "timeout"
    elif row["outcome"] == "crashed":
        row |= _from_log(task.log_path, exit_code, row)
    row |= {"wall_s": time.monotonic() - started, "nvml_idle_bytes": idle_bytes}
    return row


def _in_child(start: str, target: Any, arguments: tuple[Any, ...], timeout_s: float) -> int | None:
    """The exit code of a child process; None when it ran out of time and was ended."""
    process = multiprocessing.get_context(start).Process(target=target, args=arguments)
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


def _from_log(log: Path, exit_code: int, row: dict[str, Any]) -> dict[str, Any]:
    """What the end of a log says of a process that died: bitsandbytes exits when memory ends."""
    from tuner.core.outcome import is_out_of_memory, requested_bytes

    text = log.read_text(errors="replace")[-4000:] if log.exists() else ""
    message = row.get("message") or f"exit code {exit_code}: {text.strip()[-300:]}"
    out_of_memory = is_out_of_memory(text)
    return {
        "outcome": "oom" if out_of_memory else "crashed",
        "message": message,
        "requested_bytes": requested_bytes(text),
    }


def _choose_start(device: str, folder: Path) -> str | None:
    """How children can begin and use the device: "fork", else "spawn", else None."""
    for start in ("fork", "spawn"):
        path = folder / f"probe-{start}"
        code = _in_child(start, measure.probe_main, (device, path), 45.0)
        if code == 0 and path.exists():
            return start
        print(f"a child that was started by {start} could not use {device} (exit code {code})")
    return None


def _check(settings: Settings, started: float) -> int:
    """One tiny configuration from end to end; prints a verdict, appends nothing."""
    row = run_one(smoke_list()[1], settings, 120.0)
    print(json.dumps({k: v for k, v in row.items() if k != "allocator_settings"}, indent=1))
    needed = ("peak_allocated_bytes", "peak_backward_bytes", "loaded_bytes", "step_s")
    missing = [name for name in needed if row.get(name) is None]
    good = row["outcome"] == "ok" and not missing and row.get("finite") is True
    if row["outcome"] == "crashed":
        print((settings.folder / "log.txt").read_text(errors="replace")[-3000:])
    _say(started, "check: good" if good else f"check: FAILED ({row['outcome']}, no {missing})")
    return 0 if good else 1


def _calibrate(settings: Settings, started: float, *, smoke: bool) -> None:
    path = settings.output / "profile.yaml"
    arguments = (settings.device, path, CALIBRATION_S, smoke)
    code = _in_child(settings.start, measure.calibrate_main, arguments, CALIBRATION_S + 25)
    _say(started, f"profile: {path}" if code == 0 else f"profile: FAILED (exit code {code})")


def _described(case: Case) -> dict[str, Any]:
    settings = dict(case.settings)
    settings["lora_targets"] = list(settings["lora_targets"])
    limit = case.limit_gib
    return {
        **{name: settings.get(name) for name in table.COLUMNS if name in settings},
        "name": case.name,
        "workload": "causal_lm",
        "model": case.model,
        "weights": "synthetic",
        "limit_bytes": round(limit * measure.GIB) if limit is not None else None,
        "allocator": case.allocator,
        "model_overrides": dict(case.model_overrides) or None,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _versions(device: str) -> dict[str, Any]:
    import torch

    from tuner.core.nvml import device_identity

    identity = device_identity() if device.startswith("cuda") else None
    return {
        **{name: _version(name) for name in LIBRARIES},
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "driver": identity.driver if identity else None,
        "python": platform.python_version(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _device_bytes(device: str) -> int | None:
    """Device memory in use while no case runs."""
    from tuner.core.nvml import device_use

    if not device.startswith("cuda"):
        return None
    use = device_use(int(device.partition(":")[2] or 0))
    return use.used_bytes if use else None


def _in_short(row: dict[str, Any]) -> str:
    gib = measure.GIB
    if row["outcome"] != "ok":
        return f"{row['outcome']} {row.get('oom_phase') or ''} {row.get('message', '')[:120]}"
    return (
        f"{row['peak_allocated_bytes'] / gib:.2f} GiB allocated, "
        f"{row['peak_reserved_bytes'] / gib:.2f} reserved, {row['step_s'] * 1e3:.1f} ms a step "
        f"(+-{row['step_spread']:.0%}), {row['tokens_per_s']:.0f} tokens/s, "
        f"{row['wall_s']:.1f} s in all"
    )


def _summarise(rows: Sequence[dict[str, Any]], cases: Sequence[Case], output: Path) -> None:
    outcomes: dict[str, int] = {}
    for row in rows:
        outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + 1
    counted = ", ".join(f"{count} {name}" for name, count in outcomes.items())
    print(f"{len(rows)} of {len(cases)} cases: {counted}; {output / table.CSV_NAME}")


def _say(started: float, text: str) -> None:
    print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
