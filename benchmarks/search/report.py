"""Rows of replays, and the tables that are made of them."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from benchmarks.search.replay import Replay

SHARES = (0.9, 0.99)
AT_TRIALS = (12, 40, 150)
AT_HOURS = (1.0, 3.0, 10.0)
REGRET_AT = 12
WRONG_PRIOR = "levels-30"
NAN = math.nan
OPTUNA = ("tpe", "nsga2", "gp", "random")
"""What Optuna has: the best of these is what `guided` is held against."""


@dataclass(frozen=True, slots=True)
class Row:
    """One replay in numbers."""

    table: str
    world: str
    searcher: str
    seed: int
    trials: int
    trials_to_90: float
    trials_to_99: float
    hours_to_99: float
    volume_at_12: float
    volume_at_40: float
    volume_at_150: float
    volume_at_1h: float
    volume_at_3h: float
    volume_at_10h: float
    oom_share: float
    wasted_share: float
    regret_at_12: float
    regret_at_end: float
    decision_ms: float
    fewest_to_99: float = NAN
    volume_at_5: float = NAN
    volume_at_10: float = NAN
    volume_at_20: float = NAN
    regret_at_5: float = NAN
    regret_at_10: float = NAN
    regret_at_20: float = NAN
    regret_at_40: float = NAN
    trials_to_95: float = NAN
    failed_share: float = 0.0
    oom_after_5: float = NAN
    """Share of the trials after the fifth that ran out of memory."""


def row_of(table: str, world: str, searcher: str, seed: int, replay: Replay) -> Row:
    """The numbers of one replay."""
    count = len(replay.oom)
    hours = np.array(replay.seconds) / 3600
    volume = np.array(replay.hypervolume)

    def at(number: int) -> int:
        return min(number, count) - 1

    def after(limit: float) -> float:
        done = np.flatnonzero(hours <= limit)
        return float(volume[done[-1]]) if done.size else 0.0

    return Row(
        table=table,
        world=world,
        searcher=searcher,
        seed=seed,
        trials=count,
        trials_to_90=replay.trials_to(SHARES[0]),
        trials_to_99=replay.trials_to(SHARES[1]),
        hours_to_99=replay.seconds_to(SHARES[1]) / 3600,
        volume_at_12=float(volume[at(AT_TRIALS[0])]),
        volume_at_40=float(volume[at(AT_TRIALS[1])]),
        volume_at_150=float(volume[at(AT_TRIALS[2])]),
        volume_at_1h=after(AT_HOURS[0]),
        volume_at_3h=after(AT_HOURS[1]),
        volume_at_10h=after(AT_HOURS[2]),
        oom_share=float(np.mean(replay.oom)),
        wasted_share=replay.wasted_s / replay.seconds[-1],
        regret_at_12=replay.regret[at(REGRET_AT)],
        regret_at_end=replay.regret[-1],
        decision_ms=1e3 * float(np.mean(replay.decision_s)),
        fewest_to_99=float(replay.fewest_to_99),
        **{f"volume_at_{n}": float(volume[at(n)]) for n in (5, 10, 20)},
        **{f"regret_at_{n}": float(replay.regret[at(n)]) for n in (5, 10, 20, 40)},
        trials_to_95=replay.trials_to(0.95),
        failed_share=float(np.mean(replay.failed)),
        oom_after_5=float(np.mean(replay.oom[5:])) if count > 5 else 0.0,
    )


def read(path: Path) -> list[Row]:
    """Rows of an earlier run; none where there is no file."""
    if not path.exists():
        return []
    types = {field.name: field.type for field in fields(Row)}
    cast: dict[str, Callable[[str], object]] = {"str": str, "int": int, "float": float}
    with path.open(newline="") as file:
        return [
            Row(**{name: cast[str(types[name])](value) for name, value in line.items()})  # type: ignore[arg-type]
            for line in csv.DictReader(file)
        ]


def append(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a file, with a header where it is new."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({n: _short(v) for n, v in asdict(row).items()})


def overview(rows: Sequence[Row]) -> str:
    """A markdown table for each table of outcomes: one line for each searcher, over all worlds."""
    parts = []
    for table in dict.fromkeys(row.table for row in rows):
        of_table = [row for row in rows if row.table == table]
        parts.append(f"## {table}\n\n{_lines(of_table, 'searcher')}")
    return "\n\n".join(parts)


def by_world(rows: Sequence[Row], searcher: str) -> str:
    """A markdown table for each table of outcomes: one line for each world, of one searcher."""
    parts = []
    for table in dict.fromkeys(row.table for row in rows):
        chosen = [row for row in rows if row.table == table and row.searcher == searcher]
        if chosen:
            parts.append(f"## {table}: `{searcher}`\n\n{_lines(chosen, 'world')}")
    return "\n\n".join(parts)


def verdicts(rows: Sequence[Row]) -> str:
    """The targets and what was reached, one line each."""
    guided = [row for row in rows if row.searcher == "guided"]
    lines = []
    for table in dict.fromkeys(row.table for row in guided):
        own = [row for row in guided if row.table == table]
        others = [row for row in rows if row.table == table]
        best, trials, censored = _best_optuna(others)
        mine = _median(r.trials_to_99 for r in own)
        ratio = mine / trials
        mark = "at most " if censored else ""
        fewest = _median(r.fewest_to_99 for r in own if not math.isnan(r.fewest_to_99))
        least = "" if math.isnan(fewest) else f"; an oracle needs {fewest:.1f}"
        lines += [
            f"{table}: 99 % of the hypervolume after {mine:.1f} trials (median), {best} "
            f"{'not within' if censored else 'after'} {trials:.0f}: {mark}1/{1 / ratio:.1f} "
            f"({_met(ratio <= 0.2)}: at most a fifth{least})",
            f"{table}: {100 * _pooled_oom(own):.1f} % of all trials ran out of memory "
            f"({_met(_pooled_oom(own) <= 0.03)}: at most 3 %)",
            f"{table}: regret after {REGRET_AT} trials, median "
            f"{100 * _median(r.regret_at_12 for r in own):.2f} %, within 2 % in "
            f"{100 * np.mean([r.regret_at_12 <= 0.02 for r in own]):.0f} % of searches "
            f"({_met(_median(r.regret_at_12 for r in own) <= 0.02)}: median at most 2 %)",
        ]
        if any(row.world == WRONG_PRIOR for row in own):
            lines.append(_wrong_prior(table, own, others))
    return "\n".join(f"- {line}" for line in lines)


def _wrong_prior(table: str, own: Sequence[Row], others: Sequence[Row]) -> str:
    world = WRONG_PRIOR
    mine = _median(r.volume_at_40 for r in own if r.world == world)
    found = {
        name: _median(r.volume_at_40 for r in others if r.world == world and r.searcher == name)
        for name in dict.fromkeys(r.searcher for r in others if r.searcher != "guided")
    }
    found = {name: value for name, value in found.items() if not math.isnan(value)}
    name = max(found, key=found.__getitem__, default="nothing")
    return (
        f"{table}: with a prior wrong by 30 %, {100 * mine:.1f} % of the hypervolume after 40 "
        f"trials, the best other ({name}) {100 * found.get(name, NAN):.1f} % "
        f"({_met(mine >= found.get(name, 0.0))}: not worse)"
    )


def _best_optuna(rows: Sequence[Row]) -> tuple[str, float, bool]:
    """Which of Optuna's samplers needs the fewest trials, at least how many, and if that is all.

    One that did not get there in the trials that it was given may have done so in the next.
    """
    found = []
    for name in OPTUNA:
        own = [row for row in rows if row.searcher == name]
        if own:
            needed = _median(row.trials_to_99 for row in own)
            found.append((min(needed, float(max(r.trials for r in own))), math.isinf(needed), name))
    trials, censored, name = min(found, default=(NAN, True, "none"))
    return name, trials, censored


def _lines(rows: Sequence[Row], key: str) -> str:
    first = "scenario" if key == "world" else key
    head = (
        f"| {first} | replays | trials each | trials to 90 % | trials to 99 % | GPU hours to 99 % "
        "| volume after 12 / 40 / 150 trials | volume after 1 / 3 / 10 GPU hours | OOM "
        "| wasted time | regret after 12 | regret at the end | ms per decision |"
    )
    lines = [head, "|---|" + "---:|" * 12]
    for name in dict.fromkeys(getattr(row, key) for row in rows):
        own = [row for row in rows if getattr(row, key) == name]
        given = max(row.trials for row in own)
        lines.append(
            f"| {name} | {len(own)} | {given} "
            f"| {_trials(_median(r.trials_to_90 for r in own), given)} "
            f"| {_trials(_median(r.trials_to_99 for r in own), given)} "
            f"| {_hours(_median(r.hours_to_99 for r in own))} "
            f"| {_percents(own, 'volume_at_12', 'volume_at_40', 'volume_at_150')} "
            f"| {_percents(own, 'volume_at_1h', 'volume_at_3h', 'volume_at_10h')} "
            f"| {100 * _pooled_oom(own):.1f} % "
            f"| {100 * float(np.mean([r.wasted_share for r in own])):.1f} % "
            f"| {100 * _median(r.regret_at_12 for r in own):.1f} % "
            f"| {100 * _median(r.regret_at_end for r in own):.1f} % "
            f"| {float(np.mean([r.decision_ms for r in own])):.1f} |"
        )
    return "\n".join(lines)


def _pooled_oom(rows: Sequence[Row]) -> float:
    total = sum(row.trials for row in rows)
    return sum(row.oom_share * row.trials for row in rows) / total


def _percents(rows: Sequence[Row], *names: str) -> str:
    return " / ".join(f"{100 * _median(getattr(r, n) for r in rows):.0f}" for n in names)


def _trials(value: float, given: int) -> str:
    return f"> {given}" if math.isinf(value) else f"{value:.1f}".removesuffix(".0")


def _hours(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.1f}"


def _median(values: Iterable[float]) -> float:
    numbers = list(values)
    return float(np.median(numbers)) if numbers else NAN


def _met(condition: bool) -> str:
    return "met" if condition else "missed"


def _short(value: object) -> object:
    return f"{value:.5g}" if isinstance(value, float) else value
