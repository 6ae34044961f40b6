"""The frontier of known OOMs: sound, minimal, independent of order, and open to correction."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.core.records import Configuration
from tuner.core.setup.schemas import MEMORY_ORDERS, memory_order
from tuner.searches.proposer import _OomFrontier

ORDER = MEMORY_ORDERS["causal_lm"]
VALUES = {
    "micro_batch": (1, 2, 4),
    "lora_rank": (16, 64),
    "max_length": (512, 1024, 2048),
    "gradient_checkpointing": (True, False),
    "optimizer": ("paged_adamw_8bit", "adamw_torch", "sgd"),
    "precision": ("nf4", "bf16"),
}
ALL = [
    Configuration(
        {
            **dict(zip(VALUES, values, strict=True)),
            "grad_accum": 4 // values[0],
            "lora_alpha": 2 * values[1],
            "effective_batch": 4,
        }
    )
    for values in itertools.product(*VALUES.values())
]
places = st.lists(st.integers(0, len(ALL) - 1), max_size=12)


@st.composite
def memories(draw):
    """A memory that grows with every declared knob, and does as it likes with the others."""
    weight = {name: draw(st.floats(0.0, 2.0)) for name in ORDER.knobs}
    kept = draw(st.floats(0.0, 2.0))
    base = {p: draw(st.floats(0.0, 10.0)) for p in VALUES["precision"]}
    sgd = draw(st.floats(0.0, 10.0))

    def memory(configuration):
        found, _ = ORDER.split(configuration)
        growth = sum(weight[name] * np.log1p(found[name]) for name in weight if name in found)
        kept_gradients = kept if configuration["grad_accum"] > 1 else 0.0
        other = sgd if configuration["optimizer"] == "sgd" else 0.0
        return base[configuration["precision"]] + growth + kept_gradients + other

    return np.array([memory(c) for c in ALL])


@given(memory=memories(), tried=places, limit=st.floats(0.0, 30.0))
@settings(max_examples=60)
def test_what_is_covered_runs_out_of_memory(memory, tried, limit):
    frontier = _OomFrontier(ALL, ORDER)
    for place in tried:
        if memory[place] > limit:
            frontier.ran_out(place)
        else:
            frontier.fitted(place)
    assert (memory[frontier.covered()] > limit).all()
    assert all(frontier.covered()[p] for p in tried if memory[p] > limit)


@given(tried=places, order=st.randoms())
def test_order_does_not_matter_and_no_known_one_covers_another(tried, order):
    shuffled = list(tried)
    order.shuffle(shuffled)
    first, second = _OomFrontier(ALL, ORDER), _OomFrontier(ALL, ORDER)
    for place in tried:
        first.ran_out(place)
    for place in shuffled:
        second.ran_out(place)
    assert set(first.known) == set(second.known)
    assert np.array_equal(first.covered(), second.covered())
    for known in first.known:
        alone = _OomFrontier(ALL, ORDER)
        alone.ran_out(known)
        assert not any(alone.covered()[other] for other in first.known if other != known)


def place_of(**wanted):
    return next(i for i, c in enumerate(ALL) if all(c[k] == v for k, v in wanted.items()))


SMALL = {
    "micro_batch": 1,
    "lora_rank": 16,
    "max_length": 512,
    "gradient_checkpointing": True,
    "optimizer": "paged_adamw_8bit",
    "precision": "nf4",
}


def test_larger_in_several_knobs_is_covered_and_names_its_witness():
    frontier = _OomFrontier(ALL, ORDER)
    small = place_of(**SMALL)
    frontier.ran_out(small)
    larger = place_of(**{**SMALL, "max_length": 2048, "optimizer": "adamw_torch"})
    assert frontier.witness(larger) == small
    assert frontier.witness(place_of(**{**SMALL, "precision": "bf16"})) is None
    assert frontier.witness(place_of(**{**SMALL, "optimizer": "sgd"})) is None


def test_kept_gradients_are_not_assumed_where_nothing_accumulates():
    """The largest micro-batch takes one micro-step, and so may need less than two smaller ones."""
    frontier = _OomFrontier(ALL, ORDER)
    frontier.ran_out(place_of(**{**SMALL, "micro_batch": 2}))
    assert not frontier.covered()[place_of(**{**SMALL, "micro_batch": 4})]
    frontier.ran_out(place_of(**{**SMALL, "micro_batch": 4}))
    assert frontier.covered()[place_of(**{**SMALL, "micro_batch": 4, "max_length": 1024})]


def test_a_fit_takes_back_what_it_contradicts():
    frontier = _OomFrontier(ALL, ORDER)
    frontier.ran_out(place_of(**SMALL))
    frontier.fitted(place_of(**{**SMALL, "max_length": 1024}))
    assert not frontier.known
    assert not frontier.covered().any()


def test_unknown_workload_orders_nothing():
    frontier = _OomFrontier(ALL, memory_order("mine:workload"))
    frontier.ran_out(place_of(**SMALL))
    assert frontier.covered().sum() == 1
