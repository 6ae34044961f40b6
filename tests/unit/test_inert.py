"""Knobs that change neither memory nor time are found, and no others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from results_samples import make_prediction

from tuner.core.records import Configuration
from tuner.core.units import GIB
from tuner.predict.candidates import _InertKnob, inert_knobs

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
