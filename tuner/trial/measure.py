"""One real trial, inside its own process: load, warm up, time steps, and report the costs.

Facts are reported as soon as they are known, so that they remain if the process is killed. A
verification also evaluates and saves a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

import torch

from tuner.core.errors import InputError
from tuner.core.records import Configuration, Measurement, Phase, Source, Speed
from tuner.cost.speed.kernel_times import mfu
from tuner.emulator.here import is_emulated
from tuner.predict.training import TrainingSession, get_workload
from tuner.space.data import DataFacts
from tuner.space.models.catalogue import get_entry, resolve_config
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.device import (
    ProcessDevice,
    RealEnvironment,
    alloc_retries,
    open_session,
    parse_device,
    peaks_of,
)
from tuner.trial.messages import Report
from tuner.trial.ranks import Rank
from tuner.trial.steps import Stepper, TimedSteps, time_steps, warm_up
from tuner.trial.stop_rule import NEEDED_S, StepPlan, StopRule, thorough

EVALUATION_BATCHES = 2
"""Two batches, because the second starts with the cache left by the first."""


class _RecordedCall:
    """Records a session's call of its model, so that an evaluation can repeat it.

    A session offers training steps only; the evaluation uses inputs of the same form.
    """

    def __init__(self, session: TrainingSession, environment: RealEnvironment) -> None:
        self._model = session.model
        self._device_type = parse_device(environment.device).type
        self._given: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self._autocast_dtype: torch.dtype | None = None
        self._hook = self._model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given = (args, kwargs)
        if torch.is_autocast_enabled(self._device_type):
            self._autocast_dtype = torch.get_autocast_dtype(self._device_type)
        self._hook.remove()

    def evaluate(self) -> bool:
        """Run forward passes in evaluation mode, without gradients; False if no call was recorded.

        The user's own session may train without calling its model as a whole.

        The model's outputs, the logits and the loss, are kept until the loss has been read, as in
        the `prediction_step` of transformers' Trainer. Trainer keeps the logits of all batches
        only if a metric is computed from them; that is not done here.
        """
        if self._given is None:
            return False
        args, kwargs = self._given
        was_training = self._model.training
        self._model.eval()
        with torch.no_grad(), self._precision():
            for _ in range(EVALUATION_BATCHES):
                outputs = self._model(*args, **kwargs)
                has_logits = isinstance(outputs, Mapping) and outputs.get("logits") is not None
                if self._autocast_dtype is not None and has_logits:
                    # A second copy in fp32, as that of accelerate (`convert_outputs_to_fp32`).
                    outputs["logits"] = outputs["logits"].float()
                loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
                if isinstance(loss, torch.Tensor):
                    loss.detach().mean().item()
        del outputs, loss
        self._model.train(was_training)
        return True

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if self._autocast_dtype is None:
            yield
            return
        with torch.autocast(self._device_type, dtype=self._autocast_dtype):
            yield


class _Sink:
    """A file that discards its data: a verification of a GPU must not depend on a disk."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.bytes += size
        return size

    def flush(self) -> None:
        """Nothing waits to be written."""


def save_checkpoint(session: TrainingSession) -> int:
    """Serialise the trained weights and the optimizer's state, and return their size in bytes.

    As in a checkpoint of Trainer: only adapters if nothing else is trained. As in `torch.save`,
    the parts are copied to the host one by one.
    """
    sink = _Sink()
    trained = {n: p for n, p in session.model.named_parameters() if p.requires_grad}
    torch.save(
        {"model": trained, "optimizer": session.optimizer.state_dict()}, cast("IO[bytes]", sink)
    )
    return sink.bytes


def evaluate_and_save(
    session: TrainingSession, call: _RecordedCall, environment: RealEnvironment
) -> tuple[int | None, int]:
    """Evaluate, save, and take one more step; returns the peak allocated bytes and those saved.

    The step shows that training can go on with the cache that evaluating and saving leave behind.
    The peak is part of the trial's own.
    """
    allocated, reserved = environment.meter.peaks()
    highest = max(environment.phase_peak_bytes, key=environment.phase_peak_bytes.__getitem__)
    environment.phase_peak_bytes[highest] = max(environment.peak_allocated_bytes, allocated)
    environment.peak_reserved_bytes = max(environment.peak_reserved_bytes, reserved)
    environment.meter.reset()
    environment.phase = Phase.EVALUATION
    evaluated = call.evaluate()
    checkpoint_bytes = save_checkpoint(session)
    environment.synchronize()
    allocated, _ = environment.meter.peaks()
    session.optimizer_step(1)
    environment.synchronize()
    return allocated if evaluated else None, checkpoint_bytes


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The second is the older name; versions of PyTorch differ in which they read first."""


def apply_settings(configuration: Configuration, device: str) -> tuple[str, ...]:
    """Apply the process-wide knobs of `configuration`; returns notes for the reader.

    Call it before `device` is touched: the allocator reads its settings once. Raises
    `InputError` for settings that PyTorch doesn't accept. The workload decides whether a knob
    can take effect on `device`.
    """
    allocator = str(configuration.get("allocator", ""))
    notes = []
    if device != "cpu":
        inherited = next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), None)
        if allocator:
            set_allocator(allocator)
        elif inherited:
            notes.append(f"the environment sets the allocator: {inherited}")
    torch.backends.cudnn.benchmark = bool(configuration.get("cudnn_benchmark", False))
    if torch.backends.cudnn.benchmark:
        notes.append("cudnn_benchmark acts on convolutions only")
    return tuple(notes)


def set_allocator(text: str) -> None:
    """Set up PyTorch's caching allocator, for this process and those that it starts.

    The settings are also applied directly: if torch was imported before a fork, it has already
    read the variables. Raises `InputError` with PyTorch's message for text it doesn't accept.
    """
    # PyTorch has no public function for it; the second is what versions before 2.10 have.
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    try:
        (setter or torch.cuda.memory._set_allocator_settings)(text)
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"allocator {text!r} is not a setting of PyTorch's allocator",
            hint=f"{str(error).splitlines()[0][:200]}; write it as in PYTORCH_CUDA_ALLOC_CONF, "
            "for example expandable_segments:True",
        ) from error
    for name in ALLOCATOR_VARIABLES:
        os.environ[name] = text


SEED = 0
"""Seed of synthetic weights and tokens: trials of the same configuration do the same work."""


def measure(
    job: TrialJob,
    configuration: Configuration,
    options: MeasureOptions,
    report: Report,
    rank: Rank | None = None,
) -> Measurement:
    """Train `configuration` for some steps on `options.device`, and return the measurement.

    Raises `InputError` for a configuration that can't be built, and all exceptions of PyTorch and
    the operating system. A loss that is not finite ends the timed steps and is noted in the
    measurement. `report` is called with JSON facts: "device", "phase" (of warm-up steps; null while
    steps are timed), "load_s", "loaded_bytes", "trainable_params", "total_params", "needed_s"
    (`tuner.trial.stop_rule`), "first_step_s", "phase_peak_bytes", "peak_reserved_bytes".

    The process must be new and have imported the training libraries (`Training.prepare`): limits
    and settings stay in force, and the memory of an import would count as the trial's.

    If the process is one `rank` of several, memory is that of this rank, and rates are totals.

    On an emulated device, the measurement's source says so. Times are then those of its clock, and
    the numbers of a real machine (load time, waiting for data, power) are unknown.
    """
    rank = rank or Rank()
    emulated = is_emulated() and options.device != "cpu"
    # On an emulated device ten steps give the same numbers as one, and each takes processor time.
    if options.instructions.verify and not emulated:
        options = thorough(options)
    torch.manual_seed(SEED)
    started = time.perf_counter()
    notes = apply_settings(configuration, options.device)
    plan = StepPlan(options, int(str(configuration.get("grad_accum", 1))), rank.count)
    place = ProcessDevice(job, options)
    report({"device": place.name})
    environment = RealEnvironment(
        options.device,
        checkpoint=_checkpoint(job, options),
        data=_data(job, options),
        full_micro_steps=plan.full_micro_steps,
        on_phase=lambda phase: report({"phase": str(phase)}),
        rank=rank,
    )
    with _last_words(environment, report):
        rank.join(options.device)
        session = open_session(
            get_workload(job.workload),
            resolve_config(job.model) if job.model is not None else None,
            configuration,
            environment,
        )
        environment.synchronize()
        load_s = time.perf_counter() - started
        report(
            {
                "load_s": load_s,
                "trainable_params": session.trainable_params,
                "total_params": session.total_params,
            }
        )
        ran = _train(session, environment, plan, place, report)
        memory, device_memory = place.memory(environment)
        session.close()
    timed, step_s = ran.timed, ran.timed.step_s
    rate, gpu = timed.flops_per_s, place.gpu
    return Measurement(
        memory=memory,
        speed=Speed(
            step_s=step_s,
            it_per_s=timed.micro_steps_per_step / step_s,
            samples_per_s=timed.samples / step_s,
            tokens_per_s=timed.tokens / step_s,
            mfu=None if rate is None or gpu is None else mfu(rate, configuration, gpu),
        ),
        trainable_params=session.trainable_params,
        total_params=session.total_params,
        device=place.name,
        steps=timed.interval.count,
        timed_micro_steps=timed.micro_steps,
        loss_finite=timed.loss_finite,
        source=Source.EMULATED if emulated else Source.MEASURED,
        warmup_steps=ran.warmup_steps,
        load_s=None if emulated else load_s,
        first_step_s=ran.first_step_s,
        # The emulated clock has no scatter, and doesn't wait for data.
        samples_per_s_interval=None if emulated else timed.interval.rates(timed.samples),
        data_wait_fraction=None if emulated else timed.data_wait_s / step_s,
        stopped_by=timed.stopped_by,
        padded_tokens_per_s=timed.padded_tokens / step_s,
        evaluation_peak_bytes=ran.evaluation_peak_bytes,
        checkpoint_bytes=ran.checkpoint_bytes,
        num_alloc_retries=place.alloc_retries(),
        timed_alloc_retries=timed.alloc_retries,
        gpu_utilization=timed.gpu_utilization,
        nvml_process_bytes=device_memory.process_bytes,
        nvml_device_bytes=device_memory.device_bytes,
        memory_limit_bytes=options.memory_limit_bytes,
        weights=environment.checkpoint or "synthetic",
        lengths=options.lengths,
        cpu_threads=torch.get_num_threads() if options.device == "cpu" else None,
        notes=tuple(filter(None, (*notes, *place.notes, timed.note))),
    )


@dataclass(frozen=True, slots=True)
class _Ran:
    """The results of a trial's steps."""

    timed: TimedSteps
    warmup_steps: int
    first_step_s: float
    evaluation_peak_bytes: int | None = None
    checkpoint_bytes: int | None = None


def _train(
    session: TrainingSession,
    environment: RealEnvironment,
    plan: StepPlan,
    place: ProcessDevice,
    report: Report,
) -> _Ran:
    """Warm up, time steps, and verify if requested."""
    verifies = plan.options.instructions.verify
    call = _RecordedCall(session, environment) if verifies else None
    rank = environment.rank
    rule = StopRule(plan.options, lambda: int(rank.most(place.device_bytes(environment))))
    stepper = Stepper(session, environment, plan.micro_steps)

    def on_pace(seconds: float) -> None:
        if not is_emulated():  # an emulated clock isn't that of the deadline
            report({NEEDED_S: seconds})

    warm = warm_up(stepper, plan, rule, on_pace)
    report({"first_step_s": warm.first_step_s, **peaks_of(environment), "phase": None})
    timed = time_steps(stepper, plan, rule, warm.timed_micro_steps)
    peak, saved = evaluate_and_save(session, call, environment) if call else (None, None)
    return _Ran(timed, rule.warmup_steps, warm.first_step_s, peak, saved)


@contextlib.contextmanager
def _last_words(environment: RealEnvironment, report: Report) -> Iterator[None]:
    """Report phase and peaks before an exception is passed on."""
    try:
        yield
    except BaseException:
        phase: Phase | None = environment.phase
        retries = alloc_retries(parse_device(environment.device))
        facts = {"phase": str(phase) if phase else None, "num_alloc_retries": retries}
        report({**facts, **peaks_of(environment)})
        raise


def _data(job: TrialJob, options: MeasureOptions) -> DataFacts | None:
    """The data whose sequence lengths are used; None if all sequences have the longest length."""
    if options.lengths == "full":
        return None
    if job.data is None or job.data.token_lengths is None:
        raise InputError(
            "the lengths of the data's examples are unknown",
            hint="add data.token_lengths to the space, or train on full lengths",
        )
    return job.data


def _checkpoint(job: TrialJob, options: MeasureOptions) -> str | None:
    """The source of real weights, a hub id or a path; None for synthetic weights."""
    if options.weights == "synthetic":
        return None
    if job.model is None:
        raise InputError(f"--weights {options.weights} is about a model, and the space names none")
    if options.weights != "hub":
        return options.weights

    entry = get_entry(job.model)
    return entry.hub_id if entry else job.model
