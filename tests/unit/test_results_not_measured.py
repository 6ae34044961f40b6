"""What a recommendation says of a faster configuration whose trial was killed."""

import dataclasses

import pytest
from device_fakes import measurement_of
from tune_fakes import GPU, FakeSpace, outcome_of, record_of

from tuner.core.kinds import LOST
from tuner.core.records import Outcome, Status
from tuner.searches.best import not_measured_text, recommend
from tuner.searches.facts import SpaceFacts

FITTING = [c for c in FakeSpace().configurations() if outcome_of(c).prediction.fits]
SLOWEST, *_, FASTEST = sorted(FITTING, key=lambda c: outcome_of(c).prediction.speed.samples_per_s)


def killed(status: Status, message: str):
    prediction = outcome_of(FASTEST).prediction
    record = record_of(FASTEST, Outcome(status, prediction=prediction, message=message))
    return dataclasses.replace(record, device="Testium 9")


@pytest.mark.parametrize(
    ("status", "message", "said"),
    [
        (Status.INTERRUPTED, f"{LOST}: the process was ended by SIGKILL", True),
        (Status.CRASHED, f"{LOST}: its node has died: w1", True),
        (Status.CRASHED, "RuntimeError: no kernel image", False),
        (Status.OOM, "CUDA out of memory", False),
    ],
)
def test_the_predicted_best_that_was_lost_is_named(status, message, said):
    ran = measurement_of(outcome_of(SLOWEST).prediction, device="Testium 9", factor=1)
    measured = record_of(SLOWEST, Outcome(Status.OK, measurement=ran))
    space = SpaceFacts("fake", knobs=tuple(FakeSpace().knobs))
    best = recommend([measured, killed(status, message)], space, GPU)
    assert best.configuration == SLOWEST
    text = not_measured_text(best)
    assert (message in text) is said
    assert best.to_dict()["undecided"].get("not_measured", "") == text
