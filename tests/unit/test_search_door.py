"""The door of the search benchmark for worlds of one's own."""

from __future__ import annotations

import numpy as np
import pytest
from tune_fakes import GPU, FakeSpace, outcome_of

from benchmarks.search import play
from benchmarks.search.baselines import optuna_searcher, predicted_front
from benchmarks.search.tables import Table, arrays_of
from benchmarks.search.tasks import SEARCHERS

ALL = tuple(FakeSpace().configurations())
ARRAYS = arrays_of([outcome_of(c).prediction for c in ALL])
TABLE = Table(
    "fake", ALL, tuple(FakeSpace().knobs), None,
    {k: v for k, v in ARRAYS.items() if np.ndim(v)}, GPU.memory_bytes, GPU.memory_bytes // 50,
)  # fmt: skip


def as_told(configuration) -> tuple[float, float, str]:
    prediction = outcome_of(configuration).prediction
    return prediction.speed.samples_per_s, prediction.memory.device_bytes, "ok"


def test_a_function_is_a_world():
    found = play(as_told, TABLE, seed=0, trials=20)
    assert found.regret[-1] < 0.03
    assert found.trials_to(0.99) <= 12
    assert sum(found.oom) <= 1


def test_trials_may_fail_and_run_out_of_memory():
    def world(configuration):
        speed, size, _ = as_told(configuration)
        ending = "failed" if configuration["precision"] == "bf16" else "ok"
        return speed, size, "oom" if configuration["lora_rank"] == 128 else ending

    found = play(world, TABLE, trials=20)
    assert any(found.failed) or any(found.oom)
    assert found.regret[-1] < 0.1


@pytest.mark.parametrize("answer", [(1.0, 1e9, "fine"), (0.0, 1e9, "ok"), (1.0, -1.0, "ok")])
def test_an_answer_that_is_no_truth_is_refused(answer):
    with pytest.raises(ValueError, match=r"samples/s and bytes above 0, and one of ok, oom"):
        play(lambda configuration: answer, TABLE)


def test_a_world_in_which_nothing_fits_is_refused():
    with pytest.raises(ValueError, match="no configuration of fake fits"):
        play(lambda configuration: (1.0, 1e9, "oom"), TABLE)


def told_nf4_fails(configuration) -> tuple[float, float, str]:
    speed, size, _ = as_told(configuration)
    return speed, size, "failed" if configuration["precision"] == "nf4" else "ok"


def test_botorch_searches_past_failures_and_memory():
    pytest.importorskip("botorch")
    found = play(told_nf4_fails, TABLE, trials=10, make=lambda t: SEARCHERS["botorch"](t, 0, 10))
    assert any(found.failed)
    assert not all(found.failed[-4:])
    assert found.regret[-1] < 0.1


def test_an_optuna_sampler_begins_with_the_predicted_front():
    front = predicted_front(TABLE)
    searcher = optuna_searcher("tpe", TABLE, seed=0, trials=10, front=True)
    asked = [searcher.ask() for _ in front]
    assert [each.index for each in asked if each] == front.tolist()
    size, speed = ARRAYS["device_bytes"][front], ARRAYS["samples_per_s"][front]
    assert (np.diff(speed) < 0).all()
    assert (np.diff(size) < 0).all()
