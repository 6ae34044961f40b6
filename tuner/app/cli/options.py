"""Options that several commands share, and the values that people type for them."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from tuner.app.cli import RareOption
from tuner.core.errors import InputError, unknown
from tuner.core.units import parse_bytes
from tuner.searches.objectives import NAMES, SHORT
from tuner.searches.options import OPTIONS, Mode, SearchOptions, checked_searcher
from tuner.space import parse_settings
from tuner.space.gpus import LIMIT_OF_TYPE

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m(?:in)?)?(?:(\d+(?:\.\d+)?)s?)?")


class _Parsed(click.ParamType[Any]):
    """A value that `parse` reads from the typed text, given the name of the option.

    `parse` raises `InputError` for a text that is no such value.
    """

    def __init__(self, name: str, parse: Callable[[str, str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> Any:
        """The value; a default is one already."""
        if not isinstance(value, str):
            return value
        return self._parse(value, param.opts[0] if param else self.name)


def _size(text: str, option: str) -> int:
    return parse_bytes(text, what=option)


def _duration(text: str, option: str) -> float:
    """Seconds, typed as 90s, 5min or 1h30m; a bare number is seconds."""
    match = _DURATION.fullmatch(text.replace(" ", "").lower())
    hours, minutes, seconds = (float(part or 0) for part in match.groups()) if match else [0] * 3
    total_s = 3600 * hours + 60 * minutes + seconds
    if total_s <= 0:
        raise InputError(
            f"{option} {text!r} is not a duration", hint="write for example 90s, 5min or 1h30m"
        )
    return total_s


def _share(text: str, option: str) -> float:
    """A fraction above 0 and below 1, typed as 1%: a number without % may mean 100 %."""
    percent = _PERCENT.fullmatch(text)
    if not percent or not 0 < float(percent.group(1)) < 100:
        raise InputError(f"{option} {text!r} is not a share", hint="write for example 1%")
    return float(percent.group(1)) / 100


def _amount(text: str, option: str) -> float:
    amount = _finite(text)
    if amount is None or amount <= 0:
        raise InputError(f"{option} {text!r} is not a number above 0")
    return amount


def _price(text: str, _: str) -> float:
    """USD per hour."""
    price = _finite(text)
    if price is None or price < 0:
        raise InputError(
            f"price {text!r} is not an amount in USD per hour", hint="write for example 0.79"
        )
    return price


def _objective(text: str, _: str) -> str:
    """The name of an objective as results know it, for its short name too."""
    name = SHORT.get(text, text)
    if name not in NAMES:
        raise unknown("objective", text, (*SHORT, *NAMES))
    return str(name)


def _finite(text: str) -> float | None:
    """The number that `text` is, None where it is none or is not finite."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


SIZE = _Parsed("size", _size)
MEMORY_LIMIT = _Parsed(
    "size",
    lambda text, option: LIMIT_OF_TYPE if text.strip().lower() == "auto" else _size(text, option),
)
DURATION = _Parsed("duration", _duration)


def together(*options: Callable[[Any], Any]) -> Callable[[_Decorated], _Decorated]:
    """Several options as one decorator, in the order of the help."""

    def decorate(function: _Decorated) -> _Decorated:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def gathered(function: _Decorated, name: str, kind: type[Any]) -> _Decorated:
    """`function`, which gets the values of the fields of `kind` as one argument."""
    fields = [field.name for field in dataclasses.fields(kind)]

    @functools.wraps(function)
    def command(*args: Any, **given: Any) -> Any:
        values = {field: given.pop(field) for field in fields}
        return function(*args, **{name: kind(**values)}, **given)

    return command  # type: ignore[return-value]


def space_option(*, required: bool = True) -> Callable[[_Decorated], _Decorated]:
    """`--space`."""
    return click.option(
        "--space",
        "space",
        metavar="NAME",
        required=required,
        help="Search space (`tuner spaces`), or a YAML file.",
    )


def _gpu_and_memory(gpu_help: str, *, required: bool = True) -> Callable[[_Decorated], _Decorated]:
    return together(
        click.option(
            "--gpu",
            "gpu_name",
            metavar="GPU",
            required=required,
            callback=None if required else lambda _, __, name: None if name == "all" else name,
            help=gpu_help,
        ),
        click.option(
            "--gpu-memory",
            cls=RareOption,
            type=SIZE,
            metavar="SIZE",
            help="Memory of the GPU, e.g. 80GiB, instead of the catalogue's.",
        ),
    )


emulated_gpu_options = _gpu_and_memory("GPU type (`tuner gpus` lists them).")
"""`--gpu` and `--gpu-memory`, of a type to emulate for a program."""

_TARGET = "GPU to target: a name from `tuner gpus`, auto (this machine's) or cpu."
_ALL_GPUS = "[default: a table of all types]"

price_option = click.option(
    "--price",
    cls=RareOption,
    type=_Parsed("price", _price),
    metavar="USD",
    help="Price of a GPU hour, instead of the catalogue's.",
)

gpu_options = together(_gpu_and_memory(_TARGET), price_option)
"""`--gpu`, `--gpu-memory` and `--price`."""

any_gpu_options = together(_gpu_and_memory(f"{_TARGET} {_ALL_GPUS}", required=False), price_option)
"""The same options, and all GPU types without them."""

any_emulated_gpu_options = together(
    _gpu_and_memory(f"GPU type (`tuner gpus` lists them). {_ALL_GPUS}", required=False),
    price_option,
)


def require_gpu(option: str, value: object) -> None:
    """Raise `InputError` for an option that says something of one GPU type where none is named."""
    if value is not None:
        raise InputError(f"{option} is of one GPU type", hint="name it with --gpu")


_KINDS: dict[str, dict[str, Any]] = {
    "amount": {"type": _Parsed("amount", _amount)},
    "count": {"type": click.IntRange(1)},
    "duration": {"type": DURATION},
    "file": {"type": click.Path(path_type=Path, dir_okay=True)},
    "flag": {"is_flag": True},
    "lengths": {"type": click.Choice(["full", "data"])},
    "limit": {"type": MEMORY_LIMIT},
    "mode": {"type": click.Choice([str(mode) for mode in Mode]), "show_default": True},
    "number": {"type": click.IntRange(0), "show_default": True},
    "objective": {"type": _Parsed("objective", _objective), "multiple": True},
    "off": {"is_flag": True, "flag_value": False},
    "searcher": {
        "type": _Parsed("searcher", lambda text, _: checked_searcher(text)),
        "show_default": True,
    },
    "setting": {"multiple": True, "callback": lambda _, __, texts: parse_settings(texts)},
    "share": {"type": _Parsed("share", _share)},
    "size": {"type": SIZE},
    "text": {},
    "texts": {"multiple": True},
}
"""Arguments of click for each kind of option."""


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SearchOptions)}


def search_options(*names: str) -> Callable[[_Decorated], _Decorated]:
    """Options of the fields of `SearchOptions` with these names, in this order; by default all."""
    return together(*map(_search_option, names or OPTIONS))


def _search_option(name: str) -> Callable[[Any], Any]:
    option, default = OPTIONS[name], _DEFAULTS[name]
    how = {**_KINDS[option.kind], "metavar": option.metavar or None, "help": option.help}
    if default is not None and not how.get("multiple"):
        how["default"] = str(default) if option.kind == "mode" else default
    kind = RareOption if option.rare else click.Option
    return click.option(option.name, name, cls=kind, **how)


where_option = search_options("where")
objective_option = search_options("objectives")
set_option = search_options("settings")
margin_option = search_options("margin")

_FLAGS: Mapping[str, dict[str, Any]] = {
    "--batch-size": {"metavar": "N", "help": "Samples of a GPU in one forward pass."},
    "--seq-len": {"metavar": "N", "help": "Max. tokens of an example."},
    "--lora-rank": {"metavar": "N", "help": "Rank of the LoRA adapters."},
    "--lora": {"is_flag": True, "help": "Train LoRA adapters."},
    "--qlora": {"is_flag": True, "help": "Train LoRA adapters, base model in 4 bits."},
    "--full": {"is_flag": True, "help": "Train all weights."},
}
"""Short forms of `--set`."""


def setting_flags(*names: str) -> Callable[[_Decorated], _Decorated]:
    """`--batch-size` and others, which the command gets among its `settings`; by default all."""
    dests = {name: f"flag_{name.strip('-').replace('-', '_')}" for name in names or _FLAGS}

    def decorate(function: _Decorated) -> _Decorated:
        @functools.wraps(function)
        def command(*args: Any, settings: Mapping[str, Any], **given: Any) -> Any:
            flags = {name: given.pop(dest) for name, dest in dests.items()}
            set_flags = {name: value for name, value in flags.items() if value}
            methods = [name for name in ("--lora", "--qlora", "--full") if name in set_flags]
            if len(methods) > 1:
                raise InputError(f"{' and '.join(methods)} contradict each other")
            if "--full" in set_flags and "--lora-rank" in set_flags:
                raise InputError("--full and --lora-rank contradict each other")
            return function(*args, settings={**set_flags, **settings}, **given)

        options = [click.option(name, dest, **_FLAGS[name]) for name, dest in dests.items()]
        return together(*options)(command)  # type: ignore[return-value]

    return decorate


def model_option(text: str) -> Callable[[_Decorated], _Decorated]:
    """`--model`."""
    return click.option("--model", metavar="MODEL", help=text)


choice_options = together(
    where_option,
    click.option("--max-memory", type=SIZE, metavar="SIZE", help="Maximum GPU memory, e.g. 40GiB."),
    click.option(
        "--headroom",
        metavar="SHARE",
        help="Memory to keep free, e.g. 10% or 4GiB.  [default: the search's]",
    ),
    objective_option,
)
"""`--where`, `--max-memory`, `--headroom` and `--objective`: what may be recommended."""

results_option = click.option(
    "--results",
    type=click.Path(path_type=Path),
    default="results",
    show_default=True,
    metavar="FOLDER",
    help="Folder of the result files.",
)

gpus_option = click.option(
    "--gpus", type=int, metavar="N", help="Number of GPUs. [default: what the launcher starts]"
)


def typed() -> tuple[str, ...]:
    """The words of this command line, without `tuner`."""
    return click.get_current_context().find_root().obj or tuple(sys.argv[1:])


verbose_option = click.option(
    "--verbose", is_flag=True, help="Show every number, what it rests on, and all notes."
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
