"""`tuner check`: whether a program fits on a GPU, and the change that makes it fit.

`tuner emulate` runs it there, with its output.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from tuner.app.cli import RareOption, subcommand
from tuner.app.cli import options as opts
from tuner.app.cli.results import write_asked
from tuner.core.errors import InputError, verdict_code
from tuner.report.terminal.progress import Waiting
from tuner.report.terminal.render import print_json
from tuner.space.gpus import get_gpu

if TYPE_CHECKING:
    from tuner.app.program_oracle import RunAnswer


@subcommand(
    "check",
    "tuner check train.py --gpu rtx4090",
    "tuner check train.py",
    "tuner check axolotl.yml --gpu a6000 --predict --set max_length=2048",
    "tuner check train.py --gpu rtx4090 --predict --largest micro_batch",
    "tuner check --gpu h100_sxm -- torchrun --nproc-per-node 2 train.py",
)
@opts.any_emulated_gpu_options
@opts.gpus_option
@opts.margin_option
@click.option(
    "--timeout",
    "timeout_s",
    type=opts.DURATION,
    metavar="TIME",
    help="Stop each run after this time.",
)
@click.option(
    "--no-changes",
    "improve",
    is_flag=True,
    default=True,
    flag_value=False,
    help="Only check the program as it is: one run.",
)
@click.option(
    "--largest",
    "largest_of",
    type=click.Choice(["micro_batch", "max_length", "lora_rank", "model"]),
    metavar="NAME",
    help="With --predict: the largest micro_batch, max_length, lora_rank or model that fits.",
)
@click.option(
    "--apply",
    "write",
    is_flag=True,
    help="Write the change into the program's files, after a question.",
)
@click.option(
    "--host-memory",
    "host_memory_bytes",
    type=opts.SIZE,
    metavar="SIZE",
    cls=RareOption,
    help="Memory of the host, e.g. 64GiB.",
)
@click.option("--predict", is_flag=True, help="Predict from the settings, without the emulator.")
@opts.model_option("With --predict: the model, if the program doesn't name it.")
@opts.set_option
@click.option(
    "--examples",
    type=int,
    metavar="N",
    help="With --predict: examples in the data, for time and cost.",
)
@opts.verbose_option
@opts.json_option
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def check(  # noqa: PLR0913 - one argument for each option
    *,
    program: tuple[str, ...],
    gpu_name: str | None,
    gpu_memory: int | None,
    price: float | None,
    largest_of: str | None,
    write: bool,
    verbose: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """Check whether PROGRAM fits on a GPU. If not, suggest the smallest change that makes it fit.

    PROGRAM is a script with its arguments, a notebook, a file of Axolotl, LLaMA-Factory, TRL or
    torchtune, or any command after --. It runs unchanged on an emulated GPU: a few steps, the
    largest batch of its data, evaluation, saving and its end; what it saves is thrown away. With
    --predict, and where there is no emulator, its lines run with stand-ins for libraries. The
    change keeps effective batch, adapters and lengths; only --apply writes it.

    The first line is the answer: fits, tight (the 90 % interval spans the limit), does not fit or
    unknown. Without --gpu, a table of all GPU types is predicted.

    Exit codes: 0 fits, 1 doesn't fit (tight: the more likely of the two), 2 the program failed,
    3 can't be emulated or predicted, 4 unknown.
    """
    from tuner.app import programs
    from tuner.app.cli.checked_text import (  # numpy
        checked_to_dict,
        largest_to_dict,
        print_checked,
        print_found,
        print_largest,
    )
    from tuner.app.everywhere import program_everywhere, show_everywhere

    if gpu_name is None:
        opts.require_gpu("--gpu-memory", gpu_memory)
        opts.require_gpu("--price", price)
        opts.require_gpu("--largest", largest_of)
        opts.require_gpu("--host-memory", how["host_memory_bytes"])
        opts.require_gpu("--apply", write or None)
        with Waiting() as waiting:
            waiting("predicting the program for every GPU type")
            found = program_everywhere(program, programs.ProgramOptions(**how))
        raise click.exceptions.Exit(show_everywhere(found, verbose=verbose, as_json=as_json))
    gpu = get_gpu(gpu_name, memory_bytes=gpu_memory, price_usd_per_hour=price)
    options = programs.ProgramOptions(**how)
    if largest_of is not None:
        if not options.predict:
            raise InputError("--largest is predicted, not run", hint="add --predict")
        with Waiting() as waiting:
            most = programs.largest(program, gpu, largest_of, options, waiting)
        print_json(largest_to_dict(most)) if as_json else print_largest(most, verbose=verbose)
        if write:
            write_asked(most.change)
        raise click.exceptions.Exit(verdict_code(most.found is not None))
    with Waiting() as waiting:

        def answered(found: RunAnswer, needed: RunAnswer | None) -> None:
            if not as_json:
                with waiting.paused():
                    print_found(found, needed)

        checked = programs.check(program, gpu, options, waiting, answered)
    print_json(checked_to_dict(checked)) if as_json else print_checked(checked, verbose=verbose)
    if write:
        write_asked(checked.suggestion.change if checked.suggestion is not None else None)
    raise click.exceptions.Exit(checked.found.exit_code)


@subcommand(
    "emulate",
    "tuner emulate --gpu rtx4090 -- python train.py --batch-size 4",
    "tuner emulate --gpu h100_sxm -- torchrun --nproc-per-node 8 train.py",
    context_settings={"allow_interspersed_args": False},
)
@opts.emulated_gpu_options
@opts.gpus_option
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
@opts.margin_option
@click.option(
    "--timeout", "timeout_s", type=opts.DURATION, metavar="TIME", help="Stop it after this time."
)
@opts.json_option
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def emulate(
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
    from tuner.app import programs
    from tuner.app.checking import CheckedProgram  # numpy
    from tuner.app.cli.checked_text import print_checked, print_found

    gpu = get_gpu(gpu_name, memory_bytes=gpu_memory)
    # The program's output must not mix with the JSON.
    output = sys.stderr if as_json else None
    found = programs.emulate(program, gpu, margin=margin, output=output, **how)
    if as_json:
        print_json(found.to_dict())
    else:
        print_found(found, None)
        print_checked(CheckedProgram(found), verbose=True)
    raise click.exceptions.Exit(found.exit_code)
