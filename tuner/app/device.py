"""The device that `--gpu` selects: a catalogue type, this machine's GPU, or its processor."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.core import host, nvml
from tuner.core.errors import InputError, UnavailableError
from tuner.core.units import format_gib
from tuner.cost.speed.profile import (
    DeviceProfile,
    find_profile,
    load_profile,
    profile_path,
    slug_of,
)
from tuner.emulator.build import unavailable
from tuner.space.gpus import Gpu, as_told, get_gpu, match_device, not_predicted, word_of

CPU, AUTO = "cpu", "auto"

_NO_TF32 = "TF32 is a format of NVIDIA's tensor cores"


_ROOT = Path("/")
_SIGNS = (
    "proc/driver/nvidia/gpus/*",
    "dev/nvidia[0-9]*",  # in containers that show no drivers (gVisor)
    "dev/nvmap",  # Jetson, whose NVML is missing or tells no memory
    "usr/lib/wsl/lib/libcuda.so.1",  # WSL: of the driver on Windows
)
"""Files that only a machine with an NVIDIA GPU has."""
SILENT = "this machine has an NVIDIA GPU, but its driver does not answer (NVML)"
HIDDEN = "CUDA_VISIBLE_DEVICES hides every NVIDIA GPU of this machine"


@dataclass(frozen=True, slots=True)
class LocalGpu:
    """A CUDA device of this machine; `gpu` is its type, None when it is unknown."""

    index: int
    name: str
    total_bytes: int
    compute_capability: tuple[int, int]
    gpu: Gpu | None = None


def find_gpu(
    text: str, *, memory_bytes: int | None = None, price_usd_per_hour: float | None = None
) -> Gpu:
    """The device type that `--gpu` names, with the user's memory and price if given.

    "auto" is this machine's GPU and "cpu" its processor. Raises `InputError` for an unknown name,
    and `UnavailableError` if this machine has no such device.
    """
    word = word_of(text)
    if word not in (CPU, AUTO):
        return get_gpu(text, memory_bytes=memory_bytes, price_usd_per_hour=price_usd_per_hour)
    gpu = this_cpu() if word == CPU else this_gpu()
    return as_told(gpu, memory_bytes=memory_bytes, price_usd_per_hour=price_usd_per_hour)


def is_cpu(gpu: Gpu) -> bool:
    """True if this "GPU type" is a processor."""
    return gpu.id == CPU


# -- this machine's processor -----------------------------------------------------------------


def this_cpu() -> Gpu:
    """The processor of this machine, on which trials are measured and nothing is predicted."""
    gpu = _gpu_of(
        CPU,
        host.cpu_name(),
        host.usable_memory_bytes(),
        sources={
            "device": "/proc/cpuinfo",
            "memory": "the smaller of /proc/meminfo and the container's limit",
        },
    )
    return replace(gpu, unsupported={"tf32": _NO_TF32}, sm_count=host.usable_cpus())


def profile_for(gpu: Gpu) -> DeviceProfile | None:
    """The device profile that predictions for `gpu` use; None without one.

    Raises `InputError` for a processor, for which nothing is predicted.
    """
    if is_cpu(gpu):
        raise not_predicted()
    return find_profile(gpu) or _profile_named(gpu.name)


# -- this machine's GPUs ----------------------------------------------------------------------


def local_gpus() -> list[LocalGpu]:
    """The CUDA devices that this process may use, in the driver's order."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if _hides_all(visible):
        return []
    count = nvml.MOST_DEVICES if visible is None else len(visible.split(","))
    found: list[LocalGpu] = []
    for index in range(count):
        try:
            identity = nvml.device_identity(index)
        except nvml.DeviceLostError:
            continue  # `lost_gpus` reports it
        except LookupError:
            break
        if identity is None:
            break
        facts = (identity.name, identity.total_bytes, identity.compute_capability)
        found.append(LocalGpu(index, *facts, _type_of(*facts)))
    return found


def lost_gpus() -> list[str]:
    """The driver's message for each device that it lists but can't talk to."""
    found: list[str] = []
    for index in range(nvml.MOST_DEVICES):
        try:
            if nvml.device_use(index) is None:
                break
        except nvml.DeviceLostError as error:
            found.append(error.message)
        except LookupError:
            break
    return found


def _hides_all(visible: str | None) -> bool:
    return visible is not None and visible.strip() in ("", "-1")


def no_gpu() -> str:
    """Why `local_gpus` finds none. CUDA may work all the same: it needs no NVML."""
    if not any(any(_ROOT.glob(sign)) for sign in _SIGNS):
        return "this machine has no NVIDIA GPU"
    return HIDDEN if _hides_all(os.environ.get("CUDA_VISIBLE_DEVICES")) else SILENT


def this_gpu() -> Gpu:
    """The type of this machine's GPU.

    Raises `UnavailableError` if there is no GPU, or if it has neither a catalogue entry nor a
    device profile, and `InputError` if this machine has GPUs of several types.
    """
    devices = local_gpus()
    if not devices:
        raise UnavailableError(
            f"{no_gpu()}, so --gpu auto finds none",
            hint="--gpu cpu uses its processor; `tuner gpus` lists the types that can be "
            "predicted without one",
        )
    types = {device.name: device for device in devices}
    if len({(d.gpu.id if d.gpu else d.name) for d in devices}) > 1:
        raise InputError(
            f"--gpu auto is ambiguous: this machine has {', '.join(types)}",
            hint="name the type, or leave only one visible with CUDA_VISIBLE_DEVICES",
        )
    first = devices[0]
    if first.gpu is None:
        raise UnavailableError(
            f"this machine's {first.name} with {format_gib(first.total_bytes)} is not in the "
            "catalogue of GPUs, and has no device profile",
            hint="`tuner calibrate` measures it in about a minute, and then --gpu auto knows it; "
            "or describe it in ~/.config/tuner/gpus.yaml",
        )
    return first.gpu


def _type_of(name: str, total_bytes: int, capability: tuple[int, int]) -> Gpu | None:
    """The catalogue's type, or else a type made from the device's profile."""
    known = match_device(name, total_bytes)
    if known is not None:
        return known
    profile = _profile_named(name)
    if profile is None:
        return None
    gpu = _gpu_of(
        slug_of(name),
        name,
        profile.memory_bytes,
        sources={"device": "the NVIDIA driver", "memory": _measured_at(profile)},
    )
    rates = {p: profile.peak_flops_per_s(p) for p in ("fp32", "tf32", "fp16", "bf16", "int8")}
    measured = _measured_at(profile)
    return replace(
        gpu,
        compute_capability=capability,
        context_bytes=profile.context_bytes or 0,
        flops={p: rate for p, rate in rates.items() if rate is not None},
        bandwidth_bytes_per_s=profile.bandwidth_bytes_per_s() or math.nan,
        sources={**gpu.sources, "tflops": measured, "bandwidth": measured},
    )


def _gpu_of(gpu_id: str, name: str, memory_bytes: int, *, sources: Mapping[str, str]) -> Gpu:
    """A device type that is not in the catalogue, without rates."""
    return Gpu(
        id=gpu_id,
        name=name,
        device_names=(name,),
        aliases=(),
        memory_bytes=memory_bytes,
        flops={},
        bandwidth_bytes_per_s=math.nan,
        compute_capability=(0, 0),
        sm_count=1,
        unsupported={},
        price_usd_per_hour=None,
        price_date=None,
        sources=sources,
        context_bytes=0,
    )


def _measured_at(profile: DeviceProfile) -> str:
    return f"measured by tuner calibrate, {profile.measured_at}"


def _profile_named(name: str) -> DeviceProfile | None:
    try:
        path = profile_path(name)
    except UnavailableError:
        return None
    return load_profile(path) if path.is_file() else None


def can_emulate(gpu: Gpu) -> bool:
    """True if this machine can emulate a device of this type; processors are not emulated."""
    return not is_cpu(gpu) and unavailable() is None
