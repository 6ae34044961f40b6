"""Values and pairs of values of candidates: each may be the cause of what trials show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

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
