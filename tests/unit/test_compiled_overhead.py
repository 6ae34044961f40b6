"""Which points the allocator is replayed at, and what lies between them."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tuner.core.units import KIB, MIB
from tuner.cost.allocator import SMALL_LIMIT_BYTES, SMALL_SEGMENT_BYTES, replay
from tuner.cost.compiled import SEGMENTS, CompiledPasses, Events, Replayed
from tuner.cost.polynomial import Probe, Terms, fit
from tuner.predict.compiler.structure import EXACT_UP_TO, anchors, interpolate

PROBES = (Probe(11, 640, 13), Probe(7, 896, 17))


@dataclasses.dataclass
class Passes:
    """As much of a compiled structure as the choice of anchors looks at."""

    squared: bool = False

    depends_on_length_alone = CompiledPasses.depends_on_length_alone

    @property
    def sizes(self) -> Terms:
        power = 2 if self.squared else 1
        values = tuple(2 * p.micro_batch * p.max_length**power for p in PROBES)
        return Terms.of([fit((values[0], values[1]), PROBES), fit((512, 512), PROBES)])


def as_array(points) -> np.ndarray:
    return np.array(sorted(points), dtype=float)


triples = st.tuples(st.integers(1, 8), st.sampled_from([256, 512, 1024]), st.integers(4, 64))
many = st.sets(triples, min_size=EXACT_UP_TO + 1, max_size=60)


def made_up(place: tuple[int, int, int]) -> tuple[Replayed, Replayed]:
    """Anything that is linear in the rank and depends on the tokens."""
    batch, length, rank = place
    once = Replayed(*(batch * length * n + rank for n in range(5)))
    return once, Replayed(*(2 * value for value in once))


@given(st.sets(triples, min_size=1, max_size=EXACT_UP_TO))
def test_a_few_points_are_replayed_themselves(points):
    chosen = anchors(as_array(points), Passes())
    assert chosen == {point: [point] for point in points}
    found = interpolate(as_array(points), chosen, {p: made_up(p) for p in points})
    for row, point in zip(found, sorted(points), strict=True):
        np.testing.assert_array_equal(row, made_up(point))


@given(points=many, squared=st.booleans())
def test_many_points_share_replays_at_the_smallest_and_the_largest_rank(points, squared):
    chosen = anchors(as_array(points), Passes(squared))
    assert chosen.keys() == points
    ranks = {min(p[2] for p in points), max(p[2] for p in points)}
    for point, places in chosen.items():
        assert {place[2] for place in places} == ranks
        for place in places:
            if squared:
                assert place[:2] == point[:2]
            else:
                assert place[0] * place[1] == point[0] * point[1]
    groups = {p[:2] if squared else p[0] * p[1] for p in points}
    distinct = {place for places in chosen.values() for place in places}
    assert len(distinct) == len(groups) * len(ranks)


@given(points=many)
def test_between_the_ranks_values_lie_on_a_line(points):
    chosen = anchors(as_array(points), Passes())
    replayed = {place: made_up(place) for places in chosen.values() for place in places}
    found = interpolate(as_array(points), chosen, replayed)
    assert found.shape == (len(points), 2, len(Replayed._fields))
    for row, point in zip(found, sorted(points), strict=True):
        np.testing.assert_allclose(row, made_up(point))


def test_points_that_were_not_replayed_add_nothing():
    """They need more than any GPU has."""
    points = as_array([(1, 512, 8), (64, 16384, 8)])
    chosen = anchors(points, Passes())
    found = interpolate(points, chosen, {(1, 512, 8): made_up((1, 512, 8))})
    assert found[0].any()
    assert not found[1].any()


SIZES = [256 * KIB, MIB, 3 * MIB, 11 * MIB, 12 * MIB + 512 * KIB, 40 * MIB]


@st.composite
def histories(draw):
    """Events of blocks, in the five segments of a compiled structure, and the blocks' sizes."""
    sizes, events, spans, live = [], [], [], []
    for _ in range(len(SEGMENTS) + 1):
        start = len(events)
        for choice in draw(st.lists(st.integers(0, 2**16), min_size=1, max_size=12)):
            if live and choice % 3 == 0:
                events.append((live.pop(choice % len(live)), -1))
            else:
                events.append((len(sizes), 1))
                live.append(len(sizes))
                sizes.append(choice % len(SIZES))
        spans.append((start, len(events)))
    loading, *passes = spans
    return Events(np.array(events), np.array(sizes, dtype=np.int32), np.array([*passes, loading]))


@given(histories())
def test_the_large_pool_alone_says_what_a_replay_of_both_says(history):
    sizes = [SIZES[number] for number in history.sizes]
    for added, segment in zip(history.replayed(np.array(SIZES)), (1, 3), strict=True):
        end = history.spans[segment][1]
        whole = replay(map(tuple, history.events[:end].tolist()), sizes, keep_history=True)
        asked = np.cumsum([sizes[index] * sign for index, sign in history.events[:end]])
        assert added.end_bytes == whole.allocated_bytes[-1] - asked[-1]
        free = whole.peak_reserved_bytes - whole.peak_allocated_bytes
        small = sum(size for size in sizes if size <= SMALL_LIMIT_BYTES)
        # Holes in the small pool are not known; of what was never freed there are none.
        assert free - small - SMALL_SEGMENT_BYTES <= added.free_bytes <= free
