"""The prediction of one configuration on one GPU, from a trace of its own training step.

Its memory over that step, by purpose, is a timeline.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tuner.core.errors import InputError, Problem, UnsupportedError
from tuner.core.gpu import Gpu
from tuner.core.records import (
    Configuration,
    Doubt,
    Memory,
    MemoryBudget,
    MemoryCategory,
    Phase,
    Prediction,
    Speed,
    Verdict,
)
from tuner.core.setup.common import QUANTIZED
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL, MACHINES, Parallelism
from tuner.core.setup.schemas import unmodelled
from tuner.cost.allocator import AllocatorSettings
from tuner.cost.calibrate import prior_intervals
from tuner.cost.memory import CATEGORIES, Course, memory_history
from tuner.cost.parallel import exchange_of, nccl_text, times_of_ranks, with_nccl
from tuner.cost.speed.kernel_times import mfu, on_measured_device
from tuner.cost.speed.profile import DeviceProfile
from tuner.cost.speed.rates import as_chosen
from tuner.cost.speed.roofline import (
    KernelSeconds,
    KernelTimes,
    StepTimes,
    StepWork,
    optimizer_time,
    pass_times,
    step_times,
)
from tuner.cost.step_details import MemoryTimeline, PhaseSpan, most_expensive
from tuner.cost.traced import Training
from tuner.cost.work_arrays import SEGMENTS
from tuner.predict.traces import Subject, Traces, grad_accum_of
from tuner.predict.training import tokens_per_sample
from tuner.space.models.catalogue import FP8, MXFP4, NF4, Architecture, architecture
from tuner.space.models.config_fields import length_problem

NOT_PREDICTED = "not predicted"
"""The words of a problem that is tuner's and not the GPU's."""

WITHOUT = "without the effect of"
"""Precedes the settings that a method ignores."""

METHOD = "trace of two optimizer steps at full depth"


def check_supported(
    configuration: Configuration, gpu: Gpu, *, model: Architecture | None = None
) -> list[Problem]:
    """Settings that the GPU or model does not support; empty when it can run."""
    problems = _format_problems(configuration, gpu, model) if model is not None else []
    for knob in ("precision", "mixed_precision", "compute_dtype"):
        value = configuration.get(knob, "no")
        if value in ("no", "auto"):
            continue
        reason = gpu.unsupported_reason(str(value))
        if reason is not None:
            problems.append(Problem(f"{knob} {value} on {gpu.name}: {reason}", where=knob))
    problems += _flash_attention_problems(configuration, gpu)
    problems += _scaling_problems(configuration)
    if "max_length" in configuration:
        positions = model.positions if model is not None else None
        too_long = length_problem(positions, int(str(configuration["max_length"])), "max_length")
        problems += [Problem("; ".join(too_long), where="max_length")] if too_long else []
    return [*problems, *Parallelism.of(configuration).problems(configuration)]


_FP8_FROM = (8, 9)
"""Older GPUs get an FP8 checkpoint in bf16 (transformers 5.23, quantizer_finegrained_fp8.py)."""


def _format_problems(configuration: Configuration, gpu: Gpu, model: Architecture) -> list[Problem]:
    """The weights of the checkpoint are stored in a format that `precision` isn't, if so.

    transformers 5.23 trains an MXFP4 checkpoint in bf16 only: without the kernels package, or with
    Mxfp4Config(dequantize=True).
    """
    stored, precision = model.stored, configuration.get("precision")
    in_bf16 = stored == MXFP4 or (stored == FP8 and gpu.compute_capability < _FP8_FROM)
    if stored is None or precision == stored or (in_bf16 and precision not in QUANTIZED):
        return []
    ways = {
        NF4: f"precision={NF4}, or in 16 bits --model {model.base}",
        MXFP4: f"16 bits, which transformers turns it into, or --model {model.base}",
    }
    way = ways.get(stored, f"--model {model.base}, in 16 bits, or with precision={NF4} in 4")
    text = f"the checkpoint's weights are {stored}, of which {precision} is {NOT_PREDICTED}"
    return [Problem(f"{text}. Allowed: {way}", where="precision")]


_FLASH_ATTENTION_FROM = (8, 0)
"""flash-attn 2 needs Ampere (its README, "NVIDIA CUDA Support") and fp16 or bf16 inputs."""


def _flash_attention_problems(configuration: Configuration, gpu: Gpu) -> list[Problem]:
    if configuration.get("attention") != "flash_attention_2":
        return []
    asked = "attention flash_attention_2"
    if gpu.compute_capability < _FLASH_ATTENTION_FROM:
        least = ".".join(map(str, _FLASH_ATTENTION_FROM))
        reason = f"{asked} on {gpu.name}: it needs a GPU of compute capability {least} or more"
        return [Problem(reason, where="attention")]
    knob = "compute_dtype" if configuration["precision"] in QUANTIZED else "precision"
    dtype = configuration.get(knob)
    if dtype in ("fp32", "tf32") and configuration.get("mixed_precision", "no") == "no":
        reason = f"{asked} with {knob} {dtype}: it takes fp16 and bf16 only"
        return [Problem(reason, where="attention")]
    return []


def _scaling_problems(configuration: Configuration) -> list[Problem]:
    """Gradients in a dtype without a kernel in PyTorch's scaler, which fp16 needs."""
    given, rank = configuration.get, configuration.get("lora_rank")
    name, dtype, instead = "adapter_dtype", "bf16", "train with bf16=True"
    if rank == 0:
        name, dtype, instead = "precision", "fp16", "load the weights in fp32"
    is_own = rank is None or (rank == 0 and given("program_ways"))  # which may keep other copies
    if given("mixed_precision") != "fp16" or given(name) != dtype or is_own:
        return []
    shown = f"{dtype} (as TRL keeps those of a quantised model)" if dtype == "bf16" else dtype
    reason = (
        f"{shown} with mixed_precision fp16: PyTorch's gradient scaler takes no gradients in "
        f"{dtype}, and the first step fails; {instead}"
    )
    return [Problem(reason, where=name)]


def predict(
    subject: Subject,
    configuration: Configuration,
    gpu: Gpu,
    *,
    margin_fraction: float | None = None,
    profile: DeviceProfile | None = None,
    traces: Traces | None = None,
    short: bool = False,
) -> Prediction:
    """Peak memory and step time of `configuration` on `gpu`, from a trace at full depth.

    A device profile replaces the catalogue's rates, and `traces` has those made before. Where
    memory is `short`, an evaluation gets what the steps left free. Raises `InputError` when the
    GPU cannot run it or the model cannot be built from it.
    """
    traces = traces or Traces(subject)
    gpu, kernel_times, rates = on_measured_device(gpu, profile, configuration)
    require_supported(configuration, gpu)
    parallelism = Parallelism.of(configuration)
    traced = traces.of(configuration, gpu)
    # DDP issues its own copies from C++, which costs no host time as the model's operators do.
    worked = traced
    if parallelism.is_replicated:
        alone = Configuration({**configuration, GPUS_PER_TRIAL: 1, MACHINES: 1})
        worked = traces.of(alone, gpu)
    settings, _ = AllocatorSettings.of(str(configuration.get("allocator", "")))
    memory = traces.memory(traced, context_bytes=gpu.context_bytes, settings=settings, short=short)
    memory = with_nccl(memory, gpu, configuration)
    times = step_times(
        step_work(worked, configuration, gpu),
        gpu,
        grad_accum=np.array([grad_accum_of(configuration)]),
        allow_tf32=configuration["precision"] == "tf32",
        kernel_times=kernel_times,
    )
    if parallelism.ranks > 1:
        exchange = exchange_of(traced.course, traced.gradient_bytes, configuration)
        times = times_of_ranks(times, [exchange], [parallelism], gpu, memory)
    found = build_prediction(
        memory,
        speed_of(times, 0, subject.workload_name, configuration, gpu),
        gpu,
        params=(traced.trainable_params, traced.total_params),
        method=method_text(
            f"{METHOD}; {rates}", subject.workload_name, configuration, gpu, traced.remarks
        ),
        margin_fraction=margin_fraction,
        unknown=times.unknown(0),
        doubts=doubts_of(subject.workload_name, configuration),
    )
    if short or not configuration.get("eval_batch") or found.verdict is Verdict.FITS:
        return found
    return predict(
        subject,
        configuration,
        gpu,
        margin_fraction=margin_fraction,
        profile=profile,
        traces=traces,
        short=True,
    )


def method_text(
    how: str, workload: str, configuration: Configuration, gpu: Gpu, remarks: Sequence[str] = ()
) -> str:
    """The method of a prediction, with the remarks of its trace and the knobs that it ignores."""
    _, options = AllocatorSettings.of(str(configuration.get("allocator", "")))
    left_out = [*unmodelled(workload, configuration), *(f"allocator's {one}" for one in options)]
    parallelism = Parallelism.of(configuration)
    if parallelism.ranks > 1:
        ranks = f"one of {parallelism.ranks} ranks under {parallelism.strategy}"
        how = f"{how}; {ranks}{nccl_text(gpu, configuration)}"
    how = "; ".join((how, *remarks))
    return f"{how}; {WITHOUT} {', '.join(left_out)}" if left_out else how


def require_supported(
    configuration: Configuration, gpu: Gpu, *, model: Architecture | None = None
) -> None:
    """Raise `InputError` with every problem that `check_supported` finds.

    `UnsupportedError` where the GPU may run it, and there is no prediction.
    """
    problems = check_supported(configuration, gpu, model=model)
    if all(NOT_PREDICTED in problem.message for problem in problems) and problems:
        raise UnsupportedError("this checkpoint cannot be predicted", problems=problems)
    if problems:
        raise InputError("the GPU cannot run this configuration", problems=problems)


def build_prediction(  # noqa: PLR0913 - all that a prediction is made of
    memory: Memory,
    speed: Speed,
    gpu: Gpu,
    *,
    params: tuple[int, int],
    method: str,
    margin_fraction: float | None,
    unknown: tuple[float, float] = (1.0, 1.0),
    doubts: Collection[Doubt] = (),
) -> Prediction:
    """A prediction; `params` are trainable and total, and memory is that of one rank.

    `unknown` are the ends of the step time over its prediction (`StepTimes.unknown`), and `doubts`
    those about the memory.
    """
    budget = MemoryBudget.of(gpu.memory_bytes, margin_fraction)
    return Prediction(
        budget=budget,
        memory=memory,
        speed=speed,
        trainable_params=params[0],
        total_params=params[1],
        gpu=gpu.id,
        method=method,
        intervals=prior_intervals(
            memory, speed, method, unknown, limit_bytes=budget.limit_bytes, doubts=set(doubts)
        ),
    )


def doubts_of(workload: str, configuration: Configuration) -> set[Doubt]:
    """The doubts that a configuration raises about its memory."""
    found = {Doubt.KERNELS} if configuration.get("fused_loss") else set()
    is_compared = (
        workload == "causal_lm"
        and Parallelism.of(configuration).ranks == 1
        and not configuration.get("reference_pass")
        and configuration.get("padding") != "packed"
    )
    return found if is_compared else {*found, Doubt.UNCOMPARED}


def attention_of(configuration: Configuration) -> str:
    """The implementation of attention; PyTorch's own where the workload has no choice."""
    return str(configuration.get("attention", "sdpa"))


def speed_of(
    times: StepTimes, point: int, workload: str, configuration: Configuration, gpu: Gpu
) -> Speed:
    """The speed of all ranks at one point of `times`; `it_per_s` counts those of one rank."""
    grad_accum = grad_accum_of(configuration)
    ranks = Parallelism.of(configuration).ranks
    samples = int(str(configuration["micro_batch"])) * grad_accum * ranks
    step_s = float(times.step_s[point])
    return Speed(
        step_s=step_s,
        it_per_s=grad_accum / step_s,
        samples_per_s=samples / step_s,
        tokens_per_s=samples * tokens_per_sample(workload, configuration) / step_s,
        mfu=mfu(float(times.model_flops[point]) / step_s, configuration, gpu),
        breakdown_s={kind: float(seconds[point]) for kind, seconds in times.breakdown_s.items()},
    )


def step_work(training: Training, configuration: Configuration, gpu: Gpu) -> StepWork:
    """The work of one optimizer step on a GPU: the second, which has all states."""
    passes = as_chosen(training.work.passes, gpu, attention_of(configuration))
    return replace(training.work, passes=passes, reads_loss=reads_loss(configuration))


def reads_loss(configuration: Configuration) -> bool:
    """True if the training's loop reads each loss before the update: see `StepWork`."""
    return configuration.get("training_loop", "trainer") == "trainer"


MAX_POINTS = 400
"""Moments of a timeline: more than a screen shows, and a page stays small."""


def trace_timeline(
    subject: Subject,
    configuration: Configuration,
    gpu: Gpu,
    *,
    profile: DeviceProfile | None = None,
) -> MemoryTimeline:
    """Trace `configuration` and say what it has allocated over its second optimizer step.

    How long a phase takes is the roofline's answer; inside a phase, allocations and frees
    are spread evenly over its time. Takes as long as a prediction at full depth. Raises
    `InputError` when the GPU cannot run it.
    """
    gpu, kernel_times, _ = on_measured_device(gpu, profile)
    require_supported(configuration, gpu, model=architecture(subject.model))
    traced = Traces(subject).of(configuration, gpu)
    work, allow_tf32 = step_work(traced, configuration, gpu), configuration["precision"] == "tf32"
    seconds = _phase_seconds(traced, work, gpu, kernel_times, allow_tf32)
    settings, _ = AllocatorSettings.of(str(configuration.get("allocator", "")))
    timeline = timeline_of(traced.course, seconds, settings)
    grad_accum = grad_accum_of(configuration)
    whole = step_times(
        work,
        gpu,
        grad_accum=np.array([grad_accum]),
        allow_tf32=allow_tf32,
        kernel_times=kernel_times,
    )
    operators = most_expensive(
        work,
        gpu,
        kernel_times,
        grad_accum=grad_accum,
        step_s=float(whole.step_s[0]),
        allow_tf32=allow_tf32,
    )
    return replace(timeline, operators=operators)


def timeline_of(
    course: Course,
    seconds: Mapping[tuple[Phase, int], float],
    settings: AllocatorSettings | None = None,
) -> MemoryTimeline:
    """The timeline of a training's second step; `seconds` by phase and micro-step."""
    first, spans, bounds = 0, [], []
    now_s = 0.0
    marks = course.marks
    ends = [mark.event for mark in marks[1:]] + [len(course.events)]
    for mark, end in zip(marks, ends, strict=True):
        if mark.step != 1 or mark.phase is Phase.LOAD:
            continue
        first = first or mark.event
        end_s = now_s + seconds[mark.phase, mark.micro_step]
        spans.append(PhaseSpan(str(mark.phase), mark.micro_step, now_s, end_s))
        bounds.append((mark.event, end, now_s, end_s))
        now_s = end_s
    live, reserved = _live_bytes(course, first, settings)
    times_s = np.concatenate(
        [np.linspace(start_s, end_s, max(0, end - start)) for start, end, start_s, end_s in bounds]
    )
    keep = _highest_of_bins(times_s, live.sum(axis=0))
    categories = {
        str(category): tuple(int(size) for size in live[row, keep])
        for row, category in enumerate(CATEGORIES)
        if live[row].any()
    }
    return MemoryTimeline(
        times_s=tuple(float(f"{t:.6g}") for t in times_s[keep]),
        categories=categories,
        reserved_bytes=tuple(int(size) for size in reserved[keep]),
        spans=tuple(spans),
    )


def _live_bytes(
    course: Course, first: int, settings: AllocatorSettings | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Allocated bytes by category (rows) after each event from `first` on, and reserved bytes.

    The rests in blocks that were not worth splitting off are overhead, as in a prediction.
    """
    changes = np.zeros((len(CATEGORIES), len(course.events)), dtype=np.int64)
    changes[course.rows[course.events[:, 0]], np.arange(len(course.events))] = course.added_bytes
    live = np.cumsum(changes, axis=1)
    history = memory_history(course, settings=settings)
    overhead = CATEGORIES.index(MemoryCategory.ALLOCATOR_OVERHEAD)
    live[overhead] += np.array(history.allocated_bytes) - live.sum(axis=0)
    return live[:, first:], np.array(history.reserved_bytes)[first:]


def _highest_of_bins(times_s: NDArray[np.float64], totals: NDArray[np.int64]) -> list[int]:
    """The place of the highest total in each of `MAX_POINTS` equal parts of the time."""
    part = np.minimum(
        (times_s / max(float(times_s[-1]), 1e-12) * MAX_POINTS).astype(int), MAX_POINTS - 1
    )
    keep = []
    for number in np.unique(part):
        places = np.flatnonzero(part == number)
        keep.append(int(places[np.argmax(totals[places])]))
    return keep


def _phase_seconds(
    traced: Training, work: StepWork, gpu: Gpu, times: KernelTimes, allow_tf32: bool
) -> dict[tuple[Phase, int], float]:
    """Seconds of each phase of the traced second step."""
    kernels = KernelSeconds.of(work.passes, gpu, times, allow_tf32=allow_tf32)
    passes = pass_times(kernels, work.executions)
    seconds = {
        (segment.phase, segment.micro_step): float(sum(s[0] for s in by_kind.values()))
        for segment, by_kind in zip(SEGMENTS, passes.seconds, strict=True)
    }
    update = work.optimizer, work.optimizer_executions, work.trained
    optimizer_s = sum(float(part[0]) for part in optimizer_time(*update, gpu, times, allow_tf32))
    for mark in traced.course.marks:
        if mark.phase is Phase.OPTIMIZER:
            seconds[mark.phase, mark.micro_step] = optimizer_s
    return seconds
