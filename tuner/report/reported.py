"""Rows of measured runs to give away: `ReportedRun`, its privacy, and what is implausible in it.

No field is free text: names are those of tuner's own catalogues, values are numbers or words of
the vocabulary, and everything else is dropped. So a row cannot hold a path, a private model or a
machine's name, whichever objects it was made from.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tuner.core.errors import InputError
from tuner.core.files import read_file
from tuner.core.records.trial import PROCESSOR
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL
from tuner.core.setup.schemas import SCHEMAS
from tuner.core.units import format_size
from tuner.space.gpus import shipped_catalogue
from tuner.space.models.catalogue import get_entry
from tuner.space.models.catalogue import load_catalogue as load_models

Bytes = Annotated[int, Meta(ge=0)]
Value = bool | int | float | str | list[str]


class MeasuredNumbers(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The peaks of one GPU in bytes, and seconds per optimizer step; None is unknown."""

    step_s: float | None = None
    device_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    peak_allocated_bytes: Bytes | None = None
    data_wait_fraction: float | None = None
    """Share of the time in which the training waited for its next batch; not in `step_s`."""


class PredictedNumbers(
    MeasuredNumbers, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The same as predicted before the run; `has_profile` says with the GPU's measured rates."""

    source: Literal["predicted", "emulated"] = "predicted"
    has_profile: bool = False
    is_corrected: bool = False
    """Measured runs had corrected the prediction, so that it corrects nothing itself."""


Disturbance = Literal["fragmentation", "another process", "input-bound", "slow clocks", "settings"]


class ReportedRun(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One measured run beside its prediction, without anything private.

    `model` is an id of `tuner models`. Of any other model, `architecture` has the fields of its
    config.json that are numbers, or its digest. `disturbed` names what makes the numbers no
    measure of the prediction. `reporter` is random: it tells machines apart and names nobody.
    """

    schema: Literal[2]
    gpu: str
    workload: str
    configuration: dict[str, Value]
    versions: dict[str, str]
    measured: MeasuredNumbers
    predicted: PredictedNumbers
    model: str | None = None
    architecture: dict[str, Value] | None = None
    device: str = ""
    gpu_memory_bytes: Bytes = 0
    weights: Literal["synthetic", "checkpoint"] | None = None
    lengths: Literal["full", "data"] | None = None
    steps: Annotated[int, Meta(ge=0)] = 0
    disturbed: list[Disturbance] = []
    reporter: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}$")] | None = None

    @property
    def file_name(self) -> str:
        """The name of the row's file: its model, its GPU and a digest of its content."""
        named = f"{self.model or 'private'}-{self.gpu}-{self.digest}"
        return re.sub(r"[^\w.-]", "_", named) + ".json"

    @property
    def digest(self) -> str:
        """8 hex digits of everything but the reporter."""
        content = msgspec.json.encode(msgspec.structs.replace(self, reporter=None), order="sorted")
        return hashlib.sha256(content).hexdigest()[:8]

    def to_json(self) -> str:
        """One line of JSON."""
        return msgspec.json.encode(self, order="deterministic").decode()

    def ratio(self, quantity: str) -> float | None:
        """Measured over predicted; None where one of them is unknown."""
        measured, predicted = (getattr(n, quantity) for n in (self.measured, self.predicted))
        return measured / predicted if measured and predicted else None


def read_row(path: Path) -> ReportedRun:
    """The row in a file. Raises `InputError` for a file that is none, naming the field."""
    try:
        return msgspec.json.decode(read_file(path, 1 << 20), type=ReportedRun)
    except FileNotFoundError:
        raise InputError(f"file not found: {path}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(
            f"{path} is not the row of a measured run: {error}",
            hint="a callback of tuner.integrations writes one, docs/share-a-run.md",
        ) from None


# -- nothing private ------------------------------------------------------------------------------


_ARCHITECTURE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "num_experts",
    "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "sliding_window",
)  # fmt: skip
"""Fields of a config.json that are numbers and decide memory and time."""

PACKAGES = (
    "tuner", "torch", "transformers", "peft", "bitsandbytes", "trl", "accelerate", "lightning",
    "pytorch-lightning", "deepspeed",
)  # fmt: skip
_RELEASE = re.compile(
    r"(\d+(?:\.\d+)*(?:(?:a|b|rc|\.post|\.dev)\d+)*)(\+(?:cu\d+|cpu|xpu|rocm[\d.]+))?"
)
"""A release and its build; what else follows may be a company's name or a commit."""

_MODULES = frozenset((
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj",
    "gate_up_proj", "all-linear", "embed_tokens", "lm_head", "query_key_value", "dense", "c_attn",
    "c_proj", "c_fc", "fc1", "fc2", "out_proj", "in_proj", "query", "key", "value", "none",
    "dense_h_to_4h", "dense_4h_to_h", "score", "classifier",
))  # fmt: skip
"""Names of modules in published models; others become "other"."""


def public_model(
    name: str | None, config: Mapping[str, Any] | None, digest: str = ""
) -> dict[str, Any]:
    """The fields `model` and `architecture` of a row.

    The name counts only if it is one of `tuner models` and `config`, if given, has the sizes of
    that model: a private model may keep the name of its base.
    """
    entry = get_entry(name) if name else None
    found = architecture_of(config or {})
    if entry is not None:
        own = architecture_of(entry.config)
        if all(own.get(key, value) == value for key, value in found.items()):
            return {"model": entry.id, "architecture": None}
    if not found and re.fullmatch(r"[0-9a-f]{8,64}", digest):
        found = {"digest": digest}
    return {"model": None, "architecture": found or None}


def architecture_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a model's configuration, and its type if that is a published one."""
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    found = {
        name: config[name]
        for name in _ARCHITECTURE
        if isinstance(config.get(name), int | float) and config[name] is not None
    }
    kind = config.get("model_type")
    known = {kind for entry in load_models().values() for kind in (
        entry.config.get("model_type"), entry.text_config.get("model_type"))}  # fmt: skip
    return {"model_type": kind, **found} if kind in known else found


def public_configuration(workload: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of the vocabulary whose values are numbers, allowed words or published modules."""
    terms = SCHEMAS[workload].terms if workload in SCHEMAS else {}
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name not in terms:
            continue
        if isinstance(value, str):
            if value in terms[name].allowed or value in _MODULES:
                found[name] = value
        elif isinstance(value, list | tuple | set | frozenset):
            found[name] = [item if item in _MODULES else "other" for item in value]
        elif isinstance(value, bool | int | float):
            found[name] = value
    return found


def public_versions(versions: Mapping[str, Any]) -> dict[str, str]:
    """The releases of known packages, without a build of one's own."""
    found = {}
    for name in PACKAGES:
        release = _RELEASE.match(str(versions.get(name) or ""))
        if release is not None:
            found[name] = release[1] + (release[2] or "")
    return found


def public(row: ReportedRun) -> ReportedRun:
    """The row with everything dropped that is in no catalogue, whoever wrote its file.

    A user's own GPU types may have any name, so only those that come with tuner keep theirs.
    """
    gpus = shipped_catalogue()
    known = row.gpu == PROCESSOR or row.gpu in gpus
    names = {*gpus[row.gpu].device_names, gpus[row.gpu].name} if row.gpu in gpus else set()
    is_processor = row.gpu == PROCESSOR and re.fullmatch(r"[\w ()@.-]{1,60}", row.device)
    architecture = row.architecture or {}
    return msgspec.structs.replace(
        row,
        gpu=row.gpu if known else "unknown",
        device=row.device if row.device in names or is_processor else "",
        workload=row.workload if row.workload in SCHEMAS else "unknown",
        configuration=public_configuration(row.workload, row.configuration),
        versions=public_versions(row.versions),
        **public_model(row.model, architecture, str(architecture.get("digest", ""))),
    )


# -- what is implausible --------------------------------------------------------------------------


FAR = {"device_bytes": 1.25, "peak_allocated_bytes": 1.1, "step_s": 1.5}
"""Measured beyond this factor of the prediction is named for a look."""


def problems_of(row: ReportedRun) -> Iterator[str]:
    """What cannot be true of a run; such a row is refused."""
    measured = row.measured
    for name, value in (*_numbers(measured), *_numbers(row.predicted)):
        if not math.isfinite(value) or (value <= 0 and name != "data_wait_fraction"):
            yield f"{name} is {value}: expected more than 0"
    if measured.step_s is None and measured.device_bytes is None:
        yield "neither step_s nor device_bytes was measured"
    if row != public(row):
        yield "it has values that tuner has no name for; `tuner report-run` drops them"
    gpu = shipped_catalogue().get(row.gpu)
    if gpu is None and row.gpu != PROCESSOR:
        yield f"unknown GPU {row.gpu!r}: `tuner gpus` lists them"
    needed = ("tuner", "torch", *(("transformers",) if row.workload == "causal_lm" else ()))
    if missing := [name for name in needed if name not in row.versions]:
        yield f"versions missing: {', '.join(missing)}"
    if row.model is None and row.architecture is None:
        yield "neither a model nor its architecture"
    yield from _memory_problems(row, None if gpu is None else gpu.memory_bytes)
    least = None if gpu is None or measured.step_s is None else _least_step_s(row, gpu)
    if least is not None and measured.step_s is not None and measured.step_s < least:
        yield f"step_s is {measured.step_s:.3g}: the GPU's peak rate needs {least:.3g}"


def _numbers(numbers: MeasuredNumbers) -> Iterator[tuple[str, float]]:
    for name in MeasuredNumbers.__struct_fields__:
        if (value := getattr(numbers, name)) is not None:
            yield name, value


def _memory_problems(row: ReportedRun, memory_bytes: int | None) -> Iterator[str]:
    numbers = row.measured
    if row.gpu != PROCESSOR and None in (numbers.device_bytes, numbers.peak_allocated_bytes):
        yield "device_bytes and peak_allocated_bytes are needed of a GPU"
    sizes = {
        "peak_allocated_bytes": numbers.peak_allocated_bytes,
        "peak_reserved_bytes": numbers.peak_reserved_bytes,
        "device_bytes": numbers.device_bytes,
        "the GPU's memory": memory_bytes or row.gpu_memory_bytes or None,
    }
    known = [(name, size) for name, size in sizes.items() if size is not None]
    for (name, size), (above, limit) in itertools.pairwise(known):
        if size > limit:
            yield f"{name} ({format_size(size)}) is above {above} ({format_size(limit)})"


def _least_step_s(row: ReportedRun, gpu: Any) -> float | None:
    """Seconds at the GPU's highest rate, of passes through the blocks; None if not known.

    4 operations a weight and token: forward, and back to what is trained, without its weights.
    """
    entry = get_entry(row.model) if row.model else None
    values = row.configuration
    tokens = [values.get(name) for name in ("effective_batch", "max_length")]
    sizes = [] if entry is None else [entry.hidden_size, entry.vocab_size, entry.params]
    is_sparse = entry is not None and any("expert" in key for key in entry.text_config)
    if is_sparse or not sizes or row.lengths == "data" or row.workload != "causal_lm":
        return None
    counts = [n for n in (*sizes, *tokens) if isinstance(n, int)]
    if len(counts) < 5 or not gpu.flops:
        return None
    hidden, vocabulary, params, batch, length = counts
    blocks = max(0, params - 2 * hidden * vocabulary)
    rate = max(gpu.flops.values()) * int(str(values.get(GPUS_PER_TRIAL, 1)))
    return float(4 * blocks * batch * length / rate)


def looks_of(row: ReportedRun) -> Iterator[str]:
    """What is possible and far from the prediction: named for a look, and not refused."""
    for name, factor in FAR.items():
        if row.gpu == PROCESSOR and name == "peak_allocated_bytes":
            continue  # resident bytes, which no allocator counts
        ratio = row.ratio(name)
        if ratio is not None and not 1 / factor <= ratio <= factor:
            yield f"{name} is {ratio:.2f} times the {row.predicted.source} one"


def duplicates(rows: Mapping[str, ReportedRun]) -> Iterator[tuple[str, str]]:
    """Pairs of names whose rows are one run: no two runs take the same time to six digits."""
    seen: dict[tuple[Any, ...], str] = {}
    for name, row in rows.items():
        exact = (row.measured.device_bytes, f"{row.measured.step_s or 0:.6g}")
        key = (row.model, row.gpu, sorted_text(row.configuration), *exact)
        if key in seen:
            yield name, seen[key]
        seen.setdefault(key, name)


def sorted_text(values: Mapping[str, Any]) -> str:
    """A text that is the same for equal mappings."""
    return msgspec.json.encode(values, order="sorted").decode()


def read_rows(folder: Path) -> dict[str, ReportedRun]:
    """The rows in a folder by file name. Raises `InputError` for a file that is none."""
    return {path.name: read_row(path) for path in sorted(folder.glob("*.json"))}


def schema() -> dict[str, Any]:
    """The JSON schema of a row."""
    made = msgspec.json.schema(ReportedRun)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a row of benchmarks/reported_runs",
        **made,
    }


@functools.cache
def shipped_rows() -> tuple[ReportedRun, ...]:
    """The rows that come with tuner; what is no row is left out, as the check refuses it."""
    package = Path(__file__).parents[1]
    folders = (package / "reported_runs", package.parent / "benchmarks" / "reported_runs")
    found = []
    for path in sorted(next((f for f in folders if f.is_dir()), package).glob("*.json")):
        with contextlib.suppress(InputError):
            found.append(read_row(path))
    return tuple(found)
