"""The catalogue of GPU types: memory, dense peak rates, bandwidth, what is unsupported, price.

The data is `gpus.yaml` beside this module; its head says how each number is meant. Users add
types of their own in a file of the same form. A GPU is recognised by its exact device name
and its memory, never by a part of its name: "NVIDIA L40" is not an L4.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from yaml import ScalarNode, SequenceNode

from tuner.core.errors import InputError, Problem, UnavailableError, unknown
from tuner.core.gpu import ARCHITECTURES, NATIVE_PRECISIONS, PRECISIONS, VENDORS, Gpu, not_supported
from tuner.core.units import GIB, KIB, MIB, format_gib, parse_bytes
from tuner.space.document import Entry, Form, Place, Problems, compose, is_nothing, read_text

_LONGEST_SIZE = 40  # characters; longer digits would overflow a float


_SOURCE_GROUPS = (
    *("device", "memory", "tflops", "bandwidth", "l2"),
    *("link", "network", "nccl", "power", "context", "price"),
)

_OPTIONAL_KEYS: dict[str, Any] = {
    "aliases": (), "ecc_memory": None, "l2_cache": None, "link_gb_per_s": None,
    "network_gb_per_s": None, "nccl_channels": None, "power_w": None, "unsupported": {},
    "price_usd_per_hour": None, "price_date": None,
}  # fmt: skip
"""Keys of an entry that may be left out, with what that means."""


def _text(place: Place) -> str | None:
    """The text of a scalar, without space around it; empty text is a problem."""
    text = place.scalar()
    if text is not None and not text.strip():
        place.add("is empty")
    return text.strip() or None if text is not None else None


def _texts(place: Place) -> tuple[str, ...] | None:
    """The texts of a list."""
    items = place.sequence()
    return None if items is None else tuple(t for t in map(_text, items) if t is not None)


def _number(place: Place, low: float, high: float) -> float | None:
    """A number from `low` to `high`, both included; None with the problem noted."""
    text = _text(place)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        place.add(f"{text!r} is not a number from {low:g} to {high:g}")
        return None
    return value


def _size(place: Place, low: int, high: int) -> int | None:
    """Bytes of a size with its unit, from `low` to `high`; None with the problem noted."""
    text = _text(place)
    if text is None:
        return None
    try:
        value = parse_bytes(text[:_LONGEST_SIZE], what=place.at.rpartition(".")[2])
    except InputError as error:
        place.add_error(error)
        return None
    if not low <= value <= high:
        place.add(f"{text!r} is not between {low} and {high} bytes")
        return None
    return value


def _memory(place: Place) -> int | None:
    return _size(place, 256 * MIB, 4096 * GIB)


def _bandwidth(place: Place) -> float | None:
    gb_per_s = _number(place, 1, 1e6)
    return gb_per_s * 1e9 if gb_per_s is not None else None


def _capability(place: Place) -> tuple[int, int] | None:
    text = _text(place)
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,2})\.([0-9])", text)
    if match is None:
        place.add(f"{text!r} is not a compute capability like 8.6")
        return None
    found = int(match[1]), int(match[2])
    if found not in ARCHITECTURES:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        place.add(f"no GPU of NVIDIA has {text}; known: {known}")
        return None
    return found


def _count(place: Place) -> int | None:
    number = _number(place, 1, 10_000)
    if number is not None and number != int(number):
        place.add(f"{number} is not a whole number")
    return int(number) if number is not None else None


def _flops(place: Place) -> dict[str, float]:
    found = place.mapping(allowed=NATIVE_PRECISIONS)
    rates = {precision: _number(entry, 0.01, 1e6) for precision, entry in found.items()}
    return {p: round(rate * 1e12, 0) for p, rate in rates.items() if rate is not None}


def _reasons(place: Place) -> dict[str, str]:
    return {p: _text(e) or "" for p, e in place.mapping(allowed=NATIVE_PRECISIONS).items()}


def _date(place: Place) -> str | None:
    text = _text(place)
    if text is not None and not re.fullmatch(r"[0-9]{4}(-[0-9]{2}(-[0-9]{2})?)?", text):
        place.add(f"{text!r} is not a date like 2026-09-27")
    return text


_READERS: Mapping[str, tuple[str, str, Callable[[Place], Any]]] = {
    "name": ("name", "device", _text),
    "device_names": ("device_names", "device", _texts),
    "aliases": ("aliases", "device", _texts),
    "memory": ("memory_bytes", "memory", _memory),
    "ecc_memory": ("ecc_memory_bytes", "memory", _memory),
    "tflops": ("flops", "tflops", _flops),
    "unsupported": ("unsupported", "tflops", _reasons),
    "bandwidth_gb_per_s": ("bandwidth_bytes_per_s", "bandwidth", _bandwidth),
    "l2_cache": ("l2_bytes", "l2", lambda place: _size(place, 64 * KIB, GIB)),
    "link_gb_per_s": ("link_bytes_per_s", "link", _bandwidth),
    "network_gb_per_s": ("network_bytes_per_s", "network", _bandwidth),
    "nccl_channels": ("nccl_channels", "nccl", _count),
    "power_w": ("power_w", "power", lambda place: _number(place, 5, 5000)),
    "compute_capability": ("compute_capability", "device", _capability),
    "sm_count": ("sm_count", "device", _count),
    "context": ("context_bytes", "context", lambda place: _size(place, 0, 16 * GIB)),
    "price_usd_per_hour": (
        "price_usd_per_hour",
        "price",
        lambda place: None if is_nothing(place.node) else _number(place, 0, 1000),
    ),
    "price_date": ("price_date", "price", _date),
}
"""By key of an entry: the field of `Gpu` that it fills, its group of sources, its reader."""


def read_entry(entry: Entry, base: Mapping[str, Gpu], *, shipped: bool) -> Gpu | None:
    """The GPU of an entry, or None when it has a problem, which is then noted."""
    gpu_id, problems, before = entry.name, entry.problems, len(entry.problems.found)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_]{0,63}", gpu_id):
        entry.add("an id has lower-case letters, digits and underscores only")
    keys = entry.mapping(allowed=(*_READERS, "vendor", "sources", "like"))
    _check_vendor(keys)
    values = _taken_over(gpu_id, keys.get("like"), base)
    sources: dict[str, str] = dict(values.pop("sources", {}))
    for key, (name, group, read) in _READERS.items():
        if key in keys:
            values[name] = read(keys[key])
            if not shipped:
                line = keys[key].node.start_mark.line + 1
                sources[group] = f"{problems.file}:{line}"
        elif name not in values:
            if key not in _OPTIONAL_KEYS:
                how = "" if shipped else "; `like: rtx4090` takes over all that another type has"
                entry.add(f"{key!r} is missing{how}")
            values[name] = _OPTIONAL_KEYS.get(key)
    if own := keys.get("sources"):
        for group, text in own.mapping(allowed=_SOURCE_GROUPS).items():
            sources[group] = _text(text) or ""
    if len(problems.found) == before:
        gpu = Gpu(id=gpu_id, sources=sources, **values)
        _check_figures(entry, gpu)
    return gpu if len(problems.found) == before else None


def _check_vendor(keys: Mapping[str, Entry]) -> None:
    """Report a GPU of another vendor than NVIDIA: by `vendor`, or where its name begins with one.

    Rooflines, kernels and the memory of a context are those of CUDA.
    """
    if "vendor" in keys:
        text = _text(keys["vendor"])
        if text is not None and text.lower() != "nvidia":
            keys["vendor"].add(not_supported(VENDORS.get(text.lower(), text)))
    for entry in (keys[key] for key in ("name", "device_names") if key in keys):
        node = entry.node
        for each in node.value if isinstance(node, SequenceNode) else [node]:
            word = str(each.value).partition(" ")[0] if isinstance(each, ScalarNode) else ""
            vendor = VENDORS.get(word.lower(), "NVIDIA")
            if vendor != "NVIDIA":
                replace(entry, node=each).add(not_supported(vendor))


def _taken_over(gpu_id: str, like: Entry | None, base: Mapping[str, Gpu]) -> dict[str, Any]:
    """The fields of the entry that `like` names: all of it for the same id, else its figures."""
    if like is None:
        return {}
    named = _text(like)
    if named is None or named not in base:
        if named is not None:
            like.add_error(unknown("GPU", named, base, list_command="tuner gpus"))
        return {field.name: None for field in fields(Gpu) if field.name not in ("id", "sources")}
    gpu = base[named]
    values = {field.name: getattr(gpu, field.name) for field in fields(Gpu) if field.name != "id"}
    if gpu_id != named:
        values |= {"name": f"{gpu.name} ({gpu_id})", "device_names": (), "aliases": ()}
    return values


def _check_figures(entry: Entry, gpu: Gpu) -> None:
    """Report what contradicts itself within one entry."""
    for precision in NATIVE_PRECISIONS:
        places = (precision in gpu.flops) + (precision in gpu.unsupported)
        if places == 0:
            entry.add(f"{precision} has neither a rate in `tflops` nor a reason in `unsupported`")
        elif places == 2:
            entry.add(f"{precision} is in both `tflops` and `unsupported`")
    if "fp32" not in gpu.flops:
        entry.add("needs a rate for fp32, which every GPU has")
    if gpu.context_bytes >= gpu.memory_bytes:
        entry.add("`context` is not smaller than `memory`")
    if gpu.ecc_memory_bytes is not None and gpu.ecc_memory_bytes >= gpu.memory_bytes:
        entry.add("`ecc_memory` is not smaller than `memory`")
    if gpu.price_usd_per_hour is not None and gpu.price_date is None:
        entry.add("a price needs its `price_date`")
    absent = {
        "price": gpu.price_usd_per_hour is None,
        "power": gpu.power_w is None,
        "l2": gpu.l2_bytes is None,
        "link": gpu.link_bytes_per_s is None,
        "network": gpu.network_bytes_per_s is None,
        "nccl": gpu.nccl_channels is None,
    }
    for group in _SOURCE_GROUPS:
        if not gpu.sources.get(group) and not absent.get(group, False):
            entry.add(f"`sources` has no source for `{group}`")


__all__ = [
    "LIMIT_OF_TYPE", "NATIVE_PRECISIONS", "PRECISIONS", "Gpu", "get_gpu", "load_catalogue",
    "match_device",
]  # fmt: skip

MEMORY_TOLERANCE = 0.05
"""Tolerance of a device's memory against the catalogue's: drivers differ by 2 %, types by more."""

USER_FILE_VARIABLE = "TUNER_GPUS"

_FORM = Form(
    "GPU catalogue", "gpus: {my_gpu: {like: a6000}}", "expected `gpus:` with one entry per id"
)
_SHIPPED = Path(__file__).with_name("gpus.yaml")

_VENDORS = {
    "AMD": r"(amd|instinct|radeon|ryzen|rocm|gfx\d).*|mi\d{2,3}\w{0,2}|(rx\d|w[67][5-9]0)\d+\w*",
    "Intel": r"(intel|gaudi|habana|arc|pontevecchio|hpu|xpu|max1[15]\d\d).*|a[357][1578]0|b5[78]0",
    "Google": r"(google|tpu|trillium|ironwood|v[2-7](e|p|lite)).*",
    "Apple": r"(apple|mps).*|m[1-9](pro|max|ultra)?",
    "Amazon": r"(amazon|aws)?(trainium|inferentia|neuron|trn\d|inf\d).*",
    "Huawei": r"(huawei|ascend).*|910[abc]?",
}
"""By vendor of other accelerators: names that people have for them, after `_normalise`."""

_WITHOUT_TENSOR_CORES = re.compile(
    r"(nvidia|tesla|geforce|quadro)*((gtx)?(9|10|16)\d0(ti|super)?|titan(x|xp)|[kmp]\d{1,4}0?)"
    r"(pcie|sxm2)?(\d+gb)?"
)
"""NVIDIA's GPUs before Volta, and those of Turing without tensor cores, after `_normalise`."""

_RAY_NAME = re.compile(r"\w+\s+((?:[A-Z]+\s+)*[A-Z0-9]*\d[A-Z0-9]*)")
"""The part of a device's name that Ray 2.60 takes as the accelerator's ("NVIDIA RTX A6000"), with
dashes for spaces; without such a part it takes all after "NVIDIA"."""

LIMIT_OF_TYPE = -1
"""A memory limit of as much as the type asked for has (`--memory-limit auto`)."""


@dataclass(frozen=True, slots=True)
class _Catalogue:
    """Entries by id, and the names that are refused because several entries answer to them.

    `instances` has the machines of clouds by normalised name: the id of their GPUs, and how many.
    `accelerators` has the ids that Ray's name of an accelerator may mean, as it is written.
    """

    gpus: Mapping[str, Gpu]
    ambiguous: Mapping[str, tuple[str, ...]]
    instances: Mapping[str, tuple[str, int]]
    accelerators: Mapping[str, tuple[str, ...]]


def load_catalogue(extra: Path | None = None) -> Mapping[str, Gpu]:
    """Every known GPU type by id: the shipped ones, then the user's, which may replace them.

    The user's file is `extra`, else what the environment variable TUNER_GPUS names, else
    ~/.config/tuner/gpus.yaml where that exists. Raises `InputError` with every problem of it.
    """
    return MappingProxyType(dict(_load(extra).gpus))


def get_gpu(
    text: str,
    *,
    memory_bytes: int | None = None,
    price_usd_per_hour: float | None = None,
    extra: Path | None = None,
) -> Gpu:
    """The GPU type that `text` names, with the user's own memory and price where given.

    Ids, aliases, exact device names and the machines of clouds ("p4de.24xlarge") are accepted;
    case, spaces, dashes and underscores do not matter. The name of one GPU of several in a machine
    says so. Raises `InputError` for a name that is unknown or that several types answer to and for
    the processor, and `UnavailableError` for an accelerator of another vendor.
    """
    if word_of(text) == "cpu":
        raise not_predicted()
    catalogue = _load(extra)
    gpu = _find(text, catalogue)
    _, count = catalogue.instances.get(_normalise(text), ("", 1))
    if count > 1:
        gpu = replace(gpu, name=f"{gpu.name}, one of {count} in a {text.strip()}")
    return as_told(gpu, memory_bytes=memory_bytes, price_usd_per_hour=price_usd_per_hour)


def word_of(gpu: object) -> str:
    """The name of a GPU type in small letters. Raises `InputError` for what is no text."""
    if not isinstance(gpu, str):
        raise InputError(f"gpu is the name of one GPU type, got {gpu!r}", hint="call once for each")
    return gpu.strip().lower()


def not_predicted() -> InputError:
    """The error where memory or speed of a processor is asked for."""
    return InputError(
        "a processor isn't predicted or emulated",
        hint="`tuner search` and `tuner trial` with --gpu cpu measure on it; `tuner gpus` lists "
        "the types that are predicted",
    )


def as_told(gpu: Gpu, *, memory_bytes: int | None, price_usd_per_hour: float | None) -> Gpu:
    """`gpu` with the user's own memory and price where given.

    Raises `InputError` for memory that its context alone exceeds, and for what is no price.
    """
    changes: dict[str, Any] = {}
    sources = dict(gpu.sources)
    if memory_bytes is not None:
        if memory_bytes <= gpu.context_bytes:
            raise InputError(
                f"GPU memory of {memory_bytes} bytes is less than the CUDA context of a {gpu.name}"
                f" ({gpu.context_bytes} bytes)",
                hint=f"a {gpu.name} has {format_gib(gpu.memory_bytes)}",
            )
        changes["memory_bytes"] = memory_bytes
        sources["memory"] = "given by the user"
    if price_usd_per_hour is not None:
        if not (math.isfinite(price_usd_per_hour) and price_usd_per_hour >= 0):
            raise InputError(f"price {price_usd_per_hour} is not an amount in USD per hour")
        changes |= {"price_usd_per_hour": float(price_usd_per_hour), "price_date": None}
        sources["price"] = "given by the user"
    return replace(gpu, sources=sources, **changes) if changes else gpu


def match_device(name: str, memory_bytes: int, extra: Path | None = None) -> Gpu | None:
    """The type of a device with this exact name and, within 5 %, this memory; else None.

    A card with ECC switched on is the same type with less memory, and is returned with it.
    """
    found: tuple[float, Gpu] | None = None
    for gpu in load_catalogue(extra).values():
        if name not in gpu.device_names:
            continue
        for size in filter(None, (gpu.memory_bytes, gpu.ecc_memory_bytes)):
            distance = abs(memory_bytes - size) / size
            if distance <= MEMORY_TOLERANCE and (found is None or distance < found[0]):
                found = (distance, replace(gpu, memory_bytes=size))
    return found[1] if found else None


def _normalise(text: str) -> str:
    return re.sub(r"[\s_-]+", "", text).casefold()


def types_named(text: str) -> tuple[str, ...]:
    """The ids of the types that answer to `text`: one for most names, none for an unknown one."""
    return _named(text, _load(None))


def accelerator_types(name: str) -> tuple[str, ...]:
    """The ids of the types that Ray's name of an accelerator may mean; none for an unknown name."""
    catalogue, key = _load(None), _normalise(name)
    for text, ids in catalogue.accelerators.items():
        if _normalise(text) == key:
            return ids
    return _named(name, catalogue) or _named(f"NVIDIA {name}", catalogue) if name else ()


def accelerator_names(gpu: Gpu) -> tuple[str, ...]:
    """Names by which nodes of a Ray cluster may label GPUs of this type, that of Ray first."""
    names = [
        match[1].replace(" ", "-")
        for name in gpu.device_names
        if (match := _RAY_NAME.match(name)) or (match := re.match(r"NVIDIA (.*)", name))
    ]
    own = [name for name, ids in _load_shipped().accelerators.items() if gpu.id in ids]
    every = [*names, *own, gpu.id, gpu.id.upper(), *map(str.upper, gpu.aliases)]
    return tuple(dict.fromkeys(every))


def _named(text: str, catalogue: _Catalogue) -> tuple[str, ...]:
    key = _normalise(text)
    gpus = catalogue.gpus
    for gpu in gpus.values():
        if key in map(_normalise, (gpu.id, *gpu.aliases)):
            return (gpu.id,)
    if key in catalogue.instances:
        return (catalogue.instances[key][0],)
    return tuple(catalogue.ambiguous.get(key, ())) or tuple(
        gpu.id for gpu in gpus.values() if key in map(_normalise, (gpu.name, *gpu.device_names))
    )


def _find(text: str, catalogue: _Catalogue) -> Gpu:
    """The entry that `text` names, or the error that says why there is none."""
    gpus = catalogue.gpus
    ids = _named(text, catalogue)
    if len(ids) == 1:
        return gpus[ids[0]]
    if ids:
        choices = ", ".join(
            f"{i} ({gpus[i].name}, {format_gib(gpus[i].memory_bytes)})" for i in ids
        )
        raise InputError(f"GPU {text!r} is ambiguous", hint=f"choose one of: {choices}")
    key = _normalise(text)
    vendors = (v for v, names in _VENDORS.items() if re.match(f"({names})$", key))
    if vendor := next(vendors, None):
        raise UnavailableError(
            f"{not_supported(vendor)}: {text!r}",
            hint="only GPUs of NVIDIA are: `tuner gpus` lists them",
        )
    if _WITHOUT_TENSOR_CORES.fullmatch(_normalise(text)):
        raise UnavailableError(
            f"GPUs without tensor cores are not supported: {text!r}",
            hint="the oldest are of the Volta and Turing generations: `tuner gpus` lists all",
        )
    if "," in text:
        hint = "name one; `tuner check` and `tuner estimate` compare all types without --gpu"
        raise InputError(f"--gpu {text!r} names several GPU types", hint=hint)
    error = unknown("GPU", text, gpus, list_command="tuner gpus")
    own = "a GPU of your own can be described in ~/.config/tuner/gpus.yaml"
    raise InputError(error.message, hint=f"{error.hint}; {own}")


def _user_file(extra: Path | None) -> Path | None:
    if extra is not None:
        return extra
    if named := os.environ.get(USER_FILE_VARIABLE):
        return Path(named)
    try:
        default = Path.home() / ".config" / "tuner" / "gpus.yaml"
    except RuntimeError:  # no home directory, as in some containers
        return None
    return default if default.is_file() else None


def _load(extra: Path | None) -> _Catalogue:
    shipped = _load_shipped()
    path = _user_file(extra)
    try:
        return shipped if path is None else _read(path, shipped)
    except InputError as error:
        problems = error.problems or [Problem(error.message)]
        text = f"GPU file {path} cannot be used"
        raise InputError(text, problems=problems, hint=error.hint) from None


@functools.cache
def _load_shipped() -> _Catalogue:
    return _read(_SHIPPED, _Catalogue({}, {}, {}, {}), shipped=True)


def _read(path: Path, base: _Catalogue, *, shipped: bool = False) -> _Catalogue:
    """The catalogue `base` with the entries of the file at `path`, all of its problems at once."""
    problems = Problems(path.name)
    # libyaml is ten times faster, and brackets nested by the thousand overflow its stack.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader) if shipped else yaml.SafeLoader
    root = compose(read_text(path, _FORM), path.name, _FORM, loader=loader)
    allowed = ("gpus", "ambiguous", "instances", "accelerators")
    top = Place(problems, root, "").mapping(allowed=allowed)

    def section(name: str) -> dict[str, Entry]:
        return top[name].mapping() if name in top else {}

    gpus, entries = dict(base.gpus), section("gpus")
    if not entries and not problems.found:
        problems.place("").add("has no GPU", hint=_FORM.hint)
    for gpu_id, entry in entries.items():
        gpu = read_entry(entry, base.gpus, shipped=shipped)
        if gpu is not None:
            gpus[gpu_id] = gpu
    ambiguous, accelerators = dict(base.ambiguous), dict(base.accelerators)
    for kind, found in (("ambiguous", ambiguous), ("accelerators", accelerators)):
        for text, entry in section(kind).items():
            choices = _texts(entry) or ()
            for choice in choices:
                if choice not in gpus and choice not in entries:
                    entry.add(f"{choice!r} is not the id of a GPU")
            found[_normalise(text) if kind == "ambiguous" else text] = choices
    instances = dict(base.instances)
    for gpu_id, entry in section("instances").items():
        if gpu_id not in gpus and gpu_id not in entries:
            entry.add(f"{gpu_id!r} is not the id of a GPU")
        for machine, held in entry.mapping().items():
            instances[_normalise(machine)] = (gpu_id, _count(held) or 1)
    _check_names(problems, gpus, ambiguous, entries)
    problems.check()
    return _Catalogue(gpus, ambiguous, instances, accelerators)


def _check_names(
    problems: Problems, gpus: Mapping[str, Gpu], ambiguous: Iterable[str], own: Mapping[str, Entry]
) -> None:
    """Report names that two entries share; an id may not be refused as ambiguous either."""

    def report(gpu_id: str, message: str) -> None:
        (own.get(gpu_id) or problems.place(f"gpus.{gpu_id}")).add(message)

    owners: dict[str, str] = {}
    for gpu in gpus.values():
        for name in (gpu.id, *gpu.aliases):
            key = _normalise(name)
            owner = owners.setdefault(key, gpu.id)
            culprit = gpu.id if gpu.id in own else owner
            if owner != gpu.id:
                other = owner if culprit == gpu.id else gpu.id
                report(culprit, f"{name!r} also names {other!r}")
            if key in ambiguous:
                report(gpu.id, f"{name!r} is refused as ambiguous")
    for gpu_id in own.keys() & gpus.keys():
        for twin in gpus.values():
            shared = set(gpus[gpu_id].device_names) & set(twin.device_names)
            distance = abs(twin.memory_bytes / gpus[gpu_id].memory_bytes - 1)
            if twin.id != gpu_id and shared and distance <= 2 * MEMORY_TOLERANCE:
                message = f"device {min(shared)!r} with this memory is already {twin.id!r}"
                report(gpu_id, message)
