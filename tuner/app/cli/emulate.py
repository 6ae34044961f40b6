"""`tuner emulate`: run a training program, unchanged, on a GPU that is not there."""

from __future__ import annotations

import sys
from typing import Any

import click

from tuner.app.cli.options import (
    DURATION,
    emulated_gpu_options,
    gpus_option,
    json_option,
    margin_option,
    subcommand,
)
from tuner.report.terminal.render import print_json
from tuner.space.gpus import get_gpu


@subcommand(
    "emulate",
    "tuner emulate --gpu rtx4090 -- python train.py --batch-size 4",
    "tuner emulate --gpu h100_sxm -- torchrun --nproc-per-node 8 train.py",
    context_settings={"allow_interspersed_args": False},
)
@emulated_gpu_options
@gpus_option
@click.option(
    "--all-ranks", is_flag=True, help="Run every rank. By default rank 0 stands for all of them."
)
@click.option(
    "--steps",
    default=3,
    show_default=True,
    metavar="N",
    help="Stop it after N optimizer steps; 0: never.",
)
@margin_option
@click.option(
    "--timeout", "timeout_s", type=DURATION, metavar="TIME", help="Stop it after this time."
)
@json_option
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    *,
    program: tuple[str, ...],
    gpu_name: str,
    gpu_memory: int | None,
    margin: str | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Run PROGRAM on an emulated GPU: real PyTorch, real memory allocator, no arithmetic.

    Prints whether it fits, its peak memory with the lines of code that take it, and an estimated
    step time. Needs a CUDA build of PyTorch and a C compiler, but no GPU.

    Exit codes: 0 fits, 1 doesn't fit, 2 the program failed, 3 something isn't emulated, 4 unknown.
    """
    from tuner.app.checking import CheckedProgram  # numpy
    from tuner.app.cli.checked_text import print_checked, print_found
    from tuner.app.programs import emulate

    gpu = get_gpu(gpu_name, memory_bytes=gpu_memory)
    # The program's output must not mix with the JSON.
    output = sys.stderr if as_json else None
    found = emulate(program, gpu, margin=margin, output=output, **how)
    if as_json:
        print_json(found.to_dict())
    else:
        print_found(found, None)
        print_checked(CheckedProgram(found), verbose=True)
    raise click.exceptions.Exit(found.exit_code)
