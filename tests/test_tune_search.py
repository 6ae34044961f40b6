"""Searches on a real local Ray, with a closed-form GPU in place of the trials."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from device_fakes import measurement_of
from tune_fakes import (
    GPU,
    SMALL_SPACE,
    FakeFactory,
    FakeSpace,
    MeasuredFakes,
    outcome_of,
    request_of,
)
from tune_fakes import state_of as search_without_ray
from waiting import wait_for

from tuner.core.errors import UnavailableError
from tuner.core.records import Outcome, Source, Status, TrialRecord
from tuner.searches.open_trials import RETRIES_OF_A_LOST_NODE, STARTS_OF_A_TRIAL
from tuner.searches.ray.driver import search
from tuner.searches.request import SearchOutcome, SearchRequest, StoppedBy, TrialDevice
from tuner.searches.state import SearchState

SPACE = FakeSpace()
VERSIONS = {"tuner": "1"}


@pytest.fixture(scope="module")
def local_ray():
    import ray

    with pytest.MonkeyPatch.context() as patch:
        # Workers unpickle the runner factory, and so import it.
        patch.setenv("PYTHONPATH", python_path())
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100_000_000,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    yield
    ray.shutdown()


def python_path() -> str:
    return os.pathsep.join(path for path in sys.path if path)


def request(factory: FakeFactory | None = None, **changes) -> SearchRequest:
    settings = {
        "space": SPACE,
        "gpu": GPU,
        "runner_factory": factory or FakeFactory(),
        "searcher": "tpe",
        "trials": 8,
        "versions": VERSIONS,
    }
    return request_of(**(settings | changes))


def run(factory: FakeFactory | None = None, **changes) -> tuple[SearchOutcome, list[TrialRecord]]:
    journal: list[TrialRecord] = []
    result = search(request(factory, **changes), on_record=journal.append)
    return result, journal


def keys(records) -> list[str]:
    return [record.configuration.key for record in records]


def ran(log: Path) -> list[str]:
    return [note.read_text() for note in sorted(log.iterdir())]


@pytest.mark.usefixtures("local_ray")
class TestSearch:
    @pytest.mark.proof
    def test_gpu_that_is_lost_after_some_trials_ends_the_search(self, tmp_path):
        journal: list[TrialRecord] = []
        asked = request(FakeFactory(log=tmp_path, lost_after=3), trials=20)
        with pytest.raises(UnavailableError, match="GPU 0 does not answer"):
            search(asked, on_record=journal.append)
        assert len(journal) == 3
        assert len(ran(tmp_path)) <= 5  # each worker was refused once

    @pytest.mark.slow
    def test_budget_is_spent_on_distinct_trials_and_each_is_journalled(self, tmp_path, capfd):
        seen = []
        journal: list[TrialRecord] = []
        result = search(
            request(FakeFactory(log=tmp_path), trials=20, seed=1),
            on_record=journal.append,
            on_progress=seen.append,
        )
        assert (result.stopped_by, result.interrupted) == (StoppedBy.BUDGET, False)
        assert result.candidates == len(list(SPACE.configurations()))
        assert len(set(keys(result.records))) == 20
        assert list(result.records) == journal
        assert sorted(ran(tmp_path)) == sorted(keys(journal))
        assert len({record.trial_id for record in journal}) == 20
        assert {r.outcome.evidence.source for r in journal} == {Source.PREDICTED}
        assert result.counts[Status.OOM] > 0
        assert result.counts[Status.OK] + result.counts[Status.OOM] == 20
        assert TrialRecord.from_dict(journal[0].to_dict()) == journal[0]
        assert (seen[0].done, seen[-1].done, seen[-1].total) == (0, 20, 20)
        assert (seen[-1].running, seen[-1].oom) == (0, result.counts[Status.OOM])
        assert max(progress.running for progress in seen) <= 2
        assert seen[-1].best == max(
            (r for r in journal if r.fits), key=lambda r: r.outcome.evidence.speed.samples_per_s
        )
        assert capfd.readouterr() == ("", "")

    @pytest.mark.slow
    def test_record_has_device_margin_and_the_prediction_of_before(self, tmp_path):
        predictions = {c.key: outcome_of(c).prediction for c in SPACE.configurations()}
        trial_device = TrialDevice("Testium 9", memory_limit_bytes=99)
        result, _ = run(
            MeasuredFakes(tmp_path), trials=6, workers=1, margin_bytes=7,
            predictions=predictions, trial_device=trial_device,
        )  # fmt: skip
        assert len(result.records) == 6
        for record in result.records:
            assert (record.device, record.memory_limit_bytes, record.margin_bytes) == (
                "Testium 9",
                99,
                7,
            )
            assert record.outcome.prediction == predictions[record.configuration.key]
            assert record.outcome.measurement is not None
            assert record.outcome.evidence is record.outcome.measurement
        assert list(tmp_path.glob("closed-*"))

    @pytest.mark.proof
    def test_workers_are_reused_and_take_one_thread(self, tmp_path):
        _, journal = run(FakeFactory(log=tmp_path), trials=16)
        workers = {note.name.split("-")[1] for note in tmp_path.iterdir()}
        assert len(workers) <= 2
        assert {record.outcome.message for record in journal} == {"threads=1"}

    @pytest.mark.proof
    def test_trials_that_end_their_worker_twice_are_crashes_and_the_rest_goes_on(self, tmp_path):
        deadly, broken = list(SMALL_SPACE.configurations())[1:3]
        result, _ = run(
            FakeFactory(
                log=tmp_path, kills=frozenset({deadly.key}), raises=frozenset({broken.key})
            ),
            space=SMALL_SPACE,
        )
        crashed = {
            r.configuration: r.outcome.message
            for r in result.records
            if r.outcome.status is Status.CRASHED
        }
        assert set(crashed) == {deadly, broken}
        assert "RuntimeError: a bug in the runner" in crashed[broken]
        assert "died" in crashed[deadly]
        assert not any(r.fits for r in result.records if r.configuration in crashed)
        assert len(result.records) == 6
        assert [ran(tmp_path).count(c.key) for c in (deadly, broken)] == [2, 2]

    @pytest.mark.proof
    def test_runner_that_cannot_be_built_ends_the_search_with_its_reason(self):
        with pytest.raises(UnavailableError, match="no torch on this worker") as error:
            run(FakeFactory(unavailable=True))
        assert error.value.hint == "install it"


def state_of(**changes) -> SearchState:
    return search_without_ray(request(run_id="r", **{"searcher": "random", **changes}))


def lose(state: SearchState, name: str, message: str, **how) -> None:
    """A worker takes the trial, and is lost."""
    state.start(name)
    state.lose(name, message, **how)


def test_search_ends_when_each_of_the_first_workers_is_lost():
    state = state_of()
    for name in "abc":
        assert state.failure is None
        assert state.propose(name) is not None
        lose(state, name, "ImportError: no libcuda")
    assert isinstance(state.failure, UnavailableError)
    assert "first 3 trials" in str(state.failure)
    assert "no libcuda" in str(state.failure)
    assert state.propose("d") is None
    assert (state.over, state.result().stopped_by) == (True, StoppedBy.FAILED)


def test_lost_workers_among_good_trials_do_not_end_a_search():
    state = state_of(trials=6)
    for name in "abcdef":
        configuration = state.propose(name)
        if name == "b":
            state.start(name)
            state.end(name, outcome_of(configuration))
        else:
            lose(state, name, "killed")
    again = 0
    while state.propose(f"again{again}") is not None:
        lose(state, f"again{again}", "killed")
        again += 1
    assert (state.failure, again, state.over) == (None, 5, True)
    assert sorted(r.trial_id for r in state.records) == [f"r-00{i}" for i in range(1, 7)]
    assert [r.outcome.status for r in state.records].count(Status.CRASHED) == 5


def test_trial_of_a_lost_run_is_the_same_trial_and_comes_last():
    state = state_of(trials=3)
    first, second = state.propose("a"), state.propose("b")
    lose(state, "a", "killed")
    third = state.propose("c")
    assert third not in (first, second)
    state.end("a", outcome_of(first))  # too late: that run is lost
    assert not state.records
    assert state.propose("d") == first
    state.end("d", outcome_of(first))
    state.end("d", outcome_of(first))
    state.end("b", outcome_of(second))
    assert [(r.trial_id, r.configuration) for r in state.records] == [
        ("r-001", first), ("r-002", second)
    ]  # fmt: skip
    assert not state.over


def test_the_time_limit_keeps_a_share_for_the_verification_and_gives_up_what_is_late(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    state = state_of(time_limit_s=100.0, verify=True, trial_device=TrialDevice("Testium 9"))
    tried = 0
    while (configuration := state.propose(str(tried))) and not state.instructions(
        str(tried)
    ).verify:
        now_s[0] += 10
        ran = measurement_of(outcome_of(configuration).prediction, device="Testium 9", factor=1)
        state.start(str(tried))
        state.end(str(tried), Outcome(Status.OK, measurement=ran, duration_s=10.0))
        tried += 1
    # Ten seconds a trial, thirty-five for the verification.
    assert (tried, now_s[0]) == (6, 60)
    assert state.instructions(str(tried)).verify
    now_s[0] = 99.0
    state.give_up_late()
    assert not state.over
    now_s[0] = 101.0
    state.give_up_late()
    assert (state.over, state.stopped_by) == (True, StoppedBy.TIME_LIMIT)


def test_lost_nodes_are_no_fault_of_a_trial_and_idle_workers_even_less():
    state = state_of(trials=1)
    wanted = state.propose("run")
    names = (f"run{number}" for number in range(100))
    name = "run"
    for _ in range(RETRIES_OF_A_LOST_NODE):
        for _ in range(STARTS_OF_A_TRIAL - 1):  # died while they had no trial
            state.lose(name, "died")
            name = next(names)
            assert state.propose(name) == wanted
        lose(state, name, "its node has died", with_node=True)
        name = next(names)
        assert state.propose(name) == wanted
    lose(state, name, "its node has died", with_node=True)
    assert [r.outcome.status for r in state.records] == [Status.CRASHED]


def test_search_ends_where_no_worker_begins_with_a_trial():
    state = state_of()
    for number in range(STARTS_OF_A_TRIAL):
        assert state.failure is None
        assert state.propose(str(number)) is not None
        state.lose(str(number), "ImportError: no such module")
    assert "no such module" in str(state.failure)
    assert not state.records


def test_trial_of_a_worker_that_can_run_none_goes_to_another():
    state = state_of()
    wanted = state.propose("a")
    state.start("a")
    state.refuse("a", UnavailableError("a worker on w1 has NVIDIA L4"))
    assert state.failure is None
    assert list(state.unfit_workers) == ["a"]
    assert state.propose("b") == wanted
    state.end("b", outcome_of(wanted))
    state.lose("a", "its node has died")  # nothing was on it
    assert not state.unfit_workers
    state.interrupt()
    assert state.result().warnings == ("a worker was not used: a worker on w1 has NVIDIA L4",)
    assert [r.trial_id for r in state.records] == ["r-001"]


def test_what_ends_after_an_interrupt_counts_and_what_is_killed_does_not():
    state = state_of()
    first, _ = state.propose("a"), state.propose("b")
    state.interrupt()
    state.end("a", outcome_of(first))
    state.lose("b", "killed")
    assert [r.configuration for r in state.records] == [first]
    assert state.stopped_by is StoppedBy.INTERRUPTED


INTERRUPTED = """
import gc, json, sys
from pathlib import Path
from device_fakes import measurement_of
from tune_fakes import GPU, FakeFactory, FakeSpace, request_of
from tuner.searches.ray.driver import search
from tuner.searches.state import SearchState

ledger_interrupt = SearchState.interrupt

def interrupt(self):
    ledger_interrupt(self)
    gc.set_threshold(50, 1, 1)  # what is collected asks Ray's processes, which may be gone
    Path(sys.argv[1] + ".heard").touch()

def note(record):
    with Path(sys.argv[1]).open("a") as file:
        file.write(json.dumps(record.to_dict()) + "\\n")

SearchState.interrupt = interrupt
result = search(
    request_of(
        space=FakeSpace(), gpu=GPU, runner_factory=FakeFactory(sleep_s=float(sys.argv[2])),
        trials=60, versions={"tuner": "1"}, searcher="tpe",
    ),
    on_record=note,
)
print(result.interrupted, len(result.records))
"""


@pytest.fixture
def start_search():
    """Starts a search in a session of its own; none outlives the test."""
    started = []

    def start(journal: Path, sleep_s: float) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, str(journal), str(sleep_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def session_ids(session: int) -> list[int]:
    """The processes of a session that are not defunct."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            letter, _, _, member_of = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(member_of) == session and letter != "Z":
            members.append(int(stat.parent.name))
    return members


def session_members(session: int) -> list[str]:
    """Their command lines."""
    members = []
    for pid in session_ids(session):
        with contextlib.suppress(OSError):
            members.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return members


def lines(journal: Path) -> int:
    return len(journal.read_text().splitlines()) if journal.exists() else 0


def tell_twice(process: subprocess.Popen[str], number: int) -> None:
    """As `timeout` does."""
    os.kill(process.pid, number)
    wait_for(Path(process.args[3] + ".heard").exists)
    os.killpg(process.pid, number)


def tell_everybody(process: subprocess.Popen[str], number: int) -> None:
    """As schedulers that know all processes of a job do."""
    for pid in session_ids(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("tell", "number", "sleep_s"),
    [(tell_twice, signal.SIGTERM, 600.0), (tell_everybody, signal.SIGTERM, 0.5)],
)
def test_a_stop_leaves_a_valid_journal_and_no_process(
    tmp_path, start_search, tell, number, sleep_s
):
    """Between short trials, and in the middle of long ones."""
    journal = tmp_path / "trials.jsonl"
    child = start_search(journal, sleep_s)
    if sleep_s < 1:
        wait_for(lambda: lines(journal) >= 3)
    else:
        wait_for(lambda: any(".train" in m for m in session_members(child.pid)))
    tell(child, number)
    # Much less than what long trials would still take.
    out, err = child.communicate(timeout=300)
    # Where Ray's own processes are told as well, Ray may end this one before it has answered: some
    # calls of Ray's wait for what is gone. Its journal has all that ended, and is gone on from.
    if tell is not tell_everybody or child.returncode == 0:
        assert (child.returncode, out.split(), err) == (0, ["True", str(lines(journal))], "")
    assert lines(journal) < 60
    for line in journal.read_text().splitlines() if journal.exists() else []:
        TrialRecord.from_dict(json.loads(line))
    wait_for(lambda: not session_members(child.pid))


@pytest.mark.proof
def test_second_ctrl_c_ends_the_program(tmp_path, start_search):
    child = start_search(tmp_path / "trials.jsonl", 600.0)
    wait_for(lambda: any("raylet" in member for member in session_members(child.pid)))
    os.kill(child.pid, signal.SIGINT)
    wait_for((tmp_path / "trials.jsonl.heard").exists)  # two at once may be one
    os.kill(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=300)
    assert child.returncode != 0
    assert "KeyboardInterrupt" in err
    wait_for(lambda: not session_members(child.pid))
