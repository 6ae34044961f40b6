"""Random pairs of a model and a method: the trace beside the emulator, peak allocated memory.

    python -m benchmarks.random_pairs [--pairs 40] [--seed 15] [--markdown FILE]

The committed page is docs/notebook/random_pairs.md.

Models are those of the catalogue, cut to a few layers (widths and vocabulary stay); methods are
drawn knob by knob, and drawn again where `tuner estimate` refuses them. Trace and emulator execute
tuner's own training step, as in `benchmarks.emulated`. About half a minute a pair. Numbers are
written as they come; a run that was stopped goes on from its file.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.emulated import ALIKE, Answer, compare
from benchmarks.emulated_cases import QUICK_LAYERS, Case
from tuner.app.estimate import one_configuration
from tuner.app.listener import quiet_libraries
from tuner.app.search.supported import require_supported
from tuner.core.errors import InputError
from tuner.core.units import MIB
from tuner.emulator.toolchain import unavailable
from tuner.predict.predict import resolve_subject
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import load_catalogue
from tuner.space.models.trainable import model_defaults

ROWS = Path(__file__).resolve().parent / "random_pairs.csv"
GPUS = ("t4", "rtx3090", "a100_80gb", "h100_sxm")

BASES: tuple[Mapping[str, Any], ...] = (
    {"precision": "bf16", "mixed_precision": "bf16"},
    {"precision": "bf16", "mixed_precision": "no"},
    {"precision": "fp16", "mixed_precision": "fp16"},
    {"precision": "fp32", "mixed_precision": "no"},
    {"precision": "fp32", "mixed_precision": "bf16"},
    {"precision": "nf4"},
    {"precision": "nf4", "double_quant": False, "kbit_preparation": "none"},
    {"precision": "nf4", "kbit_preparation": "trl", "adapter_dtype": "bf16"},
    {"precision": "int8"},
)
TRAINED: tuple[Mapping[str, Any], ...] = (
    {"lora_rank": 0},
    {"lora_rank": 8},
    {"lora_rank": 64, "lora_dropout": 0.05},
    {"lora_rank": 16, "adapter": "dora"},
    {"lora_rank": 32, "adapter": "rslora"},
    {"lora_rank": 16, "adapter_dtype": "bf16"},
)
CHECKPOINTS: tuple[Mapping[str, Any], ...] = (
    {"gradient_checkpointing": False},
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "use_reentrant": True},
)
OTHERS: Mapping[str, Sequence[Any]] = {
    "optimizer": (
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_8bit",
        "paged_adamw_8bit",
        "paged_adamw_32bit",
        "lion_32bit",
        "lion_8bit",
        "adafactor",
        "sgd",
    ),
    "loss": ("transformers", "transformers", "transformers_4_46", "chunked"),
    "training_loop": ("trainer", "trainer", "function", "loop"),
    "micro_batch": (1, 2, 3, 4),
    "max_length": (64, 200, 256, 512, 777),
    "grad_accum": (1, 2, 4),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a pair, in bytes; `failure` says why there are no numbers."""

    model: str
    gpu: str
    method: str
    traced: int
    emulated: int
    reserved_traced: int
    reserved_emulated: int
    failure: str

    @property
    def share(self) -> float:
        """By how much the trace's peak is larger, as a share of the emulator's."""
        return self.traced / self.emulated - 1

    @classmethod
    def of(cls, case: Case, answer: Answer) -> Row:
        """The numbers of a pair that was compared."""
        found = {pair.name: pair for pair in answer.pairs}
        counts = [
            number
            for name in ("allocated", "reserved")
            for number in ((found[name].traced, found[name].emulated) if found else (0, 0))
        ]
        failure = " ".join(answer.failure.split())[:300]
        return cls(str(case.model), case.gpu, json.dumps(dict(case.settings)), *counts, failure)


def drawn(seed: int) -> Iterator[Case]:
    """Pairs without end, the same ones for the same seed and catalogue."""
    chance = random.Random(seed)  # noqa: S311 - a draw, no secret
    families = _families()
    while True:
        case = _accepted(_draw(chance, families))
        if case is not None:
            yield case


def _families() -> Mapping[str, Sequence[str]]:
    """Causal language models of the catalogue by their type, so that types are drawn alike."""
    found: dict[str, list[str]] = {}
    for entry in load_catalogue().values():
        if entry.task == "causal-lm" and not entry.id.startswith("tiny-"):
            found.setdefault(str(entry.config["model_type"]), []).append(entry.id)
    return found


def _draw(chance: random.Random, families: Mapping[str, Sequence[str]]) -> Case:
    model = chance.choice(families[chance.choice(sorted(families))])
    settings: dict[str, Any] = {**chance.choice(CHECKPOINTS), **chance.choice(TRAINED)}
    settings |= chance.choice(BASES)
    settings |= {name: chance.choice(values) for name, values in OTHERS.items()}
    settings["attention"] = chance.choice(("sdpa", "sdpa", "eager"))
    return Case(model, chance.choice(GPUS), model=model, settings=settings)


def _accepted(case: Case) -> Case | None:
    """The case, or None where its settings do not go together or the GPU cannot run them."""
    model = str(case.model)
    settings = {**case.settings, **model_defaults(model)}
    quantized = settings["precision"] in ("nf4", "int8")
    if settings["lora_rank"] == 0 and (quantized or "adapter_dtype" in settings):
        return None
    if settings["precision"] == "fp16" and settings["lora_rank"] == 0:
        return None  # gradients of fp16 weights cannot be scaled
    try:
        _, configuration = one_configuration(None, model, settings)
        require_supported(configuration, get_gpu(case.gpu))
        resolve_subject("causal_lm", model)
    except InputError:
        return None
    return Case(case.name, case.gpu, model=model, settings=settings)


def run(number: int, seed: int, file: Path) -> list[Row]:
    """Draw and compare until so many have numbers, from the file where they are there."""
    had = {(row.model, row.gpu, row.method): row for row in read(file)} if file.exists() else {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
        for case in drawn(seed):
            if sum(not row.failure for row in rows) == number:
                break
            row = had.pop((str(case.model), case.gpu, json.dumps(dict(case.settings))), None)
            if row is None:
                row = Row.of(case, compare(case, QUICK_LAYERS, Path(folder)))
                print(" | ".join(cells(row)), flush=True)
            rows.append(row)
            _write(file, [*rows, *had.values()])
    return rows


def read(file: Path) -> list[Row]:
    """The rows of an earlier run."""
    with file.open(encoding="utf-8", newline="") as lines:
        return [
            Row(
                **{
                    name: text if name in ("model", "gpu", "method", "failure") else int(text)
                    for name, text in row.items()
                }
            )
            for row in csv.DictReader(lines)
        ]


def _write(file: Path, rows: Sequence[Row]) -> None:
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, list(Row.__slots__))
        writer.writeheader()
        writer.writerows({name: getattr(row, name) for name in Row.__slots__} for row in rows)


def cells(row: Row) -> tuple[str, ...]:
    """Of one row of the table."""
    method = " ".join(f"{k}={v}" for k, v in json.loads(row.method).items())
    if row.failure:
        return (row.model, row.gpu, method, row.failure[:150].replace("|", "/"), "", "", "")
    mark = " **differs**" if abs(row.share) > ALIKE else ""
    reserved = row.reserved_traced / row.reserved_emulated - 1
    return (
        row.model,
        row.gpu,
        method,
        f"{row.traced / MIB:,.1f}",
        f"{row.emulated / MIB:,.1f}",
        f"{row.share:+.2%}{mark}",
        f"{reserved:+.1%}",
    )


def page(rows: Sequence[Row], seed: int) -> str:
    """The table and what it stands for, in Markdown."""
    compared = sorted((row for row in rows if not row.failure), key=lambda row: -abs(row.share))
    failed = [row for row in rows if row.failure]
    apart = [row for row in compared if abs(row.share) > ALIKE]
    lines = [
        "# Random pairs of model and method",
        "",
        f"Written by `python -m benchmarks.random_pairs --seed {seed}`: {len(compared)} pairs, "
        f"models of the catalogue cut to {QUICK_LAYERS} layers, each traced and run on an emulated "
        f"GPU. **Peak allocated memory is within {ALIKE:.1%} in {len(compared) - len(apart)} of "
        f"{len(compared)}.** What is reserved stands beside it. Predicted and emulated numbers; "
        f"none is measured. {len(failed)} more were drawn that do not fit the GPU or are refused; "
        "they stand below.",
        "",
        "| model | GPU | settings | predicted MiB | emulated MiB | difference | of reserved |",
        "|---|---|---|---:|---:|---:|---:|",
        *("| " + " | ".join(cells(row)) + " |" for row in compared),
        "",
        "## Drawn and not compared",
        "",
        "| model | GPU | settings | why |",
        "|---|---|---|---|",
        *("| " + " | ".join(cells(row)[:4]) + " |" for row in failed),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Compare what is missing; 1 where any pair differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--rows", type=Path, default=ROWS, help="rows to go on from and to write")
    parser.add_argument("--markdown", type=Path, help="write the page there")
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        print(f"nothing can be emulated here: {reason}", file=sys.stderr)
        return 3
    warnings.simplefilter("ignore", FutureWarning)
    rows = run(options.pairs, options.seed, options.rows)
    if options.markdown:
        options.markdown.write_text(page(rows, options.seed), encoding="utf-8")
    return int(any(row.failure or abs(row.share) > ALIKE for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
