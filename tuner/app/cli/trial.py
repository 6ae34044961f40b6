"""`tuner trial`: runs one configuration for real, and prints what was predicted beside it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import click

from tuner.app import measuring
from tuner.app.cli import options as opts
from tuner.app.cli import subcommand
from tuner.app.cli.data import DataFile, data_options
from tuner.app.device import AUTO, CPU, LocalGpu, find_gpu, is_cpu, local_gpus, profile_for
from tuner.app.estimate import estimate_configuration, one_configuration
from tuner.app.listener import quiet_libraries
from tuner.app.search.supported import is_predicted, require_lengths, require_supported, trial_job
from tuner.core import errors
from tuner.core.expressions import settings_text
from tuner.core.gpu import Gpu
from tuner.core.records import (
    Configuration,
    MemoryBudget,
    Status,
    TrialRecord,
    Verdict,
    parse_margin,
)
from tuner.core.setup.distributed_knobs import gpus_per_trial, machines
from tuner.core.units import format_duration, format_size
from tuner.emulator.here import is_emulated
from tuner.report.terminal import evidence
from tuner.report.terminal.render import echo, print_fields, print_json
from tuner.searches.facts import SpaceFacts, gpus_text, ranks_text
from tuner.searches.options import Mode, SearchOptions
from tuner.space import SearchSpace
from tuner.space.data import DataFacts
from tuner.space.gpus import as_told
from tuner.trial.base import outcome_versions


@subcommand(
    "trial",
    "tuner trial --space tiny_cpu --set micro_batch=4 --device cpu",
    "tuner trial --space qlora27b --set micro_batch=2 --device cuda:0",
    "tuner trial --space qlora27b --gpu a6000 --mode emulate",
    "tuner trial --space qlora27b --data train.jsonl --length-column n_tokens",
)
@opts.space_option(required=False)
@opts.model_option(
    "Model to use instead of the space's; without --space, all settings have their defaults."
)
@click.option(
    "--mode",
    type=click.Choice(["measure", "emulate"]),
    default="measure",
    help="On a device here, or on an emulated --gpu.",
)
@click.option("--device", default=None, metavar="DEVICE", help="cuda:0, cuda:1, ... or cpu.")
@click.option(
    "--gpu",
    "gpu_name",
    metavar="GPU",
    help="GPU type of the device, or the one it stands in for.  [default: the device's own]",
)
@click.option(
    "--gpu-memory", type=opts.SIZE, metavar="SIZE", help="Memory of the GPU, such as 80GiB."
)
@click.option(
    "--memory-limit",
    type=opts.MEMORY_LIMIT,
    metavar="SIZE",
    help="Memory that the trial may use, such as 24GiB; auto: that of --gpu.",
)
@opts.search_options("budget_s", "timeout_s", "weights", "lengths", "whole_steps")
@data_options
@opts.margin_option
@opts.set_option
@opts.json_option
def command(  # noqa: PLR0913 - one argument for each option that is not about how to measure
    *,
    space: str | None,
    model: str | None,
    mode: str,
    device: str | None,
    gpu_name: str | None,
    gpu_memory: int | None,
    data: DataFile,
    as_json: bool,
    **how: Any,
) -> int:
    """Train a few steps in a separate process, and print the result.

    The prediction is shown beside it. Nothing is written. Exit code 1 if the configuration does not
    fit or does not finish.
    """
    options = SearchOptions(mode=Mode(mode), **how)
    gpu, trials_on = device_type(options, device, gpu_name, gpu_memory)
    of, configuration = one_configuration(space, model, options.settings)
    with quiet_libraries():
        trial = run_trial(of, configuration, gpu, trials_on, *with_data(of, data, options))
    print_json(trial.to_dict()) if as_json else print_trial(trial)
    return trial.exit_code


def with_data(
    space: SearchSpace, file: DataFile, options: SearchOptions
) -> tuple[SearchOptions, DataFacts]:
    """The options, and facts about the data: the space's, with the lengths of a file if any.

    A file asks for its lengths. Raises `InputError` where the trial is to draw examples and nothing
    says of which lengths, and for lengths that the file would not act on.
    """
    if file.path is not None and options.lengths == "full":
        raise errors.InputError("--lengths full trains on none of the lengths of --data")
    found = file.lengths()
    if found is None:
        if options.lengths == "data":
            require_lengths(space)
        return options, space.data
    data = dataclasses.replace(space.data, examples=found.examples, token_lengths=found)
    return dataclasses.replace(options, lengths="data"), data


def device_type(
    options: SearchOptions, device: str | None, gpu_name: str | None, gpu_memory: int | None
) -> tuple[Gpu, measuring.Measuring]:
    """The GPU type that is asked about, and the device that the trial runs on.

    Without `device` it is the processor for `--gpu cpu`, else the first GPU. Raises
    `InputError` for contradicting options, `UnavailableError` without such a device.
    """
    named = gpu_name.strip().lower() if gpu_name is not None else None
    if options.mode is Mode.EMULATE:
        if gpu_name is None:
            raise errors.InputError(
                "--mode emulate needs a GPU type to emulate",
                hint="name it with --gpu (`tuner gpus`)",
            )
        if device not in (None, "cuda", "cuda:0"):
            raise errors.InputError(
                f"--device {device} is of this machine, but --mode emulate makes its own",
                hint="leave --device out",
            )
        gpu = find_gpu(gpu_name, memory_bytes=gpu_memory)
        return gpu, measuring.emulating(gpu, options.memory_limit)
    device = device or (CPU if named == CPU else "cuda:0")
    if device == CPU:
        if named not in (None, CPU):
            raise errors.InputError(
                f"a processor cannot stand in for GPU {gpu_name!r}",
                hint="`tuner estimate` predicts for it",
            )
        gpu = find_gpu(CPU, memory_bytes=gpu_memory)
        return gpu, measuring.on_processor(gpu, options.memory_limit)
    found = _cuda_device(device)
    if named in (None, AUTO) and found.gpu is not None:
        gpu = as_told(found.gpu, memory_bytes=gpu_memory, price_usd_per_hour=None)
    else:
        gpu = find_gpu(gpu_name or AUTO, memory_bytes=gpu_memory)
    if is_cpu(gpu):
        raise errors.InputError(f"--gpu cpu is a processor, but --device {device} is not")
    return gpu, measuring.Measuring(
        device,
        (found.name,),
        (found.total_bytes,),
        {"CPU": float(measuring.cpu_share(len(local_gpus())))},
        local=(found.index,),
        memory_limit_bytes=measuring.limit_of(gpu, options.memory_limit, found.total_bytes),
        stands_in=found.gpu is None or found.gpu.id != gpu.id,
        emulated=is_emulated(),
    )


def _cuda_device(device: str) -> LocalGpu:
    name, _, number = device.partition(":")
    if name != "cuda" or not (number or "0").isdigit():
        raise errors.InputError(f"device {device!r} cannot train", hint="write cuda:0 or cpu")
    index = int(number or "0")
    found = {local.index: local for local in local_gpus()}.get(index)
    if found is None:
        raise errors.UnavailableError(
            f"there is no CUDA device {index} on this machine",
            hint="--mode emulate runs it on an emulated GPU, --device cpu on the processor",
        )
    return found


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial that was run: where, of what, with what came of it and what was predicted."""

    space: SearchSpace
    gpu: Gpu
    trials_on: measuring.Measuring
    record: TrialRecord

    @property
    def exit_code(self) -> int:
        """The verdict's status where the trial ended in one, else that of its ending."""
        status = self.record.outcome.status
        own = self.space.command is None
        codes = {
            Status.INTERRUPTED: errors.EXIT_INTERRUPTED,
            Status.INVALID: errors.EXIT_BAD_INPUT,
            # The training is tuner's own, or the person's.
            Status.CRASHED: errors.EXIT_UNAVAILABLE if own else errors.EXIT_BAD_INPUT,
            Status.NON_FINITE: errors.EXIT_BAD_INPUT,
            Status.TIMEOUT: errors.EXIT_UNKNOWN,
        }
        return codes.get(status, errors.verdict_code(self.record.fits))

    def to_dict(self) -> dict[str, Any]:
        """JSON types: the journal's record, and whether it fits."""
        left_out = {"trial_id", "run_id", "searcher", "seed"}
        return {
            **{k: v for k, v in self.record.to_dict().items() if k not in left_out},
            "model": self.space.model,
            "fits": self.record.fits,
            "source": str(self.record.source),
            "stands_in": self.trials_on.stands_in,
        }


def run_trial(
    space: SearchSpace,
    configuration: Configuration,
    gpu: Gpu,
    trials_on: measuring.Measuring,
    options: SearchOptions,
    data: DataFacts,
) -> Trial:
    """Predict for a GPU, then run. Raises `InputError` for what this device cannot run."""
    from tuner.app.search.prepare import measure_options  # numpy

    margin_fraction = parse_margin(options.margin, gpu)
    prediction, profile = None, None
    if is_predicted(space, gpu):
        profile = profile_for(gpu)
        prediction = estimate_configuration(
            space, configuration, gpu, margin_fraction=margin_fraction, profile=profile
        ).prediction
    elif space.predictable:
        require_supported(configuration, gpu)
    if space.predictable:
        measuring.require_one_machine(machines(configuration))
    job = dataclasses.replace(trial_job(space, gpu, margin_fraction, profile), data=data)
    trials_on = dataclasses.replace(trials_on, gpus=gpus_per_trial(configuration))
    how = measure_options(trials_on, options, None)
    outcome = trials_on.run(job, how, (space, configuration, prediction))
    record = TrialRecord.of(
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
    return Trial(space, gpu, trials_on, record)


def print_trial(trial: Trial) -> None:
    """The outcome, and predicted numbers beside those of the trial."""
    record, outcome = trial.record, trial.record.outcome
    ended = f"{outcome.status}{f' in {outcome.phase}' if outcome.phase else ''}"
    if outcome.requested_bytes is not None:
        ended += f", {format_size(outcome.requested_bytes)} asked for"
    ran = outcome.ran
    misfit = Verdict.DOES_NOT_FIT if outcome.status is Status.OOM else ""
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
            ("verdict", evidence.verdict_text(ran, record.budget) if ran else str(misfit)),
            ("ranks", ranks_text(ran) if ran else ""),
            ("parameters", evidence.params_text(ran) if ran else ""),
            ("more", evidence.more_text(ran) if ran else ""),
            ("notes", "; ".join(getattr(ran, "notes", ()))),
        ]
    )
    evidence.print_stages(record, SpaceFacts.of(trial.space))
    if outcome.prediction is not None:
        echo()
        evidence.print_comparison(outcome.prediction, ran, record.source)
    elif ran is not None:
        echo()
        evidence.print_ran(ran)
