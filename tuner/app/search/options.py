"""Options of a search, each with the option of the command line that sets it.

The commands make their options from these fields, and `tuner.search` its keyword arguments.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tuner.core.records import KnobValue
from tuner.searches.names import DEFAULT_SEARCHER, DEFAULT_TRIALS, SEARCHERS


class Mode(enum.StrEnum):
    """The ways to run trials."""

    AUTO = "auto"
    MEASURE = "measure"
    EMULATE = "emulate"
    PREDICT = "predict"


Kind = Literal[
    "amount", "count", "duration", "file", "flag", "lengths", "limit", "mode", "number",
    "objective", "off", "port", "searcher", "setting", "share", "size", "text", "texts",
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
    rare: bool
    of_trials: bool


def _field(
    name: str,
    kind: Kind,
    text: str,
    metavar: str = "",
    *,
    default: Any = None,
    rare: bool = False,
    of_trials: bool = False,
) -> Any:
    option = Option(name, kind, metavar, text, rare, of_trials)
    if kind == "setting":
        return field(default_factory=dict, metadata={"option": option})
    return field(default=default, metadata={"option": option})


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Options of `tuner search`, which are also the arguments of `tuner.search`.

    Times are in seconds, memory is in bytes; `margin` is a share ("3%") or a size ("2GiB").
    """

    trials: int = _field(
        "--trials",
        "count",
        "Max. number of trials (in predict mode: full-depth traces), "
        f"including earlier ones.  [default: {DEFAULT_TRIALS}]",
        "N",
        default=DEFAULT_TRIALS,
    )
    seed: int = _field(
        "--seed", "number", "Random seed of the search and its trials.", "N", default=0, rare=True
    )
    time_limit_s: float | None = _field(
        "--time-limit", "duration", "Limit on the search, such as 90s, 5min or 1h.", "TIME"
    )
    gpu_hours: float | None = _field(
        "--gpu-hours",
        "amount",
        "Limit on the trials' GPU time, known trials included.",
        "HOURS",
        of_trials=True,
    )
    max_cost_usd: float | None = _field(
        "--max-cost", "amount", "Limit on the cost of the trials' GPU time.", "USD", of_trials=True
    )
    min_gain: float | None = _field(
        "--min-gain",
        "share",
        "Stop when the expected improvement falls below this, e.g. 1%.",
        "SHARE",
        of_trials=True,
    )
    margin: str | None = _field("--headroom", "text", "Memory to keep free. [default: 3%]", "SHARE")
    verify: bool = _field(
        "--no-verify",
        "off",
        "Skip the verification run of the recommendation.",
        default=True,
        rare=True,
    )
    metrics_port: int | None = _field(
        "--metrics-port",
        "port",
        "Serve metrics for Prometheus; 0: on a port that Ray chooses.",
        "PORT",
        rare=True,
        of_trials=True,
    )
    dashboard: bool = _field(
        "--dashboard",
        "flag",
        "Start Ray's dashboard on this machine and print its address.",
        default=False,
        rare=True,
        of_trials=True,
    )
    study: Path | None = _field(  # noqa: RUF009 - frozen values
        "--study",
        "file",
        "Also keep the Optuna study in a file, for optuna-dashboard.",
        "FILE",
        rare=True,
        of_trials=True,
    )
    searcher: str = _field(
        "--searcher",
        "searcher",
        f"Search strategy: {', '.join(SEARCHERS)}, or package.module:Class of an Optuna sampler.",
        "NAME",
        default=DEFAULT_SEARCHER,
        rare=True,
        of_trials=True,
    )
    workers: int | None = _field(
        "--workers",
        "count",
        "Trials at once. [default: GPUs, or CPUs]",
        "N",
        rare=True,
        of_trials=True,
    )
    fresh: bool = _field(
        "--fresh", "flag", "Run known trials again; keep the old journal.", default=False, rare=True
    )
    address: str | None = _field(
        "--address", "text", "Ray cluster address.  [default: start a local one]", "ADDRESS"
    )
    labels: tuple[str, ...] = _field(
        "--label",
        "texts",
        "Only use nodes of the cluster with this label, e.g. team=vision.",
        "KEY=VALUE",
        default=(),
        rare=True,
        of_trials=True,
    )
    host_memory: int | None = _field(
        "--host-memory",
        "size",
        "Main memory that a trial reserves on its node (Ray's memory=).",
        "SIZE",
        rare=True,
        of_trials=True,
    )
    mode: Mode = _field(  # noqa: RUF009 - frozen values
        "--mode",
        "mode",
        "measure: run trials on a GPU; emulate: run them on an emulated one; "
        "predict: run none; auto: measure if there is such a GPU, else predict.",
        default=Mode.AUTO,
        rare=True,
    )
    memory_limit: int | None = _field(
        "--memory-limit",
        "limit",
        "Memory that a real trial may use, such as 24GiB, if a larger "
        "GPU stands in; auto: that of --gpu.",
        "SIZE",
        rare=True,
    )
    budget_s: float | None = _field(
        "--budget",
        "duration",
        "Max. measuring time per trial; stops early once throughput is "
        "stable.  [default: 20s; in a search on a processor 0.5s]",
        "TIME",
    )
    timeout_s: float | None = _field(
        "--timeout",
        "duration",
        "Stop a real trial after this time. [default: 10min, then by its pace]",
        "TIME",
    )
    weights: str | None = _field(
        "--weights",
        "text",
        "Weights of real trials: synthetic, hub, or the folder of a "
        "checkpoint.  [default: synthetic]",
        "WHICH",
        rare=True,
    )
    lengths: str | None = _field(
        "--lengths",
        "lengths",
        "Lengths of sequences in real trials: the longest, or the data's.",
        rare=True,
    )
    whole_steps: bool = _field(
        "--whole-steps",
        "flag",
        "Time whole optimizer steps, however long.",
        default=False,
        rare=True,
    )
    where: tuple[str, ...] = _field(
        "--where",
        "texts",
        "Only consider matching configurations, e.g. 'lora_rank >= 64'. "
        "Overrides the space's minimums.",
        "CONDITION",
        default=(),
    )
    objectives: tuple[str, ...] = _field(
        "--objective",
        "objective",
        "What to optimize: throughput, memory, cost, ... Repeat for several; the first is primary.",
        "NAME",
        default=(),
    )
    settings: Mapping[str, KnobValue] = _field(
        "--set", "setting", "Set a parameter by tuner's name or your trainer's, e.g. --set "
        "max_length=2048. Can be repeated.", "NAME=VALUE",
    )  # fmt: skip


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
