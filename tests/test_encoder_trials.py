"""Workloads around an encoder as real trials, in processes of their own."""

from __future__ import annotations

import pytest
from encoder_samples import TINY_BERT, TINY_ROBERTA, configuration, opened
from test_workload_contrastive import TINY as CONTRASTIVE
from test_workload_multitask import TINY as MULTITASK

from tuner.core.errors import InputError
from tuner.core.records import Source, Status
from tuner.predict.training import get_workload
from tuner.space.gpus import get_gpu
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.device import RealEnvironment, open_session
from tuner.trial.isolated import IsolatedRunner

QUICK = MeasureOptions(device="cpu", budget_s=0.2, min_steps=2, warmup_steps=1, timeout_s=300)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("workload", "model", "tiny"),
    [
        ("contrastive", TINY_BERT, CONTRASTIVE),
        ("multitask", TINY_ROBERTA, {**MULTITASK, "phase": "joint"}),
    ],
    ids=["contrastive", "multitask"],
)
def test_a_trial_trains_for_real(workload, model, tiny, tmp_path):
    model.save_pretrained(tmp_path)
    values = configuration(workload, **tiny)
    with IsolatedRunner(TrialJob(workload, str(tmp_path), get_gpu("t4")), QUICK) as runner:
        outcome = runner.run(values)
    assert outcome.status is Status.OK, outcome.message
    measured = outcome.measurement
    assert measured is not None
    assert measured.source is Source.MEASURED
    assert measured.loss_finite
    _, session = opened(model, values)
    assert (measured.trainable_params, measured.total_params) == (
        session.trainable_params,
        session.total_params,
    )
    assert measured.speed.samples_per_s == pytest.approx(6 / measured.speed.step_s)


@pytest.mark.parametrize(
    ("changes", "checkpoint", "text"),
    [({}, "some/folder", "checkpoint"), ({"persistent_workers": True}, None, "no effect")],
)
def test_what_would_have_no_effect_is_refused(changes, checkpoint, text):
    environment = RealEnvironment("cpu", checkpoint=checkpoint)
    values = configuration("contrastive", **CONTRASTIVE, **changes)
    with pytest.raises(InputError, match=text):
        open_session(get_workload("contrastive"), TINY_BERT, values, environment)
