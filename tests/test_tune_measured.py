"""Measured trials in a search: what is kept of them, what is known, and who runs them."""

import dataclasses
import pickle

import pytest
from device_fakes import A6000, H200, measured, pretend
from tune_fakes import GPU, FakeSpace, MeasuredFakes, record_of, request_of

from tuner.core.errors import UnavailableError
from tuner.core.records import Outcome, Status, TrialRecord
from tuner.searches.request import SearchRequest, TrialDevice
from tuner.space.gpus import get_gpu
from tuner.trial.factories import VerifiedFactory

BENCH = TrialDevice("Testium 9")
SPACE = FakeSpace()
CONFIGURATIONS = list(SPACE.configurations())


def request(**changes) -> SearchRequest:
    values = {"space": SPACE, "gpu": GPU, "runner_factory": MeasuredFakes(),
              "searcher": "tpe", "versions": {"tuner": "1"}, "trial_device": BENCH,
              "margin_bytes": 7}  # fmt: skip
    return request_of(**{**values, **changes})


class TestKnown:
    def records(self) -> list[TrialRecord]:
        return [record_of(c) for c in CONFIGURATIONS[:3]]

    def test_simulated_trials_are_not_known_to_who_measures(self):
        asked = request()
        assert not any(map(asked.is_known, self.records()))
        assert all(map(dataclasses.replace(asked, trial_device=None).is_known, self.records()))

    def test_measured_trials_are_known_on_the_same_bench_only(self):
        own = [measured(r, device="Testium 9") for r in self.records()]
        assert all(map(request().is_known, own))
        others = (None, TrialDevice("Testium 10"), TrialDevice("Testium 9", memory_limit_bytes=5))
        for trial_device in others:
            assert not any(map(request(trial_device=trial_device).is_known, own))

    def test_out_of_memory_on_the_device_is_known_too(self):
        outcome = Outcome(Status.OOM, phase="forward")
        one = dataclasses.replace(self.records()[0], outcome=outcome, device="Testium 9")
        assert request().is_known(one)
        assert not request(trial_device=None).is_known(one)


class TestVerified:
    def factory(self) -> VerifiedFactory:
        gpu = get_gpu("a6000")
        made = VerifiedFactory(MeasuredFakes(), gpu.device_names, (gpu.memory_bytes,))
        return pickle.loads(pickle.dumps(made))

    def test_right_gpu_runs_trials(self, monkeypatch):
        pretend(monkeypatch, A6000)
        assert self.factory()() == MeasuredFakes()

    @pytest.mark.parametrize(
        ("device", "message"),
        [
            (None, "no NVIDIA driver, where trials need NVIDIA RTX A6000"),
            (H200, "has NVIDIA H200 with 139"),
            (dataclasses.replace(A6000, total_bytes=A6000.total_bytes // 2), "with 23.7"),
        ],
    )
    def test_another_gpu_ends_the_search_with_what_is_there(self, monkeypatch, device, message):
        pretend(monkeypatch, *([device] if device else []))
        with pytest.raises(UnavailableError, match=message):
            self.factory()()
