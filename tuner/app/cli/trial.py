"""`tuner trial`: runs one configuration for real, and prints what was predicted beside it."""

from __future__ import annotations

from typing import Any

import click

from tuner.app.cli.data import DataFile, data_options
from tuner.app.cli.options import (
    MEMORY_LIMIT,
    SIZE,
    json_option,
    margin_option,
    measure_options,
    model_option,
    set_option,
    space_option,
    subcommand,
)
from tuner.app.cli.trial_run import device_type, print_trial, run_trial, with_data
from tuner.app.estimate import one_configuration
from tuner.app.listener import quiet_libraries
from tuner.app.search.options import Mode, SearchOptions
from tuner.report.terminal.render import print_json


@subcommand(
    "trial",
    "tuner trial --space tiny_cpu --set micro_batch=4 --device cpu",
    "tuner trial --space qlora27b --set micro_batch=2 --device cuda:0",
    "tuner trial --space qlora27b --gpu a6000 --mode emulate",
    "tuner trial --space qlora27b --data train.jsonl --length-column n_tokens",
)
@space_option(required=False)
@model_option(
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
@click.option("--gpu-memory", type=SIZE, metavar="SIZE", help="Memory of the GPU, such as 80GiB.")
@click.option(
    "--memory-limit",
    type=MEMORY_LIMIT,
    metavar="SIZE",
    help="Memory that the trial may use, such as 24GiB; auto: that of --gpu.",
)
@measure_options
@data_options
@margin_option
@set_option
@json_option
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
