"""Which configurations of a predicted space are tried: properties of the short list."""

from collections.abc import Callable
from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from results_samples import make_prediction

from tuner.core.records import Configuration, MemoryBudget, Prediction
from tuner.core.units import GIB
from tuner.predict.candidates import NEAR_LIMIT, _InertKnob, inert_knobs, shortlist

LIMIT, MARGIN = 1000, 30

pairs = st.tuples(st.integers(1, 20), st.integers(500, 1200))
spaces = st.lists(pairs, max_size=40)


def predicted(speed: float, device_bytes: int) -> Prediction:
    budget = MemoryBudget(LIMIT, MARGIN)
    return make_prediction(device_bytes, 512.0 * speed, sample_tokens=512, budget=budget)


def space(rows: list[tuple[int, int]]) -> tuple[list[Configuration], list[Prediction]]:
    return [Configuration({"n": n}) for n in range(len(rows))], [predicted(*row) for row in rows]


def chosen(rows: list[tuple[int, int]], number: int) -> list[int]:
    configurations, predictions = space(rows)
    return [int(str(c["n"])) for c in shortlist(configurations, predictions, number)]


def fits(row: tuple[int, int]) -> bool:
    return row[1] + MARGIN <= LIMIT


@given(rows=spaces, number=st.integers(1, 50))
def test_the_fastest_that_fits_comes_first(rows, number):
    fitting = [row for row in rows if fits(row)]
    found = chosen(rows, number)
    if fitting:
        # Of equally fast ones the smallest.
        assert rows[found[0]] == min(fitting, key=lambda row: (-row[0], row[1]))


@given(rows=spaces)
def test_what_is_far_too_large_is_never_tried(rows):
    usable = LIMIT - MARGIN
    for index in chosen(rows, 100):
        assert rows[index][1] <= usable * (1 + NEAR_LIMIT)


@given(rows=spaces)
def test_a_long_list_has_the_whole_front_and_every_distinct_fit(rows):
    """Configurations with equal numbers count once; what fits is all there otherwise."""
    found = [rows[index] for index in chosen(rows, 1000)]
    fitting = {row for row in rows if fits(row)}
    assert {row for row in found if fits(row)} == fitting
    assert sum(fits(row) for row in found) == len(fitting)


@given(rows=spaces)
def test_a_long_list_has_everything_just_above_the_limit(rows):
    near = {i for i, row in enumerate(rows) if not fits(row) and row[1] <= (LIMIT - MARGIN) * 1.05}
    assert near <= set(chosen(rows, 1000))


@given(rows=st.lists(pairs, min_size=12, max_size=40, unique=True))
def test_a_short_list_has_some_of_each(rows):
    """Fast ones, small ones of the front, and a fifth or so that may yet fit."""
    found = [rows[index] for index in chosen(rows, 9)]
    fitting = [row for row in rows if fits(row)]
    near = [row for row in rows if not fits(row) and row[1] <= (LIMIT - MARGIN) * (1 + NEAR_LIMIT)]
    if len(fitting) >= 9 and near:
        assert sum(not fits(row) for row in found) in (1, 2, 3)
    if len(fitting) >= 2:
        front = [
            row
            for row in fitting
            if not any(o[0] >= row[0] and o[1] <= row[1] and o != row for o in fitting)
        ]
        taken = [row for row in found if row in front]
        assert len(taken) >= min(len(front), 3)


# -- knobs that change neither memory nor time are found, and no others -----------------------


KNOBS = {
    "micro_batch": (1, 2, 4),
    "precision": ("nf4", "int8", "bf16"),
    "gradient_checkpointing": (True, False),
}
ALL = [
    # Derived from the micro-batch: it differs whenever that does, and is no knob.
    Configuration({**dict(zip(KNOBS, values, strict=True)), "grad_accum": 4 // values[0]})
    for values in product(*KNOBS.values())
]


def found(device_bytes: Callable[[Configuration], float], chosen=ALL) -> list[_InertKnob]:
    predictions = [make_prediction(round(device_bytes(c) * GIB)) for c in chosen]
    return inert_knobs(chosen, predictions, tuple(KNOBS))


def weight(configuration: Configuration) -> float:
    return {"nf4": 1.0, "int8": 2.0, "bf16": 4.0}[str(configuration["precision"])]


def test_a_knob_can_be_inert_beside_values_of_another():
    def forced_where_quantised(c: Configuration) -> float:
        kept = c["precision"] == "bf16" and not c["gradient_checkpointing"]
        return weight(c) + int(c["micro_batch"]) * (3 if kept else 1)

    inert = found(forced_where_quantised)
    beside = ("precision", ("nf4", "int8"))
    assert inert == [_InertKnob("gradient_checkpointing", 6, beside)]
    assert str(inert[0]).endswith("where precision is nf4 or int8")


@given(st.permutations(range(len(ALL))), st.sets(st.sampled_from(list(KNOBS))))
def test_exactly_the_knobs_that_do_not_act_are_found_in_any_order(order, acting):
    places = {knob: {v: i for i, v in enumerate(values)} for knob, values in KNOBS.items()}
    factors = dict(zip(KNOBS, (1.0, 10.0, 100.0), strict=True))
    chosen = [ALL[i] for i in order]
    inert = found(lambda c: 1 + sum(factors[k] * places[k][c[k]] for k in acting), chosen)
    assert {knob.knob for knob in inert if knob.beside is None} == KNOBS.keys() - acting
