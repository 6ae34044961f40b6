"""Which predicted configurations get a trial, and in which order."""

from __future__ import annotations

from tune_fakes import FakeSpace, outcome_of, samples_per_s, tokens_per_s

from tuner.estimate.shortlist import shortlist

ALL = list(FakeSpace().configurations())
PREDICTIONS = [outcome_of(c).prediction for c in ALL]
FITTING = [c for c, p in zip(ALL, PREDICTIONS, strict=True) if p.fits]


def test_the_fastest_epoch_comes_first_and_not_the_most_tokens():
    first = shortlist(ALL, PREDICTIONS, 1)
    assert first == [max(FITTING, key=samples_per_s)]
    assert first != [max(FITTING, key=tokens_per_s)]


def test_the_smallest_that_fits_is_among_them_and_nothing_comes_twice():
    chosen = shortlist(ALL, PREDICTIONS, len(ALL))
    sizes = {c.key: p.memory.device_bytes for c, p in zip(ALL, PREDICTIONS, strict=True)}
    assert min(sizes[c.key] for c in chosen) == min(sizes[c.key] for c in FITTING)
    assert len({c.key for c in chosen}) == len(chosen)


def test_what_is_just_too_large_is_tried_and_what_is_much_too_large_is_not():
    chosen = {c.key for c in shortlist(ALL, PREDICTIONS, len(ALL))}
    for configuration, prediction in zip(ALL, PREDICTIONS, strict=True):
        if not prediction.fits:
            usable = prediction.limit_bytes - prediction.margin_bytes
            near = prediction.memory.device_bytes <= 1.05 * usable
            assert (configuration.key in chosen) is near
