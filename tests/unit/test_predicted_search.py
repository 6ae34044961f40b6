"""A predicted search traces what decides its front, and no more than that."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from cli_samples import write_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from search_fakes import prediction_of

from tuner.app.search.plan import make_plan
from tuner.app.search.predicted import keep_predictions, search_predicted
from tuner.app.target import load_targets
from tuner.core.errors import InputError
from tuner.core.records import Configuration, Outcome, Prediction
from tuner.core.units import GIB
from tuner.predict.predictor import RESERVED_TOLERANCE, Predicted
from tuner.searches.front import pareto_front
from tuner.searches.journal import read_journal
from tuner.searches.options import Mode, SearchOptions, without_effect
from tuner.searches.progress import StoppedBy


class Tracer:
    """Stands in for a `SpacePredictor` that knows what every trace comes to."""

    at_once = 2

    def __init__(self, truth: dict[str, Prediction]) -> None:
        self.truth = truth
        self.asked: list[str] = []

    def trace(self, configurations: Sequence[Configuration]) -> list[Predicted]:
        self.asked += [configuration.key for configuration in configurations]
        return [Predicted(each, self.truth[each.key]) for each in configurations]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("space")
    write_samples(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        target = load_targets("tiny.yaml", ["t4"], results=folder / "results")[0]
        yield make_plan(target, SearchOptions(mode=Mode.PREDICT, where=("lora_rank >= 4",)))


def worlds(plan, seed: int) -> tuple[list[Prediction], dict[str, Prediction]]:
    """What is compiled of each configuration, and what its trace comes to."""
    rng = random.Random(seed)
    compiled, truth = [], {}
    for configuration in plan.part.supported:
        size, speed = rng.uniform(4, 20) * GIB, rng.choice([1.0, 2.0, 3.0, rng.uniform(1, 4)])
        compiled.append(prediction_of(plan, round(size), speed))
        error = rng.uniform(-RESERVED_TOLERANCE, RESERVED_TOLERANCE) * 0.99
        truth[configuration.key] = prediction_of(plan, round(size * (1 + error)), speed)
    return compiled, truth


def search(plan, compiled, tracer, known=(), **how):
    records = []
    outcome = search_predicted(
        replace(plan, options=replace(plan.options, **how)), compiled, known, tracer,
        on_record=records.append, on_progress=lambda progress: None,
    )  # fmt: skip
    return outcome, records


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_front_is_that_of_tracing_everything(plan, seed):
    compiled, truth = worlds(plan, seed)
    tracer = Tracer(truth)
    outcome, records = search(plan, compiled, tracer)
    everything = [
        replace(record, outcome=Outcome.predicted(truth[record.configuration.key]))
        for record in outcome.records
    ]
    found = [record.configuration.key for record in pareto_front(outcome.records)]
    assert found == [record.configuration.key for record in pareto_front(everything)]
    assert set(found) <= set(tracer.asked)  # nobody's recommendation is a guess
    assert len(set(tracer.asked)) == len(tracer.asked) == len(records) == outcome.traced
    assert outcome.stopped_by is StoppedBy.EXHAUSTED


def test_most_of_a_space_needs_no_trace(plan):
    asked = []
    for seed in range(20):
        tracer = Tracer(worlds(plan, seed)[1])
        search(plan, worlds(plan, seed)[0], tracer)
        asked.append(len(tracer.asked) / len(plan.part.supported))
    assert sum(asked) / len(asked) < 0.5


def test_what_was_traced_before_is_not_traced_again(plan):
    compiled, truth = worlds(plan, 3)
    _, first = search(plan, compiled, Tracer(truth))
    again = Tracer(truth)
    outcome, second = search(plan, compiled, again, known=first)
    assert (again.asked, second) == ([], [])
    assert (outcome.reused, outcome.traced) == (len(first), 0)


def test_equal_numbers_are_traced_once(plan):
    """As where a knob changes nothing."""
    size = 8 * GIB
    compiled = [prediction_of(plan, size, 2.0) for _ in plan.part.supported]
    tracer = Tracer({c.key: prediction_of(plan, size + 1, 2.0) for c in plan.part.supported})
    outcome, records = search(plan, compiled, tracer)
    assert len(records) == 1
    sizes = {record.outcome.prediction.memory.device_bytes for record in outcome.records}
    assert sizes == {size + 1}


def test_traces_that_are_far_off_widen_what_is_allowed_for(plan):
    """One that seems to beat all others takes a fifth more than compiled."""
    sizes = [8.0, 8.9, *(12.0 for _ in plan.part.supported[2:])]
    compiled = [prediction_of(plan, round(size * GIB), 2.0) for size in sizes]
    keys = [configuration.key for configuration in plan.part.supported]
    truth = dict(zip(keys, compiled, strict=True))
    truth[keys[0]] = prediction_of(plan, round(9.6 * GIB), 2.0)
    tracer = Tracer(truth)
    outcome, _ = search(plan, compiled, tracer)
    assert [record.configuration.key for record in pareto_front(outcome.records)] == [keys[1]]
    assert keys[1] in tracer.asked


def test_limits_leave_the_rest_as_compiled(plan):
    compiled, truth = worlds(plan, 5)
    outcome, records = search(plan, compiled, Tracer(truth), trials=1)
    assert (len(records), outcome.stopped_by) == (1, StoppedBy.BUDGET)
    outcome, records = search(plan, compiled, Tracer(truth), time_limit_s=0.0)
    assert (len(records), outcome.stopped_by) == (0, StoppedBy.TIME_LIMIT)
    assert len(outcome.records) == len(plan.part.supported)


def test_predictions_of_other_conditions_stay(plan):
    compiled, truth = worlds(plan, 7)
    outcome, _ = search(plan, compiled, Tracer(truth))
    folder = plan.target.folder
    keep_predictions(plan, outcome.records[:10])
    keep_predictions(plan, outcome.records[5:])
    kept = read_journal(folder.predicted).records
    assert {r.configuration.key for r in kept} == {r.configuration.key for r in outcome.records}
    assert len(kept) == len(outcome.records)
    fresh = replace(plan, options=replace(plan.options, fresh=True))
    keep_predictions(fresh, outcome.records[:10])
    assert len(folder.read_all()) == 10
    folder.predicted.write_bytes(folder.predicted.read_bytes()[:-20])
    with pytest.raises(InputError, match="damaged"):
        folder.read_all()


def test_options_of_trials_are_named():
    assert without_effect(SearchOptions(trials=3, seed=2)) == ""
    given_ = SearchOptions(searcher="tpe", gpu_hours=2.0, dashboard=True)
    assert without_effect(given_) == "--gpu-hours, --dashboard, --searcher"
