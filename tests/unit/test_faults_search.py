"""Clocks that jump, and out-of-memory trials without an end: the search ends as it should."""

import dataclasses
import itertools
import random
import time
import warnings
from datetime import UTC, datetime, timedelta

import pytest
from results_samples import GPU as SAMPLE_GPU
from results_samples import SPACE as SAMPLE_SPACE
from results_samples import make_record, write_all
from tune_fakes import GPU, FakeFactory, FakeSpace, drive, outcome_of, request_of, state_of

from tuner.core.records import Exhausted, MemoryBudget, Outcome, Status
from tuner.core.units import GIB
from tuner.report.terminal.progress import progress_line
from tuner.searches.journal import JournalWriter, read_journal
from tuner.searches.request import SearchRequest, StoppedBy
from tuner.searches.state import SearchState
from tuner.searches.store import ResultsFolder

COUNT = 1000
WIDE = FakeSpace(
    name="wide",
    values={
        "micro_batch": tuple(range(1, 9)),
        "lora_rank": tuple(range(1, 64)),
        "precision": ("nf4",),
        "gradient_checkpointing": (True, False),
        "attention": ("sdpa", "eager"),
    },
)
LARGER = 2 * GPU.memory_bytes


def request(**changes) -> SearchRequest:
    known = {
        "space": WIDE,
        "gpu": GPU,
        "runner_factory": FakeFactory(),
        "searcher": "random",
        "trials": COUNT,
        "seed": 1,
        "versions": {"tuner": "1"},
        "run_id": "r",
    }
    return request_of(**{**known, **changes})


def out_of_memory() -> Outcome:
    return Outcome(
        Status.OOM, phase="backward", requested_bytes=GIB, message="CUDA out of memory",
        exhausted=Exhausted.DEVICE, duration_s=1.0,
    )  # fmt: skip


def driven(asked: SearchRequest, outcome) -> tuple[SearchState, list]:
    """A search without Ray that has ended, and its progress."""
    records, moments = [], []
    state = state_of(asked, on_record=records.append, on_progress=moments.append)
    drive(state, lambda configuration, _: outcome(configuration))
    assert state.stopped_by is not None
    assert records == state.records
    return state, moments


class TestOutOfMemoryWithoutEnd:
    """Where nothing is predicted, as of code of the user's own, only trials tell."""

    @pytest.mark.parametrize("searcher", ["random", "tpe"])
    def test_each_is_an_outcome_and_the_search_ends(self, searcher):
        count = COUNT if searcher == "random" else 60  # a sampler that learns takes longer
        state, moments = driven(request(searcher=searcher, trials=count), lambda c: out_of_memory())
        assert state.stopped_by in (StoppedBy.BUDGET, StoppedBy.NOTHING_LEFT)
        assert {record.outcome.status for record in state.records} == {Status.OOM}
        keys = [record.configuration.key for record in state.records]
        assert len(set(keys)) == len(keys) == len(state.records)
        assert moments[-1].oom == moments[-1].done == len(keys)
        assert len(progress_line(moments[-1])) <= 80
        assert "none fits yet" in progress_line(moments[-1])

    def test_what_is_predicted_is_learned_from_and_the_rest_is_not_tried(self):
        """Predictions say that all fit, and none does: a few trials rule the others out."""
        predictions = {
            c.key: dataclasses.replace(outcome_of(c).prediction, budget=MemoryBudget(1 << 60))
            for c in WIDE.configurations()
        }
        wide = dataclasses.replace(WIDE, workload="causal_lm")
        asked = request(searcher="guided", predictions=predictions, space=wide)
        state, _ = driven(asked, lambda c: out_of_memory())
        assert state.stopped_by in (StoppedBy.NOTHING_LEFT, StoppedBy.EXHAUSTED)
        assert len(state.records) < COUNT / 4

    def test_its_files_are_written_and_its_journal_is_read(self, tmp_path):
        folder = ResultsFolder(tmp_path, SAMPLE_SPACE.name, SAMPLE_GPU.id)
        with folder.writer() as writer:
            for number in range(COUNT):
                settings = {"micro_batch": 1 + number % 10, "lora_rank": 1 + number // 10}
                writer.append(make_record(1.0, LARGER, settings=settings, trial_id=f"t{number}"))
        records = folder.read().records
        assert len(records) == COUNT
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # matplotlib's, of what cannot be laid out
            view = write_all(folder, records, SAMPLE_SPACE, SAMPLE_GPU)
        assert view.best is None
        assert folder.pareto_csv.read_text().count("\n") == 1  # its head
        assert folder.report_html.stat().st_size > 0


class JumpingClock(datetime):
    """The wall clock of a machine that is corrected all the time, by up to years."""

    draw = random.Random(3)

    @classmethod
    def now(cls, tz: object = None) -> datetime:
        return datetime(2026, 5, 1, tzinfo=UTC) + timedelta(days=cls.draw.uniform(-900, 900))


class TestClock:
    def test_a_wall_clock_that_jumps_changes_nothing_but_stamps(self, monkeypatch, tmp_path):
        asked = request(trials=40, time_limit_s=3600.0)
        calm, _ = driven(asked, outcome_of)
        monkeypatch.setattr("tuner.core.records.trial.datetime", JumpingClock)
        jumped, moments = driven(asked, outcome_of)
        assert jumped.stopped_by is calm.stopped_by is StoppedBy.BUDGET
        assert [r.configuration for r in jumped.records] == [r.configuration for r in calm.records]
        stamps = [record.started_at for record in jumped.records]
        assert stamps != sorted(stamps)
        assert all(a.elapsed_s <= b.elapsed_s for a, b in itertools.pairwise(moments))
        with JournalWriter(tmp_path / "trials.jsonl") as writer:
            for record in jumped.records:
                writer.append(record)
        known = read_journal(tmp_path / "trials.jsonl").records
        assert list(known) == jumped.records
        resumed = state_of(dataclasses.replace(asked, resume=known, run_id="again"))
        resumed.reuse()
        assert resumed.reused == 40
        assert resumed.stopped_by is StoppedBy.BUDGET

    def test_a_time_limit_is_of_a_clock_that_does_not_jump(self, monkeypatch):
        seconds = itertools.count(100.0, 10.0)
        monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
        monkeypatch.setattr(time, "time", lambda: 0.0)
        state, _ = driven(request(time_limit_s=600.0), outcome_of)
        assert state.stopped_by is StoppedBy.TIME_LIMIT
        assert 0 < len(state.records) < 60
