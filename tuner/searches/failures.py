"""Learns from errors: finds the knob values, or pairs of values, that make trials fail.

A trial that ended with an error gives no speed or memory, but a broken value makes every trial
with it fail. Each value and each pair of values may be broken; a trial that ran rules this out for
all of its values. The others share the blame for the failed trials; a value that explains more
failures gets more blame (a noisy-or, solved by damped fixed-point steps). Each kind of error is
solved separately.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.core.errors import TunerError, UnavailableError
from tuner.core.records import Exhausted, Outcome, Status, TrialRecord

Suspect = tuple[tuple[int, int], ...]
"""One or two values: (number of the knob, number of its value) of each."""


class Suspects:
    """The values that candidates have, and pairs of values of different knobs."""

    def __init__(self, columns: Mapping[str, Sequence[object]]) -> None:
        """`columns` are the values of each knob that varies, one for each candidate."""
        self._names = list(columns)
        self._values = [{v: i for i, v in enumerate(dict.fromkeys(c))} for c in columns.values()]
        coded = [
            [values[value] for value in column]
            for values, column in zip(self._values, columns.values(), strict=True)
        ]
        number = len(next(iter(columns.values()))) if columns else 1
        self.codes = np.array(coded, dtype=np.intp).reshape(len(coded), number)

    def of(self, place: int) -> Iterator[Suspect]:
        """The values and pairs that the candidate at `place` has."""
        values = list(enumerate(self.codes[:, place].tolist()))
        yield from itertools.chain(
            itertools.combinations(values, 1), itertools.combinations(values, 2)
        )

    def has(self, suspect: Suspect) -> NDArray[np.bool_]:
        """Mask of the candidates that have the value, or both values of the pair."""
        return self._have(suspect, self.codes)

    def among(self, places: NDArray[np.intp]) -> tuple[list[Suspect], NDArray[np.bool_]]:
        """The suspects of some candidates, and which has which, shape (places, suspects)."""
        found = dict.fromkeys(s for place in places.tolist() for s in self.of(place))
        codes = self.codes[:, places]
        marks = [self._have(suspect, codes) for suspect in found]
        return list(found), np.array(marks, dtype=bool).reshape(len(found), len(places)).T

    def chance(self, suspect: Suspect) -> float:
        """The probability of this suspect, if there is one.

        A value is as likely as a pair; so is each knob or pair of knobs, and each of its values.
        """
        kinds = math.comb(len(self._values), len(suspect))
        return 0.5 / kinds / math.prod(len(self._values[knob]) for knob, _ in suspect)

    def text(self, suspect: Suspect) -> str:
        """The suspect for people: "attention=sdpa precision=nf4"."""
        texts = [list(values) for values in self._values]
        return " ".join(f"{self._names[k]}={texts[k][value]}" for k, value in suspect)

    @staticmethod
    def _have(suspect: Suspect, codes: NDArray[np.intp]) -> NDArray[np.bool_]:
        return np.asarray(np.all([codes[knob] == value for knob, value in suspect], axis=0))


Floats = NDArray[np.float64]
PRIORS = {1: 0.05, 2: 0.01}
"""Prior probability that a value is broken, and that two working values fail together."""

OWN = 0.05
"""Probability that a trial fails for another reason: its own configuration, or chance."""

ALIKE_TO_CLOSE, LEAST_TO_TRY = 3, 0.3
"""A value that never ran and failed alike this many times is closed, but only for configurations
less likely to run than the second number: another value may have caused the failures."""

SUSPECTED = 0.5
"""Values are reported if their probability of being broken is above this."""

STEPS, DAMPING = 25, 0.5
"""Number and damping of the fixed-point steps; without damping, two values that always occur
together would oscillate."""

FAILED = (Status.CRASHED, Status.INVALID, Status.TIMEOUT, Status.NON_FINITE)
"""Statuses of a trial whose configuration failed for another reason than device memory."""

FAILURES_THAT_END, MOST_FAILURES = 6, 12
"""This many failed trials end a search in which none ran: the first number if the trials share no
value that could be the only cause, the second in any case."""

_CHANGING = re.compile(r"0x[0-9a-f]+|(?:/[\w.+-]+)+|\d+(?:\.\d+)?")
"""Addresses, paths and numbers: they differ between errors that are alike."""
MOST_LETTERS = 160


def failure_of(outcome: Outcome) -> str | None:
    """The kind of error that ended a trial, for people; None where none did.

    Running out of main memory is such an error, because it tells nothing about device memory.
    """
    if outcome.status is Status.OOM and outcome.exhausted is Exhausted.HOST:
        return "the machine's main memory ran out"
    if outcome.status not in FAILED:
        return None
    lines = [line.strip() for line in outcome.message.splitlines() if line.strip()]
    text = _CHANGING.sub("#", lines[-1]) if lines else ""
    return f"{outcome.status}: {text}"[:MOST_LETTERS] if text else str(outcome.status)


def everything_fails(records: Sequence[TrialRecord], failures: Failures) -> TunerError | None:
    """The error that ends a search whose trials all failed so far; None if it may go on.

    `records` are its own trials. Those that ran out of device memory might run otherwise.
    """
    if failures.any_ran:
        return None
    kinds = [kind for record in records if (kind := failure_of(record.outcome)) is not None]
    ran_out = sum(record.outcome.device_ran_out for record in records)
    if len(kinds) < FAILURES_THAT_END or len(kinds) + ran_out < len(records):
        return None
    shared = failures.shared()
    if shared and len(kinds) < MOST_FAILURES:
        return None
    kind, times = Counter(kinds).most_common(1)[0]
    alike = "all" if times == len(kinds) else f"{times} of them"
    also = f", all with {' '.join(shared)}" if shared else ""
    return UnavailableError(
        f"each of the first {len(kinds)} trials failed, {alike} with {kind}{also}",
        hint="`tuner trial` runs one of them and shows its log; once that works, search with "
        "--fresh, as failed trials are not run again otherwise",
    )


def _told(value: str, times: int, kind: str) -> str:
    return f"{value} failed {times} time{'s' * (times != 1)} and never ran: {kind}"


class Failures:
    """Failed and successful trials by the place of their candidate, and the values to blame."""

    def __init__(self, columns: Mapping[str, Sequence[object]]) -> None:
        """`columns` are the values of each knob that varies, one for each candidate."""
        self._suspects = Suspects(columns)
        self.any_ran = False
        self._ran: set[Suspect] = set()
        self._failed: dict[str, dict[int, None]] = {}
        self._blame: dict[Suspect, float] = {}
        self._probability: Floats | None = None
        self._closed: dict[str, NDArray[np.bool_]] | None = None
        self.in_a_row = 0
        """Trials that failed since the last one that ran."""

    def ran(self, place: int) -> None:
        """Note that the candidate at `place` ran: none of its values or pairs is broken."""
        self.any_ran, self.in_a_row = True, 0
        before = len(self._ran)
        self._ran.update(self._suspects.of(place))
        for places in self._failed.values():
            places.pop(place, None)
        if self._failed and len(self._ran) > before:
            self._probability = self._closed = None

    def failed(self, place: int, kind: str) -> None:
        """Note that the candidate at `place` failed with this kind of error."""
        self._failed.setdefault(kind, {})[place] = None
        self._probability = self._closed = None
        self.in_a_row += 1

    def probability(self) -> Floats:
        """The probability that each candidate runs without an error, shape (candidates,)."""
        if self._probability is None:
            self._blame, logs = {}, np.zeros(self._suspects.codes.shape[1])
            for places in self._failed.values():
                for suspect, blame in self._blamed(tuple(places)).items():
                    self._blame[suspect] = max(blame, self._blame.get(suspect, 0.0))
                    logs[self._suspects.has(suspect)] += np.log1p(-min(blame, 1 - 1e-9))
            self._probability = np.exp(logs)
        return self._probability

    def closed(self) -> dict[str, NDArray[np.bool_]]:
        """Masks of the candidates that must not be tried any more, by the reason for people.

        The reason names a value that failed alike several times and never ran; the value with the
        most blame comes first.
        """
        if self._closed is None:
            left, self._closed = self.probability() < LEAST_TO_TRY, {}
            for suspect, kind, times in self._never_ran():
                mask = left & self._suspects.has(suspect)
                if times >= ALIKE_TO_CLOSE and mask.any():
                    self._closed[_told(self._suspects.text(suspect), times, kind)] = mask
                    left = left & ~mask
        return self._closed

    def suspected(self) -> list[str]:
        """The values that are probably broken, with the number and kind of their failures."""
        self.probability()
        return [
            _told(self._suspects.text(suspect), times, kind)
            for suspect, kind, times in self._never_ran()
            if self._blame.get(suspect, 0.0) > SUSPECTED
        ]

    def shared(self) -> list[str]:
        """The values that all failed candidates have, of knobs that have others: "a=1"."""
        places = [place for places in self._failed.values() for place in places]
        if not places:
            return []
        codes = self._suspects.codes[:, places]
        same = np.flatnonzero((codes == codes[:, :1]).all(axis=1))
        return [self._suspects.text(((int(k), int(codes[k, 0])),)) for k in same]

    def _never_ran(self) -> list[tuple[Suspect, str, int]]:
        """Values that failed and never ran, with kind and number of failures, most blamed first."""
        found = []
        for kind, places in self._failed.items():
            times = Counter(
                (s,) for p in places for s in enumerate(self._suspects.codes[:, p].tolist())
            )
            for suspect, number in times.items():
                if suspect not in self._ran:
                    found.append((suspect, kind, number))
        return sorted(found, key=lambda f: (-self._blame.get(f[0], 0.0), f[0]))

    def _blamed(self, places: Sequence[int]) -> dict[Suspect, float]:
        """The probability that each suspect is broken, given the failures at `places`."""
        every, has = self._suspects.among(np.array(places, dtype=np.intp))
        left = [number for number, suspect in enumerate(every) if suspect not in self._ran]
        if not left:
            return {}
        every, has = [every[number] for number in left], has[:, left]
        prior = np.array([PRIORS[len(suspect)] for suspect in every])
        odds = np.log(prior / (1 - prior))
        now = odds.copy()
        for _ in range(STEPS):
            sound = -np.logaddexp(0.0, now)  # log of the probability that it is not broken
            others = np.log1p(-OWN) + (has @ sound)[:, None] - sound
            explained = -np.log(-np.expm1(np.minimum(others, -1e-12)))
            now += DAMPING * (odds + np.where(has, explained, 0.0).sum(axis=0) - now)
        blame = 1.0 / (1.0 + np.exp(-now))
        return dict(zip(every, blame.tolist(), strict=True))
