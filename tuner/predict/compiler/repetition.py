"""The events of a deeper model, from those of models of a few layers.

One more layer inserts the same run of events into each phase, for each kind of layers another.
Models with one more layer of each kind tell which runs these are, and which block each event of a
run frees. A model with two more layers must have just the events that follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuner.cost.memory import category_of
from tuner.cost.operators.timeline import Block, Mark, Timeline

_NEVER = np.int32(1 << 30)


def align(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Places in `theirs` of the elements of `ours`, with the fewest runs between; None for none.

    Where an inserted run repeats what surrounds it (a layer among equal layers), it stands as late
    as possible, so that the elements of `ours` are the first of their kind.
    Exact, by dynamic programming over element and shift: O(len(ours) * number inserted).
    """
    if len(theirs) < len(ours):
        return None
    if not len(ours):
        return np.zeros(0, dtype=np.int64)
    costs = _costs(ours, theirs)
    trailing = np.ones(costs.shape[1], dtype=np.int32)  # one run more where not all are inserted
    trailing[-1] = 0
    total = costs[-1] + trailing
    if total.min() >= _NEVER:
        return None
    end = int(np.argmin(total))
    places: NDArray[np.int64] = np.arange(len(ours)) + _shifts(costs, end)
    return places


def _costs(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> NDArray[np.int32]:
    """Fewest runs inserted before each element, by the number of elements in them."""
    width = len(theirs) - len(ours) + 1
    costs = np.empty((len(ours), width), dtype=np.int32)
    before = np.ones(width, dtype=np.int32)
    before[0] = 0
    inserted = np.full(width, _NEVER, dtype=np.int32)
    for element, token in enumerate(ours):
        np.minimum.accumulate(before[:-1], out=inserted[1:])
        inserted[1:] += 1
        np.minimum(before, inserted, out=costs[element])
        costs[element][theirs[element : element + width] != token] = _NEVER
        before = costs[element]
    return costs


def _shifts(costs: NDArray[np.int32], end: int) -> NDArray[np.int64]:
    """Number of elements inserted before each one, from the last to the first."""
    shifts = np.empty(len(costs), dtype=np.int64)
    shift = end
    for element in range(len(costs) - 1, 0, -1):
        shifts[element] = shift
        jumps = np.nonzero(costs[element - 1, :shift] == costs[element, shift] - 1)[0]
        if len(jumps):
            shift = int(jumps[0])
    shifts[0] = shift
    return shifts


class Different(Exception):  # noqa: N818 - no error: a reason to trace all layers
    """The traces are not repetitions of one another."""


class _Free(NamedTuple):
    """The place of a freed block among the live ones of its group."""

    from_newest: int
    from_oldest: int


class _FreeRule(NamedTuple):
    """The freed one of the live blocks of a group, counted from the newest or the oldest.

    `first` in the base model, `by_kind` more for each further layer of a kind, and in the runs of
    layers `by_run` more from one run to the next.
    """

    newest: bool
    first: int
    by_kind: tuple[int, ...]
    by_run: int = 0

    def at(self, more: Sequence[int]) -> _PlaceRule:
        """The rule in a model with this number of further layers of each kind."""
        by_layer = sum(each * number for each, number in zip(self.by_kind, more, strict=True))
        return _PlaceRule(self.newest, self.first + by_layer, self.by_run)


class _PlaceRule(NamedTuple):
    """As `_FreeRule`, in a model of one depth: the place in the first run, more in each next."""

    newest: bool
    first: int
    by_run: int


def shared_rule(base: _Free, ones: Sequence[_Free | None], two: _Free | None) -> _FreeRule:
    """The rule of an event that the base model has too. Raises `Different`."""
    for number, newest in enumerate((True, False)):
        by_kind = tuple(one[number] - base[number] for one in ones if one is not None)
        if two is not None and two[number] - base[number] == by_kind[0] + by_kind[-1]:
            return _FreeRule(newest, base[number], by_kind)
    raise Different


def run_rule(ones: Sequence[_Free | None], two: Sequence[_Free | None]) -> _FreeRule | None:
    """The rule of an event in runs that are alike, by its frees in them; None if there is none.

    `ones` are those of the models with one more layer, `two` those of both runs of the model with
    two more. Runs that are all the same are looked for first, then those that count from the first
    or the last.
    """
    rules = []
    for number, newest in enumerate((True, False)):
        here = {free[number] for free in ones if free is not None}
        there = [free[number] for free in two if free is not None]
        if len(here) == 1:
            (place,) = here
            by_layer, by_run = there[0] - place, there[-1] - there[0]
            by_kind = (by_layer,) * len(ones)
            rules.append((by_layer, _FreeRule(newest, place - by_layer, by_kind, by_run)))
    found = [rule for _, rule in rules if not rule.by_run] + [
        rule for by_layer, rule in rules if not by_layer or rule.by_run == -by_layer
    ]
    return found[0] if found else None


def constant_rule(one: _Free, two: Sequence[_Free | None], *, kinds: int) -> _FreeRule:
    """The rule of an event that frees the same place however many layers. Raises `Different`."""
    for number, newest in enumerate((True, False)):
        if all(free is not None and free[number] == one[number] for free in two):
            return _FreeRule(newest, one[number], (0,) * kinds)
    raise Different


Group = tuple[int, str, bool, bool]
"""Blocks that are alike: number of the size, category, whether logits, whether paged."""


class TracedEvents:
    """One trace as groups of blocks: a token for each event, and the place of each free.

    Its blocks have the numbers of their sizes.
    """

    def __init__(self, timeline: Timeline, numbers: dict[Group, int]) -> None:
        self.timeline = timeline
        groups = [numbers.setdefault(_group(block), len(numbers)) for block in timeline.blocks]
        self.groups = [groups[block] for block, _ in timeline.events]
        live: dict[int, list[int]] = defaultdict(list)
        self.tokens = np.empty(len(timeline.events), dtype=np.int64)
        self.frees: list[_Free | None] = []
        for event, (block, sign) in enumerate(timeline.events):
            group = groups[block]
            self.tokens[event] = 2 * group + (sign > 0)
            if sign > 0:
                live[group].append(block)
                self.frees.append(None)
                continue
            place = live[group].index(block)
            self.frees.append(_Free(len(live[group]) - 1 - place, place))
            del live[group][place]
        self.spans = [*pairwise([*(mark.event for mark in timeline.marks), len(self.tokens)])]


def _group(block: Block) -> Group:
    return block.number, str(category_of(block)), block.is_logits, block.paged


class _Shared(NamedTuple):
    """Events of the base model that all have."""

    start: int
    end: int


class _Repeated(NamedTuple):
    """A run of events for each further layer.

    By kind of layer: where the model with one more of it has the run, and of how many events.
    `backward` if the run of the last layer comes first, `alike` if those of all kinds are.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    backward: bool
    alike: bool

    def order(self, kinds: Sequence[int]) -> Sequence[int]:
        """The kinds of further layers in the order of their runs."""
        return kinds[::-1] if self.backward else kinds


class _DeepEvents:
    """Events of a deeper model, of which each is one of a model of few layers.

    `sources` says of each block which model has it, by number, and which of its blocks it is.
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []
        self.marks: list[Mark] = []
        self.sources: list[tuple[int, int]] = []
        self._live: dict[int, list[int]] = defaultdict(list)

    def add(
        self,
        number: int,
        source: TracedEvents,
        rules: Sequence[_PlaceRule | None],
        span: tuple[int, int],
        run: int,
    ) -> None:
        """Add events like those of a `span` of the model of this number. Raises `Different`."""
        traced = source.timeline.events
        for event in range(*span):
            rule, live = rules[event], self._live[source.groups[event]]
            if rule is None:
                live.append(len(self.sources))
                self.events.append((len(self.sources), 1))
                self.sources.append((number, traced[event][0]))
                continue
            newest, first, by_run = rule
            place = first + by_run * run
            if not 0 <= place < len(live):
                raise Different
            self.events.append((live.pop(-1 - place if newest else place), -1))


class _Insertion(NamedTuple):
    """A run of a model that the base model lacks, and before which of its events."""

    before: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Depth:
    """Model of any depth, from traces of a few layers.

    Those of a base model, of one more layer of each kind, and of two more: one of each kind, or
    both of the only one.
    """

    base: TracedEvents
    ones: tuple[TracedEvents, ...]
    two: TracedEvents

    def with_layers(self, kinds: Sequence[int]) -> _DeepEvents:
        """The events of the base model with further layers of these kinds. Raises `Different`."""
        more = [kinds.count(kind) for kind in range(len(self.ones))]
        phases = self._phases()
        rules = self._rules(phases)
        shared, *repeated = [
            [each and each.at(more) for each in of] for of in (rules[0], *rules[1])
        ]
        result = _DeepEvents()
        for mark, pieces in zip(self.base.timeline.marks, phases, strict=True):
            result.marks.append(mark._replace(event=len(result.events)))
            for piece in pieces:
                if isinstance(piece, _Shared):
                    result.add(0, self.base, shared, (piece.start, piece.end), 0)
                    continue
                for run, kind in enumerate(piece.order(kinds)):
                    start = piece.starts[kind]
                    span = start, start + piece.lengths[kind]
                    result.add(1 + kind, self.ones[kind], repeated[kind], span, run)
        return result

    @property
    def _pair(self) -> tuple[int, int]:
        """The kinds of the further layers of the model that has two."""
        return 0, len(self.ones) - 1

    def _phases(self) -> list[list[_Shared | _Repeated]]:
        """For each phase, its events in pieces. Raises `Different`."""
        if any(_marks(other) != _marks(self.base) for other in (*self.ones, self.two)):
            raise Different
        found = []
        for phase, (start, end) in enumerate(self.base.spans):
            theirs = self.two.tokens[slice(*self.two.spans[phase])]
            inserted = [[*_insertions(self.base, one, phase)] for one in self.ones]
            if len({len(each) for each in inserted}) > 1:
                raise Different
            pieces: list[_Shared | _Repeated] = []
            tokens: list[Any] = []
            at_base, at_two = start, 0
            for scattered in zip(*inserted, strict=True):
                together = self._at_one_place(scattered)
                before = together[0].before
                pieces.append(_Shared(at_base, before))
                tokens.append(self.base.tokens[at_base:before])
                at_two += before - at_base
                for part in self._repeated(together, theirs[at_two:]):
                    pieces.append(part)
                    for kind in part.order(self._pair):
                        first = part.starts[kind]
                        own = self.ones[kind].tokens
                        tokens.append(own[first : first + part.lengths[kind]])
                        at_two += part.lengths[kind]
                at_base = before
            pieces.append(_Shared(at_base, end))
            tokens.append(self.base.tokens[at_base:end])
            if not np.array_equal(np.concatenate(tokens), theirs):
                raise Different
            found.append(pieces)
        return found

    def _at_one_place(self, scattered: Sequence[_Insertion]) -> list[_Insertion]:
        """Runs of all kinds before the same event of the base model. Raises `Different`.

        A run that repeats what stands before it may as well be the earlier of the two.
        """
        place = min(each.before for each in scattered)
        found = []
        for one, each in zip(self.ones, scattered, strict=True):
            shift = each.before - place
            start, end = each.start, each.start + each.length
            if not np.array_equal(one.tokens[start - shift : start], one.tokens[end - shift : end]):
                raise Different
            found.append(_Insertion(place, start - shift, each.length))
        return found

    def _repeated(self, together: Sequence[_Insertion], theirs: Any) -> Iterator[_Repeated]:
        """Runs as they begin `theirs`, where two layers have them; in parts where it must be.

        Where all layers allocate and then all free, what one more layer inserts is a run of both,
        and what two insert is none: each part is there twice. Raises `Different`.
        """
        starts = tuple(each.start for each in together)
        lengths = tuple(each.length for each in together)
        runs = [
            one.tokens[start : start + length]
            for one, start, length in zip(self.ones, starts, lengths, strict=True)
        ]
        alike = all(np.array_equal(run, runs[0]) for run in runs)
        for backward in (False, True):
            whole = _Repeated(starts, lengths, backward, alike)
            twice = np.concatenate([runs[kind] for kind in whole.order(self._pair)])
            if np.array_equal(twice, theirs[: len(twice)]):
                yield whole
                return
        if not alike:
            raise Different
        at, end = 0, len(runs[0])
        while at < end:
            ends = (
                stop
                for stop in range(end, at, -1)
                if np.array_equal(np.tile(runs[0][at:stop], 2), theirs[2 * at : 2 * stop])
            )
            stop = next(ends, None)
            if stop is None:
                raise Different
            moved = tuple(start + at for start in starts)
            yield _Repeated(moved, (stop - at,) * len(starts), backward=False, alike=True)
            at = stop

    def _rules(
        self, phases: Sequence[Sequence[_Shared | _Repeated]]
    ) -> tuple[list[_FreeRule | None], list[list[_FreeRule | None]]]:
        """The block that each event frees: events of the base model, and those of runs by kind."""
        shared: list[_FreeRule | None] = [None] * len(self.base.tokens)
        repeated: list[list[_FreeRule | None]] = [[None] * len(one.tokens) for one in self.ones]
        for phase, pieces in enumerate(phases):
            at_ones = [one.spans[phase][0] for one in self.ones]
            at_two = self.two.spans[phase][0]
            for piece in pieces:
                if isinstance(piece, _Shared):
                    for number, event in enumerate(range(piece.start, piece.end)):
                        if (free := self.base.frees[event]) is not None:
                            ones = [
                                one.frees[at + number]
                                for one, at in zip(self.ones, at_ones, strict=True)
                            ]
                            shared[event] = shared_rule(free, ones, self.two.frees[at_two + number])
                    length = piece.end - piece.start
                    at_ones = [at + length for at in at_ones]
                    at_two += length
                    continue
                runs = []
                for kind in piece.order(self._pair):
                    runs.append((kind, at_two))
                    at_two += piece.lengths[kind]
                for kind, rules in enumerate(repeated):
                    self._note_rules(piece, kind, runs, rules)
                at_ones = [at + n for at, n in zip(at_ones, piece.lengths, strict=True)]
        return shared, repeated

    def _note_rules(
        self,
        piece: _Repeated,
        kind: int,
        runs: Sequence[tuple[int, int]],
        rules: list[_FreeRule | None],
    ) -> None:
        """Note which block each event of a run of this kind frees.

        `runs` are those of the model with two more layers: the kind of each, and where it begins.
        """
        for number in range(piece.lengths[kind]):
            event = piece.starts[kind] + number
            free = self.ones[kind].frees[event]
            if free is None:
                continue
            found = None
            if piece.alike:
                starts = zip(self.ones, piece.starts, strict=True)
                ones = [one.frees[start + number] for one, start in starts]
                found = run_rule(ones, [self.two.frees[at + number] for _, at in runs])
            if found is None:
                own = [self.two.frees[at + number] for each, at in runs if each == kind]
                found = constant_rule(free, own, kinds=len(self.ones))
            rules[event] = found


def _insertions(base: TracedEvents, one: TracedEvents, phase: int) -> Iterator[_Insertion]:
    """The runs that the model of `one` has more in a phase. Raises `Different`."""
    start, end = base.spans[phase]
    start_one, end_one = one.spans[phase]
    alignment = align(base.tokens[start:end], one.tokens[start_one:end_one])
    if alignment is None:
        raise Different
    at = 0
    for number, place in enumerate([*alignment.tolist(), end_one - start_one]):
        if place > at:
            yield _Insertion(start + number, start_one + at, place - at)
        at = place + 1


def _marks(traced: TracedEvents) -> list[Any]:
    return [mark[1:] for mark in traced.timeline.marks]
