"""`tuner trial`: runs one configuration for real, and prints what was predicted beside it."""

from __future__ import annotations

from typing import Any

import click

from tuner.app.cli.data import data_options
from tuner.app.cli.options import (
    MemoryLimitType,
    SizeType,
    examples,
    json_option,
    margin_option,
    measure_options,
    model_option,
    set_option,
    space_option,
)
from tuner.app.cli.trial_run import Trial, TrialOptions, print_trial, run_trial, to_dict
from tuner.app.listener import quiet_libraries
from tuner.core.records import parse_margin
from tuner.report.terminal.render import print_json


@click.command(
    "trial",
    epilog=examples(
        "tuner trial --space tiny_cpu --set micro_batch=4 --device cpu",
        "tuner trial --space qlora27b --set micro_batch=2 --device cuda:0",
        "tuner trial --space qlora27b --gpu a6000 --mode emulate",
        "tuner trial --space qlora27b --data train.jsonl --length-column n_tokens",
    ),
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
@click.option(
    "--gpu-memory", type=SizeType(), metavar="SIZE", help="Memory of the GPU, such as 80GiB."
)
@click.option(
    "--memory-limit",
    type=MemoryLimitType(),
    metavar="SIZE",
    help="Memory that the trial may use, such as 24GiB; auto: that of --gpu.",
)
@measure_options
@data_options
@margin_option
@set_option
@json_option
def command(*, as_json: bool, margin: str | None, **options: Any) -> int:
    """Train a few steps in a separate process, and print the result.

    The prediction is shown beside it. Nothing is written. Exit code 1 if the configuration does not
    fit or does not finish.
    """
    question = TrialOptions.of(**options)
    gpu, trials_on = question.device_type()
    fraction = parse_margin(margin, gpu)
    with quiet_libraries():
        trial: Trial = run_trial(question, gpu, trials_on, fraction)
    print_json(to_dict(trial)) if as_json else print_trial(trial)
    return trial.exit_code
