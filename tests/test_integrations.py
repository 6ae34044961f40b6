"""Callbacks for existing training code: what they tell, when they stop it, and when they do not."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from started import run_python
from transformers import TrainerControl, TrainerState

from tuner.integrations import Reporter, in_trial, report_step, reporting
from tuner.integrations import lightning as for_lightning
from tuner.integrations.transformers import TunerCallback
from tuner.trial.base import MeasureOptions
from tuner.trial.command import trial_facts

TRIAL = json.dumps(trial_facts(MeasureOptions(budget_s=100.0)))


@pytest.fixture
def trial(monkeypatch):
    monkeypatch.setenv("TUNER_TRIAL", TRIAL)
    monkeypatch.delenv("RANK", raising=False)
    clock = SimpleNamespace(now=0.0)

    def tick() -> float:
        clock.now += 0.5
        return clock.now

    monkeypatch.setattr(reporting.time, "monotonic", tick)
    reporting._process_reporter.cache_clear()
    yield
    reporting._process_reporter.cache_clear()


def told(capfd) -> list[dict]:
    lines = capfd.readouterr().out.splitlines()
    assert all(line.startswith("tuner: ") for line in lines)
    return [json.loads(line.removeprefix("tuner: ")) for line in lines]


def test_nothing_is_told_outside_a_trial(monkeypatch, capfd):
    monkeypatch.delenv("TUNER_TRIAL", raising=False)
    reporting._process_reporter.cache_clear()
    assert not in_trial()
    assert not any(report_step(8) for _ in range(50))
    Reporter().parameters(torch.nn.Linear(2, 2))
    assert told(capfd) == []


def test_steps_are_told_until_there_are_enough(trial, capfd):
    # Two steps of warm-up, then three that take the same time: their mean is known.
    assert [report_step(8, tokens=64) for _ in range(5)] == [False] * 4 + [True]
    lines = told(capfd)
    assert [line["samples"] for line in lines] == [8] * 5
    assert [line["time_s"] for line in lines] == [0.5, 1.0, 1.5, 2.0, 2.5]


def test_only_the_first_process_tells(trial, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    assert not report_step(8)
    assert told(capfd) == []


class TestTransformers:
    ARGUMENTS = SimpleNamespace(train_batch_size=2, gradient_accumulation_steps=3, world_size=2)

    def step(self, callback, state, control):
        return callback.on_step_end(self.ARGUMENTS, state, control, model=None)

    def test_tells_samples_tokens_and_parameters_and_stops(self, trial, capfd):
        callback, state, control = TunerCallback(), TrainerState(), TrainerControl()
        state.is_world_process_zero = True
        model = torch.nn.Linear(3, 1)
        model.bias.requires_grad_(False)
        callback.on_train_begin(self.ARGUMENTS, state, control, model=model)
        for step in range(5):
            assert not control.should_training_stop
            control.should_save = control.should_evaluate = True
            state.num_input_tokens_seen = 10 * (step + 1)
            self.step(callback, state, control)
            assert not control.should_save
            assert not control.should_evaluate
        assert control.should_training_stop
        first, *steps = told(capfd)
        assert first == {"trainable_params": 3, "total_params": 4}
        assert {(line["samples"], line["tokens"]) for line in steps} == {(12, 10)}

    def test_leaves_training_alone_outside_a_trial(self, monkeypatch, capfd):
        monkeypatch.delenv("TUNER_TRIAL", raising=False)
        callback, state, control = TunerCallback(), TrainerState(), TrainerControl()
        control.should_save = True
        for _ in range(20):
            self.step(callback, state, control)
        assert control.should_save
        assert not control.should_training_stop
        assert told(capfd) == []


class FakeCallback:
    """Of the signature of lightning.pytorch.callbacks.Callback (2.6)."""

    def on_train_start(self, trainer, pl_module) -> None: ...

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None: ...


@pytest.fixture
def lightning_callback(monkeypatch):
    fake = SimpleNamespace(Callback=FakeCallback)
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(pytorch=fake))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", fake)
    for_lightning._callback_class.cache_clear()
    yield for_lightning.TunerCallback
    for_lightning._callback_class.cache_clear()


@pytest.mark.parametrize(
    ("batch", "given", "samples"),
    [
        (torch.zeros(4, 2), None, 4),
        ([torch.zeros(3, 2), torch.zeros(3)], None, 3),
        ({"ids": torch.zeros(5, 2), "name": "x"}, None, 5),
        (("text", {"ids": [torch.zeros(6, 2)]}), None, 6),
        (object(), 7, 7),
        (torch.tensor(1.0), None, 0),
    ],
)
def test_tells_each_optimizer_step(trial, capfd, lightning_callback, batch, given, samples):
    callback = lightning_callback(given)
    assert isinstance(callback, FakeCallback)
    trainer = SimpleNamespace(global_step=0, is_global_zero=True, world_size=2, should_stop=False)
    callback.on_train_start(trainer, torch.nn.Linear(3, 1))
    for index in range(10):  # an optimizer step in every second batch
        assert not trainer.should_stop
        trainer.global_step = (index + 1) // 2
        callback.on_train_batch_end(trainer, None, None, batch, index)
    assert trainer.should_stop
    parameters, *steps = told(capfd)
    assert parameters == {"trainable_params": 4, "total_params": 4}
    assert [line["samples"] for line in steps] == [samples * 2 * 2] * 5


def test_neither_library_is_needed():
    code = """
import sys
sys.modules["transformers"] = sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
import tuner.integrations.transformers, tuner.integrations.lightning
from tuner.integrations.transformers import TunerCallback as A
from tuner.integrations.lightning import TunerCallback as B
print(A().__class__.__name__, B().__class__.__name__, "torch" in sys.modules)
"""
    done = run_python("-c", code)
    assert done.stdout.split() == ["TunerCallback", "TunerCallback", "False"], done.stderr
