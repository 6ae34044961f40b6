"""Options that several commands share, and the values that people type for them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tuner.app.cli import completing
from tuner.core.errors import InputError, unknown
from tuner.core.units import parse_bytes
from tuner.searches.objectives import NAMES, SHORT
from tuner.space.gpus import LIMIT_OF_TYPE

_ALL_OPTIONS = "tuner.all_options"
"""Key of a context's `meta`: True to show all options."""

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m(?:in)?)?(?:(\d+(?:\.\d+)?)s?)?")


def examples(*lines: str) -> str:
    """An epilog that shows command lines as they are (click would fill them as prose)."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class RareOption(click.Option):
    """An option that few need: `--help` leaves it out, and `--help-all` shows it."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """As click does, where all options are asked for; else None, which leaves it out."""
        return super().get_help_record(ctx) if ctx.meta.get(_ALL_OPTIONS) else None


def with_help_all(command: click.Command) -> click.Command:
    """`command` with `--help-all`, where it has rare options."""
    names = {name for parameter in command.params for name in parameter.opts}
    if "--help-all" in names or not any(isinstance(p, RareOption) for p in command.params):
        return command
    command.params.append(
        click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            help="Show all options, including rare ones.",
            callback=_show_all,
        )
    )
    return command


def _show_all(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_ALL_OPTIONS] = True
        click.echo(ctx.get_help())
        ctx.exit()


class SizeType(click.ParamType[int]):
    """A size in bytes, typed with its unit."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> int:
        """Bytes. Raises `InputError` for a size without a unit."""
        if isinstance(value, int):
            return value
        return parse_bytes(value, what=param.opts[0] if param else "size")


class MemoryLimitType(SizeType):
    """A size in bytes, or `LIMIT_OF_TYPE` for "auto"."""

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> int:
        """Bytes. Raises `InputError` for a size without a unit."""
        if isinstance(value, str) and value.strip().lower() == "auto":
            return LIMIT_OF_TYPE
        return super().convert(value, param, ctx)


class DurationType(click.ParamType[float]):
    """A duration in seconds, typed as 90s, 5min or 1h30m; a bare number is seconds."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> float:
        """Seconds, more than 0. Raises `InputError` for anything else."""
        if isinstance(value, float):
            return value
        match = _DURATION.fullmatch(value.replace(" ", "").lower())
        hours, minutes, seconds = (
            (float(part or 0) for part in match.groups()) if match else [0] * 3
        )
        total_s = 3600 * hours + 60 * minutes + seconds
        if total_s <= 0:
            raise InputError(
                f"{param.opts[0] if param else 'time limit'} {value!r} is not a duration",
                hint="write for example 90s, 5min or 1h30m",
            )
        return total_s


class ShareType(click.ParamType[float]):
    """A share above 0 and below 1, typed as 1%."""

    name = "share"

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> float:
        """The fraction. Raises `InputError` for a number without % (1 may be meant as 100 %)."""
        if isinstance(value, float):
            return value
        percent = _PERCENT.fullmatch(value)
        if not percent or not 0 < float(percent.group(1)) < 100:
            name = param.opts[0] if param else "share"
            raise InputError(f"{name} {value!r} is not a share", hint="write for example 1%")
        return float(percent.group(1)) / 100


class AmountType(click.ParamType[float]):
    """A number above 0."""

    name = "amount"

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> float:
        """The number. Raises `InputError` for anything else."""
        amount = _finite(value)
        if amount is None or amount <= 0:
            name = param.opts[0] if param else "amount"
            raise InputError(f"{name} {value!r} is not a number above 0")
        return amount


class ObjectiveType(click.ParamType[str]):
    """The name of an objective; the short ones become those that results use."""

    name = "objective"

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> str:
        """The name as results know it. Raises `InputError` for one that is none."""
        name = SHORT.get(value, value)
        if name not in NAMES:
            raise unknown("objective", value, (*SHORT, *NAMES))
        return str(name)


class PriceType(click.ParamType[float]):
    """An amount of money per hour."""

    name = "price"

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> float:
        """USD per hour. Raises `InputError` for what is no amount."""
        price = _finite(value)
        if price is None or price < 0:
            raise InputError(
                f"price {value!r} is not an amount in USD per hour", hint="write for example 0.79"
            )
        return price


def _finite(value: Any) -> float | None:
    """The number that `value` is, None where it is none or is not finite."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def space_option(*, required: bool = True) -> Callable[[_Decorated], _Decorated]:
    """`--space`."""
    return click.option(
        "--space",
        "space_name",
        metavar="NAME",
        shell_complete=completing.spaces,
        required=required,
        help="Search space (`tuner spaces`), or a YAML file.",
    )


def emulated_gpu_options(function: _Decorated) -> _Decorated:
    """`--gpu` and `--gpu-memory`, of a type to emulate for a program."""
    return _gpu_and_memory(function, "GPU type (`tuner gpus` lists them).")


def gpu_options(function: _Decorated) -> _Decorated:
    """`--gpu`, `--gpu-memory` and `--price`."""
    function = click.option(
        "--price",
        cls=RareOption,
        type=PriceType(),
        metavar="USD",
        help="Price of a GPU hour, instead of the catalogue's.",
    )(function)
    return _gpu_and_memory(
        function, "GPU to target: a name from `tuner gpus`, auto (this machine's) or cpu."
    )


def _gpu_and_memory(function: _Decorated, gpu_help: str) -> _Decorated:
    for option in (
        click.option(
            "--gpu-memory",
            cls=RareOption,
            type=SizeType(),
            metavar="SIZE",
            help="Memory of the GPU, e.g. 80GiB, instead of the catalogue's.",
        ),
        click.option(
            "--gpu",
            "gpu_name",
            metavar="GPU",
            shell_complete=completing.gpus,
            required=True,
            help=gpu_help,
        ),
    ):
        function = option(function)
    return function


def measure_options(function: _Decorated) -> _Decorated:
    """Options of real trials: `--budget`, `--timeout`, `--weights`, `--lengths`, and so on."""
    for option in (
        click.option(
            "--whole-steps",
            cls=RareOption,
            is_flag=True,
            help="Time whole optimizer steps, however long.",
        ),
        click.option(
            "--lengths",
            cls=RareOption,
            type=click.Choice(["full", "data"]),
            help="Lengths of sequences in real trials: the longest, or the data's.",
        ),
        click.option(
            "--wait",
            "wait_s",
            cls=RareOption,
            type=DurationType(),
            metavar="TIME",
            help="Max. time to wait for a busy device.  [default: 3s]",
        ),
        click.option(
            "--weights",
            cls=RareOption,
            metavar="WHICH",
            help="Weights of real trials: synthetic, hub, or the folder of a checkpoint.  "
            "[default: synthetic]",
        ),
        click.option(
            "--timeout",
            "timeout_s",
            type=DurationType(),
            metavar="TIME",
            help="Stop a real trial after this time. [default: 10min, then by its pace]",
        ),
        click.option(
            "--budget",
            "budget_s",
            type=DurationType(),
            metavar="TIME",
            help="Max. measuring time per trial; stops early once throughput is stable.  "
            "[default: 20s; in a search on a processor 0.5s]",
        ),
    ):
        function = option(function)
    return function


def model_option(text: str) -> Callable[[_Decorated], _Decorated]:
    """`--model`."""
    return click.option("--model", metavar="MODEL", shell_complete=completing.models, help=text)


where_option = click.option(
    "--where",
    multiple=True,
    metavar="CONDITION",
    help="Only consider matching configurations, e.g. 'lora_rank >= 64'. Overrides the space's "
    "minimums.",
)

objective_option = click.option(
    "--objective",
    "objectives",
    type=ObjectiveType(),
    shell_complete=completing.objectives,
    multiple=True,
    metavar="NAME",
    help="What to optimize: throughput, memory, energy, cost, ... Repeat for several; the first is "
    "primary.",
)


def choice_options(function: _Decorated) -> _Decorated:
    """`--where`, `--max-memory`, `--headroom` and `--objective`: what may be recommended."""
    for option in (
        objective_option,
        click.option(
            "--headroom",
            metavar="SHARE",
            help="Memory to keep free, e.g. 10% or 4GiB.  [default: the search's]",
        ),
        click.option(
            "--max-memory", type=SizeType(), metavar="SIZE", help="Maximum GPU memory, e.g. 40GiB."
        ),
        where_option,
    ):
        function = option(function)
    return function


set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KNOB=VALUE",
    shell_complete=completing.settings,
    help="Set a parameter, e.g. --set max_length=2048. Can be repeated.",
)

results_option = click.option(
    "--results",
    type=click.Path(path_type=Path),
    default="results",
    show_default=True,
    metavar="FOLDER",
    help="Folder of the result files.",
)

calibration_option = click.option(
    "--no-calibration",
    "calibrated",
    is_flag=True,
    default=True,
    flag_value=False,
    help="Don't correct predictions by trials in the results folder.",
)

margin_option = click.option("--margin", metavar="SHARE", help="Memory to keep free. [default: 3%]")

seed_option = click.option(
    "--seed", default=0, metavar="N", cls=RareOption, help="Random seed of made-up values."
)

gpus_option = click.option(
    "--gpus", type=int, metavar="N", help="Number of GPUs. [default: what the launcher starts]"
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
