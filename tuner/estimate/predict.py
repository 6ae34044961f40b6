"""The prediction of one configuration on one GPU, from a trace of its own training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tuner.errors import InputError, Problem
from tuner.estimate.memory import peak_memory
from tuner.estimate.roofline import StepTime, matmul_peak, step_time
from tuner.estimate.trace import Trace, trace
from tuner.gpus import Gpu
from tuner.models.catalogue import resolve_config
from tuner.records import Configuration, Prediction, Speed
from tuner.workloads import get_workload
from tuner.workloads.base import Workload

DEFAULT_MARGIN_FRACTION = 0.03
"""Part of the GPU's memory to keep free: reserved memory differed by up to 11.7 % between two
identical published runs, and drivers and displays take their share."""

METHOD = "trace of two optimizer steps at full depth; roofline from the GPU catalogue"

_COMPUTE_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "tf32": "float32"}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is trained: the workload and model of a search, the configuration resolved once."""

    workload: Workload
    model: str
    model_config: Any


def resolve_subject(workload: str, model: str) -> Subject:
    """Look both names up. Raises `InputError` for names that do not exist."""
    return Subject(get_workload(workload), model, resolve_config(model))


def check_supported(configuration: Configuration, gpu: Gpu) -> list[Problem]:
    """What the GPU cannot do of what the configuration asks; empty when it can run."""
    problems = []
    for knob in ("precision", "mixed_precision"):
        value = configuration.get(knob, "no")
        if value == "no":
            continue
        reason = gpu.unsupported_reason(str(value))
        if reason is not None:
            problems.append(Problem(f"{knob} {value} on {gpu.name}: {reason}", where=knob))
    return problems


def predict(
    subject: Subject,
    configuration: Configuration,
    gpu: Gpu,
    *,
    margin_fraction: float | None = None,
) -> Prediction:
    """Peak memory and step time of `configuration` on `gpu`.

    Raises `InputError` when the GPU cannot run it or the model cannot be built from it.
    """
    problems = check_supported(configuration, gpu)
    if problems:
        raise InputError("the GPU cannot run this configuration", problems=problems)
    traced = trace(
        subject.workload,
        subject.model_config,
        configuration,
        compute_capability=gpu.compute_capability,
    )
    memory = peak_memory(traced.timeline, context_bytes=gpu.context_bytes)
    fraction = DEFAULT_MARGIN_FRACTION if margin_fraction is None else margin_fraction
    margin = round(gpu.memory_bytes * fraction)
    return Prediction(
        fits=memory.device_bytes + margin <= gpu.memory_bytes,
        limit_bytes=gpu.memory_bytes,
        margin_bytes=margin,
        memory=memory,
        speed=_speed(traced, subject.workload, configuration, gpu),
        trainable_params=traced.trainable_params,
        total_params=traced.total_params,
        gpu=gpu.id,
        method=METHOD,
    )


def _speed(traced: Trace, workload: Workload, configuration: Configuration, gpu: Gpu) -> Speed:
    grad_accum = int(str(configuration.get("grad_accum", 1)))
    samples = int(str(configuration["micro_batch"])) * grad_accum
    timing = step_time(
        traced,
        gpu,
        grad_accum=grad_accum,
        allow_tf32=configuration["precision"] == "tf32",
    )
    return Speed(
        step_s=timing.step_s,
        it_per_s=grad_accum / timing.step_s,
        samples_per_s=samples / timing.step_s,
        tokens_per_s=samples * workload.tokens_per_sample(configuration) / timing.step_s,
        mfu=_mfu(timing, configuration, gpu),
        breakdown_s=timing.breakdown_s,
    )


def _mfu(timing: StepTime, configuration: Configuration, gpu: Gpu) -> float | None:
    """Model FLOPs over the dense peak of the precision in which most products run."""
    mixed = str(configuration.get("mixed_precision", "no"))
    precision = mixed if mixed != "no" else str(configuration["precision"])
    if precision in ("nf4", "int8"):
        precision = "bf16"
    if precision not in gpu.flops:
        return None
    dtype = _COMPUTE_DTYPES[precision]
    peak = matmul_peak(gpu, dtype, allow_tf32=precision == "tf32")
    return timing.model_flops / (timing.step_s * peak)
