"""`tuner doctor` and `calibrate`: this machine and its GPUs."""

from __future__ import annotations

from pathlib import Path

import click

from tuner.app.cli.options import DURATION, json_option, subcommand
from tuner.app.doctor import examine
from tuner.app.listener import quiet_libraries
from tuner.core.errors import EXIT_FOUND, EXIT_UNAVAILABLE
from tuner.core.records.reading import written
from tuner.core.units import format_duration, format_gib, significant
from tuner.cost.speed.profile import DeviceProfile, profile_path, profiles_folder
from tuner.report.terminal.render import echo, print_fields, print_json


@subcommand("doctor", "tuner doctor", "tuner doctor --json")
@json_option
def doctor(*, as_json: bool) -> int:
    """Check libraries and driver, and train a tiny model on each GPU, as a search would.

    Each line is ok, a warning or a problem, with what to do about it. Exit code 3 if there is a
    problem.
    """
    findings = list(examine(lambda line: echo(line, err=True)))
    worst = EXIT_UNAVAILABLE if any(f.level == "problem" for f in findings) else EXIT_FOUND
    if as_json:
        print_json({"ok": worst == EXIT_FOUND, "findings": list(map(written, findings))})
        return worst
    lines = []
    for finding in findings:
        lines.append((f"{finding.level:9}{finding.check}", finding.text))
        lines.append(("", f"-> {finding.fix}" if finding.fix else ""))
    print_fields(lines)
    return worst


DEFAULT_BUDGET_S = 90.0


@subcommand("calibrate", "tuner calibrate", "tuner calibrate --device cuda:1 --output rtx4090.yaml")
@click.option(
    "--device", default="cuda:0", show_default=True, metavar="DEVICE", help="cuda:0, cuda:1, ..."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File of the profile.  [default: ~/.config/tuner/profiles/GPU.yaml]",
)
@click.option(
    "--budget",
    "budget_s",
    type=DURATION,
    default=DEFAULT_BUDGET_S,
    metavar="TIME",
    help="Time after which remaining measurements are skipped.  [default: 90s]",
)
@json_option
def calibrate(*, device: str, output: Path | None, budget_s: float, as_json: bool) -> None:
    """Measure a GPU in about a minute and save the figures as its device profile.

    Measures matrix products of many shapes, memory traffic, attention, 4-bit and 8-bit
    dequantisation, the launch cost and the size of the CUDA context. Predictions for this GPU type
    then use these figures instead of the data sheet's. Nothing else should run on the GPU
    meanwhile.
    """
    output or profiles_folder()  # a minute of measuring must not end at a missing folder
    with quiet_libraries():
        # Seconds to import: torch and bitsandbytes.
        from tuner.predict.measure_device import measure_device

        profile = measure_device(
            device, budget_s=budget_s, report=lambda line: echo(line, err=True)
        )
    path = output or profile_path(profile.gpu or profile.device)
    profile.save(path)
    if as_json:
        print_json(_summary(profile, path))
    else:
        _print_profile(profile, path)


def _summary(profile: DeviceProfile, path: Path) -> dict[str, object]:
    dtypes = sorted({rate.dtype for rate in profile.matmul})
    return {
        "path": str(path),
        "device": profile.device,
        "gpu": profile.gpu,
        "peak_flops_per_s": {dtype: profile.peak_flops_per_s(dtype) for dtype in dtypes},
        "bandwidth_bytes_per_s": profile.bandwidth_bytes_per_s(),
        "launch_s": profile.launch_s,
        "kernel_s": profile.kernel_s,
        "context_bytes": profile.context_bytes,
        "products": len(profile.matmul),
        "skipped": list(profile.skipped),
        "duration_s": profile.duration_s,
    }


def _print_profile(profile: DeviceProfile, path: Path) -> None:
    dtypes = dict.fromkeys(rate.dtype for rate in profile.matmul)
    rates = ", ".join(
        f"{dtype} {significant((profile.peak_flops_per_s(dtype) or 0) / 1e12)}" for dtype in dtypes
    )
    bandwidth = profile.bandwidth_bytes_per_s()
    context = profile.context_bytes
    print_fields(
        [
            ("device", profile.device),
            ("GPU type", profile.gpu or "not in the catalogue"),
            ("best TFLOP/s", rates),
            ("bandwidth", f"{significant(bandwidth / 1e9)} GB/s" if bandwidth else ""),
            ("launch", f"{significant(profile.launch_s * 1e6)} us per operator"),
            ("shortest kernel", f"{significant(profile.kernel_s * 1e6)} us"),
            ("CUDA context", format_gib(context) if context is not None else "unknown"),
            ("figures", str(len(profile.matmul) + len(profile.traffic) + len(profile.attention))),
            ("skipped", "; ".join(profile.skipped)),
            ("took", format_duration(profile.duration_s)),
            ("profile", str(path)),
        ]
    )
