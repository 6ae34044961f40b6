"""The processes of a runner: who starts, supervises and ends whom. No torch in any of them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from runner_bodies import CLOCK, JumpingClock
from waiting import is_alive, state_of, wait_for, wait_until_gone

from tuner.core import processes
from tuner.core.errors import InputError, UnavailableError
from tuner.core.records import Configuration, Source, Status
from tuner.predict.training import load_object
from tuner.space.gpus import get_gpu
from tuner.trial import isolated
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.isolated import IsolatedRunner

BODY = "runner_bodies:PLAIN"
LONG_S = 120.0
"""For what takes a moment, on a machine that others use too."""


def job(model="plain"):
    return TrialJob("causal_lm", model, get_gpu("a6000"))


def new_runner(model="plain", **known):
    options = MeasureOptions(device="cpu", timeout_s=LONG_S)
    return IsolatedRunner(job(model), options, body=BODY, **known)


def acting(name, **knobs):
    return Configuration({"act": name, **knobs})


@pytest.fixture(scope="module")
def clock_file(tmp_path_factory):
    """See `runner_bodies.CLOCK`."""
    path = tmp_path_factory.mktemp("clock") / "time is up"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CLOCK, str(path))
        yield path


@pytest.fixture
def time_is_up(clock_file):
    """Called, it ends the time of all trials, until the end of the test."""
    yield clock_file.touch
    clock_file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def runner(clock_file):
    with new_runner() as open_runner:
        yield open_runner


@pytest.fixture
def own_runner(clock_file):
    """One whose warm process a test may take down."""
    with new_runner() as open_runner:
        yield open_runner


class Notes(dict):
    """The latest of everything that a trial reports; `then` is called after each report."""

    def __init__(self, then=lambda: None):
        self._then = then

    def __call__(self, facts):
        self.update(facts)
        self._then()


def test_a_good_trial_comes_back_with_its_numbers(runner):
    started = time.monotonic()
    outcome = runner.run(acting("good"))
    assert 0 < outcome.duration_s < time.monotonic() - started
    assert outcome.status is Status.OK
    assert outcome.measurement.speed.tokens_per_s == 128
    assert outcome.measurement.source is runner.source is Source.MEASURED


def test_what_a_trial_reports_arrives_in_order_and_whole(runner):
    heard = []
    assert runner.run(acting("talk"), on_progress=heard.append).status is Status.OK
    steps = [facts["step"] for facts in heard if "step" in facts]
    assert steps == sorted(steps)
    assert steps[-1] == 199


def test_the_end_of_the_log_is_kept(runner):
    runner.run(acting("talk"))
    assert runner.last_log.endswith("xxx\nthe last line\n")
    assert len(runner.last_log) == 64 * 1024
    runner.run(acting("good"))
    assert runner.last_log == ""


def test_a_trial_is_a_session_of_its_own_with_what_it_needs_only(runner):
    notes = Notes()
    runner.run(acting("environment"), on_progress=notes)
    assert notes["session"] not in (os.getsid(0), os.getsid(runner.warm_pid))
    assert notes["adjustment"] == "1000"
    assert notes["environment"].get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    assert len(notes["open"]) == 5  # standard streams, the line to its parent, /proc/self/fd


def test_a_hanging_trial_dies_with_all_its_helpers(runner, time_is_up):
    notes = Notes(time_is_up)
    outcome = runner.run(acting("hang"), on_progress=notes)
    assert (outcome.status, outcome.phase) == (Status.TIMEOUT, "forward")
    assert f"{LONG_S:g} s" in outcome.message
    assert len(notes["pids"]) == 4
    assert not any(map(is_alive, notes["pids"]))
    assert psutil.Process(runner.warm_pid).children() == []


def test_helpers_of_a_trial_that_ended_well_die_too(runner):
    notes = Notes()
    assert runner.run(acting("leave_family"), on_progress=notes).status is Status.OK
    assert len(notes["pids"]) == 3
    assert not any(map(is_alive, notes["pids"]))


@pytest.mark.proof
@pytest.mark.parametrize("killed", [True, False])
def test_shared_memory_is_given_back(time_is_up, killed):
    notes = Notes() if killed else Notes(time_is_up)
    with new_runner("patient") as runner:
        runner.run(acting("share_memory", killed=killed), on_progress=notes)
        assert notes["segment"].startswith("psm_")
        assert not Path("/dev/shm", notes["segment"]).exists()


def test_files_of_a_trial_go_with_it_and_those_of_others_stay(runner, tmp_path):
    heard, notes = tmp_path / "heard", Notes()
    neighbour = Path(f"/dev/shm/torch_{os.getpid()}_1_0")

    def note(facts):
        notes.update(facts)
        if "made" in facts:
            wait_for(lambda: all(Path(path).exists() for path in facts["made"]))
            neighbour.touch()
            time.sleep(0.5)  # the entries were seen by then; a trial is never as short
            heard.touch()

    try:
        runner.run(acting("leave_files", heard=str(heard)), on_progress=note)
        assert len(notes["made"]) == 3
        assert not any(Path(path).exists() for path in notes["made"])
        assert neighbour.exists()
    finally:
        neighbour.unlink()


def test_a_signal_is_told_to_descendants_that_have_a_handler_only():
    code = "import signal, sys, time; signal.signal(50, lambda *_: sys.exit(7)) if {} else None; "
    code += "print(flush=True); time.sleep(600)"
    started = [
        subprocess.Popen([sys.executable, "-c", code.format(has)], stdout=subprocess.PIPE)
        for has in (True, False)
    ]
    try:
        for process in started:
            process.stdout.readline()
        one, other = (process.pid for process in started)
        assert {one, other} <= set(processes.descendants(os.getpid()))
        assert processes.handles(one, 50)
        assert not processes.tell(one, 50, below=other)
        assert not processes.tell(other, 50, below=os.getpid())
        assert processes.tell(one, 50, below=os.getpid())
        assert not processes.has_ended(other)
        os.waitid(os.P_PID, one, os.WEXITED | os.WNOWAIT)
        assert not processes.handles(one, 50)  # not reaped yet
        assert started[0].wait() == 7
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_a_trial_can_be_given_up_from_another_thread(runner):
    heard = threading.Event()
    notes = Notes(heard.set)

    def give_up():
        heard.wait(LONG_S)
        runner.interrupt()

    thread = threading.Thread(target=give_up)
    thread.start()
    outcome = runner.run(acting("hang"), on_progress=notes)
    thread.join()
    assert outcome.status is Status.INTERRUPTED
    assert not any(map(is_alive, notes["pids"]))
    assert runner.run(acting("good")).status is Status.OK  # and it holds for one trial only


def test_an_exception_here_ends_the_trial_and_goes_on(own_runner):
    pids = []

    def fail(facts):
        pids.extend(facts.get("pids", []))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        own_runner.run(acting("hang"), on_progress=fail)
    assert len(pids) == 4
    assert not any(map(is_alive, pids))
    assert own_runner.run(acting("good")).status is Status.OK


def test_when_the_warm_process_is_killed_its_trial_dies_and_the_next_has_a_new_one(
    own_runner, tmp_path
):
    heard = tmp_path / "heard"
    notes = Notes(heard.touch)
    outcome = own_runner.run(acting("kill_parent", heard=str(heard)), on_progress=notes)
    assert outcome.status is Status.INTERRUPTED
    assert len(notes["pids"]) == 4
    wait_until_gone(notes["pids"])
    assert own_runner.run(acting("good")).status is Status.OK


def test_a_warm_process_that_died_between_trials_is_replaced(own_runner):
    own_runner.run(acting("good"))
    before = own_runner.warm_pid
    os.kill(before, signal.SIGKILL)
    wait_until_gone([before])
    assert own_runner.run(acting("good")).status is Status.OK
    assert own_runner.warm_pid != before


def test_a_warm_process_that_falls_silent_is_replaced(own_runner, monkeypatch, tmp_path):
    late, heard, notes = tmp_path / "late", tmp_path / "heard", Notes()
    monkeypatch.setattr(isolated, "time", JumpingClock(late))

    def note(facts):
        notes.update(facts)
        heard.touch()
        wait_for(lambda: state_of(own_runner.warm_pid) == "T")
        late.touch()

    outcome = own_runner.run(acting("stop_parent", heard=str(heard)), on_progress=note)
    assert outcome.status is Status.TIMEOUT
    late.unlink()
    wait_until_gone(notes["pids"])
    assert own_runner.run(acting("good")).status is Status.OK


def test_a_job_that_cannot_be_run_says_so_and_leaves_nothing():
    with new_runner("impossible") as runner, pytest.raises(InputError) as caught:
        runner.run(acting("good"))
    assert caught.value.hint == "take another"
    assert runner.warm_pid is None


@pytest.mark.parametrize(
    ("model", "said"),
    [("dies", r"(?s)code 9.*a library failed"), ("killed:{}", r"SIGKILL ended .* 2 times: ")],
)
def test_a_warm_process_that_cannot_start_leaves_its_last_words(model, said, tmp_path):
    with new_runner(model.format(tmp_path)) as runner, pytest.raises(UnavailableError, match=said):
        runner.run(acting("good"))
    assert runner.warm_pid is None


def test_a_warm_process_that_is_killed_while_it_imports_is_started_once_more(tmp_path):
    with new_runner(f"killed:{tmp_path / 'once'}") as runner:
        assert runner.run(acting("good")).status is Status.OK


@pytest.mark.parametrize("name", ["nowhere:NOTHING", "runner_bodies:NOTHING", "runner_bodies"])
def test_a_name_that_leads_nowhere_is_refused(name):
    with pytest.raises(InputError, match=f"trial body '{name}' cannot be found"):
        load_object(name, "trial body")
    with (
        IsolatedRunner(job(), MeasureOptions(device="cpu"), body=name) as runner,
        pytest.raises(InputError, match="cannot be found"),
    ):
        runner.start()


def test_a_process_with_threads_is_not_forked():
    with new_runner("threads") as runner, pytest.raises(UnavailableError, match="sleeper"):
        runner.run(acting("good"))


def test_threads_of_libraries_are_named_and_refuse_no_trial():
    with new_runner("native") as runner:
        outcome = runner.run(acting("good"))
    assert outcome.status is Status.OK
    (note,) = outcome.measurement.notes
    assert note.startswith("libraries started threads before the trial: ")


def test_where_a_fork_hangs_beside_such_threads_a_fresh_process_runs_the_trial(
    clock_file, time_is_up
):
    notes = Notes()
    with new_runner("native") as runner:
        for _ in range(2):  # the second does not wait for a fork to hang
            notes.clear()
            outcome = runner.run(acting("good", hangs_forked=True), on_progress=notes)
            assert outcome.status is Status.OK
            assert "ran in a fresh process" in outcome.measurement.notes[-1]
            assert notes["is_fork"] is False
        assert "started_again" not in notes


def test_a_token_that_a_trial_prints_is_in_no_outcome(runner, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted-token")
    outcome = runner.run(acting("raise_it", text="for planted-token: 401"))
    assert outcome.message == "RuntimeError: for ***: 401"


def test_a_busy_device_is_refused_before_anything_starts():
    def busy(options, given_up_within):
        raise UnavailableError("cuda:0 is in use by train.py (process 7)")

    with new_runner(preflight=busy) as runner:
        with pytest.raises(UnavailableError, match=r"train\.py"):
            runner.run(acting("good"))
        assert runner.warm_pid is None


def test_memory_of_a_trial_that_was_killed_is_waited_for():
    looks = []

    def busy(options, given_up_within):
        looks.append(len(looks))
        if looks[-1] in (1, 2):
            raise UnavailableError("5 GiB of cuda:0 are in use")
        return True

    with new_runner(preflight=busy) as runner:
        killed = runner.run(acting("hang"), on_progress=lambda facts: runner.interrupt())
        assert killed.status is Status.INTERRUPTED
        assert runner.run(acting("good")).status is Status.OK
        assert len(looks) == 4


SUPERVISOR = """
import json, os, signal, sys
from tuner.space.gpus import get_gpu
from tuner.core.records import Configuration
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.isolated import IsolatedRunner

deaf, act, *group = sys.argv[1] == "deaf", *sys.argv[2:]
if group:
    open(group[0] + "/cgroup.procs", "w").write(str(os.getpid()))
if deaf:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
def say(facts):
    print(json.dumps({**facts, "warm": runner.warm_pid}), flush=True)
options = MeasureOptions(device="cpu", timeout_s=120.0)
runner = IsolatedRunner(
    TrialJob("causal_lm", "plain", get_gpu("a6000")), options, body="runner_bodies:PLAIN"
)
try:
    outcome = runner.run(Configuration({"act": act}), on_progress=say)
    answer = {"status": outcome.status, "exhausted": outcome.exhausted, "phase": outcome.phase}
    print(json.dumps(answer), flush=True)
finally:
    print(json.dumps({"torch": "torch" in sys.modules}), flush=True)
"""


@pytest.fixture
def supervise(clock_file):
    """Starts a program that runs one trial, in a session as a terminal would have it."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def first_pids(process):
    for line in process.stdout:
        facts = json.loads(line)
        if "pids" in facts:
            return [facts["warm"], *facts["pids"]]
    raise AssertionError(process.stderr.read())


def test_when_the_supervisor_is_killed_everything_it_started_ends(supervise):
    process = supervise("plain", "hang")
    pids = first_pids(process)
    assert len(pids) == 5
    process.kill()
    wait_until_gone(pids)


def test_a_supervisor_that_just_exits_leaves_nothing(supervise):
    process = supervise("plain", "leave_family")
    pids = first_pids(process)
    output, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, errors
    wait_until_gone(pids)
    said = [json.loads(line) for line in output.splitlines()]
    assert said[-2]["status"] == "ok"
    assert {"torch": False} in said


def test_ctrl_c_reaches_the_supervisor_only(supervise, time_is_up):
    """A terminal sends SIGINT to its whole foreground group."""
    process = supervise("deaf", "hang")
    pids = first_pids(process)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert all(map(is_alive, pids))
    time_is_up()
    output, _ = process.communicate(timeout=LONG_S)
    assert json.loads(output.splitlines()[-2])["status"] == "timeout"


def test_ctrl_c_that_the_supervisor_hears_ends_the_trial(supervise):
    process = supervise("plain", "hang")
    pids = first_pids(process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=LONG_S)
    assert "KeyboardInterrupt" in errors
    wait_until_gone(pids)


def test_only_marked_processes_are_ended():
    code = "import time; print(flush=True); time.sleep(600)"
    others = [
        subprocess.Popen(
            [sys.executable, "-c", code], env={"TUNER_RUNNER": mark}, stdout=subprocess.PIPE
        )
        for mark in ("mine", "mine too", "other")
    ]
    try:
        for other in others:
            other.stdout.readline()
        assert processes.marked("TUNER_RUNNER=mine") == [others[0].pid]
        assert processes.end_marked("TUNER_RUNNER=mine", deadline_s=LONG_S) == ()
        assert others[0].wait(LONG_S) == -signal.SIGKILL
        assert others[1].poll() is others[2].poll() is None
    finally:
        for other in others:
            other.kill()
            other.communicate()


def test_the_kernels_counter_is_read_where_there_is_one(tmp_path, monkeypatch):
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    monkeypatch.setattr(processes, "_counters", lambda: iter([tmp_path / "memory.events"]))
    assert processes.oom_kills() == 2
    assert processes.oom_kills_since(1) == 1
    assert processes.oom_kills_since(None) is None
    paths = [tmp_path / "none", tmp_path / "memory.oom_control"]
    monkeypatch.setattr(processes, "_counters", lambda: iter(paths))
    assert processes.oom_kills() == 5
    monkeypatch.setattr(processes, "_counters", lambda: iter([tmp_path / "none"]))
    assert processes.oom_kills() is None


@pytest.fixture
def small_group():
    """A control group with 256 MiB, inside that of this process."""
    own = next(iter(processes._counters()), Path("/none")).parent
    limits = ("memory.max", "memory.limit_in_bytes")
    group = own / f"tuner-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        limit = next((group / name for name in limits if (group / name).exists()), None)
        if limit is None:
            pytest.skip("control groups here cannot limit memory")
        limit.write_text(str(256 * 2**20))
        yield group
    finally:
        until = time.monotonic() + LONG_S
        while True:  # it is busy while the kernel still clears up after a process of it
            try:
                group.rmdir()
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.1)


def test_a_kill_by_the_real_kernel_is_the_hosts_memory(small_group, supervise):
    """The trial is killed, not the processes that watch it."""
    process = supervise("plain", "eat", str(small_group))
    output, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, errors
    answer = json.loads(output.splitlines()[-2])
    assert answer == {"status": "oom", "exhausted": "host", "phase": "load"}
