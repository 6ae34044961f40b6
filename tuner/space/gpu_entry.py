"""One entry of the GPU catalogue: its fields, and how it is read from a file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from yaml import Node, ScalarNode, SequenceNode

from tuner.core.errors import InputError, Problem, nearest, unknown
from tuner.core.gpu import ARCHITECTURES, NATIVE_PRECISIONS, VENDORS, Gpu, not_supported
from tuner.core.units import GIB, MIB, parse_bytes

MAX_BYTES = 256 * 1024
"""Several times the shipped catalogue with its sources."""

_LONGEST_SIZE = 40  # characters; longer digits would overflow a float


class YamlFile:
    """A YAML file as nodes that know their line, and the problems found in it so far.

    Nodes instead of Python objects: every scalar stays the text that was written (YAML 1.1
    would make numbers, dates and booleans of some), and every problem gets its line.
    """

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self.path = path
        self._trusted = trusted
        self.problems: list[Problem] = []

    def root(self) -> yaml.Node | None:
        """The document's node; None for an empty or unreadable one, which is reported."""
        # libyaml is ten times faster, and brackets nested by the thousand overflow its stack.
        loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader) if self._trusted else yaml.BaseLoader
        try:
            node: yaml.Node | None = yaml.compose(self._text(), loader)
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path} is not a text file in UTF-8: {error}") from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark else ""
            what = getattr(error, "problem", None) or str(error).splitlines()[0]
            self.problems.append(Problem(f"is not valid YAML: {what}", f"{self.path.name}{line}"))
            self.raise_problems()
        except RecursionError:
            self.report(None, "", "is nested too deeply")
            self.raise_problems()
        except (ValueError, OverflowError) as error:
            # PyYAML lets these escape from impossible escapes (\UFFFFFFFF) and versions.
            self.report(None, "", f"is not valid YAML: {error}")
            self.raise_problems()
        if node is None:
            self.report(None, "", "is empty; expected `gpus:` with one entry per id")
        return node

    def _text(self) -> str:
        with self.path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InputError(f"{self.path} is larger than {MAX_BYTES} bytes, and no GPU file")
        return data.decode("utf-8")

    def report(self, node: yaml.Node | None, where: str, message: str) -> None:
        """Note a problem of the value at `node`, which stands at `where` ("gpus.a6000.memory")."""
        line = f":{node.start_mark.line + 1}" if node is not None else ""
        self.problems.append(Problem(message, f"{self.path.name}{line} {where}".rstrip()))

    def raise_problems(self) -> None:
        """Raise one `InputError` with all problems noted so far, if there are any."""
        if self.problems:
            raise InputError(f"GPU file {self.path} cannot be used", problems=self.problems)

    def mapping(
        self, node: yaml.Node | None, where: str, known: Iterable[str] = ()
    ) -> dict[str, yaml.Node]:
        """The entries of a mapping; double keys and, given `known`, unknown ones are reported."""
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            self.report(node, where, "is not a mapping (`key: value` lines)")
            return {}
        found: dict[str, yaml.Node] = {}
        known = tuple(known)
        for key_node, value in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if not key or not key.strip():
                self.report(key_node, where, "has a key that is not a word")
            elif known and key not in known:
                close = nearest(key, known)
                hint = f"did you mean {close!r}?" if close else f"allowed: {', '.join(known)}"
                self.report(key_node, where, f"unknown key {key!r}; {hint}")
            elif key in found:
                self.report(key_node, where, f"key {key!r} is set twice")
            else:
                found[key] = value
        return found

    @staticmethod
    def is_null(node: yaml.Node) -> bool:
        """True if the value is written as nothing, `~` or `null`."""
        return isinstance(node, yaml.ScalarNode) and node.value in ("", "~", "null")

    def text(self, node: yaml.Node, where: str) -> str | None:
        """The text of a scalar as it was written, without space around it."""
        if isinstance(node, yaml.ScalarNode) and node.value.strip():
            return str(node.value).strip()
        self.report(node, where, "is not a text")
        return None

    def texts(self, node: yaml.Node, where: str) -> tuple[str, ...] | None:
        """The texts of a list."""
        if not isinstance(node, yaml.SequenceNode):
            self.report(node, where, "is not a list of texts")
            return None
        values = [self.text(item, where) for item in node.value]
        return tuple(value for value in values if value is not None)

    def number(self, node: yaml.Node, where: str, low: float, high: float) -> float | None:
        """A number from `low` to `high`, both included."""
        text = self.text(node, where)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            self.report(node, where, f"{text!r} is not a number from {low:g} to {high:g}")
            return None
        return value

    def size(self, node: yaml.Node, where: str, low: int, high: int) -> int | None:
        """Bytes of a size with its unit, from `low` to `high`."""
        text = self.text(node, where)
        if text is None:
            return None
        try:
            value = parse_bytes(text[:_LONGEST_SIZE], what=where.rpartition(".")[2])
        except InputError as error:
            self.report(node, where, f"{error.message}; {error.hint}")
            return None
        if not low <= value <= high:
            self.report(node, where, f"{text!r} is not between {low} and {high} bytes")
            return None
        return value


_SOURCE_GROUPS = (
    *("device", "memory", "tflops", "bandwidth"),
    *("link", "network", "nccl", "power", "context", "price"),
)

_OPTIONAL_KEYS: dict[str, Any] = {
    "aliases": (),
    "ecc_memory": None,
    "link_gb_per_s": None,
    "network_gb_per_s": None,
    "nccl_channels": None,
    "power_w": None,
    "unsupported": {},
    "price_usd_per_hour": None,
    "price_date": None,
}
"""Keys of an entry that may be left out, with what that means."""


def _readers(file: YamlFile) -> dict[str, tuple[str, str, Callable[[Node, str], Any]]]:
    """For each key of an entry: the field of `Gpu` it fills, its group of sources, its reader."""

    def memory(node: Node, where: str) -> int | None:
        return file.size(node, where, 256 * MIB, 4096 * GIB)

    def bandwidth(node: Node, where: str) -> float | None:
        gb_per_s = file.number(node, where, 1, 1e6)
        return gb_per_s * 1e9 if gb_per_s is not None else None

    def capability(node: Node, where: str) -> tuple[int, int] | None:
        text = file.text(node, where)
        if text is None:
            return None
        match = re.fullmatch(r"([0-9]{1,2})\.([0-9])", text)
        if match is None:
            file.report(node, where, f"{text!r} is not a compute capability like 8.6")
            return None
        found = int(match[1]), int(match[2])
        if found not in ARCHITECTURES:
            known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
            file.report(node, where, f"no GPU of NVIDIA has {text}; known: {known}")
            return None
        return found

    def count(node: Node, where: str) -> int | None:
        number = file.number(node, where, 1, 10_000)
        if number is not None and number != int(number):
            file.report(node, where, f"{number} is not a whole number")
        return int(number) if number is not None else None

    def flops(node: Node, where: str) -> dict[str, float]:
        rates = {
            precision: file.number(value, f"{where}.{precision}", 0.01, 1e6)
            for precision, value in file.mapping(node, where, known=NATIVE_PRECISIONS).items()
        }
        return {p: round(rate * 1e12, 0) for p, rate in rates.items() if rate is not None}

    def reasons(node: Node, where: str) -> dict[str, str]:
        found = file.mapping(node, where, known=NATIVE_PRECISIONS)
        return {p: file.text(value, f"{where}.{p}") or "" for p, value in found.items()}

    def price(node: Node, where: str) -> float | None:
        return None if file.is_null(node) else file.number(node, where, 0, 1000)

    def date(node: Node, where: str) -> str | None:
        text = file.text(node, where)
        if text is not None and not re.fullmatch(r"[0-9]{4}(-[0-9]{2}(-[0-9]{2})?)?", text):
            file.report(node, where, f"{text!r} is not a date like 2026-09-27")
        return text

    return {
        "name": ("name", "device", file.text),
        "device_names": ("device_names", "device", file.texts),
        "aliases": ("aliases", "device", file.texts),
        "memory": ("memory_bytes", "memory", memory),
        "ecc_memory": ("ecc_memory_bytes", "memory", memory),
        "tflops": ("flops", "tflops", flops),
        "unsupported": ("unsupported", "tflops", reasons),
        "bandwidth_gb_per_s": ("bandwidth_bytes_per_s", "bandwidth", bandwidth),
        "link_gb_per_s": ("link_bytes_per_s", "link", bandwidth),
        "network_gb_per_s": ("network_bytes_per_s", "network", bandwidth),
        "nccl_channels": ("nccl_channels", "nccl", count),
        "power_w": ("power_w", "power", lambda n, w: file.number(n, w, 5, 5000)),
        "compute_capability": ("compute_capability", "device", capability),
        "sm_count": ("sm_count", "device", count),
        "context": ("context_bytes", "context", lambda n, w: file.size(n, w, 0, 16 * GIB)),
        "price_usd_per_hour": ("price_usd_per_hour", "price", price),
        "price_date": ("price_date", "price", date),
    }


def read_entry(
    file: YamlFile, gpu_id: str, node: Node, base: Mapping[str, Gpu], *, shipped: bool
) -> Gpu | None:
    """The entry, or None when it has a problem (which is then in `file.problems`)."""
    where, before = f"gpus.{gpu_id}", len(file.problems)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_]{0,63}", gpu_id):
        file.report(node, where, "an id has lower-case letters, digits and underscores only")
    readers = _readers(file)
    keys = file.mapping(node, where, known=(*readers, "vendor", "sources", "like"))
    _check_vendor(file, keys, where)
    values = _taken_over(file, gpu_id, keys.get("like"), base)
    sources: dict[str, str] = dict(values.pop("sources", {}))
    for key, (name, group, read) in readers.items():
        if key in keys:
            values[name] = read(keys[key], f"{where}.{key}")
            if not shipped:
                sources[group] = f"{file.path.name}:{keys[key].start_mark.line + 1}"
        elif name not in values:
            if key not in _OPTIONAL_KEYS:
                file.report(node, where, f"{key!r} is missing")
            values[name] = _OPTIONAL_KEYS.get(key)
    for group, text in file.mapping(keys.get("sources"), where, known=_SOURCE_GROUPS).items():
        sources[group] = file.text(text, f"{where}.sources.{group}") or ""
    if len(file.problems) == before:
        gpu = Gpu(id=gpu_id, sources=sources, **values)
        _check_figures(file, node, gpu)
    return gpu if len(file.problems) == before else None


def _check_vendor(file: YamlFile, keys: Mapping[str, Node], where: str) -> None:
    """Report a GPU of another vendor than NVIDIA: by `vendor`, or where its name begins with one.

    Rooflines, kernels and the memory of a context are those of CUDA.
    """
    if "vendor" in keys:
        text = file.text(keys["vendor"], f"{where}.vendor")
        if text is not None and text.lower() != "nvidia":
            vendor = VENDORS.get(text.lower(), text)
            file.report(keys["vendor"], f"{where}.vendor", not_supported(vendor))
    for key in ("name", "device_names"):
        node = keys.get(key)
        for each in node.value if isinstance(node, SequenceNode) else [node]:
            word = str(each.value).partition(" ")[0] if isinstance(each, ScalarNode) else ""
            vendor = VENDORS.get(word.lower(), "NVIDIA")
            if vendor != "NVIDIA":
                file.report(each, f"{where}.{key}", not_supported(vendor))


def _taken_over(
    file: YamlFile, gpu_id: str, like: Node | None, base: Mapping[str, Gpu]
) -> dict[str, Any]:
    """The fields of the entry that `like` names: all of it for the same id, else its figures."""
    if like is None:
        return {}
    where = f"gpus.{gpu_id}.like"
    named = file.text(like, where)
    if named is None or named not in base:
        if named is not None:
            error = unknown("GPU", named, base, list_command="tuner gpus")
            file.report(like, where, f"{error.message}; {error.hint}")
        return {field.name: None for field in fields(Gpu) if field.name not in ("id", "sources")}
    gpu = base[named]
    values = {field.name: getattr(gpu, field.name) for field in fields(Gpu) if field.name != "id"}
    if gpu_id != named:
        values |= {"name": f"{gpu.name} ({gpu_id})", "device_names": (), "aliases": ()}
    return values


def _check_figures(file: YamlFile, node: Node, gpu: Gpu) -> None:
    """Report what contradicts itself within one entry."""
    where = f"gpus.{gpu.id}"
    for precision in NATIVE_PRECISIONS:
        places = (precision in gpu.flops) + (precision in gpu.unsupported)
        if places == 0:
            message = f"{precision} has neither a rate in `tflops` nor a reason in `unsupported`"
            file.report(node, where, message)
        elif places == 2:
            file.report(node, where, f"{precision} is in both `tflops` and `unsupported`")
    if "fp32" not in gpu.flops:
        file.report(node, where, "needs a rate for fp32, which every GPU has")
    if gpu.context_bytes >= gpu.memory_bytes:
        file.report(node, where, "`context` is not smaller than `memory`")
    if gpu.ecc_memory_bytes is not None and gpu.ecc_memory_bytes >= gpu.memory_bytes:
        file.report(node, where, "`ecc_memory` is not smaller than `memory`")
    if gpu.price_usd_per_hour is not None and gpu.price_date is None:
        file.report(node, where, "a price needs its `price_date`")
    absent = {
        "price": gpu.price_usd_per_hour is None,
        "power": gpu.power_w is None,
        "link": gpu.link_bytes_per_s is None,
        "network": gpu.network_bytes_per_s is None,
        "nccl": gpu.nccl_channels is None,
    }
    for group in _SOURCE_GROUPS:
        if not gpu.sources.get(group) and not absent.get(group, False):
            file.report(node, where, f"`sources` has no source for `{group}`")
