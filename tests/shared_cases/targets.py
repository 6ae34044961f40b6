"""What is fuzzed: for each kind of input its files, and what reads them.

A target's `check` gets the path of a damaged file. It may raise `TunerError`, which is an
answer; anything else that it raises is a failure.
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from shared_cases.hostile import EXPRESSIONS
from shared_cases.mutate import damaged, expressions
from tuner.space import pin

ROOT = Path(__file__).parents[2]
SPACE = """\
name: input
description: a model of two layers
workload: causal_lm
model: ./tiny-model
knobs:
  micro_batch: [1, 2, 4]
  lora_rank: [4, 8]
  precision: [nf4, bf16]
  max_length: {min: 16, max: 128, step: 16}
fixed: {effective_batch: 4, lora_dropout: 0.05}
derived: {grad_accum: effective_batch // micro_batch, lora_alpha: 2 * lora_rank}
constraints: ["micro_batch * max_length <= 256 or precision == 'nf4'"]
floors: [lora_rank >= 8]
data: {examples: 1000, epochs: 2, token_lengths: {quantiles: {0.5: 20, 1: 30}}, padding: longest}
objectives: [samples_per_s, device_bytes]
baseline: {micro_batch: 1, lora_rank: 8, precision: nf4, max_length: 32}
apply: {trl: {file: "*.yaml", keys: {.batch: micro_batch, "a[0].b": lora_rank > 4}}}
"""
STAGES = "[{name: a, set: {max_length: 16}}, {name: b, set: {micro_batch: [1, 2]}, examples: 10}]"
STAGED = SPACE.replace("floors:", f"stages: {STAGES}\nfloors:").replace(
    "baseline: {", "baseline: {b.micro_batch: 1, "
)
COMMAND = """\
name: input
command: python train.py --batch {micro_batch} --lr {lr}
cwd: .
env: {RATE: "{lr}"}
samples_per_step: micro_batch * 2
progress: "train"
knobs: {micro_batch: [1, 2], lr: [1e-4, 2e-4], name: [a, b]}
constraints: [micro_batch > 0]
"""
TRAINING = {
    "input.yaml": b"batch: 4  # samples\nname: adamw\n"
    b"lora: {r: 8, targets: [q, v]}\na:\n- b: 1\n- c: &x 2\nd: *x\n",
    "input.json": b'{"batch": 4, "lora": {"r": 8, "targets": ["q"]}, "a": [{"b": 1}]}',
    "input.py": b'batch = 4\nBATCH = batch\nlora = dict(r=8, targets=["q"])\n'
    b'parser.add_argument("--rank", type=int, default=8)\n',
}


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of input: its file's name, how it is made and read."""

    name: str
    file: str
    inputs: Callable[[], st.SearchStrategy[bytes]]
    check: Callable[[Path], None]


def _files(pattern: str, limit: int = 60_000) -> list[bytes]:
    found = sorted(ROOT.glob(pattern))
    return [data for path in found if len(data := path.read_bytes()) <= limit]


# --- spaces ----------------------------------------------------------------------------------


def space_inputs() -> st.SearchStrategy[bytes]:
    own = [text.encode() for text in (SPACE, STAGED, COMMAND)]
    shipped = [_short(data) for data in _files("search_spaces/*.yaml")]
    # The small ones are read ten times as fast, and have all parts that a space can have.
    return damaged([*own * 6, *shipped], form="yaml", values=EXPRESSIONS)


def _short(data: bytes) -> bytes:
    """A space file without its comments, under the name that it gets here."""
    named = re.sub(rb"(?m)^name:.*$", b"name: input", data)
    return re.sub(rb"(?m)^\s*#.*\n", b"", named)


def read_space(path: Path) -> None:
    from tuner.space import load_space

    space = load_space(str(path))
    json.dumps(space.to_dict(), allow_nan=False)
    space.count(use_floors=False)
    for configuration in itertools.islice(space.configurations(use_floors=False), 3):
        json.dumps(configuration.to_dict(), allow_nan=False)
        space.matches(configuration)
        space.stage_configurations(configuration)
        if space.command is not None:
            space.command.arguments(configuration)
            space.command.environment(configuration)
            space.command.samples(configuration)


@cache
def _space() -> Any:
    from tuner.space.load import read_space as read

    return read(SPACE, "input.yaml")


def expression_inputs() -> st.SearchStrategy[bytes]:
    return expressions().map(lambda text: text.encode("utf-8", "surrogatepass"))


def read_expression(path: Path) -> None:
    """As `--where` and as `--set`."""
    from tuner.core.errors import InputError
    from tuner.space.settings import parse_settings

    text = os.fsdecode(path.read_bytes())  # as Python reads a command line
    try:
        _space().require_configurations([text])
        _space().count([text])
    except InputError as error:
        str(error)
    for setting in (text, f"micro_batch={text}", f"precision={text}", f"lora_dropout={text}"):
        try:
            pin(_space(), parse_settings([setting]))
        except InputError as error:
            str(error)


# --- journals --------------------------------------------------------------------------------


def journal_inputs() -> st.SearchStrategy[bytes]:
    journals = [
        b"".join(data.splitlines(keepends=True)[:3])
        for data in _files("results/*/*/trials.jsonl", 10**6)
    ]
    words = ("ok", "oom", "measured", "predicted", "host", "a6000", "qlora27b", "run-1")
    return damaged(journals, form="jsonl", values=words)


def read_a_journal(path: Path) -> None:
    """Read it, write to a copy of it, and make of it what `tuner show` and `best` print."""
    from tuner.report.table import pareto_csv
    from tuner.searches.best import best_yaml
    from tuner.searches.journal import encode, latest, read_journal
    from tuner.searches.view import build_view

    records = read_journal(path).records
    _write_on(path, len(records))
    latest(records)
    for record in records[:1]:
        encode(record)
    if records:
        space, gpu = _facts(records[0])
        view = build_view(records, space, gpu)
        pareto_csv(view)
        text = best_yaml(view.best, view.space, view.gpu, trials=len(view.records))
        text.encode("utf-8", "backslashreplace")


def _write_on(path: Path, count: int) -> None:
    """A search goes on in a copy: one more record, and nothing else is lost."""
    from tuner.searches.journal import JournalWriter, read_journal

    copy = path.parent / "scratch" / "trials.jsonl"
    copy.write_bytes(path.read_bytes())
    with JournalWriter(copy) as writer:
        writer.append(_record())
    after = read_journal(copy)
    assert len(after.records) == count + 1, (count, len(after.records))
    assert not after.notes, after.notes


@cache
def _record() -> Any:
    from tuner.searches.journal import read_journal

    return read_journal(next(iter(sorted(ROOT.glob("results/*/*/trials.jsonl"))))).records[0]


def _facts(record: Any) -> tuple[Any, Any]:
    import dataclasses

    from tuner.searches.facts import SpaceFacts
    from tuner.space.gpus import get_gpu

    gpu = dataclasses.replace(get_gpu("a6000"), id=record.gpu, memory_bytes=record.gpu_memory_bytes)
    space = SpaceFacts(
        name=record.space,
        description="",
        model="mistral-7b-v0.3",
        knobs=("micro_batch", "lora_rank"),
        examples=1000,
        epochs=1,
        baseline=None,
    )
    return space, gpu


# --- profiles and measured tables ------------------------------------------------------------


@cache
def _profile() -> bytes:
    """A profile as `tuner calibrate` writes one, short."""
    import yaml

    rows = {
        "matmul": [
            {"dtype": d, "m": m, "n": n, "k": 512, "flops_per_s": 1e13, "spread": 0.01}
            for d in ("bf16", "fp32")
            for m, n in ((16, 512), (512, 512))
        ],
        "traffic": [
            {"kind": k, "size_bytes": s, "bytes_per_s": 6e11, "spread": 0.0}
            for k in ("elementwise", "dequantise")
            for s in (2**20, 2**28)
        ],
        "attention": [
            {"kernel": "flash", "dtype": "bf16", "batch": 2, "heads": 16, "length": 2048,
             "head_dim": 128, "forward_flops_per_s": 8e13, "backward_flops_per_s": 6e13,
             "spread": 0.03}
        ],
    }  # fmt: skip
    head = {
        "schema": 1, "device": "NVIDIA RTX A6000", "gpu": "a6000", "memory_bytes": 50_896_896_000,
        "compute_capability": "8.6", "measured_at": "2026-11-21T10:00:00+00:00",
        "versions": {"torch": "2.13.0"}, "launch_s": 5e-6, "kernel_s": 2e-6,
        "context_bytes": 400_000_000, **rows, "skipped": [], "duration_s": 60.0,
    }  # fmt: skip
    return yaml.safe_dump(head, sort_keys=False).encode()


def profile_inputs() -> st.SearchStrategy[bytes]:
    return damaged([_profile()], form="typed yaml", values=("bf16", "fp16", "int8", "flash", "9.0"))


_NUMBERS = (1, 2, 3, 10**6, 10**12, 10**15, 10**18, 1e-12, 1e-6, 0.5, 1.0, 1e6, 1e15, 1e18)
_NUMBER = re.compile(rb"(?<=: )[-+.\deE]+(?=\n)")


def table_inputs() -> st.SearchStrategy[bytes]:
    """Profiles of the right form whose numbers are anything above 0."""

    def changed(places: list[tuple[float, float]]) -> bytes:
        data = _profile()
        for place, value in places:
            found = list(_NUMBER.finditer(data))[1:]  # not the schema
            at = found[int(place * len(found))]
            text = repr(value).replace("e-", ".0e-") if "." not in repr(value) else repr(value)
            new = str(int(value)).encode() if at[0].isdigit() else text.encode()
            data = data[: at.start()] + new + data[at.end() :]
        return data

    share = st.floats(0, 1, exclude_max=True, allow_subnormal=False)
    value = st.one_of(
        st.sampled_from(_NUMBERS).map(float), st.floats(1e-300, 1e300), st.floats(1, 1e12)
    )
    return st.lists(st.tuples(share, value), min_size=1, max_size=6).map(changed)


@cache
def _works() -> Any:
    from tuner.cost.operators.timeline import Work
    from tuner.cost.work_arrays import WorkArrays

    def work(kind: str, dtype: str, moved: int, flops: int = 0, shape: Any = None) -> Work:
        values = {"name": kind, "kind": kind, "flops": flops, "tensor_bytes": (moved,),
                  "dtype": dtype, "shape": shape, "workspace_bytes": ()}  # fmt: skip
        return Work(**{name: values[name] for name in Work._fields})

    return WorkArrays.of_works(
        [
            work("matmul", "bfloat16", 2**22, 2**30, (1, 512, 1024, 1024)),
            work("matmul", "float32", 2**12, 2**16, (1, 1, 16, 512)),
            work("attention", "bfloat16", 2**22, 2**32),
            work("elementwise", "bfloat16", 2**25),
            work("dequantise", "float16", 3),
        ]
    )


def read_profile(path: Path) -> None:
    """Read it, and predict kernel times with it: each is a number above 0."""
    from tuner.cost.speed.kernel_times import on_measured_device
    from tuner.cost.speed.profile import load_profile
    from tuner.space.gpus import get_gpu

    profile = load_profile(path)
    gpu = get_gpu("a6000")
    with np.errstate(all="raise", under="ignore"):
        _, times, _ = on_measured_device(gpu, profile)
        seconds = times.seconds(_works(), gpu, allow_tf32=False)
    assert np.isfinite(seconds).all(), seconds
    assert (seconds > 0).all(), seconds


# --- the rest --------------------------------------------------------------------------------

GPUS = b"""\
gpus:
  mine:
    like: a6000
    memory: 24GiB
    ecc_memory: 22GiB
    device_names: [My GPU]
    aliases: [my-gpu]
    price_usd_per_hour: 0.5
    price_date: 2026-09-27
    sources: {memory: measured}
  other:
    name: Other
    device_names: [Other GPU]
    memory: 16GiB
    context: 300MiB
    tflops: {fp32: 10, fp16: 20}
    unsupported: {tf32: none, bf16: none, int8: none}
    bandwidth_gb_per_s: 300
    compute_capability: 7.5
    sm_count: 40
ambiguous: {rtx: [mine, other]}
"""


def gpu_inputs() -> st.SearchStrategy[bytes]:
    return damaged([GPUS], form="yaml", values=("a6000", "t4", "24GiB", "8.6", "NVIDIA RTX A6000"))


def read_gpus(path: Path) -> None:
    from tuner.core.gpu import PRECISIONS
    from tuner.space.gpus import get_gpu, load_catalogue, match_device

    found = load_catalogue(path)
    for name in ("mine", "other"):
        if name in found:
            gpu = get_gpu(name, extra=path)
            assert gpu.architecture
            for precision in PRECISIONS:
                gpu.unsupported_reason(precision)
            for device in gpu.device_names[:2]:
                match_device(device, gpu.memory_bytes, extra=path)


def data_inputs() -> st.SearchStrategy[bytes]:
    lines = [
        {"tokens": n, "text": f"text {n}", "messages": [{"role": "user", "content": "x"}]}
        for n in (3, 9)
    ]
    whole = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return damaged([whole, whole[:-1]], form="jsonl")


def read_data(path: Path) -> None:
    from tuner.space.data import read_lengths

    found = read_lengths(path, length_column="tokens")
    assert found.known
    found.truncation(16)
    found.batch(4, 16)


def training_inputs(name: str) -> Callable[[], st.SearchStrategy[bytes]]:
    form = {"yaml": "yaml", "json": "json"}.get(name.rpartition(".")[2], "text")
    return lambda: damaged([TRAINING[name]], form=form)


def plan_changes(path: Path) -> None:
    """What `tuner apply` would write; it changes nothing itself."""
    from tuner.app.applying import applying
    from tuner.core.records import Configuration
    from tuner.space import ApplyTarget, SearchSpace

    values = Configuration(
        {
            "micro_batch": 16,
            "lora_rank": 32,
            "lora_targets": ("q_proj", "k_proj"),
            "lora_dropout": 0.05,
            "optimizer": "adamw: #8bit",
        }
    )
    keys = {
        ".batch": "micro_batch",
        "lora.r": "lora_rank",
        ".r": "lora_rank",
        ".targets": "lora_targets",
        "a[0].b": "lora_dropout",
        "name": "optimizer",
    }
    space = SearchSpace("any", "causal_lm", apply={"any": ApplyTarget("any", keys)})
    assert applying(space, values, [str(path)]).change.difference is not None


TARGETS: Sequence[Target] = (
    Target("space", "input.yaml", space_inputs, read_space),
    Target("expression", "input.txt", expression_inputs, read_expression),
    Target("journal", "trials.jsonl", journal_inputs, read_a_journal),
    Target("profile", "a6000.yaml", profile_inputs, read_profile),
    Target("table", "a6000.yaml", table_inputs, read_profile),
    Target("gpus", "gpus.yaml", gpu_inputs, read_gpus),
    Target("data", "data.jsonl", data_inputs, read_data),
    *(
        Target(f"apply-{name.rpartition('.')[2]}", name, training_inputs(name), plan_changes)
        for name in TRAINING
    ),
)
