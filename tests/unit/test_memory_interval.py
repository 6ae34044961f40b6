"""Intervals of predicted memory: they contain it, and are as wide as what is not known."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results_samples import make_memory, make_record

from tuner.core.records import Configuration, Doubt, Memory
from tuner.core.units import GIB, MIB
from tuner.cost.calibrate import ALLOCATED, DEVICE, RESERVED, STEP, TOKENS, prior_intervals, widened
from tuner.cost.interval import MEMORY_ERRORS
from tuner.predict.predict import doubts_of
from tuner.program.planned import ASSUMES, ProgramPlan
from tuner.program.reading import PACKED

DOUBTS = st.sets(st.sampled_from(Doubt))


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    allocated = draw(st.integers(MIB, 200 * GIB))
    gap, context = draw(st.integers(0, 20 * GIB)), draw(st.integers(0, GIB))
    return of_parts(allocated, gap, context)


def of_parts(allocated: int, gap: int, context: int = 500 * MIB) -> Memory:
    reserved = allocated + gap
    return Memory(allocated, reserved, reserved + context, allocated, {}, "backward", {})


LIMITS = st.none() | st.integers(GIB, 200 * GIB)


@given(memories(), LIMITS, st.booleans(), DOUBTS, DOUBTS)
def test_an_interval_contains_the_prediction_and_never_narrows_with_a_doubt(
    memory, limit_bytes, measured, some, more
):
    sizes = (memory.device_bytes, memory.peak_reserved_bytes, memory.peak_allocated_bytes)
    how = {"limit_bytes": limit_bytes, "measured_context": measured}
    few = MEMORY_ERRORS.ends(memory, doubts=some, **how)
    many = MEMORY_ERRORS.ends(memory, doubts=some | more, **how)
    for size, (low, high), (lower, higher) in zip(sizes, few, many, strict=True):
        assert lower <= low <= size <= high <= higher


@given(memories(), st.integers(0, 10 * GIB), LIMITS)
def test_more_free_blocks_and_an_unmeasured_context_make_it_wider(memory, more, limit_bytes):
    allocated, reserved = memory.peak_allocated_bytes, memory.peak_reserved_bytes
    context = memory.device_bytes - reserved
    larger = of_parts(allocated, reserved - allocated + more, context)
    (low, high), *_ = MEMORY_ERRORS.ends(memory)
    (lower, higher), *_ = MEMORY_ERRORS.ends(larger)
    assert high - low <= higher - lower + 1e-3
    known = MEMORY_ERRORS.ends(memory, limit_bytes=limit_bytes, measured_context=True)[0]
    unknown = MEMORY_ERRORS.ends(memory, limit_bytes=limit_bytes)[0]
    assert unknown[0] <= known[0] <= known[1] <= unknown[1]


def test_near_the_limit_free_blocks_may_go_back():
    memory = of_parts(60 * GIB, 18 * GIB)
    (low, _), *_ = MEMORY_ERRORS.ends(memory, limit_bytes=200 * GIB)
    (lower, high), *_ = MEMORY_ERRORS.ends(memory, limit_bytes=79 * GIB)
    assert low > 70 * GIB
    assert lower < 61 * GIB < 79 * GIB < high


def test_a_prediction_is_widened_as_if_the_doubt_had_been_known():
    prediction = make_record(device_bytes=20 * GIB).outcome.prediction
    memory, doubts = prediction.memory, (Doubt.RELEASES, Doubt.KERNELS)
    names = (DEVICE, RESERVED, ALLOCATED)
    plain = dict(zip(names, MEMORY_ERRORS.ends(memory), strict=True))
    wide = dict(zip(names, MEMORY_ERRORS.ends(memory, doubts=doubts), strict=True))
    before = prediction.intervals | plain
    found = widened(replace(prediction, intervals=before), doubts)
    for name in names:
        assert found.intervals[name] == pytest.approx(wide[name], abs=1)
    assert widened(found, ()) is found


def test_releases_before_pytorch_2_widen_the_time_of_a_step_too():
    prediction = make_record(device_bytes=20 * GIB).outcome.prediction
    of = prediction.memory, prediction.speed, prediction.method
    plain = prediction.intervals | prior_intervals(*of)
    wide = prior_intervals(*of, doubts=[Doubt.OLD_RELEASES])
    assert wide[STEP][1] > 1.1 * plain[STEP][1]
    found = widened(replace(prediction, intervals=plain), [Doubt.OLD_RELEASES])
    for name in (STEP, TOKENS):
        assert found.intervals[name] == pytest.approx(wide[name])


def test_allocated_memory_is_the_most_certain():
    device, reserved, allocated = MEMORY_ERRORS.ends(make_memory(20 * GIB))
    widths = [high - low for low, high in (allocated, reserved, device)]
    assert widths == sorted(widths)


@pytest.mark.parametrize(
    ("workload", "settings", "doubts"),
    [
        ("causal_lm", {}, set()),
        ("causal_lm", {"fused_loss": True}, {Doubt.KERNELS}),
        ("causal_lm", {"reference_pass": True}, {Doubt.UNCOMPARED}),
        ("causal_lm", {"padding": "packed"}, {Doubt.UNCOMPARED}),
        ("causal_lm", {"gpus_per_trial": 2}, {Doubt.UNCOMPARED}),
        ("contrastive", {}, {Doubt.UNCOMPARED}),
    ],
)
def test_trainings_that_no_published_run_has_are_doubted(workload, settings, doubts):
    assert doubts_of(workload, Configuration(settings)) == doubts


def test_a_program_says_what_is_not_known_of_it():
    plan = ProgramPlan("TRL", "gpt2", Configuration({}), 1, (), (), (), frozenset())
    assert plan.doubts == set()
    assert replace(plan, sequences=2).doubts == {Doubt.UNCOMPARED}
    assert replace(plan, notes=(PACKED,)).doubts == {Doubt.UNCOMPARED}
    assert replace(plan, at_most=("liger_kernel",)).doubts == {Doubt.KERNELS}
    other = f"{ASSUMES} trl 1.16 (you have 0.16)"
    assert replace(plan, notes=(other,)).doubts == {Doubt.RELEASES}
