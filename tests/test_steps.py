"""Which steps a trial runs, and what follows for whole ones from the parts of short ones."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch
from estimate_samples import configuration, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from measure_samples import job, knobs, model_folder, quick

from tuner.core.records import Measurement, Phase
from tuner.cost.memory import Course, peak_memory
from tuner.predict.tracing.trace import trace
from tuner.predict.training import Counts, get_workload
from tuner.space import DataFacts, TokenLengths
from tuner.trial import stop_rule
from tuner.trial.base import GiveUp, Instructions, MeasureOptions
from tuner.trial.device import RealEnvironment
from tuner.trial.measure import measure
from tuner.trial.steps import Stepper, _StepParts, time_steps, warm_up
from tuner.trial.stop_rule import STEP_SCATTER, StepPlan, StopRule

FIRST_S, LATER_S, UPDATE_S = 0.75, 1.0, 0.5
MICRO_STEPS = 16
WHOLE_S = FIRST_S + 15 * LATER_S + UPDATE_S
LONG = MeasureOptions(device="cpu")


class ScriptedSession:
    """A `TrainingSession` whose parts take exactly the times above, on the clock of the test."""

    def __init__(self, environment, clock, *, pace=1.0, announces=True) -> None:
        self._environment, self._clock, self._pace = environment, clock, pace
        self._announces = announces
        self.model = self.optimizer = None
        self.trainable_params = self.total_params = 1
        self.counts = Counts()
        self.loss = None
        self.ran: list[int] = []

    def _enter(self, phase: Phase, micro_step: int) -> None:
        if self._announces:
            self._environment.enter(phase, micro_step)

    def micro_step(self, micro_step: int) -> None:
        self._enter(Phase.FORWARD, micro_step)
        self._clock.now += self._pace * (LATER_S if micro_step else FIRST_S)
        self._enter(Phase.BACKWARD, micro_step)
        counts = self.counts
        counts.samples += 2
        counts.tokens += 100
        counts.padded_tokens += 120
        counts.model_flops += 1e9
        counts.data_wait_s += 0.1 * self._pace
        self.loss = torch.tensor(1.0)

    def optimizer_step(self, micro_steps: int) -> None:
        self.ran.append(micro_steps)
        for micro_step in range(micro_steps):
            self.micro_step(micro_step)
        self._enter(Phase.OPTIMIZER, micro_steps)
        self._clock.now += self._pace * UPDATE_S

    def close(self) -> None:
        """Nothing runs beside this session."""


@pytest.fixture
def clock(monkeypatch):
    found = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: found.now)
    return found


def run(clock, options=LONG, *, micro_steps=MICRO_STEPS, device_bytes=100, **session):
    """The session after all its steps, what the timed ones came to, and the paces reported."""
    environment = RealEnvironment("cpu")
    environment.enter(Phase.LOAD, 0)
    scripted = ScriptedSession(environment, clock, **session)
    plan, paces = StepPlan(options, micro_steps), []
    stepper = Stepper(scripted, environment, micro_steps)
    rule = StopRule(options, lambda: device_bytes)
    warm = warm_up(stepper, plan, rule, on_pace=paces.append)
    timed = time_steps(stepper, plan, rule, warm.timed_micro_steps)
    return SimpleNamespace(session=scripted, timed=timed, paces=paces, warm=warm, rule=rule)


def test_a_long_step_is_put_together_from_its_parts(clock):
    found = run(clock)
    assert found.session.ran == [2, 2, 2, 2, 2]  # two to warm up, three that are timed
    timed = found.timed
    assert timed.step_s == pytest.approx(WHOLE_S)
    assert timed.interval.half_width_s == pytest.approx(0)
    assert timed.stopped_by == "interval"
    assert (timed.interval.count, timed.micro_steps, timed.micro_steps_per_step) == (3, 6, 16)
    assert (timed.samples, timed.tokens) == pytest.approx((32, 1600))
    assert timed.padded_tokens == pytest.approx(1920)
    assert timed.flops_per_s == pytest.approx(16e9 / WHOLE_S)
    assert timed.data_wait_s == pytest.approx(1.6)
    assert "steps of 16 micro-steps are put together from 6 micro-steps and 3 updates" in timed.note
    assert found.warm.first_step_s == pytest.approx(FIRST_S + LATER_S + UPDATE_S)


@pytest.mark.parametrize(
    ("options", "session", "ran"),
    [
        # A hundredth of the time: whole steps do not cost much, and their number is the budget's.
        (LONG, {"pace": 0.01}, [2, 2, 16, 16, 16]),
        (dataclasses.replace(LONG, whole_steps=True), {}, [2, 16, 16, 16, 16]),
        # The budget holds three whole steps.
        (dataclasses.replace(LONG, budget_s=60.0), {}, [2, 2, 16, 16, 16]),
        (dataclasses.replace(LONG, budget_s=48.0), {}, [2, 2, 2, 2, 2]),
        # Lengths differ: the second micro-step does not speak for all others.
        (dataclasses.replace(LONG, lengths="data"), {}, [2, 2, 8, 8, 8]),
        # Nobody knows what its times are of.
        (LONG, {"announces": False}, [2, 16, 16, 16, 16]),
    ],
)
def test_which_steps_are_run(clock, options, session, ran):
    found = run(clock, options, **session)
    assert found.session.ran == ran
    assert found.timed.step_s == pytest.approx(WHOLE_S * session.get("pace", 1.0))
    assert found.timed.is_composed == (ran[-1] < MICRO_STEPS)
    assert (found.timed.note is None) == (ran[-1] == MICRO_STEPS)
    assert found.timed.samples == pytest.approx(32)


def test_pace_is_reported_after_the_first_step_and_holds_all_of_them(clock):
    found = run(clock, dataclasses.replace(LONG, whole_steps=True))
    assert len(found.paces) == 1
    assert found.paces[0] == pytest.approx(clock.now, rel=0.02)


@pytest.mark.parametrize(("factor", "ended"), [(1.01, True), (0.99, False)])
def test_the_rate_of_a_whole_step_decides_whether_a_trial_is_dominated(clock, factor, ended):
    """Not that of a short one: its update has fewer micro-steps to share."""
    bar = STEP_SCATTER * 32 / WHOLE_S * factor
    give_up = GiveUp(front=((100, bar),))
    found = run(clock, dataclasses.replace(LONG, instructions=Instructions(give_up)))
    # Three steps of exactly the same time are dominated as soon as their interval is known.
    assert found.timed.interval.count == (1 if ended else 2)
    assert found.timed.stopped_by == "dominated"


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8), st.floats(0, 10), st.integers(0, 100))
def test_parts_of_a_whole_step_are_its_time(micro_s, update_s, more):
    parts = _StepParts(tuple(micro_s), update_s)
    assert parts.whole_s(len(micro_s)) == pytest.approx(sum(micro_s) + update_s)
    longer = parts.whole_s(len(micro_s) + more) - parts.whole_s(len(micro_s))
    later = micro_s[1:] or micro_s
    assert longer == pytest.approx(more * sum(later) / len(later), rel=1e-6, abs=1e-6)


class SomeSteps:
    """`causal_lm`, whose two optimizer steps in a trace are three of so many micro-steps."""

    name = "causal_lm"

    def __init__(self, micro_steps: int) -> None:
        self._micro_steps = micro_steps

    def open(self, model_config, values, environment):
        session = get_workload("causal_lm").open(model_config, values, environment)
        step, calls = session.optimizer_step, []

        def steps(micro_steps: int) -> None:
            for _ in range(1 if not calls else 2):
                step(self._micro_steps)
            calls.append(micro_steps)

        session.optimizer_step = steps
        return session


@pytest.mark.proof
@pytest.mark.parametrize(
    "changes",
    [
        {"lora_rank": 0, "optimizer": "adamw_torch_fused"},
        {"gradient_checkpointing": True, "precision": "nf4"},
        {"training_loop": "trainer", "mixed_precision": "bf16", "precision": "fp32"},
    ],
    ids=str,
)
def test_two_micro_steps_have_the_memory_of_eight(changes):
    """As the allocator's rules have it, allocated and reserved, in each phase."""
    found = []
    for micro_steps in (2, 8):
        values = configuration(grad_accum=8, **changes)
        traced = trace(SomeSteps(micro_steps), tiny_config(), values, compute_capability=(8, 6))
        memory = peak_memory(Course.of(traced.timeline), context_bytes=0)
        found.append((memory.peak_allocated_bytes, memory.peak_reserved_bytes,
                      dict(memory.phase_peak_bytes)))  # fmt: skip
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


LENGTHS = TokenLengths(10.0, 20, ((0.0, 0.0), (20.0, 1.0)))


@pytest.mark.parametrize(
    ("lengths", "data", "micro_steps"),
    [("full", None, 2), ("data", DataFacts(1000, token_lengths=LENGTHS, padding="longest"), 8)],
)
def test_a_real_trial_of_long_steps_says_how_it_was_timed(
    model, monkeypatch, lengths, data, micro_steps
):
    monkeypatch.setattr(stop_rule, "LONG_STEP_S", 0.0)
    options = quick(lengths=lengths)
    found = measure(job(model, data=data), knobs(grad_accum=16), options, lambda facts: None)
    assert found.timed_micro_steps == found.steps * micro_steps
    assert any("put together" in note for note in found.notes)
    speed = found.speed
    assert speed.it_per_s == pytest.approx(16 / speed.step_s)
    assert speed.samples_per_s == pytest.approx(32 / speed.step_s)
    low, high = found.samples_per_s_interval or (0, 1e9)
    assert low < speed.samples_per_s < high
    per_sample = found.padded_tokens_per_s / speed.samples_per_s
    assert per_sample == pytest.approx(32) if lengths == "full" else per_sample <= 20
    assert 0 <= found.data_wait_fraction < 1
    assert Measurement.from_dict(found.to_dict()) == found
