"""Trials as a search writes them, with plausible numbers from a simple law, for the tests."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tuner.core.gpu import Gpu
from tuner.core.records import (
    Configuration,
    Measurement,
    Memory,
    MemoryBudget,
    MemoryCategory,
    Outcome,
    Prediction,
    Source,
    Speed,
    Status,
    TrialRecord,
)
from tuner.core.units import GIB
from tuner.report.memory_timeline import TimelineOf
from tuner.report.report import write_view
from tuner.searches.facts import SpaceFacts
from tuner.searches.store import ResultsFolder
from tuner.searches.view import View, build_view
from tuner.space.gpus import get_gpu

MARGIN_BYTES = GIB


GPU = replace(
    get_gpu("a6000"),
    memory_bytes=round(47.40 * GIB),
    price_usd_per_hour=0.5,
    price_date="2026-05-01",
)
SPACE = SpaceFacts(
    name="qlora27b",
    description="MedGemma-27B text with LoRA on all linear layers",
    model="medgemma-27b-text",
    knobs=("micro_batch", "lora_rank", "max_length", "precision", "gradient_checkpointing"),
    examples=118_431,
    epochs=3,
    baseline={
        "micro_batch": 1,
        "lora_rank": 128,
        "max_length": 1024,
        "precision": "nf4",
        "gradient_checkpointing": True,
    },
)


def make_memory(device_bytes: int) -> Memory:
    """A memory whose breakdown adds up to `device_bytes`."""
    weights = device_bytes // 3
    logits = device_bytes // 5
    context = device_bytes // 50
    rest = device_bytes - weights - logits - context
    return Memory(
        peak_allocated_bytes=int(device_bytes * 0.94),
        peak_reserved_bytes=device_bytes - context,
        device_bytes=device_bytes,
        loaded_bytes=weights,
        phase_peak_bytes={"forward": device_bytes // 2, "backward": device_bytes - context},
        peak_phase="backward",
        breakdown={
            MemoryCategory.WEIGHTS: weights,
            MemoryCategory.ACTIVATIONS: rest,
            MemoryCategory.LOGITS_AND_LOSS: logits,
            MemoryCategory.CONTEXT_AND_WORKSPACE: context,
        },
    )


def make_speed(tokens_per_s: float, *, sample_tokens: int = 600) -> Speed:
    samples_per_s = tokens_per_s / sample_tokens
    step_s = 32 / samples_per_s
    return Speed(
        step_s=step_s,
        it_per_s=8 / step_s,
        samples_per_s=samples_per_s,
        tokens_per_s=tokens_per_s,
        mfu=0.4,
        breakdown_s={"matmul": step_s * 0.7, "attention": step_s * 0.1, "memory": step_s * 0.2},
    )


def make_prediction(
    device_bytes: int = 30 * GIB,
    tokens_per_s: float = 300.0,
    *,
    sample_tokens: int = 600,
    gpu: Gpu = GPU,
    **changes: Any,
) -> Prediction:
    """A prediction of these numbers."""
    prediction = Prediction(
        budget=MemoryBudget(gpu.memory_bytes, MARGIN_BYTES),
        memory=make_memory(device_bytes),
        speed=make_speed(tokens_per_s, sample_tokens=sample_tokens),
        trainable_params=908_132_352,
        total_params=27_917_134_592,
        gpu=gpu.id,
        method="trace of two optimizer steps, full depth",
    )
    return replace(prediction, **changes)


def make_measurement(of: Prediction, *, device: str, **changes: Any) -> Measurement:
    """A measurement that is as predicted."""
    measurement = Measurement(
        memory=of.memory,
        speed=of.speed,
        trainable_params=of.trainable_params,
        total_params=of.total_params,
        device=device,
        steps=5,
        loss_finite=True,
    )
    return replace(measurement, **changes)


def make_record(
    tokens_per_s: float = 300.0,
    device_bytes: int = 30 * GIB,
    *,
    settings: dict[str, Any] | None = None,
    status: Status | None = None,
    measured: bool = False,
    emulated: bool = False,
    sample_tokens: int = 600,
    gpu: Gpu = GPU,
    **fields: Any,
) -> TrialRecord:
    """A record with these numbers; it is `oom` when they do not fit with the margin."""
    fits = device_bytes + MARGIN_BYTES <= gpu.memory_bytes
    prediction = make_prediction(device_bytes, tokens_per_s, sample_tokens=sample_tokens, gpu=gpu)
    measurement = make_measurement(prediction, device=gpu.name)
    step_s = prediction.speed.step_s
    intervals = {"step_s": (0.8 * step_s, 1.4 * step_s)}
    emulation = replace(measurement, source=Source.EMULATED, intervals=intervals)
    configuration = Configuration(settings or {"micro_batch": 4, "lora_rank": 128})
    ran = measured or emulated
    defaults: dict[str, Any] = {
        "trial_id": configuration.key,
        "space": "qlora27b",
        "gpu": gpu.id,
        "gpu_memory_bytes": gpu.memory_bytes,
        "seed": 7,
        "started_at": "2026-05-01T12:00:00Z",
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
        "searcher": "tpe",
        "run_id": "run1",
        **({"emulated_device": gpu.name} if emulated else {}),
    }
    return TrialRecord(
        configuration=configuration,
        outcome=Outcome(
            status=status or (Status.OK if fits else Status.OOM),
            prediction=None if ran else prediction,
            measurement=measurement if measured else None,
            emulation=emulation if emulated else None,
            phase=None if fits else "backward",
            duration_s=2.5,
        ),
        **{**defaults, **fields},
    )


def make_search(count: int, *, seed: int = 0, measured: bool = False) -> Sequence[TrialRecord]:
    """`count` different trials; memory and speed follow the knobs as in a real search."""
    draw = random.Random(seed)
    records: dict[str, TrialRecord] = {}
    while len(records) < count:
        micro_batch = draw.choice([1, 2, 4, 8, 16, 32])
        rank = draw.choice([128, 160, 192, 256, 320, 384])
        length = draw.choice(range(1024, 2049, 32))
        precision = draw.choice(["nf4", "int8", "bf16"])
        checkpointing = draw.random() < 0.75
        weights = {"nf4": 15.5, "int8": 27.5, "bf16": 51.0}[precision]
        tokens = micro_batch * length / 1024
        gib = weights + rank * 0.02 + tokens * (1.9 if checkpointing else 14.0)
        speed = {"nf4": 330, "int8": 260, "bf16": 420}[precision] * (1 - 0.55 / (1 + tokens))
        speed *= (1.0 if checkpointing else 1.28) * (1 - rank / 6000) * (1.3 - length / 5000)
        settings = {
            "micro_batch": micro_batch,
            "lora_rank": rank,
            "max_length": length,
            "precision": precision,
            "gradient_checkpointing": checkpointing,
            "effective_batch": 32,
            "optimizer": "paged_adamw_8bit",
            "lora_targets": ["q_proj", "v_proj"],
        }
        record = make_record(
            speed, round(gib * GIB), settings=settings, sample_tokens=length // 2, measured=measured
        )
        records[record.configuration.key] = record
    return list(records.values())


def write_all(
    folder: ResultsFolder,
    records: Sequence[TrialRecord],
    space: SpaceFacts,
    gpu: Gpu,
    *,
    timeline_of: TimelineOf | None = None,
    **shown: Any,
) -> View:
    """Write the files of `records` and return what they show; `shown` are for `build_view`."""
    view = build_view(records, space, gpu, **shown)
    write_view(folder, view, timeline_of=timeline_of)
    return view
