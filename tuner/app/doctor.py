"""Problems that stop trials on this machine, found by one trial on each GPU, run as in a search."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from tuner.app.device import HIDDEN, SILENT, LocalGpu, local_gpus, lost_gpus, no_gpu
from tuner.core import nvml
from tuner.core.errors import DISTRIBUTION, TunerError
from tuner.core.gpu import Gpu
from tuner.core.records import Status
from tuner.core.units import format_gib
from tuner.emulator.here import is_emulated
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
class Finding:
    """One line: what was looked at, what was found, and what to do about it."""

    check: str
    level: Literal["ok", "warning", "problem"]
    text: str
    fix: str = ""


def examine(report: Report) -> Iterator[Finding]:
    """The findings about libraries, driver and GPUs. `report` is told before a trial starts."""
    yield from _libraries()
    devices, lost = local_gpus(), lost_gpus()
    for text in lost:
        fix = "the kernel log says why (dmesg | grep -i xid); a reboot may bring it back"
        yield Finding("GPU", "problem", text, fix)
    if not devices and not lost:
        yield _no_gpu()
    if devices:
        identity = nvml.device_identity(devices[0].index)
        newest = ".".join(map(str, nvml.driver_cuda_version() or ("unknown",)))
        driver = identity.driver if identity else None
        yield Finding("driver", "ok", f"{driver or 'unknown'}, for CUDA up to {newest}")
    for device in devices:
        text = f"{device.index}: {device.name}, {format_gib(device.total_bytes)}"
        if device.gpu is None:
            fix = "tuner calibrate measures it, in about a minute"
            yield Finding("GPU", "warning", f"{text}, of no known type: no trial runs on it", fix)
            continue
        yield Finding("GPU", "ok", f"{text}, known as {device.gpu.id}")
        report(f"training a tiny model on GPU {device.index} ...")
        yield _tried(device, device.gpu)


def _libraries() -> Iterator[Finding]:
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
            yield Finding(name, "problem", "not installed", f"pip install {name}")
            continue
        if Version(Version(version).base_version) < Version(least.get(name, "0")):
            text = f"{version} is older than {least[name]}, the oldest that works"
            yield Finding(name, "problem", text, f"pip install -U '{name}>={least[name]}'")
        else:
            fine.append(f"{name} {version}")
    if fine:
        yield Finding("libraries", "ok", ", ".join(fine))


def _no_gpu() -> Finding:
    text = no_gpu()
    if text == SILENT:
        fix = "look at nvidia-smi; in a container, start it with --gpus all and "
        fix += "NVIDIA_DRIVER_CAPABILITIES=compute,utility; in WSL, put /usr/lib/wsl/lib first in "
        fix += "LD_LIBRARY_PATH; trials on a Jetson aren't supported"
        return Finding("GPU", "problem", text, fix)
    if text == HIDDEN:
        return Finding("GPU", "warning", text, "unset it, or name the GPUs to use")
    text = "no NVIDIA GPU on this machine: all GPU numbers are predicted"
    fix = "fine for predictions; trials need a machine with the GPU, or --gpu cpu"
    return Finding("GPU", "warning", text, fix)


def _tried(device: LocalGpu, gpu: Gpu) -> Finding:
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
        return Finding(name, "ok", "a 4-bit model with LoRA and an 8-bit optimizer was trained")
    fix = next((remedy for words, remedy in _REMEDIES.items() if words in text), fix)
    return Finding(name, "problem", text, fix)
