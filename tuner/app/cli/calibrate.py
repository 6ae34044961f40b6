"""`tuner calibrate`: measure this machine's GPU, so that predictions for it need not guess."""

from __future__ import annotations

from pathlib import Path

import click

from tuner.app.cli.options import DurationType, examples, json_option
from tuner.app.listener import quiet_libraries
from tuner.core.units import format_duration, format_gib, significant
from tuner.cost.speed.profile import DeviceProfile, profile_path, profiles_folder
from tuner.report.terminal.render import echo, print_fields, print_json

DEFAULT_BUDGET_S = 90.0


@click.command(
    "calibrate",
    epilog=examples("tuner calibrate", "tuner calibrate --device cpu --output cpu.yaml"),
)
@click.option(
    "--device",
    default="cuda:0",
    show_default=True,
    metavar="DEVICE",
    help="cuda:0, cuda:1, ... or cpu.",
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
    type=DurationType(),
    default=DEFAULT_BUDGET_S,
    metavar="TIME",
    help="Time after which remaining measurements are skipped.  [default: 90s]",
)
@click.option(
    "--smoke", is_flag=True, help="Test the code, not the device, with a few tiny shapes."
)
@json_option
def command(
    *, device: str, output: Path | None, budget_s: float, smoke: bool, as_json: bool
) -> None:
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
            device, budget_s=budget_s, smoke=smoke, report=lambda line: echo(line, err=True)
        )
    path = output or profile_path(profile.gpu or profile.device)
    profile.save(path)
    if as_json:
        print_json(_summary(profile, path))
    else:
        _print(profile, path)


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


def _print(profile: DeviceProfile, path: Path) -> None:
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
