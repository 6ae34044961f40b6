"""Trials of a command: real programs that report, hang, crash, run out of memory, or go on."""

import sys
import time
from pathlib import Path

import pytest

from tuner.app.cli import main
from tuner.core.errors import UnavailableError
from tuner.core.processes import marked
from tuner.core.records import Configuration, Outcome, Status
from tuner.space.command import Command
from tuner.space.gpus import get_gpu
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.isolated import IsolatedRunner

MIB = 2**20

STEP_S = 0.02
TAGGED = f"""
import json, time
begin_s = time.monotonic()
for step in range(10_000):
    time.sleep({STEP_S})
    told = {{"samples": 4, "tokens": 64, "loss": 1.0, "total_params": 10}}
    print("tuner:", json.dumps({{**told, "time_s": begin_s + step * {STEP_S}}}))
"""
"""Steps that take the same time by its own clock, whatever else the machine does."""
BAR = """
import time
from tqdm import tqdm
for _ in tqdm(range(10_000)):
    time.sleep(0.02)
"""


@pytest.fixture
def run(tmp_path):
    """Runs a Python script as a command, in a trial of its own."""

    def run_script(
        code: str,
        *arguments: str,
        samples: str | None = "batch",
        progress=None,
        body=None,
        **options,
    ) -> Outcome:
        (tmp_path / "script.py").write_text(code)
        command = Command(
            (sys.executable, "script.py", *arguments),
            str(tmp_path),
            env={"GREETING": "batch {batch}"},
            samples_per_step=samples,
            progress=progress,
        )
        job = TrialJob("command", None, get_gpu("a6000"), command=command)
        measure = MeasureOptions(**{"device": "cpu", "budget_s": 0.3, "timeout_s": 300, **options})
        with IsolatedRunner(job, measure, body=body) as runner:
            return runner.run(Configuration({"batch": 4}))

    return run_script


def test_tagged_lines_are_measured(run):
    outcome = run(TAGGED, samples=None)
    assert outcome.status is Status.OK, outcome.message
    measured = outcome.measurement
    assert measured.speed.step_s == pytest.approx(STEP_S)
    assert measured.speed.samples_per_s == pytest.approx(4 / STEP_S)
    assert measured.speed.tokens_per_s == pytest.approx(64 / STEP_S)
    assert measured.total_params == 10
    assert measured.stopped_by == "interval"
    assert measured.samples_per_s_interval == pytest.approx((4 / STEP_S, 4 / STEP_S))


def test_a_progress_bar_is_measured(run):
    started = time.monotonic()
    measured = run(BAR).measurement
    assert 0 < measured.speed.step_s < time.monotonic() - started
    assert measured.speed.samples_per_s == pytest.approx(4 / measured.speed.step_s)
    assert any("progress bar" in note for note in measured.notes)


def test_a_bar_without_samples_ends_the_search_with_what_to_write(run):
    with pytest.raises(UnavailableError, match="the samples in a step are unknown"):
        run(BAR, samples=None)


def test_memory_is_that_of_all_processes(run):
    code = f"""
import subprocess, sys
hold = "import time; x = bytearray({{}}); x[::4096] = b'x' * len(x[::4096])"
hold += "; print(flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", hold.format(120 * {MIB})], stdout=subprocess.PIPE)
x = bytearray(80 * {MIB}); x[::4096] = b'x' * len(x[::4096])
child.stdout.readline()
{TAGGED}
"""
    measured = run(code).measurement
    assert 200 * MIB < measured.memory.device_bytes < 260 * MIB


def test_the_configuration_is_in_arguments_and_environment(run):
    code = """
import json, os, sys
assert sys.argv[1:] == ["4", "x=4"], sys.argv
assert json.loads(os.environ["TUNER_CONFIG"]) == {"batch": 4}
assert os.environ["GREETING"] == "batch 4"
assert json.loads(os.environ["TUNER_TRIAL"])["min_steps"] == 3
"""
    outcome = run(code + TAGGED, "{batch}", "x={batch}")
    assert outcome.status is Status.OK, outcome.message


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("import sys; sys.exit(3)", Status.CRASHED, "exit code 3"),
        ("print('all is well')", Status.CRASHED, "all is well"),
        ("raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')", Status.OOM,
         "Tried to allocate"),
    ],
)  # fmt: skip
def test_how_a_script_ends_is_its_outcome(run, code, status, words):
    outcome = run(code)
    assert outcome.status is status
    assert words in outcome.message


def test_a_memory_limit_holds_for_the_command(run):
    code = f"x = [bytearray(50 * {MIB}) for _ in range(40)]\n{TAGGED}"
    assert run(code, memory_limit_bytes=500 * MIB).status is Status.OOM
    assert run(TAGGED, memory_limit_bytes=500 * MIB).status is Status.OK


def test_a_loss_that_is_not_finite_is_told(run):
    outcome = run(TAGGED.replace('"loss": 1.0', '"loss": float("nan")'))
    assert outcome.status is Status.NON_FINITE


def test_a_hang_is_ended_with_all_that_it_started(run, tmp_path):
    code = """
import subprocess, sys, time
for session in (True, False):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                     start_new_session=session)
time.sleep(600)
"""
    assert run(code, timeout_s=2.0).status is Status.TIMEOUT
    assert not left_in(tmp_path)


@pytest.mark.parametrize("code", [BAR, TAGGED])
def test_a_command_that_ignores_sigterm_is_ended_too(run, tmp_path, code):
    deaf = "import signal, subprocess, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    helper = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    outcome = run(deaf + helper + code, body="runner_bodies:QUICKLY_ENDED")
    assert outcome.status is Status.OK, outcome.message
    assert not left_in(tmp_path)


def test_sigterm_lets_a_command_clean_up(run, tmp_path):
    code = """
import signal, sys, pathlib
def end(*_):
    pathlib.Path("cleaned").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
"""
    outcome = run(code + TAGGED, body="runner_bodies:SLOWLY_ENDED")
    assert outcome.status is Status.OK
    assert (tmp_path / "cleaned").exists()


def test_a_run_that_ends_by_itself_is_measured_too(run):
    code = BAR.replace("10_000", "25")
    measured = run(code, budget_s=60.0).measurement
    assert measured.stopped_by in ("end", "interval")
    short = run(BAR.replace("10_000", "2")).measurement  # as many as the warm-up
    assert any("warm-up included" in note for note in short.notes)


def test_a_program_that_is_not_there(tmp_path):
    for name in ("no-such-program-at-all", "./missing.sh"):
        job = TrialJob("command", None, get_gpu("a6000"), command=Command((name,), str(tmp_path)))
        with (
            IsolatedRunner(job, MeasureOptions(device="cpu")) as runner,
            pytest.raises(UnavailableError, match="no program"),
        ):
            runner.run(Configuration({"batch": 4}))


def left_in(folder: Path) -> list[int]:
    """Processes that work in a folder, after a moment."""
    until = time.monotonic() + 120
    while found := [p for p in _processes() if _folder(p) == folder]:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return found


def _processes() -> list[int]:
    return marked("PYTHONUNBUFFERED=1")


def _folder(pid: int) -> Path | None:
    try:
        return (Path("/proc") / str(pid) / "cwd").readlink()
    except OSError:
        return None  # it has ended


def test_a_trial_shows_the_command_that_ran_where_there_is_no_python(tmp_path, monkeypatch, capfd):
    """Machines that have only `python3` run `python` as well: the one that runs tuner."""
    (tmp_path / "script.py").write_text(TAGGED)
    (tmp_path / "own.yaml").write_text(
        'name: own\ncommand: [python, script.py, "--b={batch}"]\nknobs: {batch: [4, 8]}\n'
    )
    (tmp_path / "programs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    monkeypatch.setenv("COLUMNS", "100")
    trial = ["trial", "--space", "own.yaml", "--gpu", "cpu", "--set", "batch=8"]
    assert main.run([*trial, "--budget", "0.2s"]) == 0
    out = capfd.readouterr().out
    assert "python script.py --b=8" in out
    assert "{batch}" not in out
    # Whether its steps are micro-steps is not known, and optimizer steps are named already.
    assert "optimizer step" in out
    assert "micro-steps/s" not in out
