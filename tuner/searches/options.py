"""Options of a search, each with the option of the command line that sets it.

The commands make their options from these fields, and `tuner.search` its keyword arguments; the
request of a search holds them as they are. Quick to import.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tuner.core.errors import unknown
from tuner.core.records import KnobValue

SEARCHERS = ("guided", "tpe", "random", "grid")
"""Names of the searchers; "package.module:Class" loads an Optuna sampler or a `Strategy`."""
DEFAULT_SEARCHER = "guided"
"""The default searcher; it starts from the request's predictions, if any."""
DEFAULT_TRIALS = 40
TUNE_TRIALS = 6


def checked_searcher(name: str) -> str:
    """The name of a searcher, or of a class of samplers. Raises `InputError` for another one."""
    if name not in SEARCHERS and ":" not in name:
        raise unknown("searcher", name, (*SEARCHERS, "package.module:Class"))
    return name


class Mode(enum.StrEnum):
    """The ways to run trials."""

    AUTO = "auto"
    MEASURE = "measure"
    EMULATE = "emulate"
    PREDICT = "predict"


Kind = Literal[
    "amount", "count", "duration", "file", "flag", "lengths", "limit", "mode", "number",
    "objective", "off", "searcher", "setting", "share", "size", "text", "texts",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the command line: its name, how its value is read, and its help.

    Rare options are shown by `--help-all` only. Options `of_trials` have no effect on a search that
    runs no trials.
    """

    name: str
    kind: Kind
    metavar: str
    help: str
    rare: bool = False
    of_trials: bool = False


def _field(name: str, kind: Kind, text: str, default: Any = None, **marks: bool) -> Any:
    """A field whose option is called `name`: a word, and what stands for its value."""
    word, _, metavar = name.partition(" ")
    told = {"option": Option(word, kind, metavar, text, **marks)}
    if kind == "setting":
        return field(default_factory=dict, metadata=told)
    return field(default=default, metadata=told)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Options of `tuner search`, which are also the arguments of `tuner.search`.

    Times are in seconds, memory is in bytes; `margin` is a share ("3%") or a size ("2GiB").
    """

    # fmt: off
    trials: int = _field("--trials N", "count",
        "Max. number of trials (in predict mode: full-depth traces), including earlier ones."
        f"  [default: {DEFAULT_TRIALS}]", DEFAULT_TRIALS)
    seed: int = _field("--seed N", "number",
        "Random seed of the search and its trials.", 0, rare=True)
    time_limit_s: float | None = _field("--time-limit TIME", "duration",
        "Limit on the search, such as 90s, 5min or 1h.")
    gpu_hours: float | None = _field("--gpu-hours HOURS", "amount",
        "Limit on the trials' GPU time, known trials included.", of_trials=True)
    max_cost_usd: float | None = _field("--max-cost USD", "amount",
        "Limit on the cost of the trials' GPU time.", of_trials=True)
    min_gain: float | None = _field("--min-gain SHARE", "share",
        "Stop when the expected improvement falls below this, e.g. 1%.", of_trials=True)
    margin: str | None = _field("--headroom SHARE", "text", "Memory to keep free. [default: 3%]")
    verify: bool = _field("--no-verify", "off",
        "Skip the verification run of the recommendation.", True, rare=True)
    metrics: bool = _field("--metrics", "flag",
        "Serve metrics for Prometheus, and print their address.", False,
        rare=True, of_trials=True)
    dashboard: bool = _field("--dashboard", "flag",
        "Start Ray's dashboard on this machine and print its address.", False,
        rare=True, of_trials=True)
    study: Path | None = _field("--study FILE", "file",  # noqa: RUF009
        "Also keep the Optuna study in a file, for optuna-dashboard.", rare=True, of_trials=True)
    searcher: str = _field("--searcher NAME", "searcher",
        f"Search strategy: {', '.join(SEARCHERS)}, or package.module:Class of an Optuna sampler.",
        DEFAULT_SEARCHER, rare=True, of_trials=True)
    workers: int | None = _field("--workers N", "count",
        "Trials at once. [default: GPUs, or CPUs]", rare=True, of_trials=True)
    fresh: bool = _field("--fresh", "flag",
        "Run known trials again; keep the old journal.", False, rare=True)
    address: str | None = _field("--address ADDRESS", "text",
        "Ray cluster address.  [default: start a local one]")
    labels: tuple[str, ...] = _field("--label KEY=VALUE", "texts",
        "Only use nodes of the cluster with this label, e.g. team=vision.", (),
        rare=True, of_trials=True)
    host_memory: int | None = _field("--host-memory SIZE", "size",
        "Main memory that a trial reserves on its node (Ray's memory=).", rare=True, of_trials=True)
    mode: Mode = _field("--mode", "mode",  # noqa: RUF009
        "measure: run trials on a GPU; emulate: run them on an emulated one; predict: run "
        "none; auto: measure if there is such a GPU, else predict.", Mode.AUTO, rare=True)
    memory_limit: int | None = _field("--memory-limit SIZE", "limit",
        "Memory that a real trial may use, such as 24GiB, if a larger GPU stands in; auto: "
        "that of --gpu.", rare=True)
    budget_s: float | None = _field("--budget TIME", "duration",
        "Max. measuring time per trial; stops early once throughput is stable.  [default: "
        "20s; in a search on a processor 0.5s]")
    timeout_s: float | None = _field("--timeout TIME", "duration",
        "Stop a real trial after this time. [default: 10min, then by its pace]")
    weights: str | None = _field("--weights WHICH", "text",
        "Weights of real trials: synthetic, hub, or the folder of a checkpoint.  [default: "
        "synthetic]", rare=True)
    lengths: str | None = _field("--lengths", "lengths",
        "Lengths of sequences in real trials: the longest, or the data's.", rare=True)
    whole_steps: bool = _field("--whole-steps", "flag",
        "Time whole optimizer steps, however long.", False, rare=True)
    where: tuple[str, ...] = _field("--where CONDITION", "texts",
        "Only consider matching configurations, e.g. 'lora_rank >= 64'. Overrides the space's"
        " minimums.", ())
    objectives: tuple[str, ...] = _field("--objective NAME", "objective",
        "What to optimize: throughput, memory, cost, ... Repeat for several; the first is "
        "primary.", ())
    settings: Mapping[str, KnobValue] = _field("--set NAME=VALUE", "setting",
        "Set a parameter by tuner's name or your trainer's, e.g. --set max_length=2048. Can "
        "be repeated.")
    # fmt: on


OPTIONS: Mapping[str, Option] = {
    each.name: each.metadata["option"] for each in dataclasses.fields(SearchOptions)
}
"""The options by the name of their field."""


def without_effect(options: SearchOptions) -> str:
    """The given options that have no effect on a search without trials, for people."""
    usual = SearchOptions()
    return ", ".join(
        option.name
        for name, option in OPTIONS.items()
        if option.of_trials and getattr(options, name) != getattr(usual, name)
    )
