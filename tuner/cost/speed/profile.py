"""A device profile: what `tuner calibrate` measured on one GPU.

The catalogue knows the peaks that a data sheet promises. A profile knows how fast matrix
products of many shapes, memory traffic, attention and dequantisation really ran, and what a
launch cost. `tuner.cost.speed.kernel_times` makes predictions of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import yaml
from msgspec import Meta

from tuner.core.errors import InputError, Problem, UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.records.reading import Bytes, faults, read, written

SCHEMA = 1
MAX_BYTES = 4 * 2**20
"""A profile has some hundred rows, in less than 100 KiB."""

Text = Annotated[str, Meta(min_length=1)]
Whole = Annotated[int, Meta(ge=1, le=1 << 60)]
Positive = Annotated[float, Meta(ge=1e-15, le=1e21)]
"""No rate, size or time of a device is outside; products of three of them are still floats."""

Share = Annotated[float, Meta(ge=0, le=1e21)]

FOLDER_VARIABLE = "TUNER_PROFILES"
"""Environment variable that names the folder of profiles."""

METHOD = "device profile"
"""Method of a prediction, in place of "roofline from the GPU catalogue"."""


def uses_profile(method: str) -> bool:
    """True of a prediction method that uses measured rates."""
    return METHOD in method


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """One measured product of [m, k] and [k, n]; `spread` is the interquartile range / median."""

    dtype: Text
    m: Whole
    n: Whole
    k: Whole
    flops_per_s: Positive
    spread: Share


@dataclass(frozen=True, slots=True)
class TrafficRate:
    """Memory traffic of one kind of kernel that moved `size_bytes` in all, read and written."""

    kind: Text
    size_bytes: Whole
    bytes_per_s: Positive
    spread: Share


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """Causal attention; FLOPs count what the kernels need (forward 2 products, backward 5)."""

    kernel: Text
    dtype: Text
    batch: Whole
    heads: Whole
    length: Whole
    head_dim: Whole
    forward_flops_per_s: Positive
    backward_flops_per_s: Positive
    spread: Share


@dataclass(frozen=True, slots=True)
class _Measured:
    """The device that was measured, and what measured it.

    `gpu` is the catalogue's id, None for a device that is not in it.
    """

    device: Text
    gpu: Text | None
    memory_bytes: Whole
    compute_capability: Text | None
    measured_at: Text
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeviceProfile(_Measured):
    """Everything that was measured on one device.

    `context_bytes` is device memory of the process beyond what torch reserved, after all kernels
    here had been loaded; None where the driver does not tell. `kernel_s` is the shortest time of a
    kernel, `launch_s` the host's time to issue one operator from Python, autograd included.
    """

    launch_s: Positive
    kernel_s: Positive
    context_bytes: Bytes | None
    matmul: tuple[MatmulRate, ...]
    traffic: tuple[TrafficRate, ...]
    attention: tuple[AttentionRate, ...] = ()
    skipped: tuple[str, ...] = ()
    """Figures that could not be measured, with the reason."""
    duration_s: Share = 0.0

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """The best measured rate of products in `dtype` ("bf16"); None if none was measured."""
        return max((r.flops_per_s for r in self.matmul if r.dtype == dtype), default=None)

    def bandwidth_bytes_per_s(self) -> float | None:
        """The rate of the largest measured elementwise traffic; None if none was measured."""
        rates = [r for r in self.traffic if r.kind == "elementwise"]
        return max(rates, key=lambda r: r.size_bytes).bytes_per_s if rates else None

    def save(self, path: Path) -> None:
        """Write the profile as YAML, whole or not at all."""
        content = {"schema": SCHEMA, **written(self)}
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_text(yaml.safe_dump(content, sort_keys=False, width=120), "utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def load_profile(path: Path) -> DeviceProfile:
    """The profile in a file. Raises `InputError` with everything that is wrong with it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InputError(f"{path} is larger than {MAX_BYTES} bytes, and no device profile")
        content = yaml.safe_load(data.decode("utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except RecursionError:
        raise InputError(f"{path} is not valid YAML: nested too deeply") from None
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        # What PyYAML makes values with escapes from it: `!!int ""`, 2026-13-45, `!!bool x`.
        raise InputError(f"{path} is not valid YAML: {str(error)[:200]}") from error
    except yaml.YAMLError as error:
        reason = (str(error).splitlines() or ["it cannot be read"])[0]
        raise InputError(f"{path} is not valid YAML: {reason[:200]}") from error
    problems: list[Problem] = []
    profile = _read(content, problems)
    if problems or profile is None:
        raise InputError(
            f"device profile {path} cannot be used",
            problems=problems,
            hint="`tuner calibrate` measures the device again",
        )
    return profile


def profiles_folder() -> Path:
    """The folder of profiles: $TUNER_PROFILES, else ~/.config/tuner/profiles.

    Raises `UnavailableError` where nobody knows the home directory, as in some containers.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    try:
        return Path.home() / ".config" / "tuner" / "profiles"
    except RuntimeError as error:
        raise UnavailableError(
            "there is no home directory to keep device profiles in",
            hint=f"name a folder with {FOLDER_VARIABLE}",
        ) from error


def profile_path(name: str) -> Path:
    """The file of a profile: `name` is a GPU's id, or a device name made fit for a file.

    Raises `UnavailableError` where there is no folder for it.
    """
    return profiles_folder() / f"{slug_of(name)}.yaml"


def slug_of(name: str) -> str:
    """A device name as an id: lower-case letters, digits and underscores."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def find_profile(gpu: Gpu) -> DeviceProfile | None:
    """The saved profile of this GPU type, or None. Raises `InputError` if it is damaged."""
    try:
        path = profile_path(gpu.id)
    except UnavailableError:
        return None
    return load_profile(path) if path.is_file() else None


def _read(content: Any, problems: list[Problem]) -> DeviceProfile | None:
    if not isinstance(content, dict):
        problems.append(Problem("is not a mapping (`key: value` lines)"))
        return None
    if content.get("schema") != SCHEMA:
        problems.append(Problem(f"{content.get('schema')!r:.60} is not {SCHEMA}", "schema"))
        return None
    known = {f.name: content[f.name] for f in fields(DeviceProfile) if f.name in content}
    problems += faults(DeviceProfile, known)
    if problems:
        return None
    profile = read(DeviceProfile, known)
    empty = [name for name in ("matmul", "traffic") if not getattr(profile, name)]
    problems += [Problem("holds no measurement", name) for name in empty]
    if profile.traffic and profile.bandwidth_bytes_per_s() is None:
        problems.append(Problem("holds no measurement of elementwise kernels", "traffic"))
    return profile
