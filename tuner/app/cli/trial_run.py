"""One trial by hand: checked, predicted, run, and compared with its prediction."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tuner.app.cli.data import DataFile
from tuner.app.cli.listening import Printer
from tuner.app.device import AUTO, CPU, find_gpu, is_cpu, local_gpus, with_profile
from tuner.app.estimate import estimate_configuration, one_configuration
from tuner.app.measuring import (
    Measuring,
    Mode,
    cpu_share,
    emulating,
    limit_of,
    require_one_machine,
)
from tuner.app.search.supported import require_lengths, trial_job
from tuner.core import host
from tuner.core.errors import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    EXIT_UNAVAILABLE,
    EXIT_UNKNOWN,
    InputError,
    UnavailableError,
    verdict_code,
)
from tuner.core.gpu import Gpu
from tuner.core.records import (
    Configuration,
    Measurement,
    MemoryBudget,
    Outcome,
    Prediction,
    Status,
    TrialRecord,
)
from tuner.core.setup.distributed_knobs import gpus_per_trial, machines
from tuner.core.units import format_duration, format_size
from tuner.emulator.here import is_emulated
from tuner.report.terminal.evidence import (
    fits_text,
    more_text,
    params_text,
    print_comparison,
    print_ran,
    print_stages,
)
from tuner.report.terminal.render import echo, print_fields, settings_text
from tuner.searches.facts import SpaceFacts, gpus_text, ranks_text
from tuner.space import SearchSpace, parse_settings
from tuner.space.data import DataFacts
from tuner.trial.base import outcome_versions

Evidence = Prediction | Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """The options of `tuner trial`."""

    space_name: str | None
    model: str | None
    settings: tuple[str, ...]
    device: str | None
    mode: str
    gpu_name: str | None
    gpu_memory: int | None
    memory_limit: int | None
    budget_s: float | None
    timeout_s: float | None
    weights: str | None
    wait_s: float | None
    whole_steps: bool
    lengths: str | None
    data: DataFile

    @classmethod
    def of(cls, **options: Any) -> TrialOptions:
        """From the options as they were typed. A file of data asks for its lengths.

        Raises `InputError` for lengths that the file would not act on.
        """
        names = {field.name for field in dataclasses.fields(DataFile)}
        data = DataFile(**{name: options.pop(name) for name in names})
        if data.path is not None:
            if options["lengths"] == "full":
                raise InputError("--lengths full trains on none of the lengths of --data")
            options["lengths"] = "data"
        return cls(**options, data=data)

    def data_of(self, space: SearchSpace) -> DataFacts:
        """Facts about the data: the space's, with the lengths of the file where there is one.

        Raises `InputError` where the trial is to draw examples and nothing says of which lengths.
        """
        found = self.data.lengths()
        if found is None:
            if self.lengths == "data":
                require_lengths(space)
            return space.data
        return dataclasses.replace(space.data, examples=found.examples, token_lengths=found)

    def device_type(self) -> tuple[Gpu, Measuring]:
        """The GPU type that is asked about, and the device that the trial runs on.

        Without `--device` it is the processor for `--gpu cpu`, else the first GPU. Raises
        `InputError` for contradicting options, `UnavailableError` without such a device.
        """
        if self.mode == Mode.EMULATE:
            return self._emulated()
        device = self.device or (CPU if _names(self.gpu_name, CPU) else "cuda:0")
        if device == CPU:
            return self._processor()
        index = _cuda_index(device)
        found = {local.index: local for local in local_gpus()}.get(index)
        if found is None:
            raise UnavailableError(
                f"there is no CUDA device {index} on this machine",
                hint="--device cpu runs the trial on the processor",
            )
        own = self.gpu_name is None or _names(self.gpu_name, AUTO)
        if own and found.gpu is not None:
            gpu = found.gpu
            if self.gpu_memory is not None:
                gpu = dataclasses.replace(gpu, memory_bytes=self.gpu_memory)
        else:
            gpu = find_gpu(self.gpu_name or AUTO, memory_bytes=self.gpu_memory)
        if is_cpu(gpu):
            raise InputError(f"--gpu cpu is a processor, but --device {device} is not")
        return gpu, Measuring(
            device,
            (found.name,),
            (found.total_bytes,),
            {"CPU": float(cpu_share(len(local_gpus())))},
            local=(index,),
            memory_limit_bytes=limit_of(gpu, self.memory_limit, found.total_bytes),
            stands_in=found.gpu is None or found.gpu.id != gpu.id,
            emulated=is_emulated(),
        )

    def _emulated(self) -> tuple[Gpu, Measuring]:
        if self.gpu_name is None:
            raise InputError(
                "--mode emulate needs a GPU type to emulate",
                hint="name it with --gpu (`tuner gpus`)",
            )
        if self.device not in (None, "cuda", "cuda:0"):
            raise InputError(
                f"--device {self.device} is of this machine, but --mode emulate makes its own",
                hint="leave --device out",
            )
        gpu = find_gpu(self.gpu_name, memory_bytes=self.gpu_memory)
        return gpu, emulating(gpu, self.memory_limit)

    def _processor(self) -> tuple[Gpu, Measuring]:
        if not (self.gpu_name is None or _names(self.gpu_name, CPU)):
            raise InputError(
                f"a processor cannot stand in for GPU {self.gpu_name!r}",
                hint="`tuner estimate` predicts for it",
            )
        gpu = find_gpu(CPU, memory_bytes=self.gpu_memory)
        limit = limit_of(gpu, self.memory_limit, host.usable_memory_bytes())
        cpus = {"CPU": float(cpu_share(1))}
        return gpu, Measuring(CPU, (gpu.name,), (gpu.memory_bytes,), cpus, memory_limit_bytes=limit)


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial that was run: where, of what, with what came of it and what was predicted."""

    space: SearchSpace
    gpu: Gpu
    trials_on: Measuring
    record: TrialRecord

    @property
    def exit_code(self) -> int:
        """The verdict's status where the trial ended in one, else that of its ending."""
        status = self.record.outcome.status
        own = self.space.command is None
        codes = {
            Status.INTERRUPTED: EXIT_INTERRUPTED,
            Status.INVALID: EXIT_BAD_INPUT,
            # The training is tuner's own, or the person's.
            Status.CRASHED: EXIT_UNAVAILABLE if own else EXIT_BAD_INPUT,
            Status.NON_FINITE: EXIT_BAD_INPUT,
            Status.TIMEOUT: EXIT_UNKNOWN,
        }
        return codes.get(status, verdict_code(self.record.fits))


def run_trial(
    question: TrialOptions, gpu: Gpu, trials_on: Measuring, margin_fraction: float | None
) -> Trial:
    """Predict, then run. Raises `InputError` for what cannot be run on this GPU at all."""
    settings = parse_settings(question.settings)
    space, configuration = one_configuration(question.space_name, question.model, settings)
    data = question.data_of(space)
    prediction, profile = None, None
    if space.predictable:
        gpu, profile = with_profile(gpu, Printer(err=True))
        prediction = estimate_configuration(
            space, configuration, gpu, margin_fraction=margin_fraction, profile=profile
        ).prediction
    job = dataclasses.replace(trial_job(space, gpu, margin_fraction, profile), data=data)
    options = trials_on.options(
        budget_s=question.budget_s,
        timeout_s=question.timeout_s,
        weights=question.weights,
        wait_for_device_s=question.wait_s,
        whole_steps=question.whole_steps,
        lengths=question.lengths,
    )
    if space.predictable:
        require_one_machine(machines(configuration))
    trials_on = dataclasses.replace(trials_on, gpus=gpus_per_trial(configuration))
    outcome = trials_on.run(job, options, (space, configuration, prediction))
    record = _record(space, gpu, trials_on, configuration, (outcome, prediction), margin_fraction)
    return Trial(space, gpu, trials_on, record)


def _record(
    space: SearchSpace,
    gpu: Gpu,
    trials_on: Measuring,
    configuration: Configuration,
    ended: tuple[Outcome, Prediction | None],
    margin_fraction: float | None,
) -> TrialRecord:
    outcome, prediction = ended
    return TrialRecord.of(
        space.name,
        gpu,
        configuration,
        dataclasses.replace(outcome, prediction=prediction),
        trial_id="by-hand",
        versions=outcome_versions(),
        device=None if trials_on.emulated else trials_on.names[0],
        emulated_device=trials_on.names[0] if trials_on.emulated else None,
        memory_limit_bytes=trials_on.memory_limit_bytes,
        margin_bytes=MemoryBudget.of(gpu.memory_bytes, margin_fraction).margin_bytes,
    )


def to_dict(trial: Trial) -> dict[str, Any]:
    """JSON types: the journal's record, and whether it fits."""
    left_out = {"trial_id", "run_id", "searcher", "seed"}
    record = {k: v for k, v in trial.record.to_dict().items() if k not in left_out}
    return {
        **record,
        "model": trial.space.model,
        "fits": trial.record.fits,
        "source": str(trial.record.source),
        "stands_in": trial.trials_on.stands_in,
    }


def print_trial(trial: Trial) -> None:
    """The outcome, and predicted numbers beside those of the trial."""
    record, outcome = trial.record, trial.record.outcome
    ended = f"{outcome.status}{f' in {outcome.phase}' if outcome.phase else ''}"
    if outcome.requested_bytes is not None:
        ended += f", {format_size(outcome.requested_bytes)} asked for"
    ran = outcome.ran
    command = trial.space.subject_of(record.configuration) if trial.space.command else ""
    print_fields(
        [
            ("model", trial.space.model or ""),
            ("command", command),
            ("GPU", gpus_text(record.configuration, trial.gpu)),
            ("settings", settings_text(record.configuration)),
            ("numbers", trial.trials_on.text(trial.gpu)),
            ("status", f"{ended}, after {format_duration(outcome.duration_s)}"),
            ("message", outcome.message),
            ("fits", _fits_text(trial)),
            ("ranks", ranks_text(ran) if ran else ""),
            ("parameters", params_text(ran) if ran else ""),
            ("more", more_text(ran) if ran else ""),
            ("notes", "; ".join(getattr(ran, "notes", ()))),
        ]
    )
    print_stages(record, SpaceFacts.of(trial.space))
    if outcome.prediction is not None:
        echo()
        print_comparison(outcome.prediction, ran, record.source)
    elif ran is not None:
        echo()
        print_ran(ran)


def _fits_text(trial: Trial) -> str:
    record, ran = trial.record, trial.record.outcome.ran
    if ran is None:
        return "no" if record.outcome.status is Status.OOM else ""
    return fits_text(
        ran,
        fits=record.fits,
        limit_bytes=record.budget.limit_bytes,
        margin_bytes=record.budget.margin_bytes,
    )


def _names(text: str | None, word: str) -> bool:
    return text is not None and text.strip().lower() == word


def _cuda_index(device: str) -> int:
    name, _, number = device.partition(":")
    if name != "cuda" or not (number or "0").isdigit():
        raise InputError(f"device {device!r} cannot train", hint="write cuda:0 or cpu")
    return int(number or "0")
