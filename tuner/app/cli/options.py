"""Options that several commands share, and the values that people type for them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tuner.app.cli import completing
from tuner.app.measuring import Mode
from tuner.app.search.options import OPTIONS, SearchOptions
from tuner.core.errors import InputError, unknown
from tuner.core.units import parse_bytes
from tuner.searches.objectives import NAMES, SHORT
from tuner.searches.request import check_searcher
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


class SearcherType(click.ParamType[str]):
    """The name of a searcher, or of a class of samplers."""

    name = "searcher"

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> str:
        """The name itself. Raises `InputError` for an unknown one."""
        check_searcher(value)
        return str(value)


_KINDS: dict[str, dict[str, Any]] = {
    "amount": {"type": AmountType()},
    "count": {"type": click.IntRange(1)},
    "duration": {"type": DurationType()},
    "file": {"type": click.Path(path_type=Path, dir_okay=True)},
    "flag": {"is_flag": True},
    "lengths": {"type": click.Choice(["full", "data"])},
    "limit": {"type": MemoryLimitType()},
    "mode": {"type": click.Choice([str(mode) for mode in Mode]), "show_default": True},
    "number": {"type": click.IntRange(0), "show_default": True},
    "objective": {
        "type": ObjectiveType(), "multiple": True, "shell_complete": completing.objectives,
    },
    "off": {"is_flag": True, "flag_value": False},
    "port": {"type": click.IntRange(0, 65535)},
    "searcher": {
        "type": SearcherType(), "show_default": True, "shell_complete": completing.searchers,
    },
    "setting": {"multiple": True, "shell_complete": completing.settings},
    "share": {"type": ShareType()},
    "text": {},
    "texts": {"multiple": True},
}  # fmt: skip
"""Arguments of click for each kind of option."""


def search_options(*names: str) -> Callable[[_Decorated], _Decorated]:
    """Options of the fields of `SearchOptions` with these names, in this order; by default all."""

    def decorate(function: _Decorated) -> _Decorated:
        for name in reversed(names or tuple(OPTIONS)):
            option = OPTIONS[name]
            default = _DEFAULTS[name]
            how = {**_KINDS[option.kind], "metavar": option.metavar or None, "help": option.help}
            if default is not None and not how.get("multiple"):
                how["default"] = str(default) if option.kind == "mode" else default
            kind = RareOption if option.rare else click.Option
            function = click.option(option.name, name, cls=kind, **how)(function)
        return function

    return decorate


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SearchOptions)}

measure_options = search_options(
    "budget_s", "timeout_s", "weights", "wait_s", "lengths", "whole_steps"
)
where_option = search_options("where")
objective_option = search_options("objectives")
set_option = search_options("settings")
margin_option = search_options("margin")


def model_option(text: str) -> Callable[[_Decorated], _Decorated]:
    """`--model`."""
    return click.option("--model", metavar="MODEL", shell_complete=completing.models, help=text)


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

seed_option = click.option(
    "--seed", default=0, metavar="N", cls=RareOption, help="Random seed of made-up values."
)

gpus_option = click.option(
    "--gpus", type=int, metavar="N", help="Number of GPUs. [default: what the launcher starts]"
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
