"""The prediction of one configuration on one GPU, from a trace of its own training step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.core.errors import InputError, Problem, UnsupportedError
from tuner.core.gpu import Gpu
from tuner.core.records import (
    Configuration,
    Doubt,
    Memory,
    MemoryBudget,
    MemoryCategory,
    Prediction,
    Speed,
    Verdict,
)
from tuner.core.setup.causal_lm import CAUSAL_LM, IN_BACKWARD, OFFLOAD_ACTIVATIONS
from tuner.core.setup.common import QUANTIZED, TORCH_DTYPES
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL, MACHINES, Parallelism
from tuner.core.setup.optimizers import OPTIMIZERS
from tuner.core.setup.schemas import unmodelled
from tuner.cost.as_arrays import to_arrays
from tuner.cost.calibrate import prior_intervals
from tuner.cost.library_memory import cublas_workspace_bytes
from tuner.cost.memory import peak_memory
from tuner.cost.parallel import exchange_of, times_of_ranks
from tuner.cost.rank_memory import nccl_text, with_nccl
from tuner.cost.sized import OptimizerSteps, SizedTimeline
from tuner.cost.speed.kernel_times import on_measured_device
from tuner.cost.speed.profile import DeviceProfile
from tuner.cost.speed.rates import as_chosen, matmul_peak
from tuner.cost.speed.roofline import StepTimes, StepWork, step_times
from tuner.cost.traced import Trace
from tuner.cost.work_arrays import WorkArrays, executions_of, optimizer_executions_of
from tuner.predict import cache
from tuner.predict.compiler.structure import VARIABLE_KNOBS, Point, Structure, kernels_like
from tuner.predict.training import get_workload, tokens_per_sample
from tuner.space.models.catalogue import (
    FP8,
    MXFP4,
    NF4,
    Architecture,
    architecture_of,
    resolve_config,
)
from tuner.space.models.positions import length_problem

if TYPE_CHECKING:  # tracing imports torch, which reading a compiled timeline does without
    from tuner.predict.training.base import Workload

NOT_PREDICTED = "not predicted"
"""The words of a problem that is tuner's and not the GPU's."""

WITHOUT = "without the effect of"
"""Precedes the settings that a method ignores."""

METHOD = "trace of two optimizer steps at full depth"


@dataclass(frozen=True, slots=True)
class Subject:
    """The workload and model of a search, with the model's configuration."""

    workload: Workload
    model: str
    model_config: Any


def resolve_subject(workload: str, model: str) -> Subject:
    """Look both names up. Raises `InputError` for names that do not exist."""
    return Subject(get_workload(workload), model, resolve_config(model))


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
    dtype, mixed = (configuration.get(name) for name in ("adapter_dtype", "mixed_precision"))
    if dtype != "bf16" or mixed != "fp16" or not configuration.get("lora_rank"):
        return []
    reason = "adapter_dtype bf16 with mixed_precision fp16: gradients in bf16 cannot be scaled"
    return [Problem(reason, where="adapter_dtype")]


MOST_TRACES = 6
"""GPUs are of three kinds (kernels, workspaces, bf16), and several GPUs need a trace of one too."""


class Traces:
    """Traces of one model that are kept to price them on many GPU types.

    They follow from timelines for all sizes and from steps of an optimizer, which are kept on disk
    too.
    """

    def __init__(self) -> None:
        self._traces: dict[Any, Trace] = {}
        """The last ones: each has hundreds of thousands of events."""
        self._architecture: Architecture | None = None
        self._sized: dict[Structure, SizedTimeline | None] = {}
        self._optimizers: dict[str, OptimizerSteps] = {}
        self._memory: dict[tuple[Any, bool], Memory] = {}

    def of(self, subject: Subject, configuration: Configuration, gpu: Gpu) -> Trace:
        """The trace of a configuration, made once for all GPUs with the same kernels."""
        capability = gpu.compute_capability
        workspace = cublas_workspace_bytes(capability)
        key = (configuration.key, kernels_like(capability), workspace)
        if key not in self._traces:
            while len(self._traces) >= MOST_TRACES:
                del self._traces[next(iter(self._traces))]
            structure = self.structure(subject, configuration, gpu)
            sized = None if structure is None else self.sized(subject, structure)
            self._traces[key] = (
                _traced(subject, configuration, capability)
                if sized is None
                else self._at(sized, configuration, workspace)
            )
        return self._traces[key]

    def structure(
        self, subject: Subject, configuration: Configuration, gpu: Gpu
    ) -> Structure | None:
        """The structure whose timeline is the configuration's; None where all of it is traced."""
        if subject.workload.name != "causal_lm" or not is_sized(configuration):
            return None
        model = self._architecture_of(subject)
        return Structure.of(
            configuration,
            window=model.sliding_window,
            positions=model.positions,
            compute_capability=gpu.compute_capability,
            with_evaluation=True,
        )

    def sized(self, subject: Subject, structure: Structure) -> SizedTimeline | None:
        """The timeline of a structure; None where there is none for all sizes."""
        if structure not in self._sized:
            digest = self._architecture_of(subject).digest
            entry = cache.entry_name("sized", subject.workload.name, digest, structure.key)
            found = cache.read_parsed(entry, SizedTimeline)
            if found is None:
                from tuner.predict.compiler.deepening import sized_timeline

                found = sized_timeline(subject.workload, subject.model_config, structure)
                if found is not None:
                    cache.write_arrays(entry, to_arrays(found))
            self.keep(structure, found)
        return self._sized[structure]

    def _architecture_of(self, subject: Subject) -> Architecture:
        if self._architecture is None:
            self._architecture = architecture_of(subject.model_config)
        return self._architecture

    def keep(self, structure: Structure, sized: SizedTimeline | None) -> None:
        """Have this as the timeline of a structure."""
        self._sized[structure] = sized

    def lacks(self, structure: Structure) -> bool:
        """True if the timeline of a structure has not been asked for."""
        return structure not in self._sized

    def _at(self, sized: SizedTimeline, configuration: Configuration, workspace: int) -> Trace:
        point = point_of(configuration)
        optimizer = self._optimizer(configuration, sized.parameters(point))
        accumulates = grad_accum_of(configuration) > 1
        trainable, total = sized.params(point)
        batch = int(str(configuration.get("eval_batch", 0)))
        return Trace(
            timeline=sized.at(
                point,
                optimizer,
                workspace_bytes=workspace,
                accumulates=accumulates,
                evaluation=(batch, *point[1:]) if batch else None,
            ),
            micro_steps=1 + accumulates,
            trainable_params=trainable,
            total_params=total,
            remarks=sized.remarks,
            work=sized.work(point, optimizer),
        )

    def _optimizer(
        self, configuration: Configuration, parameters: tuple[tuple[int, str], ...]
    ) -> OptimizerSteps:
        default = CAUSAL_LM.terms["max_grad_norm"].default
        clip = float(str(configuration.get("max_grad_norm", default))) > 0
        name = str(configuration["optimizer"])
        scaled = configuration.get("mixed_precision") == "fp16"
        entry = cache.entry_name("optimizer steps", name, str(clip), str(scaled), repr(parameters))
        if entry not in self._optimizers:
            found = cache.read_parsed(entry, OptimizerSteps)
            if found is None:
                from tuner.predict.compiler.deepening import optimizer_steps

                found = optimizer_steps(name, parameters, clip=clip, scaled=scaled)
                cache.write_arrays(entry, to_arrays(found))
            self._optimizers[entry] = found
        return self._optimizers[entry]

    def memory(self, traced: Trace, *, context_bytes: int, short: bool = False) -> Memory:
        """`peak_memory` of one of these traces."""
        key = next(name for name, kept in self._traces.items() if kept is traced), short
        if key not in self._memory:
            self._memory[key] = peak_memory(traced.timeline, context_bytes=0, short=short)
        found = self._memory[key]
        context = str(MemoryCategory.CONTEXT_AND_WORKSPACE)
        return replace(
            found,
            device_bytes=found.device_bytes + context_bytes,
            breakdown={**found.breakdown, context: found.breakdown[context] + context_bytes},
        )


def is_sized(configuration: Configuration) -> bool:
    """True if a timeline of all sizes has the configuration: of text, on one GPU."""
    batch, eval_batch = (
        int(str(configuration.get(name, 0))) for name in ("micro_batch", "eval_batch")
    )
    return (
        Parallelism.of(configuration).ranks == 1
        and (not eval_batch or (batch == 1) == (eval_batch == 1))
        and not configuration.get("num_labels")
        and has_polynomial_sizes(configuration)
    )


def has_polynomial_sizes(configuration: Configuration) -> bool:
    """True if sizes are polynomials, and the update is one of all gradients after the passes."""
    optimizer = OPTIMIZERS.get(str(configuration.get("optimizer")))
    needs_shapes = optimizer is not None and optimizer.needs_shapes
    others = ("images", OFFLOAD_ACTIVATIONS, IN_BACKWARD)
    return not (needs_shapes or any(configuration.get(name) for name in others))


def _traced(subject: Subject, configuration: Configuration, capability: tuple[int, int]) -> Trace:
    from tuner.predict.tracing.trace import trace

    return trace(
        subject.workload, subject.model_config, configuration, compute_capability=capability
    )


def point_of(configuration: Configuration) -> Point:
    """Micro-batch, length, rank and negatives of a configuration; 0 for what it has not."""
    return tuple(int(str(configuration.get(name, 0))) for name in VARIABLE_KNOBS)


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
    traces = traces or Traces()
    gpu, kernel_times, rates = on_measured_device(gpu, profile, configuration)
    require_supported(configuration, gpu)
    parallelism = Parallelism.of(configuration)
    traced = traces.of(subject, configuration, gpu)
    # DDP issues its own copies from C++, which costs no host time as the model's operators do.
    worked = traced
    if parallelism.is_replicated:
        alone = Configuration({**configuration, GPUS_PER_TRIAL: 1, MACHINES: 1})
        worked = traces.of(subject, alone, gpu)
    memory = traces.memory(traced, context_bytes=gpu.context_bytes, short=short)
    memory = with_nccl(memory, gpu, configuration)
    times = step_times(
        step_work(worked, configuration, gpu),
        gpu,
        grad_accum=np.array([grad_accum_of(configuration)]),
        allow_tf32=configuration["precision"] == "tf32",
        kernel_times=kernel_times,
    )
    if parallelism.ranks > 1:
        exchange = exchange_of(traced.timeline, traced.gradient_bytes, configuration)
        times = times_of_ranks(times, [exchange], [parallelism], gpu, memory)
    found = build_prediction(
        memory,
        speed_of(times, 0, subject.workload.name, configuration, gpu),
        gpu,
        params=(traced.trainable_params, traced.total_params),
        method=method_text(
            f"{METHOD}; {rates}", subject.workload.name, configuration, gpu, traced.remarks
        ),
        margin_fraction=margin_fraction,
        unknown=times.unknown(0),
        doubts=doubts_of(subject.workload.name, configuration),
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
    how: str,
    workload: str,
    configuration: Configuration,
    gpu: Gpu,
    remarks: Sequence[str] = (),
) -> str:
    """The method of a prediction, with the remarks of its trace and the knobs that it ignores."""
    left_out = unmodelled(workload, configuration)
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
            memory,
            speed,
            method,
            unknown,
            limit_bytes=budget.limit_bytes,
            doubts=set(doubts),
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


def grad_accum_of(configuration: Configuration) -> int:
    """Micro-steps of an optimizer step."""
    return int(str(configuration.get("grad_accum", 1)))


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
        mfu=_mfu(float(times.model_flops[point]) / step_s, configuration, gpu),
        breakdown_s={kind: float(seconds[point]) for kind, seconds in times.breakdown_s.items()},
    )


def step_work(traced: Trace, configuration: Configuration, gpu: Gpu) -> StepWork:
    """The work of one optimizer step on a GPU: the second of a trace, which has all states."""
    work = traced.work or _second_step(traced)
    return replace(work, passes=as_chosen(work.passes, gpu, attention_of(configuration)))


def _second_step(traced: Trace) -> StepWork:
    timeline = traced.timeline
    works = WorkArrays.of_works(timeline.works)
    return StepWork(
        passes=works,
        executions=executions_of(timeline),
        optimizer=works,
        optimizer_executions=optimizer_executions_of(timeline),
    )


def _mfu(flops_per_s: float, configuration: Configuration, gpu: Gpu) -> float | None:
    """Model FLOP/s over the dense peak of the precision in which most products run."""
    mixed = str(configuration.get("mixed_precision", "no"))
    precision = mixed if mixed != "no" else str(configuration["precision"])
    if precision in QUANTIZED:
        precision = "bf16"
    if precision not in gpu.flops:
        return None
    dtype = TORCH_DTYPES[precision]
    return flops_per_s / matmul_peak(gpu, dtype, allow_tf32=precision == "tf32")
