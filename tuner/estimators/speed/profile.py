"""A device profile: what `tuner calibrate` measured on one GPU.

The catalogue knows the peaks that a data sheet promises. A profile knows how fast matrix
products of many shapes, memory traffic, attention and dequantisation really ran, and what a
launch cost. `tuner.estimators.speed.kernel_times` makes predictions of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tuner.errors import InputError, Problem, UnavailableError
from tuner.gpu import Gpu

SCHEMA = 1
MAX_BYTES = 4 * 2**20
"""A profile has some hundred rows, in less than 100 KiB."""

LEAST, MOST = 1e-15, 1e21
"""No rate, size or time of a device is outside; products of three of them are still floats."""

FOLDER_VARIABLE = "TUNER_PROFILES"
"""Environment variable that names the folder of profiles."""

METHOD = "device profile"
"""What a prediction's method says in place of "roofline from the GPU catalogue"."""


def uses_profile(method: str) -> bool:
    """Whether a prediction of this method rests on rates that were measured."""
    return METHOD in method


REFERENCE = "reference trainings"
"""How `DeviceProfile.skipped` calls what `step_factor` comes from."""


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """One measured product of [m, k] and [k, n]; `spread` is the interquartile range / median."""

    dtype: str
    m: int
    n: int
    k: int
    flops_per_s: float
    spread: float


@dataclass(frozen=True, slots=True)
class TrafficRate:
    """Memory traffic of one kind of kernel that moved `size_bytes` in all, read and written."""

    kind: str
    size_bytes: int
    bytes_per_s: float
    spread: float


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """Causal attention; FLOPs count what the kernels need (forward 2 products, backward 5)."""

    kernel: str
    dtype: str
    batch: int
    heads: int
    length: int
    head_dim: int
    forward_flops_per_s: float
    backward_flops_per_s: float
    spread: float


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Everything that was measured on one device, with what it is and what measured it.

    `gpu` is the catalogue's id, None for a device that is not in it. `context_bytes` is device
    memory of the process beyond what torch reserved, after all kernels here had been loaded;
    None where the driver does not tell. `kernel_s` is the shortest time of a kernel, `launch_s`
    the host's time to issue one operator from Python, autograd included.

    Of a processor, `context_bytes` is what a training makes resident beside its tensors: pages of
    libraries, and buffers that these keep.
    """

    device: str
    gpu: str | None
    memory_bytes: int
    compute_capability: str | None
    measured_at: str
    versions: Mapping[str, str]
    launch_s: float
    kernel_s: float
    context_bytes: int | None
    matmul: tuple[MatmulRate, ...]
    traffic: tuple[TrafficRate, ...]
    attention: tuple[AttentionRate, ...] = ()
    skipped: tuple[str, ...] = ()
    """What could not be measured, with the reason."""
    duration_s: float = 0.0
    step_factor: float | None = None
    """How much longer kernels take within a training step than alone; None for a GPU."""
    live_factor: float | None = None
    """Resident memory of a training for each byte of live tensors, beside `context_bytes`; None
    for a GPU, whose allocator is replayed."""
    link_bytes_per_s: float | None = None
    """What two processes of a processor's machine send each other a second, over gloo; None for a
    GPU, and where it was not measured."""
    step_spread: float | None = None
    """Largest spread of the step times behind `step_factor`, or the share of the processors that
    others used before, if that was more."""

    @property
    def lacks_reference(self) -> bool:
        """Whether a processor's profile is of a version that ran no trainings for reference."""
        return self.step_factor is None and not any(r.startswith(REFERENCE) for r in self.skipped)

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """The best measured rate of products in `dtype` ("bf16"); None if none was measured."""
        return max((r.flops_per_s for r in self.matmul if r.dtype == dtype), default=None)

    def bandwidth_bytes_per_s(self, kind: str = "elementwise") -> float | None:
        """The rate of the largest measured traffic of `kind`; None if none was measured."""
        rates = [r for r in self.traffic if r.kind == kind]
        return max(rates, key=lambda r: r.size_bytes).bytes_per_s if rates else None

    def save(self, path: Path) -> None:
        """Write the profile as YAML, whole or not at all."""
        content = {"schema": SCHEMA, **_plain(asdict(self))}
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
    """Where profiles are kept: $TUNER_PROFILES, else ~/.config/tuner/profiles.

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


def _plain(value: Any) -> Any:
    """Tuples as lists: YAML has no tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, slots=True)
class _Field:
    """How a value of a file is checked."""

    kind: type | tuple[type, ...]
    optional: bool = False
    late: bool = False
    """Whether profiles of earlier versions lack it."""
    positive: bool = True
    says: str = ""
    items: Mapping[str, _Field] = field(default_factory=dict)


_TEXT = _Field(str, says="a text")
_NUMBER = _Field((int, float), says="a number above 0")
_COUNT = _Field(int, says="a whole number above 0")
_SHARE = _Field((int, float), positive=False, says="a number of 0 or more")
_LATE_NUMBER = _Field((int, float), optional=True, late=True, says="a number above 0")
_ROWS: Mapping[str, tuple[type, Mapping[str, _Field]]] = {
    "matmul": (
        MatmulRate,
        {
            "dtype": _TEXT,
            "m": _COUNT,
            "n": _COUNT,
            "k": _COUNT,
            "flops_per_s": _NUMBER,
            "spread": _SHARE,
        },
    ),
    "traffic": (
        TrafficRate,
        {"kind": _TEXT, "size_bytes": _COUNT, "bytes_per_s": _NUMBER, "spread": _SHARE},
    ),
    "attention": (
        AttentionRate,
        {
            "kernel": _TEXT,
            "dtype": _TEXT,
            "batch": _COUNT,
            "heads": _COUNT,
            "length": _COUNT,
            "head_dim": _COUNT,
            "forward_flops_per_s": _NUMBER,
            "backward_flops_per_s": _NUMBER,
            "spread": _SHARE,
        },
    ),
}
_TOP: Mapping[str, _Field] = {
    "device": _TEXT,
    "gpu": _Field(str, optional=True, says="the id of a GPU"),
    "memory_bytes": _COUNT,
    "compute_capability": _Field(str, optional=True, says='a text like "9.0"'),
    "measured_at": _TEXT,
    "launch_s": _NUMBER,
    "kernel_s": _NUMBER,
    "context_bytes": _Field(int, optional=True, positive=False, says="a whole number of bytes"),
    "duration_s": _SHARE,
    "step_factor": _LATE_NUMBER,
    "live_factor": _LATE_NUMBER,
    "link_bytes_per_s": _LATE_NUMBER,
    "step_spread": _Field((int, float), True, True, False, "a number of 0 or more"),
}


def _read(content: Any, problems: list[Problem]) -> DeviceProfile | None:
    if not isinstance(content, dict):
        problems.append(Problem("is not a mapping (`key: value` lines)"))
        return None
    if content.get("schema") != SCHEMA:
        problems.append(Problem(f"{_shown(content.get('schema'))} is not {SCHEMA}", "schema"))
        return None
    values: dict[str, Any] = _fields(content, _TOP, "", problems)
    versions = content.get("versions")
    if not isinstance(versions, dict):
        problems.append(Problem("is not a mapping of names to versions", "versions"))
        versions = {}
    values["versions"] = {str(name): str(v) for name, v in versions.items() if _is_plain(v)}
    if len(values["versions"]) < len(versions):
        problems.append(Problem("holds more than names and versions", "versions"))
    skipped = content.get("skipped") or []
    if not isinstance(skipped, list) or not all(isinstance(text, str) for text in skipped):
        problems.append(Problem("is not a list of texts", "skipped"))
        skipped = []
    values["skipped"] = tuple(skipped)
    for name, (cls, fields) in _ROWS.items():
        values[name] = tuple(_rows(content.get(name), name, (cls, fields), problems))
    unknown = sorted(f"{key!s:.60}" for key in content.keys() - {*values, "schema"})
    problems += [Problem("is not a known key", key) for key in unknown]
    for name in ("matmul", "traffic"):
        if not values[name] and not problems:
            problems.append(Problem("holds no measurement", name))
    return None if problems else DeviceProfile(**values)


def _rows(
    rows: Any, name: str, form: tuple[type, Mapping[str, _Field]], problems: list[Problem]
) -> Iterable[Any]:
    if not isinstance(rows, list):
        problems.append(Problem("is not a list", name))
        return
    cls, fields = form
    for number, row in enumerate(rows):
        where = f"{name}[{number}]"
        if not isinstance(row, dict) or row.keys() != fields.keys():
            problems.append(Problem(f"does not have exactly {', '.join(fields)}", where))
            continue
        before = len(problems)
        values = _fields(row, fields, f"{where}.", problems)
        if len(problems) == before:
            yield cls(**values)


def _fields(
    content: Mapping[str, Any], fields: Mapping[str, _Field], prefix: str, problems: list[Problem]
) -> dict[str, Any]:
    values = {}
    for name, form in fields.items():
        value = content.get(name)
        is_left_out = value is None and form.optional and (form.late or name in content)
        if not is_left_out and not _is_valid(value, form):
            problems.append(Problem(f"{_shown(value)} is not {form.says}", f"{prefix}{name}"))
        values[name] = value
    return values


def _is_valid(value: Any, form: _Field) -> bool:
    if isinstance(value, bool) or not isinstance(value, form.kind):
        return False
    if isinstance(value, str):
        return bool(value)
    number: Any = value
    if number == 0:
        return not form.positive
    return bool(LEAST <= number <= MOST)  # False of nan, too


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and _shown(value) != _HUGE


def _shown(value: Any) -> str:
    """A value for a message; a list or mapping may hold itself, and is only named."""
    if isinstance(value, (dict, list, set, tuple)):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) > MOST:
        return _HUGE  # Python does not write out more than 4,300 digits
    return f"{value!r:.60}"


_HUGE = "a huge number"
