"""`tuner.check`, `tuner.emulate` and `tuner.tune`: a program of yours, as the commands take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from tuner.app import programs
from tuner.app.api import as_bytes, as_mode, as_share, as_texts
from tuner.app.api.display import check_html, check_text
from tuner.app.api.result import SearchResult
from tuner.app.api.searching import search
from tuner.app.checking import CheckedProgram
from tuner.core.errors import InputError, NothingFitsError
from tuner.core.records import KnobValue
from tuner.emulator.emulation import Emulation
from tuner.searches.options import TUNE_TRIALS
from tuner.space.gpus import get_gpu

__all__ = ["Check", "check", "emulate", "tune"]


class Check(CheckedProgram):
    """The check of a program, as `tuner check` prints it; a notebook shows it with its diff."""

    def apply(self) -> dict[Path, Path]:
        """Write the suggested change into the program's files. Returns their backups.

        Raises `NothingFitsError` without a suggestion, and `InputError` for one that changes the
        command, or where a file was changed meanwhile.
        """
        if self.suggestion is None:
            raise NothingFitsError("there is no change to write: none was found")
        change = self.suggestion.change
        if change.before.command != change.after.command:
            raise InputError(
                "the change is one of the command line, which is in no file",
                hint="start the program with the command of `suggestion.change.difference`",
            )
        return change.write()

    def __repr__(self) -> str:
        return check_text(self)

    def _repr_html_(self) -> str:
        return check_html(self)


def check(  # noqa: PLR0913 - one argument for each option
    program: str | Path | Sequence[str],
    *,
    gpu: str,
    gpus: int | None = None,
    margin: float | str | None = None,
    timeout_s: float | None = None,
    changes: bool = True,
    predict: bool = False,
    model: str | None = None,
    settings: Mapping[str, KnobValue] | None = None,
    examples: int | None = None,
    gpu_memory: int | str | None = None,
    price: float | None = None,
) -> Check:
    """Check whether a program fits on a GPU, and suggest a change: `tuner check`.

    ::

        found = tuner.check("train.py", gpu="rtx4090")
        print(found.found.fits, found.suggestion)

    `program` is a script, or a list of words that start it. The arguments are the options of the
    command; `changes=False` only checks the program as it is. No file is written before `apply`.
    """
    memory_bytes = as_bytes(gpu_memory, "gpu_memory")
    device = get_gpu(gpu, memory_bytes=memory_bytes, price_usd_per_hour=price)
    options = programs.ProgramOptions(
        gpus=gpus,
        margin=as_share(margin, "margin"),
        timeout_s=timeout_s,
        improve=changes,
        predict=predict,
        model=model,
        settings=settings,
        examples=examples,
    )
    found = programs.check(_words(program), device, options)
    return Check(*(getattr(found, each.name) for each in fields(found)))


def emulate(  # noqa: PLR0913 - one argument for each option
    command: str | Path | Sequence[str],
    *,
    gpu: str,
    gpus: int | None = None,
    steps: int = 3,
    margin: float | str | None = None,
    timeout_s: float | None = None,
    all_ranks: bool = False,
    gpu_memory: int | str | None = None,
) -> Emulation:
    """Run a program on an emulated GPU for a few steps: `tuner emulate`.

    ::

        run = tuner.emulate(["python", "train.py"], gpu="h100_sxm")
        print(run.fits, run.used_bytes, run.time.step_s)

    The arguments are the options of the command. The program's output goes where this process
    prints.
    """
    device = get_gpu(gpu, memory_bytes=as_bytes(gpu_memory, "gpu_memory"))
    return programs.emulate(
        _words(command),
        device,
        gpus=gpus,
        steps=steps,
        margin=as_share(margin, "margin"),
        timeout_s=timeout_s,
        all_ranks=all_ranks,
    )


def tune(  # noqa: PLR0913 - one argument for each option
    program: str | Path | Sequence[str],
    *,
    gpu: str,
    knobs: str | Sequence[str] = (),
    mode: Literal["emulate", "measure"] = "emulate",
    trials: int = TUNE_TRIALS,
    space: str | Path | None = None,
    margin: float | str | None = None,
    gpu_memory: int | str | None = None,
    **arguments: Any,
) -> SearchResult:
    """Search the settings of a program for the fastest that fits on a GPU: `tuner tune`.

    ::

        result = tuner.tune("train.py", gpu="rtx4090", knobs=["micro_batch", "lora_rank=16,32"])
        print(result.best().configuration)

    Writes the search space to `space`, by default "tune-PROGRAM.yaml". Further arguments are those
    of `tuner.search`.
    """
    path = programs.write_space(
        _words(program),
        gpu,
        gpu_memory=as_bytes(gpu_memory, "gpu_memory"),
        mode=as_mode(mode),
        margin=as_share(margin, "margin"),
        knobs=as_texts(knobs),
        path=None if space is None else Path(space),
    )
    return search(
        path, gpu=gpu, mode=mode, trials=trials, margin=margin, gpu_memory=gpu_memory, **arguments
    )


def _words(program: str | Path | Sequence[str]) -> tuple[str, ...]:
    return (str(program),) if isinstance(program, (str, Path)) else tuple(program)
