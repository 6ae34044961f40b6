"""`python -m benchmarks.accuracy.coverage`: how the 90 % intervals do on rows not learned from.

Every measured row is predicted and then held out in two ways:

- *another GPU*: nothing is known of its GPU; the priors come from the rows of other GPUs. All
  that suit those rows count, each with its probability, because a few GPU types do not tell
  how much GPU types differ.
- *same GPU*: calibrated on the other rows of its GPU, program and machine, without any that
  repeats its configuration; the prior again comes from other GPUs. For step time also on rows
  of other machines with the same GPU type, and of other programs.

The prior that the tool ships is the one that all rows of grade A make the most probable. The table
is written to benchmarks/accuracy/coverage.csv.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.harnesses import Case, express
from benchmarks.accuracy.predictions import predict_all
from benchmarks.accuracy.report import Comparison
from benchmarks.accuracy.rows import read_rows
from tuner.cost import calibrate
from tuner.cost.calibrate import PROGRAM_PRIOR, prior_of
from tuner.cost.interval import (
    Calibration,
    ErrorPrior,
    Interval,
    Observation,
    in_quadrature,
    log_evidence,
)

NOTHING, BEFORE_TRIALS = "nothing, the shipped prior", "nothing, the prior of trials"
"""Memory without trials has intervals of its own: `memory_intervals`."""

COVERAGE_TARGET = (0.85, 0.95)
ABOVE_TARGET = 0.05
STEP_TARGETS = {"another GPU": 0.20, "same GPU": 0.08}
"""Largest mean error of step time."""

ALLOCATED, HELD, STEP = "Peak allocated", "Reserved or device memory", "Step time"
PROGRAM = "Step time, less host, kernels and board"


@dataclass(frozen=True, slots=True)
class Held:
    """A measured row, to be held out. Rows of one configuration share `configuration`."""

    gpu: str
    program: str
    machine: str
    """The file that a step time was published in, where a program's rows came in several: runs
    of one day on one machine. Memory does not depend on it."""
    grade: str
    configuration: tuple[str, str]
    observation: Observation
    unknown: tuple[float, float] = (1.0, 1.0)
    """What host, kernels and board may make of a step time, over what is predicted."""
    samples: int = 1
    """Of a step."""

    @property
    def unexplained(self) -> Observation:
        """With the part of the error that host, kernels and board do not account for.

        They are in the interval already: a prior learned from the whole error counts them twice.
        """
        seen = self.observation
        assert seen.measured is not None
        error = math.log(seen.measured / seen.predicted)
        left = error**2 - math.log(self.unknown[error > 0]) ** 2
        measured = seen.predicted * math.exp(math.copysign(math.sqrt(max(0.0, left)), error))
        return replace(seen, measured=measured)

    @property
    def group(self) -> tuple[str, str, str]:
        """What a calibration is made for: a GPU and a workload, which a program stands for."""
        return self.gpu, self.program, self.machine


@dataclass(frozen=True, slots=True)
class Result:
    """A held-out row with the interval that was given for it."""

    held: Held
    interval: Interval

    @property
    def measured(self) -> float:
        """The value that the interval was to contain."""
        assert self.held.observation.measured is not None
        return self.held.observation.measured

    @property
    def error(self) -> float:
        """The corrected median over the measured value, minus 1."""
        return self.interval.median / self.measured - 1

    @property
    def is_above(self) -> bool:
        """Whether the measured value exceeds the interval."""
        return self.measured > self.interval.high

    @property
    def is_covered(self) -> bool:
        """Whether the interval contains the measured value."""
        return self.interval.low <= self.measured <= self.interval.high


def held_rows(comparisons: Iterable[Comparison]) -> dict[str, list[Held]]:
    """The rows of each quantity that measured it, less those with a mean length (grade C)."""
    rows: dict[str, list[Held]] = {ALLOCATED: [], HELD: [], STEP: []}
    for comparison in (c for c in comparisons if c.case.grade != "C"):
        for quantity, names in _NAMES.items():
            for name in names:
                measured = comparison.measured(name)
                if measured:
                    predicted = float(getattr(comparison.predicted, name))
                    unknown = comparison.predicted.unknown
                    held = _held(comparison.case, name, predicted, measured, unknown)
                    rows[quantity].append(held)
                    break  # device memory is reserved memory and the context: one of both
    return rows


_NAMES = {ALLOCATED: ("allocated",), HELD: ("device", "reserved"), STEP: ("step_s",)}


def _held(
    case: Case, name: str, predicted: float, measured: float, unknown: tuple[float, float]
) -> Held:
    return Held(
        gpu=case.gpu,
        program=case.group,
        machine=case.row.notes.get("file", "") if name == "step_s" else "",
        grade=case.grade,
        configuration=(case.model, case.configuration.key),
        observation=Observation(
            name, predicted, measured, units=float(str(case.configuration["grad_accum"]))
        ),
        unknown=unknown if name == "step_s" else (1.0, 1.0),
        samples=int(str(case.configuration["micro_batch"]))
        * int(str(case.configuration["grad_accum"])),
    )


def probable_priors(
    rows: Sequence[Held],
    quantity: str,
    source: str,
    *,
    observed: Callable[[Held], Observation] = lambda held: held.observation,
    spread_sds: Sequence[float] = (),
) -> list[tuple[float, ErrorPrior]]:
    """Priors with their probabilities after these rows, the most probable first.

    Searched on a grid: a handful of groups says no more than the order of magnitude. The least
    spread and the fixed cost are those of the shipped prior, which have other sources.
    """
    groups = [
        tuple(observed(held) for held in members)
        for _, members in itertools.groupby(sorted(rows, key=_group), key=_group)
    ]
    candidates = _candidates(quantity, tuple(spread_sds))
    # Leaving a group out changes nothing of the evidence of the others.
    evidence = np.zeros(len(candidates))
    for group in groups:
        evidence += _evidence(group, quantity, tuple(spread_sds))
    return [
        (share, replace(prior, source=source)) for share, prior in _weighed(candidates, evidence)
    ]


def _weighed(
    candidates: Sequence[ErrorPrior], evidence: NDArray[np.float64]
) -> list[tuple[float, ErrorPrior]]:
    """The candidates with their probabilities by their log evidence, most probable first.

    Before it all are equally probable. Of groups of observations, which are independent, `evidence`
    is the sum of `log_evidence`. What is below a ten-thousandth of the most probable is left out.
    """
    shares = np.exp(evidence - evidence.max())
    ordered = sorted(range(len(candidates)), key=lambda i: -shares[i])
    kept = [i for i in ordered if shares[i] > 1e-4]
    total = sum(float(shares[i]) for i in kept)
    return [(float(shares[i]) / total, candidates[i]) for i in kept]


def _unseen(priors: Sequence[tuple[float, ErrorPrior]]) -> Calibration:
    """Expectation for a GPU of a type never seen: priors, each with its probability.

    A few GPU types say little of how much GPU types differ. Instead of the one prior that
    suits them best, all that suit them count, each as far as it does, so that the interval
    also contains the doubt about the prior (the heavy tails that Student's t has when a
    scale comes from few values).
    """
    parts = [(share, Calibration.fit((), prior)) for share, prior in priors]
    return Calibration(
        np.concatenate([part._bias for _, part in parts]),
        np.concatenate([part._spread for _, part in parts]),
        np.concatenate([share * part._weight for share, part in parts]),
        count=0,
        fixed_cost=0.0,
    )


@cache
def _candidates(quantity: str, spread_sds: tuple[float, ...]) -> tuple[ErrorPrior, ...]:
    shipped_prior = _SHIPPED[quantity]
    return tuple(
        replace(shipped_prior, bias_scale=bias_scale, spread=spread, spread_sd=spread_sd)
        for bias_scale in _BIAS_SCALES
        for spread in _SPREADS
        for spread_sd in spread_sds or _SPREAD_SDS[quantity]
        if spread >= shipped_prior.least_spread
    )


@cache
def _evidence(
    group: tuple[Observation, ...], quantity: str, spread_sds: tuple[float, ...]
) -> NDArray[np.float64]:
    """The evidence of a group for each candidate."""
    return np.array([log_evidence(group, prior) for prior in _candidates(quantity, spread_sds)])


_BIAS_SCALES = (
    0.001,
    0.002,
    0.003,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.06,
    0.07,
    0.1,
    0.15,
    0.2,
    0.3,
)
_SPREADS = (0.003, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.1, 0.15, 0.2)
_SPREAD_SDS = {ALLOCATED: (0.3, 0.6, 1.0, 1.5), HELD: (1.0, 1.5), STEP: (0.3, 0.6, 1.0, 1.5)}
"""How far the spread of a GPU and program may be from that of others, as a logarithm.

Of reserved and device memory it is at least 1.0: what an allocator keeps depends on the program
(0.7 % on one GPU, 10 % on another), and two GPU types with one program cannot rule that out.
"""


def _group(held: Held) -> tuple[str, str, str]:
    return held.group


def uncalibrated(rows: Sequence[Held], calibration: Calibration) -> list[Result]:
    """Each row with the interval that is given when nothing was calibrated."""
    return [Result(r, interval_of(calibration, r.observation.predicted, r.unknown)) for r in rows]


def interval_of(
    calibration: Calibration, predicted: float, unknown: tuple[float, float]
) -> Interval:
    """The interval of a prediction of which host, kernels and board may make `unknown`."""
    found = calibration.factors
    low, high = in_quadrature((found.low, found.high), unknown)
    return Interval(predicted * low, predicted * found.median, predicted * high)


def across_gpus(rows: Sequence[Held], unseen: dict[str, Calibration]) -> list[Result]:
    """Each row as on a GPU never seen. `unseen` by the GPU whose rows it does not know."""
    return [r for gpu, known in unseen.items() for r in uncalibrated(_of(gpu, rows), known)]


def _of(gpu: str, rows: Iterable[Held]) -> list[Held]:
    return [row for row in rows if row.gpu == gpu]


def within_gpu(
    rows: Sequence[Held], priors: dict[str, ErrorPrior], scope: Callable[[Held], object]
) -> list[Result]:
    """Each row calibrated on the others of the same scope; those alone in it are left out."""
    results = []
    for row in rows:
        others = [
            other.observation
            for other in rows
            if scope(other) == scope(row) and other.configuration != row.configuration
        ]
        if others:
            calibration = Calibration.fit(others, priors[row.gpu])
            predicted, units = row.observation.predicted, row.observation.units
            results.append(Result(row, calibration.correct(predicted, units=units)))
    return results


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table."""

    quantity: str
    held_out: str
    rows: str
    results: Sequence[Result]

    def cells(self) -> list[str]:
        """The cells of the table, with the targets that apply and whether they are met."""
        errors = [abs(result.error) for result in self.results]
        covered = statistics.fmean(result.is_covered for result in self.results)
        above = statistics.fmean(result.is_above for result in self.results)
        widths = [r.interval.high / r.interval.low for r in self.results]
        mean = f"{statistics.fmean(errors):.2%}"
        # Targets are for sets of rows; a single group has too few to tell.
        is_set = self.rows.startswith("grade")
        target = STEP_TARGETS.get(self.held_out) if self.quantity == STEP else None
        if is_set and target is not None:
            mean += _verdict(statistics.fmean(errors) <= target, f"{target:.0%}")
        covered_text, above_text = f"{covered:.1%}", f"{above:.1%}"
        if is_set:
            is_met = COVERAGE_TARGET[0] <= covered <= COVERAGE_TARGET[1]
            covered_text += _verdict(is_met, "{:.0%} to {:.0%}".format(*COVERAGE_TARGET))
        if is_set and self.quantity == HELD:
            above_text += _verdict(above <= ABOVE_TARGET, f"{ABOVE_TARGET:.0%}")
        return [
            self.quantity,
            self.held_out,
            self.rows,
            str(len(errors)),
            f"{statistics.median(errors):.2%}",
            mean,
            covered_text,
            above_text,
            f"{statistics.median(widths):.3f}",
        ]


def _verdict(is_met: bool, target: str) -> str:
    return f" ({'met' if is_met else 'missed'}: {target})"


def program_prior(rows: Sequence[Held]) -> ErrorPrior:
    """What these rows let expect of the step of a GPU or program never seen.

    Rows of all grades count, less what host, kernels and board account for; of the priors the most
    probable one with the shipped deviation of the spread. All priors together contain 95 to 96 %.
    """
    found = probable_priors(
        rows,
        STEP,
        "",
        observed=lambda held: held.unexplained,
        spread_sds=(PROGRAM_PRIOR.spread_sd,),
    )
    return found[0][1]


def lines(
    rows: dict[str, list[Held]],
) -> tuple[list[Line], dict[str, list[tuple[float, ErrorPrior]]]]:
    """All lines of the table, and the best prior of each quantity."""
    table: list[Line] = []
    best: dict[str, list[tuple[float, ErrorPrior]]] = {}
    for quantity, members in rows.items():
        trusted = [row for row in members if row.grade == "A"]
        start = _SHIPPED[quantity]
        best[quantity] = probable_priors(trusted, quantity, "all rows of grade A")
        gpus = list(dict.fromkeys(row.gpu for row in members))
        probable = {
            gpu: probable_priors([r for r in trusted if r.gpu != gpu], quantity, f"all but {gpu}")
            for gpu in gpus
        }
        # Trials narrow the spread themselves: for them its deviation stays as shipped.
        priors = {
            gpu: next(p for _, p in found if p.spread_sd == start.spread_sd)
            for gpu, found in probable.items()
        }
        if quantity == STEP:
            others = {gpu: [r for r in members if r.gpu != gpu] for gpu in gpus}
            unseen = {gpu: Calibration.fit((), program_prior(o)) for gpu, o in others.items()}
            shipped = Calibration.fit((), PROGRAM_PRIOR)
            best[PROGRAM] = [(1.0, program_prior(members))]
        else:
            unseen = {gpu: _unseen(found) for gpu, found in probable.items()}
            shipped = Calibration.fit((), start)
        ways = {
            NOTHING if quantity == STEP else BEFORE_TRIALS: uncalibrated(members, shipped),
            "another GPU": across_gpus(members, unseen),
            "same GPU": within_gpu(members, priors, _group),
        }
        if quantity == STEP:
            ways["same GPU type, other machines too"] = within_gpu(
                members, priors, lambda held: (held.gpu, held.program)
            )
            ways["same GPU type, any program"] = within_gpu(members, priors, lambda held: held.gpu)
        for way, results in ways.items():
            for grade in ("A", "B"):
                chosen = [r for r in results if r.held.grade == grade]
                if chosen:
                    table.append(Line(quantity, way, f"grade {grade}", chosen))
            if quantity == STEP and way == "same GPU":
                table += _by_group(quantity, way, results)
    return table, best


_SHIPPED = {
    ALLOCATED: prior_of(calibrate.ALLOCATED, has_profile=False),
    HELD: prior_of(calibrate.DEVICE, has_profile=False),
    STEP: prior_of(calibrate.STEP, has_profile=False),
}


def _by_group(quantity: str, way: str, results: Sequence[Result]) -> list[Line]:
    ordered = sorted(results, key=lambda r: r.held.group)
    return [
        Line(quantity, way, " ".join(filter(None, group)), list(members))
        for group, members in itertools.groupby(ordered, key=lambda r: r.held.group)
    ]


TABLE = Path(__file__).with_name("coverage.csv")
_HEADER = (
    "quantity", "calibrated on", "rows", "number", "median error", "mean error",
    "inside the 90 % interval", "above it", "upper / lower end",
)  # fmt: skip


def priors(best: dict[str, list[tuple[float, ErrorPrior]]]) -> str:
    """The most probable prior of the rows of grade A, in logarithms of measured over predicted.

    Beside it the ends of the interval before anything is measured: of that prior alone, and of all
    priors with their probabilities.
    """
    head = ["quantity", "bias, scale", "spread", "spread, deviation", "that prior", "all priors"]
    return "\n".join(
        " | ".join(cells)
        for cells in (head, *(_prior_cells(name, found) for name, found in best.items()))
    )


def _prior_cells(name: str, found: Sequence[tuple[float, ErrorPrior]]) -> list[str]:
    prior = found[0][1]
    ends = [
        f"{calibration.factors.low:.3f} to {calibration.factors.high:.3f}"
        for calibration in (Calibration.fit((), prior), _unseen(found))
    ]
    return [name, *map(str, (prior.bias_scale, prior.spread, prior.spread_sd)), *ends]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.coverage")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    cases = [case for row in read_rows() if isinstance(case := express(row), Case)]
    comparisons = [
        Comparison(cases[index], predicted)
        for index, predicted in predict_all(cases, processes=arguments.processes)
    ]
    table, best = lines(held_rows(comparisons))
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_HEADER)
        writer.writerows(line.cells() for line in table)
    print(TABLE.read_text("utf-8"), priors(best), sep="\n")


if __name__ == "__main__":
    main()
