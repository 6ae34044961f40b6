"""What is not tried because it cannot fit: the reason, the history, and what is kept of it."""

import dataclasses
import json

import pytest
from device_fakes import measured
from tune_fakes import GPU, FakeSpace, outcome_of, record_of

from tuner.core.records import Exhausted, MemoryBudget, Outcome, Status
from tuner.core.setup.schemas import MemoryOrder
from tuner.cost.calibrate import calibrations_from
from tuner.searches.candidates import Candidates
from tuner.searches.proposer import MOST_RISK, Proposer
from tuner.searches.request import write_pruned
from tuner.searches.store import ResultsFolder
from tuner.searches.strategies import Knowledge

SPACE = FakeSpace()
ALL = list(SPACE.configurations())
PREDICTED = [outcome_of(c).prediction for c in ALL]
FITS = {
    c.key
    for c, p in zip(ALL, PREDICTED, strict=True)
    if p.memory.device_bytes <= 0.9 * p.budget.limit_bytes
}


def make(sampler: str, order: MemoryOrder | None = None) -> Proposer:
    candidates = Candidates(ALL, tuple(SPACE.knobs))
    knowledge = Knowledge(PREDICTED, order or MemoryOrder())
    return Proposer(candidates, sampler=sampler, seed=0, trials=20, knowledge=knowledge)


def trial(configuration, factor: float, name: str):
    """Memory and time are `factor` times the predicted."""
    record = measured(record_of(configuration), device="T", factor=factor)
    return dataclasses.replace(record, trial_id=name)


def held_back(adapter: Proposer) -> dict[str, str]:
    """Reasons of the configurations that are held back now, by their key."""
    now = [entry for entry in adapter.pruned if entry.revived_by is None]
    return {entry.configuration.key: entry.reason for entry in now}


@pytest.mark.parametrize("sampler", ["tpe", "random", "guided"])
def test_before_the_first_trial_predictions_say_what_cannot_fit(sampler):
    adapter = make(sampler)
    pruned = {entry.configuration.key: entry for entry in adapter.pruned}
    assert pruned
    assert not pruned.keys() & FITS
    assert {entry.since for entry in pruned.values()} == {None}
    assert all("probability" in entry.reason for entry in pruned.values())
    assert held_back(adapter).keys() == pruned.keys()
    assert adapter.held_back == len(pruned)
    for _ in range(20):
        configuration = adapter.propose()
        assert configuration.key not in pruned
        adapter.tell(trial(configuration, 1.0, configuration.key))


def test_trials_that_need_less_than_predicted_revive_and_more_prune():
    adapter = make("random")
    before = held_back(adapter)
    # Three quarters of the predicted memory each time: what was a little too large will fit.
    for number, configuration in enumerate(ALL[:10]):
        adapter.tell(trial(configuration, 0.75, f"t{number}"))
    after = held_back(adapter)
    revived = [entry for entry in adapter.pruned if entry.revived_by is not None]
    assert revived
    assert {entry.configuration.key for entry in revived} <= before.keys() - after.keys()
    assert {entry.revived_by for entry in revived} <= {f"t{n}" for n in range(10)}

    adapter = make("random")
    for number, configuration in enumerate(ALL[:10]):
        adapter.tell(trial(configuration, 1.4, f"t{number}"))
    assert held_back(adapter).keys() > before.keys()


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.3])
def test_what_probably_fits_is_never_pruned(factor):
    adapter = make("tpe")
    records = []
    for number, configuration in enumerate(ALL[::7]):
        record = trial(configuration, factor, f"t{number}")
        adapter.tell(record)
        records.append(record)
        calibrations = calibrations_from(records)
        fitting = calibrations.probabilities_of_fitting(PREDICTED, "fake")
        pruned = held_back(adapter)
        for candidate, probability in zip(ALL, fitting, strict=True):
            if probability > 1 - MOST_RISK + 1e-9:
                assert candidate.key not in pruned


def test_a_known_oom_prunes_with_the_trial_that_ran_out_and_the_host_s_does_not():
    order = MemoryOrder({"micro_batch": None})
    small, large = (c for c in ALL[:200] if (
        c["precision"], c["lora_rank"], c["gradient_checkpointing"]) == ("nf4", 16, True)
        and c["micro_batch"] in (1, 2))  # fmt: skip
    adapter = make("random", order)
    outcome = Outcome(Status.OOM, requested_bytes=1, exhausted=Exhausted.HOST)
    adapter.tell(dataclasses.replace(record_of(small, outcome), device="T", trial_id="host"))
    assert large.key not in held_back(adapter)

    adapter = make("random", order)
    outcome = dataclasses.replace(outcome, exhausted=Exhausted.DEVICE)
    adapter.tell(dataclasses.replace(record_of(small, outcome), device="T", trial_id="gpu"))
    (entry,) = (e for e in adapter.pruned if e.configuration == large)
    assert (entry.since, entry.revived_by) == ("gpu", None)
    assert "micro_batch=1" in entry.reason
    adapter.tell(trial(large, 1.0, "fits"))  # told from elsewhere: it was wrong
    assert not any("micro_batch=1" in reason for reason in held_back(adapter).values())


def test_where_nothing_seems_to_fit_the_likeliest_is_tried_once():
    tight = [dataclasses.replace(p, budget=MemoryBudget(1)) for p in PREDICTED]
    adapter = Proposer(
        Candidates(ALL, tuple(SPACE.knobs)), sampler="random", seed=0, trials=9,
        knowledge=Knowledge(tight),
    )  # fmt: skip
    smallest = min(ALL, key=lambda c: outcome_of(c).prediction.memory.device_bytes)
    assert adapter.propose() == smallest
    out = Outcome(Status.OOM, requested_bytes=1, exhausted=Exhausted.DEVICE)
    adapter.tell(dataclasses.replace(record_of(smallest, out), device="T"))
    assert adapter.propose() is None


def test_the_file_has_a_line_for_each(tmp_path):
    folder = ResultsFolder(tmp_path, "fake", GPU.id)
    folder.path.mkdir(parents=True)
    adapter = make("tpe")
    write_pruned(folder, adapter.pruned)
    lines = [json.loads(line) for line in (folder.path / "pruned.jsonl").read_text().splitlines()]
    assert [line["configuration"] for line in lines] == [
        entry.configuration.to_dict() for entry in adapter.pruned
    ]
    assert lines[0].keys() == {"configuration", "reason", "since", "revived_by"}
