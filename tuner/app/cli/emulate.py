"""`tuner emulate`: run a training program, unchanged, on a GPU that is not there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from tuner.app.cli.options import (
    DurationType,
    RareOption,
    emulated_gpu_options,
    examples,
    json_option,
)
from tuner.core.errors import InputError
from tuner.core.records import parse_margin
from tuner.program.edit.source import PYTHON
from tuner.program.launch import read_launch, runnable
from tuner.program.program import read_program
from tuner.program.trainer import Launch
from tuner.report.terminal.render import print_json
from tuner.space.gpus import get_gpu


@click.command(
    "emulate",
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        "tuner emulate --gpu rtx4090 -- python train.py --batch-size 4",
        "tuner emulate --gpu h100_sxm -- torchrun --nproc-per-node 8 train.py",
    ),
)
@emulated_gpu_options
@click.option(
    "--gpus", type=int, metavar="N", help="Number of GPUs. [default: what the launcher starts]"
)
@click.option(
    "--all-ranks",
    is_flag=True,
    help="Run every rank. By default rank 0 stands for all of them.",
)
@click.option(
    "--steps",
    default=3,
    show_default=True,
    metavar="N",
    help="Stop it after N optimizer steps; 0: never.",
)
@click.option("--margin", metavar="SHARE", help="Memory to keep free. [default: 3%]")
@click.option("--timeout", type=DurationType(), metavar="TIME", help="Stop it after this time.")
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write PyTorch's memory snapshot, for pytorch.org/memory_viz.",
)
@click.option(
    "--seed", default=0, metavar="N", cls=RareOption, help="Random seed of made-up values."
)
@json_option
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(  # noqa: PLR0913 - one argument for each option
    *,
    gpu_name: str,
    gpu_memory: int | None,
    gpus: int | None,
    all_ranks: bool,
    steps: int,
    margin: str | None,
    timeout: float | None,
    snapshot: Path | None,
    seed: int,
    as_json: bool,
    program: tuple[str, ...],
) -> None:
    """Run PROGRAM on an emulated GPU: real PyTorch, real memory allocator, no arithmetic.

    Prints whether it fits, its peak memory with the lines of code that take it, and an estimated
    step time. Needs a CUDA build of PyTorch and a C compiler, but no GPU.

    Exit codes: 0 fits, 1 doesn't fit, 2 the program failed, 3 something isn't emulated, 4 unknown.
    """
    from tuner.app.cli.emulated_text import print_emulation
    from tuner.emulator.emulating import EmulateOptions, emulate

    if steps < 0 or (gpus is not None and gpus < 1):
        raise InputError("--steps is 0 or more, and --gpus 1 or more")
    gpu = get_gpu(gpu_name, memory_bytes=gpu_memory)
    launch = _launch_of(program)
    options = EmulateOptions(
        gpus=gpus or launch.processes or 1,
        machines=launch.machines,
        all_ranks=all_ranks,
        steps=steps,
        seed=seed,
        margin_fraction=parse_margin(margin, gpu),
        snapshot=snapshot,
        timeout_s=timeout,
    )
    # What the program prints must not mix with the answer that another program reads.
    output = sys.stderr if as_json else None
    if Path(program[0]).suffix in PYTHON:  # a script or a notebook, as `tuner check` takes it
        with runnable(read_program(program)) as command:
            found = emulate(command, gpu, options, output=output)
    else:
        found = emulate(program, gpu, options, output=output)
    if as_json:
        print_json(found.to_dict())
    else:
        print_emulation(found)
    raise click.exceptions.Exit(found.exit_code)


def _launch_of(words: Sequence[str]) -> Launch:
    """What the launcher of a program starts; one process where it does not say."""
    try:
        return read_launch(read_program(words, is_run=False))
    except InputError:  # whatever it is, it is started as it stands
        return Launch()
