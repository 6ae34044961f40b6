"""One entry of the GPU catalogue: its fields, and how it is read from a file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from yaml import Node, ScalarNode, SequenceNode

from tuner.core.errors import InputError, unknown
from tuner.core.gpu import ARCHITECTURES, NATIVE_PRECISIONS, VENDORS, Gpu, not_supported
from tuner.core.units import GIB, KIB, MIB, parse_bytes
from tuner.space.document import Entry, Problems, is_nothing, mapping, scalar, sequence

_LONGEST_SIZE = 40  # characters; longer digits would overflow a float


_SOURCE_GROUPS = (
    *("device", "memory", "tflops", "bandwidth", "l2"),
    *("link", "network", "nccl", "power", "context", "price"),
)

_OPTIONAL_KEYS: dict[str, Any] = {
    "aliases": (),
    "ecc_memory": None,
    "l2_cache": None,
    "link_gb_per_s": None,
    "network_gb_per_s": None,
    "nccl_channels": None,
    "power_w": None,
    "unsupported": {},
    "price_usd_per_hour": None,
    "price_date": None,
}
"""Keys of an entry that may be left out, with what that means."""


def _text(node: Node, problems: Problems, where: str) -> str | None:
    """The text of a scalar, without space around it; empty text is a problem."""
    text = scalar(node, problems, where)
    if text is not None and not text.strip():
        problems.add(node, "is empty", at=where)
    return text.strip() or None if text is not None else None


def read_texts(node: Node, problems: Problems, where: str) -> tuple[str, ...] | None:
    """The texts of a list."""
    items = sequence(node, problems, where)
    if items is None:
        return None
    values = [_text(item, problems, where) for item in items]
    return tuple(value for value in values if value is not None)


class _Reader:
    """Reads the values of an entry; None stands for one with a problem, which is noted."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems

    def text(self, node: Node, where: str) -> str | None:
        return _text(node, self.problems, where)

    def texts(self, node: Node, where: str) -> tuple[str, ...] | None:
        return read_texts(node, self.problems, where)

    def number(self, node: Node, where: str, low: float, high: float) -> float | None:
        """A number from `low` to `high`, both included."""
        text = self.text(node, where)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            text = f"{text!r} is not a number from {low:g} to {high:g}"
            self.problems.add(node, text, at=where)
            return None
        return value

    def size(self, node: Node, where: str, low: int, high: int) -> int | None:
        """Bytes of a size with its unit, from `low` to `high`."""
        text = self.text(node, where)
        if text is None:
            return None
        try:
            value = parse_bytes(text[:_LONGEST_SIZE], what=where.rpartition(".")[2])
        except InputError as error:
            self.problems.add_error(node, error, at=where)
            return None
        if not low <= value <= high:
            text = f"{text!r} is not between {low} and {high} bytes"
            self.problems.add(node, text, at=where)
            return None
        return value

    def memory(self, node: Node, where: str) -> int | None:
        return self.size(node, where, 256 * MIB, 4096 * GIB)

    def bandwidth(self, node: Node, where: str) -> float | None:
        gb_per_s = self.number(node, where, 1, 1e6)
        return gb_per_s * 1e9 if gb_per_s is not None else None

    def capability(self, node: Node, where: str) -> tuple[int, int] | None:
        text = self.text(node, where)
        if text is None:
            return None
        match = re.fullmatch(r"([0-9]{1,2})\.([0-9])", text)
        if match is None:
            self.problems.add(node, f"{text!r} is not a compute capability like 8.6", at=where)
            return None
        found = int(match[1]), int(match[2])
        if found not in ARCHITECTURES:
            known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
            self.problems.add(node, f"no GPU of NVIDIA has {text}; known: {known}", at=where)
            return None
        return found

    def count(self, node: Node, where: str) -> int | None:
        number = self.number(node, where, 1, 10_000)
        if number is not None and number != int(number):
            self.problems.add(node, f"{number} is not a whole number", at=where)
        return int(number) if number is not None else None

    def flops(self, node: Node, where: str) -> dict[str, float]:
        found = mapping(node, self.problems, where, allowed=NATIVE_PRECISIONS)
        rates = {p: self.number(e.value, e.at, 0.01, 1e6) for p, e in found.items()}
        return {p: round(rate * 1e12, 0) for p, rate in rates.items() if rate is not None}

    def reasons(self, node: Node, where: str) -> dict[str, str]:
        found = mapping(node, self.problems, where, allowed=NATIVE_PRECISIONS)
        return {p: self.text(e.value, e.at) or "" for p, e in found.items()}

    def price(self, node: Node, where: str) -> float | None:
        return None if is_nothing(node) else self.number(node, where, 0, 1000)

    def date(self, node: Node, where: str) -> str | None:
        text = self.text(node, where)
        if text is not None and not re.fullmatch(r"[0-9]{4}(-[0-9]{2}(-[0-9]{2})?)?", text):
            self.problems.add(node, f"{text!r} is not a date like 2026-09-27", at=where)
        return text


def read_count(node: Node, problems: Problems, where: str) -> int | None:
    """A whole number from 1."""
    return _Reader(problems).count(node, where)


def _readers(read: _Reader) -> dict[str, tuple[str, str, Callable[[Node, str], Any]]]:
    """For each key of an entry: the field of `Gpu` it fills, its group of sources, its reader."""
    return {
        "name": ("name", "device", read.text),
        "device_names": ("device_names", "device", read.texts),
        "aliases": ("aliases", "device", read.texts),
        "memory": ("memory_bytes", "memory", read.memory),
        "ecc_memory": ("ecc_memory_bytes", "memory", read.memory),
        "tflops": ("flops", "tflops", read.flops),
        "unsupported": ("unsupported", "tflops", read.reasons),
        "bandwidth_gb_per_s": ("bandwidth_bytes_per_s", "bandwidth", read.bandwidth),
        "l2_cache": ("l2_bytes", "l2", lambda n, w: read.size(n, w, 64 * KIB, GIB)),
        "link_gb_per_s": ("link_bytes_per_s", "link", read.bandwidth),
        "network_gb_per_s": ("network_bytes_per_s", "network", read.bandwidth),
        "nccl_channels": ("nccl_channels", "nccl", read.count),
        "power_w": ("power_w", "power", lambda n, w: read.number(n, w, 5, 5000)),
        "compute_capability": ("compute_capability", "device", read.capability),
        "sm_count": ("sm_count", "device", read.count),
        "context": ("context_bytes", "context", lambda n, w: read.size(n, w, 0, 16 * GIB)),
        "price_usd_per_hour": ("price_usd_per_hour", "price", read.price),
        "price_date": ("price_date", "price", read.date),
    }


def read_entry(
    entry: Entry, problems: Problems, base: Mapping[str, Gpu], *, shipped: bool
) -> Gpu | None:
    """The GPU of an entry, or None when it has a problem, which is then in `problems`."""
    gpu_id, node, where, before = entry.name, entry.value, entry.at, len(problems.found)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_]{0,63}", gpu_id):
        problems.add(node, "an id has lower-case letters, digits and underscores only", at=where)
    readers = _readers(_Reader(problems))
    keys = mapping(node, problems, where, allowed=(*readers, "vendor", "sources", "like"))
    _check_vendor(problems, keys)
    values = _taken_over(problems, gpu_id, keys.get("like"), base)
    sources: dict[str, str] = dict(values.pop("sources", {}))
    for key, (name, group, read) in readers.items():
        if key in keys:
            values[name] = read(keys[key].value, keys[key].at)
            if not shipped:
                line = keys[key].value.start_mark.line + 1
                sources[group] = f"{problems.file}:{line}"
        elif name not in values:
            if key not in _OPTIONAL_KEYS:
                how = "" if shipped else "; `like: rtx4090` takes over all that another type has"
                problems.add(node, f"{key!r} is missing{how}", at=where)
            values[name] = _OPTIONAL_KEYS.get(key)
    if own := keys.get("sources"):
        for group, text in mapping(own.value, problems, own.at, allowed=_SOURCE_GROUPS).items():
            sources[group] = _text(text.value, problems, text.at) or ""
    if len(problems.found) == before:
        gpu = Gpu(id=gpu_id, sources=sources, **values)
        _check_figures(problems, node, gpu)
    return gpu if len(problems.found) == before else None


def _check_vendor(problems: Problems, keys: Mapping[str, Entry]) -> None:
    """Report a GPU of another vendor than NVIDIA: by `vendor`, or where its name begins with one.

    Rooflines, kernels and the memory of a context are those of CUDA.
    """
    if "vendor" in keys:
        entry = keys["vendor"]
        text = _text(entry.value, problems, entry.at)
        if text is not None and text.lower() != "nvidia":
            vendor = VENDORS.get(text.lower(), text)
            problems.add(entry.value, not_supported(vendor), at=entry.at)
    for entry in (keys[key] for key in ("name", "device_names") if key in keys):
        node = entry.value
        for each in node.value if isinstance(node, SequenceNode) else [node]:
            word = str(each.value).partition(" ")[0] if isinstance(each, ScalarNode) else ""
            vendor = VENDORS.get(word.lower(), "NVIDIA")
            if vendor != "NVIDIA":
                problems.add(each, not_supported(vendor), at=entry.at)


def _taken_over(
    problems: Problems, gpu_id: str, like: Entry | None, base: Mapping[str, Gpu]
) -> dict[str, Any]:
    """The fields of the entry that `like` names: all of it for the same id, else its figures."""
    if like is None:
        return {}
    named = _text(like.value, problems, like.at)
    if named is None or named not in base:
        if named is not None:
            error = unknown("GPU", named, base, list_command="tuner gpus")
            problems.add_error(like.value, error, at=like.at)
        return {field.name: None for field in fields(Gpu) if field.name not in ("id", "sources")}
    gpu = base[named]
    values = {field.name: getattr(gpu, field.name) for field in fields(Gpu) if field.name != "id"}
    if gpu_id != named:
        values |= {"name": f"{gpu.name} ({gpu_id})", "device_names": (), "aliases": ()}
    return values


def _check_figures(problems: Problems, node: Node, gpu: Gpu) -> None:
    """Report what contradicts itself within one entry."""
    where = f"gpus.{gpu.id}"
    for precision in NATIVE_PRECISIONS:
        places = (precision in gpu.flops) + (precision in gpu.unsupported)
        if places == 0:
            message = f"{precision} has neither a rate in `tflops` nor a reason in `unsupported`"
            problems.add(node, message, at=where)
        elif places == 2:
            problems.add(node, f"{precision} is in both `tflops` and `unsupported`", at=where)
    if "fp32" not in gpu.flops:
        problems.add(node, "needs a rate for fp32, which every GPU has", at=where)
    if gpu.context_bytes >= gpu.memory_bytes:
        problems.add(node, "`context` is not smaller than `memory`", at=where)
    if gpu.ecc_memory_bytes is not None and gpu.ecc_memory_bytes >= gpu.memory_bytes:
        problems.add(node, "`ecc_memory` is not smaller than `memory`", at=where)
    if gpu.price_usd_per_hour is not None and gpu.price_date is None:
        problems.add(node, "a price needs its `price_date`", at=where)
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
            problems.add(node, f"`sources` has no source for `{group}`", at=where)
