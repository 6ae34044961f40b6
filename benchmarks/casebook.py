"""Writes docs/notebook/casebook.md: what five projects ran, and what is recommended.

    python -m benchmarks.casebook
    python -m benchmarks.casebook --only qwen7b_lora,cot8b_h100 --to part.md

Every number comes from the tool. What was used is predicted from traces at full depth, as `tuner
estimate` does it, with nothing calibrated; all of them take minutes. What is recommended is what
the committed search under results/ recommends: after a search of a shipped space this page has to
be written again, which `tests/test_casebook.py` notices. Where there is none, the whole space
within its floors is predicted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.casebook_cases import SYSTEMS, System, Used
from tuner.app.compare import Side, predicted_best, side_of
from tuner.app.predicting import Predicted, SpacePredictor
from tuner.app.recommendation import recommended
from tuner.app.target import load_target
from tuner.core.errors import InputError, NothingFitsError
from tuner.core.records import Configuration, MemoryCategory, Source
from tuner.core.units import format_duration, format_size, significant
from tuner.predict.compiling import default_workers
from tuner.predict.predict import check_supported
from tuner.predict.training import tokens_per_sample
from tuner.space import SearchSpace, configure, load_space
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import get_entry

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs/notebook/casebook.md", ROOT / "results"
INTRODUCTION = """\
# Casebook: five projects, as they were and as they could be

Written by `python -m benchmarks.casebook`; all of the tool's numbers are *predicted*, uncalibrated,
from the GPUs' data sheets, but for those marked *emulated*: `tuner check` of the programs in
[`examples/programs`](../../examples/programs), which have the shapes of the projects' own. What the
projects ran, *reported* (observed) and *expected* (guessed) comes from their public sources. GB is
as they printed it, GiB is 2^30 bytes. Times are for examples at full length. "Fits" keeps 3 % of
the GPU's memory free.

Phases show the peak of allocated memory; "device" is what `nvidia-smi` would show, allocator and
CUDA context included. The recommended row is the fastest configuration that fits within the
space's floors: of the trials under [`results/`](../../results/), or, without a search, of the
predictions of the whole space.
"""
COLUMNS = (
    "configuration",
    "said",
    "fits",
    "device",
    "load",
    "forward",
    "backward",
    "optimizer",
    "step",
    "samples/s",
    "epoch",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or the part of it that `--only` names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--only", help="spaces, with commas between them")
    parser.add_argument("--to", type=Path, default=PAGE)
    parser.add_argument("--workers", type=int, default=default_workers())
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else [s.space for s in SYSTEMS]
    chosen = [system for system in SYSTEMS if system.space in names]
    options.to.write_text(page(chosen, workers=options.workers), encoding="utf-8")
    return 0


def page(systems: Sequence[System], *, model: str | None = None, workers: int = 0) -> str:
    """The page about these systems. `model` takes the place of their models, for tests."""
    parts = [INTRODUCTION]
    missing = [system.space for system in SYSTEMS if system not in systems]
    if missing:
        parts.append(f"Left out here: {', '.join(missing)}.\n")
    for system in systems:
        print(f"{system.space} ...", file=sys.stderr, flush=True)
        parts.append("\n".join(section(system, model=model, workers=workers)) + "\n")
    return "\n".join(parts)


def section(system: System, *, model: str | None = None, workers: int = 0) -> Iterator[str]:
    """The lines about one system: a table for each GPU type, then what was wrong."""
    space = load_space(system.space)
    space = replace(space, model=model or space.model)
    yield f"## {system.title}\n"
    yield f"Space [`{space.name}`](../../search_spaces/{space.name}.yaml). {system.story}"
    findings: list[str] = []
    for place, (gpu_name, used) in enumerate(system.used.items()):
        gpu = get_gpu(gpu_name)
        predictor = SpacePredictor(space, gpu, workers=workers)
        best, chosen_from = _recommended(predictor, searched=model is None)
        sides = [side_of(each, space, gpu) for each in _predicted(predictor, used)]
        yield f"\n**{gpu.name}**, {format_size(gpu.memory_bytes)}\n"
        yield "| " + " | ".join(COLUMNS) + " |"
        yield "|---" * len(COLUMNS) + "|"
        for one, side in zip(used, sides, strict=True):
            yield _row(one.label, one.said, side)
        if best is None:
            yield f"\nNothing within the floors fits ({chosen_from})."
        else:
            yield _row("**recommended**", chosen_from, side_of(best, space, gpu))
            yield f"\nRecommended: `{_settings(space, best.configuration)}`"
        if place == 0:
            findings = [
                finding.text.format(**numbers_of(each, space))
                for finding, each in zip(
                    system.findings,
                    _predicted(predictor, [Used("", f.settings) for f in system.findings]),
                    strict=True,
                )
            ]
    yield "\nWhat the budget missed:\n"
    yield from (f"- {text}" for text in findings)


def _recommended(predictor: SpacePredictor, *, searched: bool) -> tuple[Predicted | None, str]:
    """What is recommended, and what it was chosen from; None where nothing fits."""
    space, gpu = predictor.space, predictor.gpu
    target = load_target(space.name, gpu.id, results=RESULTS)
    if searched and target.folder.journal.exists():
        try:
            best = recommended(target)
        except NothingFitsError:
            return None, "of the trials under results/"
        prediction = best.record.outcome.prediction
        if prediction is not None:
            stages = space.stage_configurations(best.configuration) if space.stages else {}
            hardest = stages.get(prediction.limiting_stage or "", best.configuration)
            found = Predicted(best.configuration, prediction, hardest)
            what = "predicted" if best.source == Source.PREDICTED else "trials"
            return found, f"fastest of {best.trials:,} {what}"
    found_best, number = predicted_best(predictor, ())
    return found_best, f"fastest of {number:,} predicted"


def _predicted(predictor: SpacePredictor, used: Sequence[Used]) -> list[Predicted]:
    """Predictions of configurations that need not be in the space.

    Raises `InputError` for one that the GPU cannot run: what the page says of it would be wrong.
    """
    space = predictor.space
    chosen = [
        configure(space, {**(space.baseline or {}), **one.settings}, strict=False) for one in used
    ]
    for one, configuration in zip(used, chosen, strict=True):
        if check_supported(configuration, predictor.gpu):
            raise InputError(f"{predictor.gpu.name} cannot run {one.label!r} of {space.name}")
    return predictor.trace(chosen)


def _row(label: str, said: str, side: Side) -> str:
    memory, speed = side.evidence.memory, side.evidence.speed
    phases = memory.phase_peak_bytes
    stage = f" ({side.stage})" if side.stage else ""
    cells = [
        label,
        said,
        "yes" if side.fits else "**no**",
        format_size(memory.device_bytes) + stage,
        *(format_size(phases[name]) for name in ("load", "forward", "backward", "optimizer")),
        format_duration(speed.step_s),
        significant(speed.samples_per_s),
        "" if side.epoch_s is None else format_duration(side.epoch_s),
    ]
    return "| " + " | ".join(cells) + " |"


def _settings(space: SearchSpace, configuration: Configuration) -> str:
    names = [*space.knobs, *(["grad_accum"] if "grad_accum" not in space.knobs else [])]
    return " ".join(f"{name}={configuration[name]}" for name in names if configuration[name] != "")


def numbers_of(predicted: Predicted, space: SearchSpace) -> Mapping[str, Any]:
    """What a sentence about one configuration may name; sizes and times as text."""
    prediction, configuration = predicted.prediction, predicted.configuration
    memory, speed = prediction.memory, prediction.speed
    parts = {name: memory.breakdown.get(name, 0) for name in MemoryCategory}
    rank = int(str(configuration["lora_rank"]))
    trainable = prediction.trainable_params
    entry = get_entry(str(space.model))
    words = entry.vocab_size * entry.hidden_size if entry else 0
    frozen = prediction.total_params - trainable
    return {
        "lora_rank": rank,
        "trainable": trainable,
        "total": prediction.total_params,
        "tower_adapters": _TOWER_LAYERS * 3 * rank * 2 * _TOWER_WIDTH,
        "tokens": tokens_per_sample(space.workload, predicted.hardest),
        "device": format_size(memory.device_bytes),
        "allocated": format_size(memory.peak_allocated_bytes),
        "paged": format_size(memory.paged_bytes),
        "adapters": format_size(parts[MemoryCategory.ADAPTERS] + parts[MemoryCategory.GRADIENTS]),
        "logits": format_size(parts[MemoryCategory.LOGITS_AND_LOSS]),
        "activations": format_size(parts[MemoryCategory.ACTIVATIONS]),
        "overhead": format_size(parts[MemoryCategory.ALLOCATOR_OVERHEAD]),
        "embedding_fp32": format_size(4 * words),
        "embedding_half": format_size(2 * words),
        "four_copies": format_size(4 * 4 * trainable),
        "frozen": format_size(2 * frozen),
        "step": format_duration(speed.step_s),
        "recompute": f"{speed.breakdown_s.get('recompute', 0.0) / speed.step_s:.0%}",
    }


_TOWER_LAYERS, _TOWER_WIDTH = 27, 1152
"""SigLIP of MedGemma-4B; LoRA by name finds q, k and v in each layer."""


if __name__ == "__main__":
    sys.exit(main())
