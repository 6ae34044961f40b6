"""The searcher without Ray: a finite set, no duplicates, and out of memory as a constraint."""

import random

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from tune_fakes import FakeSpace, outcome_of, record_of

from tuner.core.errors import InputError
from tuner.core.records import Configuration, Outcome, Status, TrialRecord
from tuner.searches.candidates import Candidates
from tuner.searches.options import SEARCHERS, checked_searcher
from tuner.searches.proposer import Proposer
from tuner.searches.strategies import Knowledge, open_mirror, score

optuna.logging.set_verbosity(optuna.logging.ERROR)
SPACE = FakeSpace()
ALL = list(SPACE.configurations())
# The others propose everything in the end, and cost milliseconds a proposal.
THOROUGH = [*(name for name in SEARCHERS if name != "guided"), "optuna.samplers:NSGAIISampler"]


def make(sampler="tpe", *, seed=0, trials=48, configurations=ALL, **options) -> Proposer:
    candidates = Candidates(configurations, tuple(SPACE.knobs))
    if sampler == "guided":
        predictions = [outcome_of(c).prediction for c in configurations]
        options["knowledge"] = Knowledge(predictions)
    return Proposer(candidates, sampler=sampler, seed=seed, trials=trials, **options)


def run(adapter: Proposer, trials: int) -> list[Configuration]:
    done = []
    while len(done) < trials and (configuration := adapter.propose()) is not None:
        adapter.tell(record_of(configuration))
        done.append(configuration)
    return done


@pytest.mark.parametrize("sampler", THOROUGH)
def test_every_candidate_is_proposed_once_and_then_none(sampler):
    done = run(make(sampler), trials=len(ALL) + 10)
    assert {c.key for c in done} == {c.key for c in ALL}
    assert len(done) == len(ALL)


class LastFirst(optuna.samplers.BaseSampler):
    """A strategy of one's own: the last choice of each knob, and chance for the rest."""

    def __init__(self, seed: int) -> None:
        self._chance = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(self, study, trial):
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, name, distribution):
        if isinstance(distribution, optuna.distributions.CategoricalDistribution):
            return distribution.choices[-1]
        return self._chance.sample_independent(study, trial, name, distribution)


@pytest.mark.parametrize("name", ["test_sampler_adapter:LastFirst", "optuna.samplers:QMCSampler"])
def test_a_class_of_samplers_proposes_every_candidate(name):
    done = run(make(name), trials=len(ALL) + 10)
    assert {c.key for c in done} == {c.key for c in ALL}


@pytest.mark.parametrize(
    ("name", "said"),
    [("optuna.samplers:No", "cannot be found"), ("no.such:Sampler", "cannot be found"),
     ("random:Random", "no sampler of Optuna's"), ("tpee", "tpe")],
)  # fmt: skip
def test_what_is_no_sampler_is_said_before_a_trial(name, said):
    def begin() -> None:
        checked_searcher(name)
        make(name)

    with pytest.raises(InputError, match=said):
        begin()


@pytest.mark.proof
@pytest.mark.parametrize("sampler", ["guided", *THOROUGH])
def test_seed_decides_the_proposals(sampler):
    first, again = (run(make(sampler, seed=3), 16) for _ in range(2))
    assert first == again
    other = run(make(sampler, seed=4), 16)
    # What is decided by predictions needs no chance.
    assert (first == other) is (sampler in ("grid", "guided"))


@settings(max_examples=25)
@given(
    keep=st.sets(st.integers(0, len(ALL) - 1), min_size=1, max_size=30),
    seed=st.integers(0, 2**32 - 1),
    sampler=st.sampled_from(THOROUGH),
)
def test_proposals_of_any_subset_are_valid_and_distinct(keep, seed, sampler):
    subset = [ALL[i] for i in sorted(keep)]
    adapter = make(sampler, seed=seed, configurations=subset)
    # None of them has ended yet: parallel workers must not get the same one either.
    proposed = [adapter.propose() for _ in subset]
    assert {c.key for c in proposed} == {c.key for c in subset}
    assert adapter.propose() is None


def test_initial_comes_first_without_duplicates_or_strangers():
    stranger = ALL[0].replace(micro_batch=999)
    adapter = make(initial=[ALL[5], stranger, ALL[5], ALL[9]])
    assert run(adapter, 2) == [ALL[5], ALL[9]]
    assert adapter.propose() not in (None, ALL[5], ALL[9], stranger)


def test_records_of_a_searcher_that_has_no_name_any_more_are_taught():
    adapter = make("tpe")
    written = {**record_of(ALL[0]).to_dict(), "searcher": "nsga2"}
    adapter.tell(TrialRecord.from_dict(written))
    assert ALL[0] not in run(adapter, len(ALL))


def test_nearest_candidate_keeps_what_was_valid():
    candidates = Candidates(ALL, tuple(SPACE.knobs))
    proposal = {
        "micro_batch": 13,
        "lora_rank": 60,
        "precision": "nf4",
        "gradient_checkpointing": False,
    }
    found = candidates.nearest_untried(proposal, random.Random(0))
    # 13 is nearer to 16 than to 8 on the logarithmic scale of a micro-batch.
    assert (found["micro_batch"], found["lora_rank"]) == (16, 64)
    assert (found["precision"], found["gradient_checkpointing"]) == ("nf4", False)


def test_configurations_that_differ_in_no_knob_are_refused():
    twin = ALL[0].replace(grad_accum=7)
    with pytest.raises(ValueError, match="differ in no knob"):
        Candidates([ALL[0], twin], tuple(SPACE.knobs))


def test_out_of_memory_with_numbers_violates_by_the_bytes_over_the_limit():
    too_big = next(c for c in ALL if outcome_of(c).status is Status.OOM)
    record = record_of(too_big)
    prediction = record.outcome.prediction
    scored = score(record)
    assert scored.constraints == {
        "device_bytes_over_limit": prediction.memory.device_bytes
        + prediction.budget.margin_bytes
        - record.gpu_memory_bytes,
        "did_not_train": -1.0,
    }
    assert scored.values[0] == prediction.speed.samples_per_s


def test_out_of_memory_without_numbers_violates_by_the_request():
    asked = score(record_of(ALL[0], Outcome(Status.OOM, requested_bytes=5000)))
    assert asked.constraints["device_bytes_over_limit"] == 5000.0
    unknown = score(record_of(ALL[0], Outcome(Status.OOM)))
    assert unknown.constraints["device_bytes_over_limit"] == 1.0


def test_time_out_is_a_violation_and_a_crash_teaches_nothing():
    timed_out = score(record_of(ALL[0], Outcome(Status.TIMEOUT)))
    assert timed_out.constraints["did_not_train"] > 0
    assert score(record_of(ALL[0], Outcome(Status.CRASHED))) is None


def test_a_sampler_that_wants_the_same_constraints_of_every_trial_goes_on_after_a_time_out():
    adapter = make("optuna.samplers:GPSampler")
    for number in range(13):  # it draws at random before its eleventh
        configuration = adapter.propose()
        outcome = Outcome(Status.TIMEOUT) if number == 3 else outcome_of(configuration)
        adapter.tell(record_of(configuration, outcome))


def test_tpe_learns_to_stay_inside_memory():
    """Taught OOM as a constraint, it wastes fewer trials on it than random search does."""
    wide = FakeSpace(
        values={
            **SPACE.values,
            "micro_batch": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
            "lora_rank": tuple(range(16, 272, 16)),
        }
    )
    configurations = list(wide.configurations())

    def ooms_once_it_knows(sampler, seed):
        done = run(make(sampler, seed=seed, configurations=configurations), 80)
        return sum(outcome_of(c).status is Status.OOM for c in done[40:])

    tpe = sum(ooms_once_it_knows("tpe", seed) for seed in range(3))
    uniform = sum(ooms_once_it_knows("random", seed) for seed in range(3))
    assert tpe < 0.75 * uniform


def test_mirror_holds_what_ended_as_a_study_that_optuna_reads(tmp_path):
    path = tmp_path / "study.log"
    for seed in range(2):  # the study of the second search replaces that of the first
        adapter = make(seed=seed, mirror=open_mirror(path, "fake-a6000"))
        adapter.tell(record_of(ALL[0], Outcome(Status.CRASHED)))
        done = run(adapter, 12)
    study = optuna.load_study(
        study_name="fake-a6000", storage=JournalStorage(JournalFileBackend(str(path)))
    )
    finished = [t for t in study.trials if t.state is TrialState.COMPLETE]
    assert [t.params["micro_batch"] for t in finished] == [c["micro_batch"] for c in done]
    assert {t.user_attrs["status"] for t in finished} <= {"ok", "oom"}
    assert all(t.constraints for t in finished)
    assert [t.user_attrs["status"] for t in study.trials][:1] == ["crashed"]
    assert study.best_trials


def test_guided_without_predictions_can_be_told_but_not_asked():
    candidates = Candidates(ALL, tuple(SPACE.knobs))
    adapter = Proposer(candidates, sampler="guided", seed=0, trials=5, initial=[ALL[1]])
    assert run(adapter, 1) == [ALL[1]]
    with pytest.raises(ValueError, match="prediction of each"):
        adapter.propose()


@pytest.mark.parametrize("sampler", [*THOROUGH, "guided"])
@pytest.mark.parametrize("broken_off_after", [1, 13])
def test_who_is_told_what_ended_goes_on_as_if_never_broken_off(sampler, broken_off_after):
    initial = [ALL[40], ALL[3]]
    undisturbed = run(make(sampler, seed=5, initial=initial), 18)
    again = make(sampler, seed=5, initial=initial)
    for configuration in undisturbed[:broken_off_after]:
        again.tell(record_of(configuration))
    assert run(again, 18 - broken_off_after) == undisturbed[broken_off_after:]
