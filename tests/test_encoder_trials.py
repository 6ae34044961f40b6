"""Workloads around an encoder as real trials, in processes of their own."""

import pytest
from encoder_samples import TINY_BERT, configuration
from test_workload_contrastive import TINY as CONTRASTIVE

from tuner.core.errors import InputError
from tuner.predict.training import get_workload
from tuner.trial.device import RealEnvironment, open_session


@pytest.mark.parametrize(
    ("changes", "checkpoint", "text"),
    [({}, "some/folder", "checkpoint"), ({"persistent_workers": True}, None, "no effect")],
)
def test_what_would_have_no_effect_is_refused(changes, checkpoint, text):
    environment = RealEnvironment("cpu", checkpoint=checkpoint)
    values = configuration("contrastive", **CONTRASTIVE, **changes)
    with pytest.raises(InputError, match=text):
        open_session(get_workload("contrastive"), TINY_BERT, values, environment)
