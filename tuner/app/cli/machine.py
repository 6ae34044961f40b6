"""`tuner doctor` and `calibrate`: this machine and its GPUs.

Problems that stop trials are found by one trial on each GPU, run as in a search.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import click
from packaging.requirements import Requirement
from packaging.version import Version

from tuner.app.cli import subcommand
from tuner.app.cli.options import DURATION, json_option
from tuner.app.device import HIDDEN, SILENT, LocalGpu, local_gpus, lost_gpus, no_gpu
from tuner.app.listener import quiet_libraries
from tuner.core import nvml
from tuner.core.errors import (
    DISTRIBUTION,
    EXIT_FOUND,
    EXIT_UNAVAILABLE,
    TunerError,
    install_command,
)
from tuner.core.gpu import Gpu
from tuner.core.records import Status
from tuner.core.records.reading import written
from tuner.core.units import format_duration, format_gib, significant
from tuner.cost.speed.profile import DeviceProfile, profile_path, profiles_folder
from tuner.emulator.here import is_emulated
from tuner.report.terminal.render import echo, print_fields, print_json
from tuner.space import configure, load_space

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "ray", "optuna", "nvidia-ml-py")
"""Libraries that a trial, a prediction or a search needs."""
_SETTINGS = {"precision": "nf4", "optimizer": "adamw_8bit"}
"""Settings of the trial: both need kernels of bitsandbytes for the GPU."""
_BUILD = "install a build of PyTorch for this GPU and driver (pytorch.org/get-started)"
_REMEDIES = {
    "no kernel image": _BUILD,
    "not compiled with CUDA": _BUILD,
    "driver": f"update the driver, or {_BUILD}",
    "bitsandbytes": "python -m bitsandbytes says more",
    "out of memory": "end the programs that nvidia-smi shows on the GPU",
}
"""Remedies, by words in the message of a failed trial."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Finding:
    """One line: what was looked at, what was found, and what to do about it."""

    check: str
    level: Literal["ok", "warning", "problem"]
    text: str
    fix: str = ""


def examine(report: Report) -> Iterator[_Finding]:
    """The findings about libraries, driver and GPUs. `report` is told before a trial starts."""
    yield from _libraries()
    devices, lost = local_gpus(), lost_gpus()
    for text in lost:
        fix = "the kernel log says why (dmesg | grep -i xid); a reboot may bring it back"
        yield _Finding("GPU", "problem", text, fix)
    if not devices and not lost:
        yield _no_gpu()
    if devices:
        identity = nvml.device_identity(devices[0].index)
        newest = ".".join(map(str, nvml.driver_cuda_version() or ("unknown",)))
        driver = identity.driver if identity else None
        yield _Finding("driver", "ok", f"{driver or 'unknown'}, for CUDA up to {newest}")
    for device in devices:
        text = f"{device.index}: {device.name}, {format_gib(device.total_bytes)}"
        if device.gpu is None:
            fix = "tuner calibrate measures it, in about a minute"
            yield _Finding("GPU", "warning", f"{text}, of no known type: no trial runs on it", fix)
            continue
        yield _Finding("GPU", "ok", f"{text}, known as {device.gpu.id}")
        report(f"training a tiny model on GPU {device.index} ...")
        yield _tried(device, device.gpu)


def _libraries() -> Iterator[_Finding]:
    needed: list[Requirement] = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        needed += [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    # The oldest versions with which tuner works.
    all_of = [one for one in needed if not one.marker or one.marker.evaluate({"extra": "all"})]
    pairs = ((one.name, bound) for one in all_of for bound in one.specifier)
    least = {name: bound.version for name, bound in pairs if bound.operator == ">="}
    fine = []
    for name in LIBRARIES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield _Finding(name, "problem", "not installed", install_command("all"))
            continue
        if Version(Version(version).base_version) < Version(least.get(name, "0")):
            text = f"{version} is older than {least[name]}, the oldest that works"
            yield _Finding(name, "problem", text, f"pip install -U '{name}>={least[name]}'")
        else:
            fine.append(f"{name} {version}")
    if fine:
        yield _Finding("libraries", "ok", ", ".join(fine))


def _no_gpu() -> _Finding:
    text = no_gpu()
    if text == SILENT:
        fix = "look at nvidia-smi; in a container, start it with --gpus all and "
        fix += "NVIDIA_DRIVER_CAPABILITIES=compute,utility; in WSL, put /usr/lib/wsl/lib first in "
        fix += "LD_LIBRARY_PATH; trials on a Jetson aren't supported"
        return _Finding("GPU", "problem", text, fix)
    if text == HIDDEN:
        return _Finding("GPU", "warning", text, "unset it, or name the GPUs to use")
    text = "no NVIDIA GPU on this machine: all GPU numbers are predicted"
    fix = "fine for predictions; trials need a machine with the GPU, or --gpu cpu"
    return _Finding("GPU", "warning", text, fix)


def _tried(device: LocalGpu, gpu: Gpu) -> _Finding:
    """One trial on the GPU: what failed and what to do, or how fast it was."""
    from tuner.app.measuring import Measuring  # numpy
    from tuner.app.search.supported import trial_job

    space = load_space("tiny_cpu")
    configuration = configure(space, {**(space.baseline or {}), **_SETTINGS})
    trials_on = Measuring(
        f"cuda:{device.index}", (device.name,), (device.total_bytes,), {}, emulated=is_emulated()
    )
    again = f"tuner trial --space tiny_cpu --device cuda:{device.index}"
    words = " ".join(f"--set {name}={value}" for name, value in _SETTINGS.items())
    name, fix = f"trial on {device.index}", f"{again} {words} runs it again"
    try:
        outcome = trials_on.run(
            trial_job(space, gpu, None, None),
            trials_on.options(budget_s=1.0),
            (space, configuration, None),
        )
        text = f"{outcome.status}: {outcome.message}"
    except TunerError as error:
        outcome, text, fix = None, error.message, error.hint or fix
    if outcome is not None and outcome.status is Status.OK:
        return _Finding(name, "ok", "a 4-bit model with LoRA and an 8-bit optimizer was trained")
    fix = next((remedy for words, remedy in _REMEDIES.items() if words in text), fix)
    return _Finding(name, "problem", text, fix)


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
        dtypes = sorted({rate.dtype for rate in profile.matmul})
        print_json(
            {
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
        )
    else:
        _print_profile(profile, path)


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
